"""Draft trees as tensors: tokens, parents, depths, and the ancestor mask.

A tree is the input of the target in one round. Node 0 is the root: the last committed token
x_{t+1}, whose key and value are not in the target's cache yet. A node at depth d is a draft of
token x_{t+1+d}. A chain is a tree without siblings.

Worked example, "the" with the children "cat" and "dog", and "sat" below "cat":

    node     0    1    2    3             mask   0 1 2 3
    token  the  cat  dog  sat                0   1 . . .
    parent  -1    0    0    1                1   1 1 . .
    depth    0    1    1    2                2   1 . 1 .
                                             3   1 1 . 1

The trees of a batch are padded to one size: a padding node (`real` is False) hangs below the root
or below another padding node, is computed like the others, and is never accepted.

Shape letters: B prompts, N nodes (root included), M candidates of which a tree is chosen, n chosen,
K draws.

Source: ancestor masks, Miao et al. 2023, "SpecInfer", arXiv:2305.09781; the choice of nodes, Li
et al. 2024, "EAGLE-2", section 4.2, arXiv:2406.16858.
Differs: EAGLE's code leaves ties to torch.topk and sums in half precision, which can keep a child
without its parent; here ties go to the shallower node and half-precision scores are refused.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

NEVER = float("-inf")


@dataclass(frozen=True, eq=False)
class Tree:
    """The draft trees of one round; nodes are stored parents first.

    Attributes:
        ids: ids[:, 0] are the last committed tokens.
        parents: parents[:, 0] = -1, and parents[:, i] < i for every other node.
        depths: edges between a node and the root; positions are prefix + depth.
        ancestor_mask: [b, i, j] is True iff j is i itself or an ancestor of i: what i attends to.
        real: False for padding nodes; a real node's ancestors are real.
        levels: upper bound of the depths, known on the host.
        is_chain: every tree is a chain, and its nodes are real up to some depth.
        unpadded: all nodes are real, known on the host.
        draws: of merged drafts, the node of every draw in the order drawn; -1: none was drawn.
    """

    ids: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]
    depths: Int[Tensor, "B N"]
    ancestor_mask: Bool[Tensor, "B N N"]
    real: Bool[Tensor, "B N"]
    levels: int
    is_chain: bool = False
    unpadded: bool = False
    draws: Int[Tensor, "B K"] | None = None

    @classmethod
    def chain(cls, ids: Int[Tensor, "B N"], drafted: Int[Tensor, " B"] | None = None) -> "Tree":
        """Return chains: each token is the only child of the one before.

        Args:
            drafted: how many of the tokens after the root are real; None: all.
        """
        batch, count = ids.shape
        parents, depths, mask, real = _chain_parts(batch, count, ids.device)
        if drafted is not None:
            real = depths <= drafted[:, None]
        return cls(ids, parents, depths, mask, real, count - 1, True, drafted is None)

    @classmethod
    def from_parents(
        cls,
        ids: Int[Tensor, "B N"],
        parents: Int[Tensor, "B N"],
        depths: Int[Tensor, "B N"],
        levels: int,
        real: Bool[Tensor, "B N"] | None = None,
    ) -> "Tree":
        """Build trees from parent indices; the ancestor mask follows from them.

        Args:
            real: None: all nodes are.
        """
        identity, all_real, _ = _identity_parts(*ids.shape, ids.device)
        parent = parents.clamp(min=0)
        ancestors = [parent]
        for _ in range(1, levels):
            ancestors.append(parent.gather(1, ancestors[-1]))
        mask = identity.scatter(2, torch.stack(ancestors, dim=2), True)
        unpadded = real is None
        return cls(
            ids, parents, depths, mask, all_real if real is None else real, levels, False, unpadded
        )

    def with_draws(self, draws: Int[Tensor, "B K"]) -> "Tree":
        """Return the tree with the draws that its nodes stand for."""
        return replace(self, draws=draws)

    @property
    def size(self) -> int:
        """Nodes per prompt, with the root and padding."""
        return self.ids.shape[1]

    @property
    def nodes(self) -> Int[Tensor, "B N"]:
        """Their indices, 0..N-1."""
        return _identity_parts(*self.ids.shape, self.ids.device)[2]

    def max_depths(self) -> Int[Tensor, " B"]:
        """Return the depth of the deepest real node."""
        if self.is_chain:
            return self.depths[:, -1] if self.unpadded else self.real.sum(1) - 1
        return (self.depths if self.unpadded else self.depths * self.real).amax(1)


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # shared by all callers
def _chain_parts(
    batch: int, count: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return parents, depths, ancestor mask and `real` of chains."""
    depths = torch.arange(count, device=device)
    real = torch.ones(count, dtype=torch.bool, device=device)
    one = (depths - 1, depths, depths[:, None] >= depths, real)
    parents, depths, mask, real = (part.expand(batch, *part.shape) for part in one)
    return parents, depths, mask, real


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # shared by all callers
def _identity_parts(batch: int, count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mask of nodes without ancestors, `real` of all nodes, and their indices."""
    identity = torch.eye(count, dtype=torch.bool, device=device).repeat(batch, 1, 1)
    all_real = torch.ones(batch, count, dtype=torch.bool, device=device)
    return identity, all_real, torch.arange(count, device=device).expand(batch, -1)


def rerank(scores: Float[Tensor, "B M"], budget: int) -> Int[Tensor, "B n"]:
    """Select the `budget` most probable candidates, which always form a tree (EAGLE-2).

    Equal scores prefer the lower index; NaN counts as -inf. So if candidates are stored
    level by level, and no child scores above its parent, every parent is selected before its
    children.

    Args:
        scores: cumulative log-probability of each candidate, in nats; half precision is refused.
        budget: how many candidates to keep, >= 1; fewer candidates are all kept.

    Returns:
        Indices of the kept candidates, ascending (so parents stay first).
    """
    if scores.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"scores are {scores.dtype}: sum log-probabilities in float32")
    scores = scores.nan_to_num(NEVER, neginf=NEVER)  # NaN would sort first
    best_first = scores.sort(dim=-1, descending=True, stable=True).indices
    return best_first[:, :budget].sort(dim=-1).values
