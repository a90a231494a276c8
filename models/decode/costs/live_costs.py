"""Expected seconds of a round: a measured table, corrected by the times of the rounds themselves.

A factor per kind of round (plain, chain, tree, look-up) and size of the batch (`factors.py`)
carries what the table lacks: the decoder's own share and the processor's caches between forwards.
The pace of the machine is common to all. Chains have a second factor for what levels below the
first add: with one alone, a table whose levels are too dear would keep chains at one token, and
rounds of one token could not correct it. Contexts are rounded to halves of an octave, so that a
round is looked up and seldom interpolated.

A measured time is not used, and the expected one is, where the clock has stood still or gone back,
or where it is so long that the machine has paused: at most one of APART rounds of a kind is taken
for a pause, so that drafts that always take long count and are learnt.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.models.decode.costs.factors import LEVELS, READ, Factors
from outrider.models.decode.costs.round_costs import (
    PLAIN,
    DraftShape,
    MeasuredTimes,
    chain_shape,
)

JUMP, JUMP_SECONDS = 10.0, 0.1  # a round this many times and seconds longer has had a pause,
APART = 16  # if none of so many rounds of its kind before has had one
FIRST_LEVEL = chain_shape(1)
SHORTEST = 64  # rows of a context, below which it makes no difference


class RoundSeconds(NamedTuple):
    """Expected seconds of a round of the batch: of the drafter's part and of all others."""

    draft: float
    other: float

    @property
    def total(self) -> float:
        return self.draft + self.other


@dataclass
class LiveCosts:
    """Expected seconds of rounds.

    Attributes:
        ignored: rounds whose measured time was not used.
        still: how many of the last rounds took no time at all by the clock.
    """

    times: MeasuredTimes
    factors: Factors = field(default_factory=Factors)
    ignored: int = 0
    still: int = 0

    def __post_init__(self) -> None:
        self._table: dict[tuple[DraftShape, int, int], RoundSeconds] = {}
        self._chains: dict[tuple[int, int, int], list[RoundSeconds]] = {}
        self._rows: dict[tuple[int, int, int], list[float]] = {}
        self._apart = dict[str, int]()  # kind -> rounds until the next may have had a pause

    def table_seconds(self, shape: DraftShape, batch: int, context: int) -> RoundSeconds:
        """Return the seconds of the measured table alone."""
        key = shape, batch, _half_octaves(context)
        if key not in self._table:
            at = round(2 ** (key[2] / 2))
            draft, target, rest = self.times.parts(shape, batch, at, extrapolate=True)
            self._table[key] = RoundSeconds(draft / 1000, (target + rest) / 1000)
        return self._table[key]

    def seconds(self, shape: DraftShape, batch: int, context: int) -> RoundSeconds:
        """Return the expected seconds."""
        factor = self.factors.value(shape.kind, batch)
        draft, other = self.table_seconds(shape, batch, context)
        if shape.kind != "chain":
            return RoundSeconds(factor * draft, factor * other)
        first = self.table_seconds(FIRST_LEVEL, batch, context)
        levels = self.factors.value(LEVELS, batch)
        return RoundSeconds(
            factor * first.draft + levels * (draft - first.draft),
            factor * first.other + levels * (other - first.other),
        )

    def chain_seconds(
        self, batch: int, context: int, deepest: int, kind: str = ""
    ) -> list[RoundSeconds]:
        """Return the expected seconds of chains of 0, 1, .. deepest tokens.

        Args:
            kind: LOOK_UP for those that no weights draft: they take what is verified.
        """
        key = batch, _half_octaves(context), deepest
        if key not in self._chains:
            shapes = map(chain_shape, range(deepest + 1))
            self._chains[key] = [self.table_seconds(one, batch, context) for one in shapes]
        plain, *chains = self._chains[key]
        factor = self.factors.value(PLAIN.kind, batch)
        out = [RoundSeconds(factor * plain.draft, factor * plain.other)]
        if kind:
            factor = self.factors.value(kind, batch)
            out += [RoundSeconds(0.0, factor * other) for _, other in chains]
        elif chains:
            first, levels = chains[0], self.factors.value(LEVELS, batch)
            more = self.factors.value(FIRST_LEVEL.kind, batch) - levels
            draft, other = more * first.draft, more * first.other
            out += [RoundSeconds(draft + levels * d, other + levels * o) for d, o in chains]
        return out

    def row_seconds(self, kind: str, batch: int, context: int, nodes: int) -> list[float]:
        """Return the expected seconds of the target's forward over 0, 1, .. nodes and the root."""
        key = batch, _half_octaves(context), nodes
        if key not in self._rows:
            at = round(2 ** (key[1] / 2))
            shapes = map(chain_shape, range(nodes + 1))
            rows = [self.times.parts(one, batch, at, extrapolate=True) for one in shapes]
            self._rows[key] = [row.target / 1000 for row in rows]
        factor = self.factors.value(kind, batch)
        return [factor * row for row in self._rows[key]]

    def read_seconds(self, batch: int) -> float:
        """Expected seconds per row of reading many rows that the drafter has missed."""
        return self.factors.value(READ, batch) * self.times.read / 1000

    def upper(self, kind: str, batch: int) -> float:
        """Return the factor on the expected seconds that few rounds of this kind exceed."""
        return 1 + 2 * self.factors.of(kind, batch).spread

    def observe(
        self,
        kind: str,
        table: float,
        seconds: float,
        levels: float = 0.0,
        batch: int = 1,
        learns: bool = True,
    ) -> float:
        """Refresh the factors by a round; return the seconds that count for it.

        Args:
            table: the table's seconds of the round.
            seconds: measured.
            levels: the part of `table` that a chain's levels below the first add.
            learns: the factors are refreshed.
        """
        first = table - levels
        expected = first * self.factors.value(kind, batch)
        expected += levels * self.factors.value(LEVELS, batch)
        if kind != READ:
            self.still = self.still + 1 if seconds <= 0 else 0
        is_time = seconds > 0 and math.isfinite(seconds)
        if not is_time or self._is_pause(kind, seconds, expected):
            self.ignored += 1
            return expected
        if learns:
            self.factors.add(kind, batch, seconds, first, levels)
        return seconds

    def _is_pause(self, kind: str, seconds: float, expected: float) -> bool:
        """Return whether the machine has paused within a round."""
        wait = self._apart.get(kind, 0)
        is_pause = not wait and seconds > max(JUMP * expected, expected + JUMP_SECONDS)
        if wait or is_pause:
            self._apart[kind] = APART if is_pause else wait - 1
        return is_pause


def _half_octaves(context: int) -> int:
    """Return a context in halves of an octave, of which it is looked up."""
    return round(2 * math.log2(max(SHORTEST, context)))
