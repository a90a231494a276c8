"""`Calibration`, a map from a drafter's confidence to the accuracy that was measured at it.

Accuracy was counted in bins of confidence, per depth (`eval/calibration.py`). A bin with n guesses
of which r were right stands for the accuracy (r + 1) / (n + 2), so that none is 0 or 1. Neighbours
in the wrong order are pooled: the map never falls. Between the bins it is linear, outside them
constant; depths that were not measured have the map of the deepest one.

Source: isotonic regression (pool adjacent violators), Zadrozny and Elkan 2002, "Transforming
Classifier Scores into Accurate Multiclass Probability Estimates", section 3; Laplace's rule.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class Bin(NamedTuple):
    """Guesses of similar confidence: its mean, how many there are, the share that was right."""

    confidence: float
    guesses: float
    right: float


class Calibration:
    """The maps of all depths."""

    def __init__(self, depths: Sequence[Sequence[Bin]]) -> None:
        """
        Args:
            depths: the bins of depth 1, 2, .., each in ascending order of confidence.

        Raises:
            ValueError: a depth has no bin, or there is no depth.
        """
        if not depths or not all(depths):
            raise ValueError("a calibration needs guesses at every depth")
        self._maps = [torch.tensor(_rising(bins), dtype=torch.float32) for bins in depths]

    def log_accuracy(self, log_confidence: Float[Tensor, "*nodes"], depth: int) -> Tensor:
        """Return the logarithm of the accuracy at each confidence."""
        accuracy: Tensor
        known, accuracy = self._maps[min(depth, len(self._maps)) - 1].to(log_confidence.device)
        x = log_confidence.exp().float().clamp(known[0], known[-1])
        above = torch.searchsorted(known, x.contiguous()).clamp(1, max(1, len(known) - 1))
        if len(known) == 1:
            return accuracy.log().expand_as(x)
        low, high = known[above - 1], known[above]
        share = (x - low) / (high - low)
        out: Tensor = torch.lerp(accuracy[above - 1], accuracy[above], share).log()
        return out


def _rising(bins: Sequence[Bin]) -> tuple[list[float], list[float]]:
    """Return the confidences of the bins and their accuracies, pooled until none falls."""
    blocks = list[tuple[float, float, int]]()  # right, guesses, bins
    for one in bins:
        blocks.append((one.right * one.guesses + 1, one.guesses + 2, 1))
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            (right, guesses, count), last = blocks[-2], blocks.pop()
            blocks[-1] = (right + last[0], guesses + last[1], count + last[2])
    accuracy = [right / guesses for right, guesses, count in blocks for _ in range(count)]
    return [one.confidence for one in bins], accuracy
