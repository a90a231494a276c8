"""Fewer columns for the same features: their principal directions.

The outputs of a target's layers say much of the same (each layer adds to what the one before
said), so that few directions of all taps together hold nearly all that varies. Columns are brought
to unit variance first: a drafter learns from directions of any size.

Source: principal components (Karhunen-Loeve transform); no one of the field stores features so.

Legend: N rows, X columns, R directions.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.train.files import read_tensors, write_tensors

ROWS = 4  # of the sample, per column


@dataclass(frozen=True)
class Basis:
    """features = mean + scale * (coordinates @ directions), nearly."""

    mean: Float[Tensor, " X"]
    scale: Float[Tensor, " X"]
    directions: Float[Tensor, "R X"]

    @property
    def rank(self) -> int:
        return len(self.directions)

    def project(self, rows: Float[Tensor, "N X"]) -> Float[Tensor, "N R"]:
        return ((rows.float() - self.mean) / self.scale) @ self.directions.mT

    def restore(self, coordinates: Float[Tensor, "N R"]) -> Float[Tensor, "N X"]:
        return coordinates.float() @ self.directions * self.scale + self.mean

    def save(self, file: Path) -> str:
        """Returns the file's sha256."""
        return write_tensors(file, vars(self), {})

    @staticmethod
    def load(file: Path, sha256: str, fix: str) -> "Basis":
        return Basis(**read_tensors(file, sha256, fix))


def fit(parts: Iterable[Float[Tensor, "N X"]], rank: int) -> tuple[Basis, float]:
    """The basis of a sample, and the share of the variance that it misses, 0..1."""
    count, total, squares = 0, torch.zeros(()), torch.zeros(())
    for part in parts:
        rows = part.double()
        count, total, squares = count + len(rows), total + rows.sum(0), squares + rows.mT @ rows
    mean = total / count
    covariance = squares / count - torch.outer(mean, mean)
    scale = covariance.diagonal().clamp(min=1e-12).sqrt()
    strengths, directions = torch.linalg.eigh(covariance / torch.outer(scale, scale))
    kept = directions[:, -rank:].flip(-1).mT
    missed = 1 - float(strengths[-rank:].sum() / strengths.sum())
    return Basis(mean.float(), scale.float(), kept.float().contiguous()), missed
