"""Location and spread per column: the units of entropy coded states.

States differ in size by orders of magnitude between layers and channels. A few rows, above all the
first one of a document, are a hundred times as large as the others, so that the scales are medians
and quartiles rather than means and standard deviations.

Legend: N rows, X columns.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

SAMPLE = 4096  # rows that the scales are fitted on
NORMAL_RANGE = 1.349  # interquartile range of a normal variable of variance 1
LEAST = 1e-3  # smallest spread, relative to the median column's; a column may be constant


@dataclass(frozen=True)
class ColumnScales:
    """states = middle + spread * units."""

    middle: Float[Tensor, " X"]
    spread: Float[Tensor, " X"]

    def units(self, rows: Float[Tensor, "N X"]) -> Float[Tensor, "N X"]:
        return (rows.float() - self.middle) / self.spread

    def restore(self, units: Float[Tensor, "N X"]) -> Float[Tensor, "N X"]:
        return units * self.spread + self.middle


def fit(parts: Iterable[Float[Tensor, "N X"]]) -> ColumnScales:
    """Return medians and normalised interquartile ranges of a sample of rows."""
    rows = torch.cat([part.float() for part in parts])[:SAMPLE]
    quartiles = np.quantile(rows.numpy(), [0.25, 0.5, 0.75], axis=0)  # torch.quantile has a limit
    low, middle, high = torch.from_numpy(quartiles).float()
    spread = (high - low) / NORMAL_RANGE
    typical = spread.median().clamp(min=torch.finfo(torch.float32).tiny / LEAST)
    return ColumnScales(middle, spread.clamp(min=LEAST * typical))
