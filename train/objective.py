"""The training objective: unroll the drafter and compare every supervised row with the target.

Returns sums and counts, never means: the caller divides once, by the counts of the whole step.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from outrider.models.drafting.drafter import Drafter
from outrider.models.interface import Guess, Trace
from outrider.train.chunked_loss import ChunkedLoss
from outrider.train.losses import parse_loss
from outrider.train.metric_sums import MetricSums
from outrider.train.teacher import TargetHead, Teacher


class Objective(nn.Module):
    """The module that accelerate wraps: the drafter, and the target as its teacher."""

    def __init__(
        self, drafter: Drafter, target: TargetHead, *, weights: list[float],
        loss: Sequence[str] = ("soft_ce",), renormalise: bool = True,
        path: Literal["fused", "stored", "plain"] = "fused",
    ) -> None:  # fmt: skip
        """
        Args:
            weights: of depths 1, 2, ...; depths of weight 0 are only measured.
            renormalise: the teacher sums to 1 over the draft vocabulary.
            path: how chunks use autograd, see chunked_loss.py; results are the same.
        """
        super().__init__()
        self.drafter, self.weights, self.path = drafter, weights, path
        self.terms, self.target_terms = parse_loss(loss), parse_loss(drafter.target_loss)
        # not a submodule: the target is neither trained nor saved
        self.teacher = Teacher(target, drafter.vocab, renormalise)

    def zero_sums(self, device: torch.device | str) -> MetricSums:
        return MetricSums.zero(len(self.weights), device, [term.name for term in self.terms])

    def needs_full_head(self, measure: bool) -> bool:
        """Return whether the draft vocabulary's share is needed, for which the whole head runs."""
        spec = any(term.spec.needs_full_head for term in self.terms)
        return (measure or not self.teacher.renormalise or spec) and not self.drafter.vocab.is_full

    def forward(
        self, trace: Trace, denominators: Float[Tensor, " D"], measure: bool = False
    ) -> tuple[Float[Tensor, ""], MetricSums]:
        """Return the sum over guesses of weight * loss / denominator, and the metric sums.

        Args:
            denominators: per depth, the trained rows of the whole step.
            measure: unroll all depths, and compute alpha and rounds.
        """
        trained = max(i for i, weight in enumerate(self.weights, start=1) if weight)
        changed, guesses = list[Guess](), list[Guess]()  # of depth 0; of the others
        for guess in self.drafter.unroll(trace):
            (guesses if guess.depth else changed).append(guess)
            if len(guesses) == (len(self.weights) if measure else trained):
                break
        device = trace.last.device
        denominators, sums = denominators.to(device), self.zero_sums(device)
        weights = [w * guess.weight for w, guess in zip(self.weights, guesses, strict=False)]
        scale = torch.tensor(weights, device=device) / denominators[: len(weights)]
        chunked = partial(ChunkedLoss, self.drafter, self.teacher, trace, path=self.path)
        full = self.needs_full_head(measure)
        loss = chunked(guesses, scale, sums, self.terms, full=full, measure=measure).loss()
        if changed:
            names = [term.name for term in self.target_terms]
            own, full = MetricSums.zero(len(changed), device, names), self.needs_full_head(False)
            scale = torch.tensor([guess.weight for guess in changed], device=device)
            parts = changed, scale / denominators[0], own, self.target_terms
            loss = loss + chunked(*parts, full=full, measure=False).loss()
            sums.target_loss.copy_(torch.stack([own.loss[0], own.rows[0]]))
        sums.objective.copy_(loss.detach())
        return loss, sums
