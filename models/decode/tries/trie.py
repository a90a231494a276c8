"""A trie of chains on the host: chains with a common beginning share its nodes.

    chains   cat sat     nodes   1 cat  2 sat  3 dog  4 ran      draws   1 3 1   level 1
             dog ran             parents  0  1  0  3                     2 4 2   level 2
             cat sat

A node stands for every draw of its token after its parent. The draws keep their order, in which
they are verified: that of the chains, level by level, whatever was drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from outrider.models.decode.tree import Tree

NO_DRAW = -1  # of a chain that has ended


@dataclass
class Trie:
    """The chains of one prompt.

    Attributes:
        ids, parents, depths: of every node; node 0 is the root.
        draws: the node of every draw, or NO_DRAW.
        ends: of every chain, the node that it ends at.
        alive: whether a chain goes on.
        frontier: the nodes of the last level that a chain goes on from.
    """

    ids: list[int]
    chains: int
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    draws: list[int] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [0])

    def __post_init__(self) -> None:
        self.ends, self.alive = [0] * self.chains, [True] * self.chains
        self._above, self._children = self.frontier, dict[tuple[int, int], int]()

    def places(self) -> list[int]:
        """Return of every chain the index in the frontier of its end; 0 for those that ended."""
        index = {node: place for place, node in enumerate(self.frontier)}
        return [index.get(node, 0) for node in self.ends]

    def parent_places(self) -> list[int]:
        """Return of every node of the frontier the index of its parent in the one before."""
        index = {node: place for place, node in enumerate(self._above)}
        return [index.get(self.parents[node], 0) for node in self.frontier]

    def end_chains(self, over: Sequence[bool]) -> None:
        """End the chains whose node in the frontier has no children, by its index there."""
        alive = zip(self.alive, self.places(), strict=True)
        self.alive = [one and not over[place] for one, place in alive]

    def grow(self, tokens: Sequence[int]) -> None:
        """Add a token to every chain that goes on."""
        for chain, token in enumerate(tokens):
            if self.alive[chain]:
                self.ends[chain] = self._child(self.ends[chain], token)
            self.draws.append(self.ends[chain] if self.alive[chain] else NO_DRAW)
        reached = zip(self.ends, self.alive, strict=True)
        self._above, self.frontier = self.frontier, [*{n: None for n, alive in reached if alive}]

    def _child(self, parent: int, token: int) -> int:
        node = self._children.setdefault((parent, token), len(self.ids))
        if node == len(self.ids):
            self.ids.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
        return node


def tree_of(tries: Sequence[Trie], device: torch.device) -> Tree:
    """Return the trees of a batch, padded to one size."""
    size, levels = max(len(one.ids) for one in tries), max(max(one.depths) for one in tries)

    def padded(rows: list[list[int]], value: int) -> Int[Tensor, "B N"]:
        return torch.tensor(
            [[*row, *[value] * (size - len(row))] for row in rows], device=device
        )  # fmt: skip

    ids, parents = padded([one.ids for one in tries], 0), padded([one.parents for one in tries], 0)
    depths = padded([one.depths for one in tries], 1)
    counts = torch.tensor([len(one.ids) for one in tries], device=device)
    real = torch.arange(size, device=device) < counts[:, None]
    tree = Tree.from_parents(ids, parents, depths, max(1, levels), real)
    return tree.with_draws(torch.tensor([one.draws for one in tries], device=device))
