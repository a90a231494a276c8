"""What one forward of the objective counted, in sums that add up over micro-batches and ranks.

Legend: D depths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass
class Sums:
    """Per depth, summed over rows. Divide by `rows`; add over micro-batches and ranks.

    loss: what the objective's terms cost together, before the weight of the depth.
    agree: the drafter's favourite is the target's.
    alpha: sum over tokens of min(p, q), the chance that sampling accepts (all tokens, T = 1).
    rows: supervised rows.
    terms: each term on its own, unweighted.
    told: rows that each term spoke of.
    kept: Medusa-2: what the changed target costs under the one it was, and the rows of that sum.
    rounds: tokens that decoding this text would emit in rounds, then the expected rounds of a
        greedy and of a sampled chain (train/acceptance_forecast.py). alpha and rounds only where measured.
    """

    names: tuple[str, ...]  # of the terms
    loss: Float[Tensor, " D"]
    agree: Float[Tensor, " D"]
    alpha: Float[Tensor, " D"]
    rows: Float[Tensor, " D"]
    terms: Float[Tensor, "terms D"]
    told: Float[Tensor, "terms D"]
    kept: Float[Tensor, "2"]
    rounds: Float[Tensor, "3"]

    @classmethod
    def zero(
        cls, depths: int, device: torch.device | str, names: Sequence[str] = ("soft_ce",)
    ) -> "Sums":
        sizes = [(depths,)] * 4 + [(len(names), depths)] * 2 + [(2,), (3,)]
        zeros = (torch.zeros(size, dtype=torch.float64, device=device) for size in sizes)
        return cls(tuple(names), *zeros)

    def tensors(self) -> list[Tensor]:
        """All numbers, in the order of the fields."""
        return [getattr(self, f.name) for f in fields(self) if f.name != "names"]

    def add(self, other: "Sums") -> None:
        for mine, part in zip(self.tensors(), other.tensors(), strict=True):
            mine.add_(part)

    def stacked(self) -> Float[Tensor, " numbers"]:
        """For one all-reduce."""
        return torch.cat([tensor.flatten() for tensor in self.tensors()])

    def filled(self, numbers: Float[Tensor, " numbers"]) -> "Sums":
        """The same fields with other numbers, as `stacked` lays them out."""
        mine = self.tensors()
        parts = numbers.split([tensor.numel() for tensor in mine])
        shaped = (part.view_as(tensor) for part, tensor in zip(parts, mine, strict=True))
        return Sums(self.names, *shaped)

    def means(self) -> dict[str, float]:
        """Flat metrics, `name@depth`, and the acceptance length they predict, bonus included.

        A depth that was not asked for is left out.
        """
        rows = self.rows.clamp(min=1)
        shares = {name: getattr(self, name) / rows for name in ("loss", "agree", "alpha")}
        if len(self.names) > 1:
            each = self.terms / self.told.clamp(min=1)
            shares.update(zip((f"term.{name}" for name in self.names), each, strict=True))
        asked = [i for i, count in enumerate(self.rows.tolist()) if count or i == 0]
        out = {f"{name}@{i + 1}": float(share[i]) for name, share in shares.items() for i in asked}
        if self.kept[1]:
            out["kept"] = float(self.kept[0] / self.kept[1])
        tokens, greedy, sampled = self.rounds.tolist()
        out["accept_length"] = tokens / greedy if greedy else 1.0
        out["accept_length_sampling"] = tokens / sampled if sampled else 1.0
        return out
