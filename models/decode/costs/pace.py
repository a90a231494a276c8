"""The pace of the machine: measured seconds over those that the table and the factors give.

It follows rounds by WEIGHT. If several rounds in turn differ from the expected seconds by far more
than usual, in one direction, the machine may have changed. If they draft, the drafter alone may
have changed, so that `Controller` then measures plain rounds. Two of these in turn set the pace to
the smaller of their changes.
"""

import math
from dataclasses import dataclass

WEIGHT, LIMIT = 0.1, 1.5  # of a round in the pace, and the most that it may say
DIFFERS = 1.25  # measured over expected seconds, or expected over measured
SPREADS = 3.0  # a round differs if its distance also exceeds this many times the usual one
SMALLEST, LARGEST = 0.1, 10.0  # of the pace, and of a factor


@dataclass
class Pace:
    """The pace, and what the last rounds say of it.

    Attributes:
        differing: how many of the last rounds differ in turn, in one direction.
        jumps: how often plain rounds have set the pace.
    """

    value: float = 1.0
    differing: int = 0
    jumps: int = 0
    _change: float = 0.0  # the logarithm of the last ratio, if it differs

    def tell(self, ratio: float, spread: float) -> bool:
        """Compare a round with the expected seconds; return whether it differs.

        Args:
            ratio: measured seconds over the expected ones, the pace included.
            spread: usual relative distance of such a round.
        """
        change = math.log(ratio)
        if abs(change) <= max(math.log(DIFFERS), math.log1p(SPREADS * spread)):
            self.differing, self._change = 0, 0.0
            return False
        self.differing = self.differing + 1 if change * self._change > 0 else 1
        self._change = change
        return True

    def follow(self, ratio: float) -> float:
        """Follow a round; return its ratio within the limits, for the factors."""
        ratio = min(max(ratio, 1 / LIMIT), LIMIT)
        self._set(self.value * (1 + WEIGHT * (ratio - 1)))
        return ratio

    def jump(self, ratios: tuple[float, float]) -> None:
        """Set the pace to the smaller change of two rounds in turn."""
        self._set(self.value * min(ratios, key=lambda one: abs(math.log(one))))
        self.jumps += 1
        self.differing, self._change = 0, 0.0

    def _set(self, value: float) -> None:
        self.value = min(max(value, SMALLEST), LARGEST)
