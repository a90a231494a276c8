"""Candidates of a round with their expected tokens and seconds, and the best of them.

    plain          batch tokens
    chain of k     batch + sum over requests and depths up to k of the survival there
    tree of m      batch + the sum over the m most probable nodes, by rank and depth, of theirs

The survival at a depth is the product of the acceptances up to it; beyond the room of a request it
is 0. The verified rows of a batch are padded to the largest draft, so that a level costs the same
for one request as for all: it is drafted for all where the sum of their survivals pays.
"""

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from outrider.models.decode.acceptance import Acceptance, RequestAcceptance
from outrider.models.decode.costs.live_costs import LiveCosts
from outrider.models.decode.costs.round_costs import DraftShape, chain_shape

BUDGETS = (3, 7, 15, 31, 63)  # nodes of the trees that are considered: 4, 8, .. rows with the root


class Choice(NamedTuple):
    """What a round drafts.

    Attributes:
        shape: PLAIN for no draft.
        tokens: expected, of the whole batch.
        seconds: expected.
        gain: expected tokens per second over those of plain decoding.
        why: the reason in a few words.
    """

    shape: DraftShape
    tokens: float
    seconds: float
    gain: float = 1.0
    why: str = ""

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds

    @property
    def label(self) -> str:
        """`plain`, `chain 4` or `tree 15`."""
        return describe(self.shape)


def describe(shape: DraftShape) -> str:
    """Return `plain`, `chain 4` or `tree 15`, a tree by its nodes."""
    return shape.kind if shape.kind == "plain" else f"{shape.kind} {shape.nodes}"


class ChainCosts(NamedTuple):
    """Expected seconds of rounds with chains of 0, 1, 2, .. tokens, by part."""

    draft: list[float]
    other: list[float]

    @classmethod
    def of(
        cls, costs: LiveCosts, batch: int, context: int, deepest: int, kind: str = ""
    ) -> "ChainCosts":
        parts = costs.chain_seconds(batch, context, deepest, kind)
        return cls([part.draft for part in parts], [part.other for part in parts])

    def total(self, depth: int) -> float:
        return self.draft[depth] + self.other[depth]


def chain_tokens(
    requests: Sequence[RequestAcceptance],
    rooms: Sequence[int],
    deepest: int,
    optimism: float = 0.0,
) -> list[float]:
    """Return the expected tokens of the batch for chains of 0, 1, .. deepest tokens."""
    tokens, survival = [float(len(requests))], [1.0] * len(requests)
    for depth in range(1, deepest + 1):
        survival = [
            s * one.mean(depth, optimism) if depth <= room else 0.0
            for s, one, room in zip(survival, requests, rooms, strict=True)
        ]
        tokens.append(tokens[-1] + sum(survival))
    return tokens


def chain_choices(tokens: Sequence[float], costs: ChainCosts, reading: float) -> list[Choice]:
    """Return a choice per depth from 1 on.

    Args:
        reading: seconds per token of the batch, of rows that the drafter has missed.
    """
    plain = tokens[0] / costs.total(0)
    choices = []
    for depth in range(1, len(tokens)):
        seconds = costs.total(depth) + reading * tokens[depth]
        gain = tokens[depth] / seconds / plain
        choices.append(Choice(chain_shape(depth), tokens[depth], seconds, gain))
    return choices


def optimism_of(requests: int) -> float:
    """Return the standard errors to add to each estimate, for levels that are seldom drafted.

    One for a single request; of several alike, their sum is raised by one.
    """
    return 1 / math.sqrt(max(1, requests))


def tree_shapes_of(
    shared: Acceptance, first: Sequence[float], width: int, most: int
) -> list[tuple[DraftShape, float]]:
    """Return the trees to consider, and the expected draft tokens per request of each.

    They are the most probable nodes, by rank and depth (`tree_shapes.best_first`): each is the one
    before it and more nodes.

    Args:
        first: acceptance of the first child by depth.
        width: children per node, and nodes expanded per level.
        most: nodes at most.
    """
    rows = [shared.sibling_row(rate)[:width] for rate in first]
    rows = [[rate / max(1.0, sum(row)) for rate in row] for row in rows]
    out, budgets = list[tuple[DraftShape, float]](), [n for n in BUDGETS if n <= most]
    heap, nodes, depth, expected = [(-1.0, 0)], 0, 0, -1.0  # the root is no draft token
    while heap and budgets:
        negated, level = heappop(heap)
        for rate in rows[level] if level < len(rows) else ():
            heappush(heap, (negated * rate, level + 1))
        depth, expected = max(depth, level), expected - negated
        if nodes == budgets[0]:
            del budgets[0]
            if nodes > depth:
                shape = DraftShape(depth, nodes, (1, *[width] * (depth - 1)))
                out.append((shape, expected))
        nodes += 1
    return out
