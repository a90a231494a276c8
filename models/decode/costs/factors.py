"""Factors on a measured table of seconds, corrected by the times of rounds.

A round takes the table's seconds, times the pace of the machine, which is common to all kinds of
rounds and follows the last ones, times a factor per kind of round and size of the batch, which
follows slowly. So a machine that slows down while no plain round is measured slows them down too.
Two plain rounds in turn that differ much set the pace, and leave the factors as they were.

Sizes are classes of 1, 2, 3 to 4, 5 to 8, .. requests, since the error of a table depends on them:
what is measured for one request may be right where what is measured for sixteen is twice as much as
it takes. A kind that a class has no round of has the factor of the class that had one last, times
that of this class's plain rounds over that of the other's.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from outrider.models.decode.costs.pace import LARGEST, SMALLEST, Pace
from outrider.models.decode.costs.round_costs import PLAIN

READ = "read"  # rows that the drafter has missed
LOOK_UP = "look-up"  # rounds whose draft needs no weights
LEVELS = "levels"  # of a chain below the first
FIRST = 5  # rounds whose median begins a factor
MEMORY = 0.05  # weight of a round in a factor, after the first ones
ALONE = 16  # rounds without a draft, after which plain rounds move the pace alone
SETTLED = 20  # plain rounds, after which the pace alone may follow them
PAUSE = 16  # rounds of other kinds, after which a factor may lag behind the machine:
AFTER_PAUSE = 0.5  # then the median of the last three ratios has this weight, three times


@dataclass
class Factor:
    """Measured seconds over table seconds times the pace, of one kind of round.

    Attributes:
        value: the median of the first ratios, since a first round is often a slow one; then their
            moving average.
        spread: moving average of its relative distance from the average.
        recent: the last ratios.
        latest: the round in which a ratio was added last.
        since_pause: ratios since a pause.
    """

    value: float = 1.0
    spread: float = 0.1
    rounds: int = 0
    recent: tuple[float, ...] = ()
    latest: int = 0
    since_pause: int = 3

    def add(self, ratio: float, now: int) -> None:
        """Add a ratio; `now` is the number of rounds of all kinds so far."""
        # one interrupted round must not move an average of many, nor begin one
        limit = 2 if self.rounds > 1 / MEMORY else 4
        ratio = min(max(ratio, self.value / limit), self.value * limit)
        distance = abs(ratio / self.value - 1) if self.rounds else self.spread
        self.recent = (*self.recent, ratio)[-FIRST:]
        self.rounds += 1
        self.since_pause = 1 if now - self.latest > PAUSE else self.since_pause + 1
        if self.rounds <= FIRST:
            self.value = median(self.recent)
        elif self.since_pause <= 3:
            self.value += AFTER_PAUSE * (median(self.recent[-3:]) - self.value)
        else:
            self.value += max(MEMORY, 1 / self.rounds) * (ratio - self.value)
        self.value = min(max(self.value, SMALLEST), LARGEST)
        self.spread += MEMORY * (min(distance, 1.0) - self.spread)
        self.latest = now

    def add_distance(self, ratio: float) -> None:
        """Add the distance of a round that is not learnt; `ratio`: of its expected seconds."""
        self.spread += MEMORY * (min(abs(ratio - 1), 1.0) - self.spread)


@dataclass
class _Measured:
    """A round: its factors, its parts in the table's seconds, and its measured seconds."""

    factors: dict[str, Factor]
    parts: dict[str, float]
    seconds: float
    is_alone: bool = False  # no round has drafted for long

    @property
    def is_known(self) -> bool:
        """Whether its factors have begun, and any time is expected of it."""
        return self.expected > 0 and all(one.rounds >= FIRST for one in self.factors.values())

    @property
    def expected(self) -> float:
        """Its expected seconds over the pace."""
        return sum(self.factors[name].value * part for name, part in self.parts.items())

    def ratio(self, pace: Pace) -> float:
        """Return measured over expected seconds, between SMALLEST and LARGEST."""
        return min(max(self.seconds / (pace.value * self.expected), SMALLEST), LARGEST)


class Factors:
    """The factors of all kinds and sizes, and the pace of the machine."""

    def __init__(self) -> None:
        self.pace = Pace()
        self._factors = dict[tuple[str, int], Factor]()
        self._guessed = dict[tuple[str, int], Factor]()  # of kinds that a class has no round of
        self._last = dict[str, int]()  # kind -> size class that had a round of it last
        self._rounds = self._drafted = 0
        self._held: _Measured | None = None  # a plain round that differs, until the next one

    def value(self, kind: str, batch: int) -> float:
        """Return the expected seconds of a kind over the table's, the pace included."""
        return self.pace.value * self.of(kind, batch).value

    def of(self, kind: str, batch: int) -> Factor:
        """Return the factor of a kind for batches of this size."""
        key = kind, size_class(batch)
        if key in self._factors:
            return self._factors[key]
        if key not in self._guessed:
            self._guessed[key] = self._guess(kind, batch)
        return self._guessed[key]

    def _guess(self, kind: str, batch: int) -> Factor:
        if kind not in self._last:
            return Factor() if kind == PLAIN.kind else replace(self.of(PLAIN.kind, batch), rounds=0)
        size, other = size_class(batch), self._last[kind]
        known = self._factors[kind, other]
        plain = [self._factors.get((PLAIN.kind, one)) for one in (size, other)]
        ratio = plain[0].value / plain[1].value if plain[0] and plain[1] else 1.0
        return replace(known, value=known.value * ratio)

    def add(self, kind: str, batch: int, seconds: float, first: float, levels: float = 0.0) -> None:
        """Add a round.

        Args:
            seconds: measured.
            first, levels: the table's, of the first level of a chain, or of any other draft, and of
                a chain's other levels. Both factors get the smallest change that gives `seconds`.
        """
        parts = {kind: first, LEVELS: levels} if levels else {kind: first}
        measured = _Measured(self._own(parts, batch), parts, seconds)
        measured.is_alone = self._rounds - self._drafted > ALONE
        self._rounds += 1
        self._guessed.clear()
        if kind == READ:
            self._learn(measured, follows=False)
            return
        if kind != PLAIN.kind:
            self._drafted = self._rounds
        held, self._held = self._held, None
        if not measured.is_known:
            self.pace.differing = 0
        elif self._sets_pace(measured, kind, held):
            return
        if held:
            self._learn(held)
        if not self._held:
            self._learn(measured, follows=measured.is_known)

    def _sets_pace(self, measured: _Measured, kind: str, held: _Measured | None) -> bool:
        """Compare a round with the expected seconds; return whether it has set the pace.

        A plain round that differs is held until the next round shows whether both set the pace.
        """
        ratio, factor = measured.ratio(self.pace), measured.factors[kind]
        differs = self.pace.tell(ratio, factor.spread)
        if kind != PLAIN.kind or not differs:
            return False
        if held and held.factors[kind] is factor and self.pace.differing > 1:
            before = held.ratio(self.pace)
            self.pace.jump((before, ratio))
            return True
        self._held = measured
        return False

    def _learn(self, measured: _Measured, follows: bool = True) -> None:
        """Learn from a round: its factors, and the pace if it follows.

        After long without a draft the pace alone follows: plain rounds alone do not show whether
        the machine has changed, or the factor of plain rounds, which drafts are compared with.
        """
        expected = measured.expected
        error = measured.seconds / self.pace.value - expected
        if follows:  # pace and factors are given the same ratio: else they would drift apart
            ratio = measured.ratio(self.pace)
            followed = self.pace.follow(ratio)
            plain = measured.factors.get(PLAIN.kind)
            if plain and plain.rounds > SETTLED and measured.is_alone:
                plain.add_distance(ratio)
                return
            error = (followed - 1) * expected
        size = sum(part**2 for part in measured.parts.values())
        for name, part in measured.parts.items():
            factor = measured.factors[name]
            factor.add(factor.value + error * part / size, self._rounds)

    def new_table(self) -> None:
        """Forget the pace, which is relative to the table before."""
        self.pace, self._held = Pace(), None

    def _own(self, kinds: Iterable[str], batch: int) -> dict[str, Factor]:
        """Return the factors of this size class; a new one counts as one round, if it is known."""
        size, found = size_class(batch), dict[str, Factor]()
        for kind in kinds:
            if (kind, size) not in self._factors:
                value, spread = (known := self.of(kind, batch)).value, known.spread
                rounds = int(kind in self._last and kind != PLAIN.kind)
                own = Factor(value, spread, rounds, (value,) * rounds, self._rounds)
                self._factors[kind, size] = own
            found[kind] = self._factors[kind, size]
            self._last[kind] = size
        return found


def size_class(batch: int) -> int:
    """Return 0 for batches of 1, 1 for 2, 2 for 3 to 4, 3 for 5 to 8, .."""
    return (batch - 1).bit_length()
