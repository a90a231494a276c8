"""The pace of the machine: by how much it is slower than the factors of rounds say.

It follows every round by WEIGHT. Rounds in turn that differ from the expected seconds by more than
DIFFERS, all in one direction, tell that the machine may have changed. Of rounds that draft it may
be the drafter alone, so that plain rounds must show it (`Controller`): AGREE of them in turn set
the pace at once, to the least change that one of them shows.
"""

import math
from dataclasses import dataclass

WEIGHT, LIMIT = 0.1, 1.5  # of a round in the pace, and the most that it may say
DIFFERS = math.log(1.25)  # of measured seconds over expected ones
AGREE = 2  # plain rounds
SMALLEST, LARGEST = 0.1, 10.0  # of the pace, and of a factor


@dataclass
class Pace:
    """The pace, and the last rounds that differ from it in one direction.

    Attributes:
        differing: how many they are.
        plain: how many of them are plain rounds in turn, up to the last one.
        least: the logarithm of the smallest ratio of these plain rounds, with its sign.
        jumps: how often plain rounds have set the pace.
    """

    value: float = 1.0
    differing: int = 0
    plain: int = 0
    least: float = 0.0
    jumps: int = 0

    def add(self, ratio: float, is_plain: bool) -> float:
        """Follow a round; return the ratio that is left for the factors.

        Args:
            ratio: measured seconds over the expected ones, the pace included.
        """
        ratio = self._jump(ratio, is_plain)
        ratio = min(max(ratio, 1 / LIMIT), LIMIT)
        self._set(self.value * (1 + WEIGHT * (ratio - 1)))
        return ratio

    def _jump(self, ratio: float, is_plain: bool) -> float:
        """Set the pace if enough plain rounds agree; return what they leave of a ratio."""
        change = math.log(ratio)
        if abs(change) <= DIFFERS:
            self.differing = self.plain = 0
            return ratio
        same = self.differing > 0 and (change > 0) == (self.least > 0)
        self.differing = self.differing + 1 if same else 1
        again = same and self.plain > 0 and is_plain
        self.least = math.copysign(min(abs(change), abs(self.least)), change) if again else change
        self.plain = self.plain + 1 if again else int(is_plain)
        if self.plain < AGREE:
            return ratio
        self._set(self.value * math.exp(self.least))
        self.jumps += 1
        self.differing = self.plain = 0
        return ratio / math.exp(self.least)

    def _set(self, value: float) -> None:
        self.value = min(max(value, SMALLEST), LARGEST)
