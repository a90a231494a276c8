"""Expected seconds of a round: a measured table, corrected by the times of the rounds themselves.

One factor per kind of round (plain, chain, tree) carries what the table lacks: the decoder's own
share, the processor's caches between forwards, and the drift of the machine. Chains have a second
factor for what levels below the first add: with one alone, a table whose levels are too dear would
keep chains at one token, and rounds of one token could not correct it. Contexts are rounded
to halves of an octave, so that a round is looked up and seldom interpolated.

A measured time is not used, and the table's is, where the clock has stood still or gone back, or
where it is so long that the process was stopped.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.models.decode.costs.round_costs import DraftShape, MeasuredTimes

READ = "read"  # rows that the drafter has missed
LEVELS = "levels"  # of a chain below the first
KINDS = ("plain", "chain", "tree", READ, LEVELS)
MEMORY = 0.05  # weight of a round in a factor, after the first ones
JUMP, JUMP_SECONDS = 20.0, 1.0  # a round this many times and seconds longer was interrupted
FIRST_LEVEL = DraftShape(1, 1, (1,))
SHORTEST = 64  # rows of a context, below which it makes no difference
SMALLEST, LARGEST = 0.1, 10.0  # of a factor


@dataclass
class Factor:
    """Measured over table seconds of one kind of round.

    Attributes:
        value: moving average of the ratio.
        spread: moving average of its relative distance from the average.
    """

    value: float = 1.0
    spread: float = 0.1
    rounds: int = 0

    def add(self, ratio: float) -> None:
        weight = max(MEMORY, 1 / (self.rounds + 1))
        # one interrupted round must not move an average of many, nor begin one
        limit = 2 if self.rounds > 1 / MEMORY else 4
        ratio = min(max(ratio, self.value / limit), self.value * limit)
        distance = abs(ratio / self.value - 1) if self.rounds else self.spread
        self.value = min(max(self.value + weight * (ratio - self.value), SMALLEST), LARGEST)
        self.spread += MEMORY * (min(distance, 1.0) - self.spread)
        self.rounds += 1


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
    factors: dict[str, Factor] = field(default_factory=lambda: {kind: Factor() for kind in KINDS})
    ignored: int = 0
    still: int = 0

    def __post_init__(self) -> None:
        self._table: dict[tuple[DraftShape, int, int], RoundSeconds] = {}

    def table_seconds(self, shape: DraftShape, batch: int, context: int) -> RoundSeconds:
        """Return the seconds of the measured table alone."""
        key = shape, batch, round(2 * math.log2(max(SHORTEST, context)))
        if key not in self._table:
            at = round(2 ** (key[2] / 2))
            draft, target, rest = self.times.parts(shape, batch, at, extrapolate=True)
            self._table[key] = RoundSeconds(draft / 1000, (target + rest) / 1000)
        return self._table[key]

    def seconds(self, shape: DraftShape, batch: int, context: int) -> RoundSeconds:
        """Return the expected seconds."""
        factor = self._factor(shape.kind).value
        draft, other = self.table_seconds(shape, batch, context)
        if shape.kind != "chain":
            return RoundSeconds(factor * draft, factor * other)
        first = self.table_seconds(FIRST_LEVEL, batch, context)
        levels = self._factor(LEVELS).value
        return RoundSeconds(
            factor * first.draft + levels * (draft - first.draft),
            factor * first.other + levels * (other - first.other),
        )

    @property
    def read_seconds(self) -> float:
        """Expected seconds per row of reading many rows that the drafter has missed."""
        return self._factor(READ).value * self.times.read / 1000

    def upper(self, shape: DraftShape) -> float:
        """Return the factor on the expected seconds that few rounds of this shape exceed."""
        return 1 + 2 * self._factor(shape.kind).spread

    def _factor(self, kind: str) -> Factor:
        """Return the factor of a kind; until it has rounds of its own, that of plain rounds."""
        own = self.factors[kind]
        return own if own.rounds else self.factors["plain"]

    def observe(self, kind: str, table: float, seconds: float, levels: float = 0.0) -> float:
        """Refresh a factor by a round; return the seconds that count for it.

        Args:
            table: the table's seconds of the round.
            seconds: measured.
            levels: the part of `table` that a chain's levels below the first add.
        """
        first = table - levels
        expected = first * self._factor(kind).value + levels * self._factor(LEVELS).value
        if kind != READ:
            self.still = self.still + 1 if seconds <= 0 else 0
        interrupted = seconds > JUMP * expected and seconds > expected + JUMP_SECONDS
        if seconds <= 0 or interrupted or not math.isfinite(seconds):
            self.ignored += 1
            return expected
        error, size = seconds - expected, first**2 + levels**2  # the least change that explains it
        for name, part in ((kind, first), (LEVELS, levels)):
            if part:
                own = self.factors[name]
                own.value = self._factor(name).value  # that of plain rounds, before its first
                own.add(own.value + error * part / size)
        return seconds
