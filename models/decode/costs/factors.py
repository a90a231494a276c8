"""Factors on a measured table of seconds, corrected by the times of rounds.

One factor per kind of round and size of the batch. Sizes are classes of 1, 2, 3 to 4, 5 to 8, ..
requests, since the error of a table depends on them: what is measured for one request may be right
where what is measured for sixteen is twice as much as it takes. A kind that a class has no round of
has the factor of all classes, times that of the class's plain rounds over that of all plain rounds.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

READ = "read"  # rows that the drafter has missed
LEVELS = "levels"  # of a chain below the first
PLAIN = "plain"
KINDS = (PLAIN, "chain", "tree", READ, LEVELS)
FIRST = 5  # rounds whose median begins a factor
MEMORY = 0.05  # weight of a round in a factor, after the first ones; after a pause it is larger:
MOST = 0.5  # seldom seen kinds, such as plain rounds while drafts pay, would lag behind
SMALLEST, LARGEST = 0.1, 10.0  # of a factor


@dataclass
class Factor:
    """Measured over table seconds of one kind of round.

    Attributes:
        value: the median of the first ratios, since a first round is often a slow one; then their
            moving average.
        spread: moving average of its relative distance from the average.
        first: the first ratios.
        latest: the round in which a ratio was added last.
    """

    value: float = 1.0
    spread: float = 0.1
    rounds: int = 0
    first: tuple[float, ...] = ()
    latest: int = 0

    def add(self, ratio: float, now: int) -> None:
        """Add a ratio; `now` is the number of rounds of all kinds so far."""
        weight = max(min(1 - (1 - MEMORY) ** (now - self.latest), MOST), 1 / (self.rounds + 1))
        self.latest = now
        # one interrupted round must not move an average of many, nor begin one
        limit = 2 if self.rounds > 1 / MEMORY else 4
        ratio = min(max(ratio, self.value / limit), self.value * limit)
        distance = abs(ratio / self.value - 1) if self.rounds else self.spread
        if self.rounds < FIRST:
            self.first = (*self.first, ratio)
            self.value = median(self.first)
        else:
            self.value += weight * (ratio - self.value)
        self.value = min(max(self.value, SMALLEST), LARGEST)
        self.spread += MEMORY * (min(distance, 1.0) - self.spread)
        self.rounds += 1


class Factors:
    """The factors of all kinds and sizes."""

    def __init__(self) -> None:
        self._all = {kind: Factor() for kind in KINDS}
        self._of_size = dict[tuple[str, int], Factor]()
        self._rounds = 0

    def has_seen(self, kind: str, batch: int) -> bool:
        """Return whether batches of this size class have had a round of this kind."""
        return (kind, _size_class(batch)) in self._of_size

    def of(self, kind: str, batch: int) -> Factor:
        """Return the factor of a kind for batches of this size."""
        size = _size_class(batch)
        if (kind, size) in self._of_size:
            return self._of_size[kind, size]
        plain, own = self._all[PLAIN], self._all[kind]
        known = own if own.rounds else plain
        value = known.value * self._of_size.get((PLAIN, size), plain).value / plain.value
        first = (value,) if known.rounds else ()
        return Factor(value, known.spread, len(first), first, self._rounds)

    def add(self, kind: str, batch: int, seconds: float, first: float, levels: float = 0.0) -> None:
        """Add a round.

        Args:
            seconds: measured.
            first, levels: the table's, the latter of a chain's levels below the first; both change
                by the least that explains `seconds`.
        """
        parts = {kind: first, LEVELS: levels} if levels else {kind: first}
        size = sum(part**2 for part in parts.values())
        self._rounds += 1
        for known in (self._of_all(parts), self._of_class(parts, batch)):
            error = seconds - sum(known[name].value * part for name, part in parts.items())
            for name, part in parts.items():
                known[name].add(known[name].value + error * part / size, self._rounds)

    def _of_all(self, kinds: Iterable[str]) -> dict[str, Factor]:
        for kind in kinds:
            if not self._all[kind].rounds:  # that of plain rounds, before its first
                self._all[kind].value = self._all[PLAIN].value
        return self._all

    def _of_class(self, kinds: Iterable[str], batch: int) -> dict[str, Factor]:
        keys = {kind: (kind, _size_class(batch)) for kind in kinds}
        return {k: self._of_size.setdefault(key, self.of(k, batch)) for k, key in keys.items()}


def _size_class(batch: int) -> int:
    return (batch - 1).bit_length()
