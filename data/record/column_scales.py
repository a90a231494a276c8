"""Where columns lie and how far they spread: what steps (steps.py) are counted in.

States differ in size by orders of magnitude between layers and channels. And a few rows, a
document's first above all, have states a hundred times as large as all others: deviations would
follow these and leave no steps to the rest, so that medians and quartiles are taken.

Legend: N rows, X columns.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

SAMPLE = 4096  # rows to look at
NORMAL = 1.349  # interquartile range of a normal variable of variance 1
LEAST = 1e-3  # of the usual spread: what a column that never changes is said to have


@dataclass(frozen=True)
class Sizes:
    """states = middle + spread * units."""

    middle: Float[Tensor, " X"]
    spread: Float[Tensor, " X"]

    def units(self, rows: Float[Tensor, "N X"]) -> Float[Tensor, "N X"]:
        return (rows.float() - self.middle) / self.spread

    def restore(self, units: Float[Tensor, "N X"]) -> Float[Tensor, "N X"]:
        return units * self.spread + self.middle


def fit(parts: Iterable[Float[Tensor, "N X"]]) -> Sizes:
    """Medians, and interquartile ranges as those of a normal variable, of a sample."""
    rows = torch.cat([part.float() for part in parts])[:SAMPLE]
    quartiles = np.quantile(rows.numpy(), [0.25, 0.5, 0.75], axis=0)  # torch's has a limit
    low, middle, high = torch.from_numpy(quartiles).float()
    spread = (high - low) / NORMAL
    usual = spread.median().clamp(min=torch.finfo(torch.float32).tiny / LEAST)
    return Sizes(middle, spread.clamp(min=LEAST * usual))
