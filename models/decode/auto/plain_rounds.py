"""When plain rounds are measured: the first of every size of the batch, and after a long pause."""

from collections import Counter

from outrider.models.decode.costs.factors import size_class

STALE = 256  # rounds without a plain one of a size, after which it is measured again


class PlainRounds:
    """How many plain rounds each size class of the batch had, and when."""

    def __init__(self) -> None:
        self._count, self._at, self._rounds = Counter[int](), dict[int, int](), 0

    def add(self, batch: int, plain: bool) -> None:
        """Count a round."""
        self._rounds += 1
        if plain:
            self._count[size_class(batch)] += 1
            self._at[size_class(batch)] = self._rounds

    def needed(self, batch: int, first: int) -> bool:
        """Return whether the size had fewer than `first` plain rounds, or none for long."""
        size = size_class(batch)
        if self._count[size] < first:
            return True
        return first > 0 and self._rounds - self._at[size] >= STALE
