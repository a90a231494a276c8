"""A drafter that delegates to another one; subclasses change a part of what it does in decoding."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from outrider.models.drafting.drafter import BatchDrafter, Drafter, LevelIds, Sources, State
from outrider.models.interface import Trace


class DelegatingDrafter(BatchDrafter):
    """A drafter that delegates decoding to `inner`, which does not run the target."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__()
        self.inner = inner
        self.taps, self.vocab = inner.taps, inner.vocab
        self.max_depth, self.extra_rows = inner.max_depth, inner.extra_rows
        self.splits, self.may_abstain = inner.splits, inner.may_abstain  # type: ignore[misc]
        self.chains_only, self.calibration = inner.chains_only, inner.calibration

    def absorb_batch(self, states: Sequence[Any], traces: Sequence[Trace]) -> list[State]:
        return self.inner.absorb_batch(states, traces)

    def step_batch(
        self, states: Sequence[State], depth: int, ids: LevelIds, parents: LevelIds
    ) -> tuple[Float[Tensor, "B N Vd"], list[State]]:
        return self.inner.step_batch(states, depth, ids, parents)

    def end_draft(self, state: State, drafted: State, depth: int) -> State:
        return self.inner.end_draft(state, drafted, depth)

    def log_confidence(
        self,
        log_q: Float[Tensor, "*nodes Vd"],
        depth: int,
        hidden: Float[Tensor, "*nodes D"] | None,
    ) -> Float[Tensor, "*nodes"]:
        return self.inner.log_confidence(log_q, depth, hidden)

    def node_hidden(self, states: Sequence[State]) -> Float[Tensor, "B N D"] | None:
        return self.inner.node_hidden(states)

    def sources(self, states: Sequence[State]) -> Sources | None:
        return self.inner.sources(states)

    def use_cost(self, cost: float) -> None:
        self.inner.use_cost(cost)

    def finish(self, answer: Sequence[int]) -> None:
        self.inner.finish(answer)
