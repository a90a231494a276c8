"""A tree of one shape in every round, filled rank by rank.

The shape is a list of paths of ranks (`shapes.py`): Medusa's choices, Sequoia's trees, EAGLE-1's.

Shape letters: B prompts, N nodes of the tree, n nodes of a level, V the target's tokens.

Source: Medusa, arXiv:2401.10774; tossed siblings, SpecInfer, arXiv:2305.09781, and Sequoia,
arXiv:2402.12374: their shape is fixed before a token is tossed (rule R3), and a node that is not
there for want of probability depends on its ancestors alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.models.decode.draft_context import Ask
from outrider.models.decode.policy import Draft
from outrider.models.decode.rules import BEST, INDEPENDENT, TOSSED, known
from outrider.models.decode.sampling import Coins
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.sibling_rules import draw_siblings
from outrider.models.decode.tree import Tree
from outrider.models.decode.tree_shapes import Paths, contiguous, parse


@dataclass(frozen=True)
class StaticTree:
    """A tree of one shape in every round; guesses fill it rank by rank.

    Attributes:
        paths: the shape (shapes.py); with tossed guesses, sibling ranks are 0..k-1.
        draft: tossed guesses pay at high temperatures, where even a favourite seldom is what
            the target draws; favourites pay at low ones.
    """

    paths: Paths
    draft: str = BEST

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", parse(self.paths))
        if known(self.draft) in TOSSED and not contiguous(self.paths):
            raise ValueError(
                f"{self}: drawn siblings come one after the other, so the ranks below a node "
                "are 0, 1, 2, .."
            )

    @property
    def branches(self) -> bool:
        return len({path[:-1] for path in self.paths}) < len(self.paths)

    @property
    def nodes(self) -> int:
        return len(self.paths)

    @property
    def levels(self) -> int:
        return len(self.paths[-1])

    def plan(self, device: torch.device) -> list["Level"]:
        """What to ask at every level, and what to keep of the answers."""
        if device not in self._plans:
            self._plans[device] = _plan(self.paths, device)
        return self._plans[device]

    @cached_property
    def _plans(self) -> dict[torch.device, list["Level"]]:
        return {}

    def propose(
        self,
        ask: Ask,
        roots: Int[Tensor, " B"],
        rooms: Sequence[int],
        sampling: Sampling,
        coins: Coins,
    ) -> Draft:
        tossed = not sampling.greedy and self.draft in TOSSED
        deepest = min(self.levels, max(rooms), ask.reach)
        ids, real = [roots[:, None]], [torch.ones_like(roots, dtype=torch.bool)[:, None]]
        rows: list[tuple[Tensor, Float[Tensor, "B _ V"]]] = []
        rows_above = torch.zeros_like(roots[:1])
        for depth, level in enumerate(self.plan(roots.device)[:deepest], start=1):
            parents = rows_above[level.expanded].expand(len(roots), -1)
            logits = ask.step(depth, ids[-1][:, level.expanded], parents)
            if tossed:
                q = sampling.rows(logits)
                found, there = draw_siblings(q, level.widest, coins, self.draft == INDEPENDENT)
                rows.append((level.places, ask.vocab.expand(q)))
            else:
                likely = logits.topk(min(level.widest, logits.shape[-1]))
                found, there = likely.indices, likely.values > float("-inf")
            rank = level.rank.clamp(max=found.shape[-1] - 1)  # a draft vocabulary may be tiny
            real.append(
                there[:, level.row, rank]
                & real[-1][:, level.expanded][:, level.row]
                & (rank == level.rank)
            )
            ids.append(ask.vocab.to_target(found)[:, level.row, rank])
            rows_above = level.row
        return self._tree(torch.cat(ids, 1), torch.cat(real, 1), rooms, deepest, rows)

    def _tree(
        self,
        ids: Int[Tensor, "B N"],
        real: Bool[Tensor, "B N"],
        rooms: Sequence[int],
        deepest: int,
        rows: list[tuple[Tensor, Float[Tensor, "B _ V"]]],
    ) -> Draft:
        count = ids.shape[1]
        parents, depths, seen = (part.to(ids.device) for part in self._layout)
        if min(rooms) < deepest:
            real = real & (depths[:count] <= torch.tensor(rooms, device=ids.device)[:, None])
        batch = len(ids)
        tree = Tree(
            ids,
            parents[:count].expand(batch, -1),
            depths[:count].expand(batch, -1),
            seen[:count, :count].expand(batch, -1, -1),
            real,
            deepest,
        )
        if not rows:
            return Draft(tree, None)
        q_rows = rows[0][1].new_zeros(batch, count, rows[0][1].shape[-1])
        for places, q in rows:
            q_rows[:, places] = q
        return Draft(tree, q_rows)

    @cached_property
    def _layout(self) -> tuple[Tensor, Tensor, Tensor]:
        """Parents, depths and ancestors of all nodes, the same in every round."""
        number: dict[tuple[int, ...], int] = {(): 0}
        number |= {path: i for i, path in enumerate(self.paths, start=1)}
        parents = torch.tensor([[-1] + [number[path[:-1]] for path in self.paths]])
        depths = torch.tensor([[0] + [len(path) for path in self.paths]])
        tree = Tree.grown(parents, parents, depths, self.levels)
        return parents[0], depths[0], tree.seen[0]


class Level(NamedTuple):
    """One level of a fixed shape.

    Attributes:
        expanded: which nodes of the level above have children.
        places: their numbers in the tree.
        row, rank: of every node of this level, its parent among the expanded ones, its own rank.
        widest: the largest rank asked for, plus one.
    """

    expanded: Int[Tensor, " n"]
    places: Int[Tensor, " n"]
    row: Int[Tensor, " n"]
    rank: Int[Tensor, " n"]
    widest: int


def _plan(paths: Paths, device: torch.device) -> list[Level]:
    above: list[tuple[int, ...]] = [()]
    levels, first = list[Level](), 0
    parents = {path[:-1] for path in paths}
    for depth in range(1, len(paths[-1]) + 1):
        here = [path for path in paths if len(path) == depth]
        expanded = [i for i, path in enumerate(above) if path in parents]
        row = {above[i]: n for n, i in enumerate(expanded)}
        numbers = (
            expanded,
            [first + i for i in expanded],
            [row[path[:-1]] for path in here],
            [path[-1] for path in here],
        )
        rows, places, row_of, ranks = (torch.tensor(part, device=device) for part in numbers)
        widest = 1 + max(path[-1] for path in here)
        levels.append(Level(rows, places, row_of, ranks, widest))
        above, first = here, first + len(above)
    return levels
