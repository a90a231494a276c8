"""Draft trees as plain data: tokens, parents, depths, and which node may see which.

A tree is what one round asks of the target. Node 0 is the root: the last committed token
x_{t+1}, whose key and value the target does not hold yet. A node at depth d is a guess at token
x_{t+1+d}. A chain is a tree in which nobody has a sibling.

Worked example, "the" with the children "cat" and "dog", and "sat" below "cat":

    node     0    1    2    3             seen   0 1 2 3
    token  the  cat  dog  sat                0   1 . . .
    parent  -1    0    0    1                1   1 1 . .
    depth    0    1    1    2                2   1 . 1 .
                                             3   1 1 . 1

The prompts of a batch have a tree each, filled up to one size: a node that is not `real` hangs
below the root or below another such node, is asked of the target like any other, and is never
accepted.

Shape letters: B prompts, N nodes (root included), M candidates of which a tree is chosen, n chosen.

Source: ancestor masks, Miao et al. 2023, "SpecInfer", arXiv:2305.09781; the choice of nodes, Li
et al. 2024, "EAGLE-2", section 4.2, arXiv:2406.16858.
Differs: EAGLE's code leaves ties to torch.topk and sums in half precision, which can keep a
child without its parent; here ties go to the shallower node and such scores are refused.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

NEVER = float("-inf")


@dataclass(frozen=True, eq=False)
class Tree:
    """One round's question to the target; nodes are stored parents first.

    Attributes:
        ids: token of each node; ids[:, 0] are the last committed tokens.
        parents: parents[:, 0] = -1, and parents[:, i] < i for every other node.
        depths: edges between a node and the root; positions are prefix + depth.
        seen: seen[b, i, j] iff j is i itself or an ancestor of i: what node i may attend to.
        real: False for nodes that only fill up; a real node's ancestors are real.
        levels: the deepest depth there can be, known without asking the device.
        straight: every tree is a chain, and nodes are real up to some depth.
        whole: all nodes are real, known without asking the device.
    """

    ids: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]
    depths: Int[Tensor, "B N"]
    seen: Bool[Tensor, "B N N"]
    real: Bool[Tensor, "B N"]
    levels: int
    straight: bool = False
    whole: bool = False

    @classmethod
    def chain(cls, ids: Int[Tensor, "B N"], drafted: Int[Tensor, " B"] | None = None) -> "Tree":
        """The tree without siblings: each token is the only child of the one before.

        Args:
            drafted: how many of the tokens behind the root are real; None: all.
        """
        batch, count = ids.shape
        parents, depths, seen, real = _line(batch, count, ids.device)
        if drafted is not None:
            real = depths <= drafted[:, None]
        return cls(ids, parents, depths, seen, real, count - 1, True, drafted is None)

    @classmethod
    def grown(
        cls,
        ids: Int[Tensor, "B N"],
        parents: Int[Tensor, "B N"],
        depths: Int[Tensor, "B N"],
        levels: int,
        real: Bool[Tensor, "B N"] | None = None,
    ) -> "Tree":
        """Any tree; who sees whom is found by climbing, all nodes together."""
        itself, everyone, _ = _alone(*ids.shape, ids.device)
        above = parents.clamp(min=0)
        steps = [above]
        for _ in range(1, levels):
            steps.append(above.gather(1, steps[-1]))
        seen = itself.scatter(2, torch.stack(steps, dim=2), True)
        whole = real is None
        return cls(
            ids, parents, depths, seen, everyone if real is None else real, levels, whole=whole
        )

    @property
    def size(self) -> int:
        """Nodes per prompt, the root and those that fill up included."""
        return self.ids.shape[1]

    @property
    def nodes(self) -> Int[Tensor, "B N"]:
        """Their numbers, 0..N-1."""
        return _alone(*self.ids.shape, self.ids.device)[2]

    def deepest(self) -> Int[Tensor, " B"]:
        """Depth of the deepest real node."""
        if self.straight:
            return self.depths[:, -1] if self.whole else self.real.sum(1) - 1
        return (self.depths if self.whole else self.depths * self.real).amax(1)

    def check(self) -> "Tree":
        """Itself, if it is a tree; waits for the device, so not for every round.

        Raises:
            ValueError: the parts disagree in shape, the order is not parents first, a node is
                not connected to the root, or a depth is not its parent's plus one.
        """
        shapes = {tuple(part.shape) for part in (self.ids, self.parents, self.depths, self.real)}
        if len(shapes) > 1 or self.seen.shape != (*self.ids.shape, self.size):
            raise ValueError(f"ids, parents, depths and real must have one shape, not {shapes}")
        for parents, depths in zip(self.parents.tolist(), self.depths.tolist(), strict=True):
            check_connected(parents, depths)
        deepest = int(self.depths.max())
        if deepest > self.levels:
            raise ValueError(f"a node is at depth {deepest} of a tree of {self.levels} levels")
        return self


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept for all who come
def _line(batch: int, count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Parents, depths, ancestors and reality of chains: the same in every round."""
    depths = torch.arange(count, device=device)
    real = torch.ones(count, dtype=torch.bool, device=device)
    one = (depths - 1, depths, depths[:, None] >= depths, real)
    parents, depths, seen, real = (part.expand(batch, *part.shape) for part in one)
    return parents, depths, seen, real


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept for all who come
def _alone(batch: int, count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Every node sees itself; all are real; their numbers."""
    itself = torch.eye(count, dtype=torch.bool, device=device).repeat(batch, 1, 1)
    everyone = torch.ones(batch, count, dtype=torch.bool, device=device)
    return itself, everyone, torch.arange(count, device=device).expand(batch, -1)


def check_connected(parents: list[int], depths: list[int]) -> None:
    """One tree: parents first, every node below its parent.

    Raises:
        ValueError: which node is wrong, and how.
    """
    if not parents or parents[0] != -1 or depths[0] != 0:
        raise ValueError("a tree starts with its root: parents[0] = -1 and depths[0] = 0")
    for node, (parent, depth) in enumerate(zip(parents[1:], depths[1:], strict=True), start=1):
        if not 0 <= parent < node:
            raise ValueError(
                f"node {node} has parent {parent}: a parent is stored before its children, "
                f"so it must be in 0..{node - 1}"
            )
        if depth != depths[parent] + 1:
            raise ValueError(
                f"node {node} has depth {depth}, but its parent {parent} has depth "
                f"{depths[parent]}: a child is one deeper than its parent"
            )


def rerank(scores: Float[Tensor, "B M"], budget: int) -> Int[Tensor, "B n"]:
    """EAGLE-2's choice: the `budget` most probable candidates, which always form a tree.

    Equal scores prefer the lower index, and what is NaN comes last, with what is -inf. Where
    candidates are stored level by level, and a child never scores above its parent, its parent is
    therefore always chosen before it.

    Args:
        scores: cumulative log-probability of each candidate, float32 or wider: nats, <= 0.
        budget: how many candidates to keep, >= 1; fewer candidates are all kept.

    Returns:
        Indices of the kept candidates, ascending (so parents stay first).

    Raises:
        ValueError: budget < 1, or half-precision scores.
    """
    if budget < 1:
        raise ValueError(f"budget={budget}: a tree keeps at least one candidate")
    if scores.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"scores are {scores.dtype}: sum log-probabilities in float32")
    scores = scores.nan_to_num(NEVER, neginf=NEVER)  # as it is, NaN would come first
    best_first = scores.sort(dim=-1, descending=True, stable=True).indices
    return best_first[:, :budget].sort(dim=-1).values
