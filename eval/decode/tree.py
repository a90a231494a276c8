"""Draft trees as plain data: tokens, parents, depths, and which node may see which.

A tree is what one round asks of the target. Node 0 is the root: the last committed token
x_{t+1}, whose key and value the target does not hold yet. A node at depth d is a guess at token
x_{t+1+d}. A chain is a tree in which nobody has a sibling.

Worked example, "the" with the children "cat" and "dog", and "sat" below "cat":

    node     0    1    2    3             mask   0 1 2 3
    token  the  cat  dog  sat                0   1 . . .
    parent  -1    0    0    1                1   1 1 . .
    depth    0    1    1    2                2   1 . 1 .
                                             3   1 1 . 1

Shape letters: N nodes (root included), M candidates of which a tree is chosen, n chosen ones.

Source: ancestor masks, Miao et al. 2023, "SpecInfer", arXiv:2305.09781; the choice of nodes, Li
et al. 2024, "EAGLE-2", section 4.2, arXiv:2406.16858.
Differs: EAGLE's code leaves ties to torch.topk and sums in half precision, which can keep a
child without its parent; here ties go to the shallower node and such scores are refused.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Tree:
    """One round's question to the target; nodes are stored parents first.

    Args:
        ids: token of each node; ids[0] is the last committed token.
        parents: parents[0] = -1, and parents[i] < i for every other node.
        depths: edges between a node and the root; positions are prefix + depth.

    Raises:
        ValueError: the three disagree in length, the order is not parents first, a node is
            not connected to the root, or a depth is not its parent's plus one.
    """

    ids: Int[Tensor, " N"]
    parents: Int[Tensor, " N"]
    depths: Int[Tensor, " N"]

    def __post_init__(self) -> None:
        if not self.ids.shape == self.parents.shape == self.depths.shape == (self.ids.numel(),):
            raise ValueError(
                f"ids {tuple(self.ids.shape)}, parents {tuple(self.parents.shape)} and depths "
                f"{tuple(self.depths.shape)} must be three vectors of one length"
            )
        _check_connected(self._host[1], self._host[2])

    @classmethod
    def chain(cls, ids: Int[Tensor, " N"]) -> "Tree":
        """The tree without siblings: each token is the only child of the one before."""
        depths = torch.arange(len(ids), device=ids.device)
        return cls(ids, depths - 1, depths)

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def _host(self) -> tuple[list[int], list[int], list[int]]:
        """Ids, parents and depths as lists: the only wait for the device in a tree's life."""
        rows = torch.stack([self.ids.long(), self.parents.long(), self.depths.long()])
        ids, parents, depths = rows.tolist()
        return ids, parents, depths

    @cached_property
    def _children(self) -> list[list[int]]:
        below: list[list[int]] = [[] for _ in range(len(self))]
        for node, parent in enumerate(self._host[1][1:], start=1):
            below[parent].append(node)
        return below

    @property
    def tokens(self) -> list[int]:
        """The ids on the host; reading them costs no wait."""
        return self._host[0]

    @property
    def branches(self) -> bool:
        """Whether some node has two children, so that the tree is not a chain."""
        return any(len(below) > 1 for below in self._children)

    def children(self, node: int) -> list[int]:
        """Nodes right below a node, in stored order (the order in which they are verified)."""
        return self._children[node]

    def path(self, node: int) -> list[int]:
        """Nodes from the root down to a node, both included."""
        path = [node]
        while path[-1] != 0:
            path.append(self._host[1][path[-1]])
        return path[::-1]

    def paths(self) -> list[list[int]]:
        """One root-to-leaf path for each leaf, leaves in stored order."""
        return [self.path(node) for node, below in enumerate(self._children) if not below]

    def mask(self) -> Bool[Tensor, "N N"]:
        """mask[i, j] is True iff j is i itself or an ancestor of i: what node i may attend to.

        All rows climb to their parents together, so this is O(depth) small kernels.
        """
        rows = torch.arange(len(self), device=self.ids.device)
        mask = torch.zeros(len(self), len(self), dtype=torch.bool, device=self.ids.device)
        seen = rows
        for _ in range(max(self._host[2]) + 1):
            mask[rows, seen] = True
            seen = self.parents[seen].clamp(min=0)  # the root stays where it is
        return mask


def _check_connected(parents: list[int], depths: list[int]) -> None:
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


def rerank(
    scores: Float[Tensor, " M"],
    parents: Int[Tensor, " M"],
    depths: Int[Tensor, " M"],
    budget: int,
) -> Int[Tensor, " n"]:
    """EAGLE-2's choice: the `budget` most probable candidates, which always form a tree.

    Equal scores prefer the shallower candidate, then the lower index. A child never scores
    above its parent and is deeper, so its parent is always chosen before it.

    Args:
        scores: cumulative log-probability of each candidate, float32 or wider: nats, <= 0.
        parents: index of the parent among the candidates; -1 for a candidate right below a
            root that is not among them (or for the root itself, if it is).
        depths: as in Tree.
        budget: how many candidates to keep, >= 1; fewer candidates are all kept.

    Returns:
        Indices of the kept candidates, ascending (so parents stay first). The parents of
        the kept, renumbered, are `torch.searchsorted(kept, parents[kept])`.

    Raises:
        ValueError: budget < 1, half-precision scores, a NaN, or a candidate that is not below
            its parent in order, depth and score.
    """
    if budget < 1:
        raise ValueError(f"budget={budget}: a tree keeps at least one candidate")
    if scores.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"scores are {scores.dtype}: sum log-probabilities in float32")
    _check_below_parents(scores, parents, depths)
    shallow_first = torch.sort(depths, stable=True).indices
    best_first = torch.sort(scores[shallow_first], descending=True, stable=True).indices
    return shallow_first[best_first[:budget]].sort().values


def _check_below_parents(
    scores: Float[Tensor, " M"], parents: Int[Tensor, " M"], depths: Int[Tensor, " M"]
) -> None:
    top = parents == -1
    above = parents.clamp(min=0)
    earlier = (parents >= 0) & (parents < torch.arange(len(parents), device=parents.device))
    below = earlier & (depths == depths[above] + 1) & (scores <= scores[above])
    wrong = scores.isnan() | ~(top | below)
    if wrong.any():
        node = int(wrong.nonzero()[0])
        parent = int(parents[node])
        raise ValueError(
            f"candidate {node} (score {scores[node]:.6g}, depth {depths[node]}) does not hang "
            f"below its parent {parent}: a parent comes earlier, is one level up, and never "
            "scores lower (NaN counts as wrong)"
        )
