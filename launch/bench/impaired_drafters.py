"""Drafters whose drafts are rejected, always or in parts of the text.

    random      random weights of the size of its own
    foreign     the dimensions of the target's states are permuted, each tap in the same way: those
                of a target of the same shape that the drafter was not trained for
    changing    alternates every 200 tokens of a text between the trained logits and logits that are
                shifted by one token id; the prompt decides where in these 400 tokens a text begins

Answers do not change, only the speed does.
"""

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.models.drafting.delegating import DelegatingDrafter
from outrider.models.drafting.drafter import Drafter, LevelIds, State
from outrider.models.interface import Trace

PERIOD = 200  # tokens of text
Weights = Literal["trained", "random", "foreign", "changing"]


def impaired(drafter: Drafter, weights: Weights) -> Drafter:
    """Return the drafter that `weights` names; `random` replaces the weights of the one given.

    Raises:
        ConfigError: it has no weights, reads no states, or runs the target on its drafts.
    """
    if weights == "trained":
        return drafter
    if weights == "random":
        _randomise(drafter)
        return drafter
    if drafter.runs_target():
        raise _refused(weights, "This drafter runs the target on its drafts.")
    return Foreign(drafter) if weights == "foreign" else Changing(drafter)


def _refused(weights: str, why: str) -> ConfigError:
    return ConfigError("weights", weights, why, "Leave it out, or use another drafter.")


def _randomise(drafter: Drafter) -> None:
    values = list(drafter.parameters())
    if not values:
        raise _refused("random", "This drafter has no weights.")
    torch.manual_seed(0)
    with torch.no_grad():
        for value in values:
            value.normal_(0, max(1e-3, float(value.float().std(correction=0))))


class Foreign(DelegatingDrafter):
    """A drafter that reads states of another basis."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        if inner.is_composite:
            raise _refused("foreign", "This drafter is made of others.")
        if not inner.is_trained or inner.required_features == "ids":
            raise _refused("foreign", "This drafter has no weights that read the target's states.")

    def absorb_batch(self, states: Sequence[Any], traces: Sequence[Trace]) -> list[State]:
        size = traces[0].last.shape[-1]
        return super().absorb_batch(states, [
            dataclasses.replace(
                one, taps=_permuted(one.taps, size), last=_permuted(one.last, size)
            )
            for one in traces
        ])  # fmt: skip


def _permuted(states: Float[Tensor, "1 T KH"], size: int) -> Float[Tensor, "1 T KH"]:
    """Permute the `size` dimensions of every layer's states."""
    layers: Tensor = states.unflatten(-1, (-1, size))
    return layers[..., _order(size, states.device)].flatten(-2)


@cache
def _order(size: int, device: torch.device) -> Int[Tensor, " H"]:
    return torch.randperm(size, generator=torch.Generator().manual_seed(0)).to(device)


class Phase(NamedTuple):
    """A state of the inner drafter, and the place of its newest row in the text."""

    inner: State
    place: int


class Changing(DelegatingDrafter):
    """A drafter that is right in every second PERIOD of a text."""

    def absorb_batch(self, states: Sequence[Any], traces: Sequence[Trace]) -> list[State]:
        inner = super().absorb_batch([one and one.inner for one in states], traces)
        first = [
            _offset(trace) if one is None else one.place
            for one, trace in zip(states, traces, strict=True)
        ]
        places = [at + trace.ids.shape[1] for at, trace in zip(first, traces, strict=True)]
        return [Phase(*pair) for pair in zip(inner, places, strict=True)]

    def step_batch(
        self, states: Sequence[State], depth: int, ids: LevelIds, parents: LevelIds
    ) -> tuple[Float[Tensor, "B N Vd"], list[State]]:
        logits, new = super().step_batch([one.inner for one in states], depth, ids, parents)
        places = [one.place for one in states]
        wrong = torch.tensor([at // PERIOD % 2 == 1 for at in places], device=logits.device)
        logits = torch.where(wrong[:, None, None], logits.roll(1, -1), logits)
        return logits, [Phase(*pair) for pair in zip(new, places, strict=True)]

    def end_draft(self, state: State, drafted: State, depth: int) -> State:
        return state._replace(inner=super().end_draft(state.inner, drafted.inner, depth))

    def node_hidden(self, states: Sequence[State]) -> Float[Tensor, "B N D"] | None:
        return super().node_hidden([one.inner for one in states])


def _offset(trace: Trace) -> int:
    return int(trace.ids[0, :8].sum()) % (2 * PERIOD)
