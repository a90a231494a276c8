"""Sums of what one forward measures at D depths; they add over micro-batches and ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass
class MetricSums:
    """Sums per depth over supervised rows. `means` divides them by `rows`.

    `rounds` holds the tokens that decoding this text emits in rounds, then the expected rounds of a
    greedy and of a sampled chain (acceptance_forecast.py). It and `alpha` are 0 where not measured;
    it is NaN if a supervised row had no guess.
    """

    names: tuple[str, ...]  # of the terms of the loss
    loss: Float[Tensor, " D"]  # all terms together, before the weight of the depth
    agree: Float[Tensor, " D"]  # the drafter's top-1 token is the target's
    alpha: Float[
        Tensor, " D"
    ]  # sum of min(p, q): the chance that sampling at temperature 1 accepts
    rows: Float[Tensor, " D"]
    terms: Float[Tensor, "terms D"]  # each term on its own, unweighted
    term_rows: Float[Tensor, "terms D"]  # rows that each term counts
    target_loss: Float[Tensor, "2"]  # of the last states of a changed target; its rows
    rounds: Float[Tensor, "3"]
    objective: Float[Tensor, ""]  # what a step minimises; `means` leaves it out

    @classmethod
    def zero(
        cls, depths: int, device: torch.device | str, names: Sequence[str] = ("soft_ce",)
    ) -> "MetricSums":
        sizes = [(depths,)] * 4 + [(len(names), depths)] * 2 + [(2,), (3,), ()]
        zeros = (torch.zeros(size, dtype=torch.float64, device=device) for size in sizes)
        return cls(tuple(names), *zeros)

    def tensors(self) -> list[Tensor]:
        """Return all sums, in the order of the fields."""
        return [getattr(self, f.name) for f in fields(self) if f.name != "names"]

    def add(self, other: "MetricSums") -> None:
        for total, part in zip(self.tensors(), other.tensors(), strict=True):
            total.add_(part)

    def flatten(self) -> Float[Tensor, " numbers"]:
        """Return all sums in one tensor, for one all-reduce."""
        return torch.cat([tensor.flatten() for tensor in self.tensors()])

    def unflatten(self, numbers: Float[Tensor, " numbers"]) -> "MetricSums":
        """Return sums with these numbers, in the order of `flatten`."""
        tensors = self.tensors()
        parts = numbers.split([tensor.numel() for tensor in tensors])
        shaped = (part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True))
        return MetricSums(self.names, *shaped)

    def means(self) -> dict[str, float]:
        """Return metrics `name@depth` and the predicted acceptance length, bonus included.

        Depths that were not unrolled are left out, and the length where rows had no guess.
        """
        rows = self.rows.clamp(min=1)
        shares = {name: getattr(self, name) / rows for name in ("loss", "agree", "alpha")}
        if len(self.names) > 1:
            values = self.terms / self.term_rows.clamp(min=1)
            shares.update(zip((f"term.{name}" for name in self.names), values, strict=True))
        depths = [i for i, count in enumerate(self.rows.tolist()) if count or i == 0]
        out = {f"{name}@{i + 1}": float(share[i]) for name, share in shares.items() for i in depths}
        if self.target_loss[1]:
            out["target_loss"] = float(self.target_loss[0] / self.target_loss[1])
        tokens, greedy, sampled = self.rounds.tolist()
        if math.isnan(tokens):
            return out
        out["accept_length"] = tokens / greedy if greedy else 1.0
        out["accept_length_sampling"] = tokens / sampled if sampled else 1.0
        return out
