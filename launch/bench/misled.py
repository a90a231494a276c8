"""Drafters whose drafts do not pay, or pay in parts of the text only.

    random    random weights
    foreign   the target's states with their dimensions exchanged at random, once: those of a target
              of the same shape whose weights the drafter has not seen
    changing  right as trained for 200 tokens of text, then its rows belong to other tokens for 200

What a drafter does to a text cannot change its answers, only their speed.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.models.drafting.drafter import Drafter, LevelIds, State
from outrider.models.drafting.wrapped import WrappedDrafter
from outrider.models.interface import Trace

PERIOD = 200  # tokens of text
Weights = Literal["trained", "random", "foreign", "changing"]


def misled(drafter: Drafter, weights: Weights) -> Drafter:
    """Return a drafter that drafts as the module's docstring says; `trained` is the drafter itself.

    Raises:
        ConfigError: it has no weights, or reads no states.
    """
    if weights == "random":
        _randomise(drafter)
    if weights == "foreign":
        return Foreign(drafter)
    return Changing(drafter) if weights == "changing" else drafter


def _randomise(drafter: Drafter) -> None:
    """Give a drafter random weights of the size of its own."""
    values = list(drafter.parameters())
    if not values:
        why = "This drafter has no weights."
        raise ConfigError("weights", "random", why, "Leave it out.")
    torch.manual_seed(0)
    with torch.no_grad():
        for value in values:
            value.normal_(0, max(1e-3, float(value.float().std(correction=0))))


class Foreign(WrappedDrafter):
    """A drafter that reads states of another basis."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        if not inner.is_trained:
            why = "This drafter does not read states of the target."
            raise ConfigError("weights", "foreign", why, "Leave it out.")

    def absorb_batch(self, states: Sequence[Any], traces: Sequence[Trace]) -> list[State]:
        return super().absorb_batch(states, [
            dataclasses.replace(one, taps=_exchanged(one.taps), last=_exchanged(one.last))
            for one in traces
        ])  # fmt: skip


def _exchanged(states: Float[Tensor, "1 T H"]) -> Float[Tensor, "1 T H"]:
    size = states.shape[-1]
    order = torch.randperm(size, generator=torch.Generator().manual_seed(size))
    return states[..., order.to(states.device)]


class Changing(WrappedDrafter):
    """A drafter whose rows are shifted by one token in every second PERIOD of the text it reads.

    Attributes:
        rows: read so far, of all texts; in a batch, the mean of its requests.
    """

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.rows = 0.0

    def absorb_batch(self, states: Sequence[Any], traces: Sequence[Trace]) -> list[State]:
        self.rows += sum(one.ids.shape[1] for one in traces) / len(traces)
        return super().absorb_batch(states, traces)

    def step_batch(
        self, states: Sequence[State], depth: int, ids: LevelIds, parents: LevelIds
    ) -> tuple[Float[Tensor, "B N Vd"], list[State]]:
        logits, new = super().step_batch(states, depth, ids, parents)
        return (logits.roll(1, -1) if self.rows // PERIOD % 2 else logits), new
