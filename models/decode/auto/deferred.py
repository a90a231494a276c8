"""A drafter that reads verified rows only when it drafts: rounds without a draft skip it.

The rows of such rounds wait with the state. The states of the target in them are those that its
forward has computed anyway, kept by reference; running the target on the rows again would cost
more than it saves. The next draft begins by absorbing what waits, in pieces of bounded size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.models.decode.round_times import Stopwatch
from outrider.models.drafting.delegating import DelegatingDrafter
from outrider.models.drafting.drafter import (
    Absorb,
    Absorbed,
    Drafter,
    LevelIds,
    LookingDrafter,
    State,
)
from outrider.models.interface import Trace
from outrider.models.target.target import TargetStates

LONG = 16  # rows per request of a look, beyond which its seconds are counted by themselves
LOOK, LOOK_ROW = 0.5, 2e-5  # weight of such a look in the mean seconds of a row; before the first
PIECE = 512  # rows that are absorbed at once


class PlainRow(NamedTuple):
    """The row of a request in a plain round, made a Trace only if the drafter reads it.

    Attributes:
        token, next_token: of the row, and the one after it.
        slot: of the request in `states`.
    """

    token: int
    next_token: int
    position: int
    slot: int
    states: TargetStates


Waiting = Trace | PlainRow


@dataclass
class Deferred:
    """What a drafter has read, and the verified rows that it has not read yet.

    Reading moves rows from `waiting` to `absorbed`; the text that the state represents is the same.

    Attributes:
        rows: number of waiting rows.
    """

    absorbed: Absorbed = field(default_factory=Absorbed)
    waiting: tuple[Waiting, ...] = ()
    rows: int = 0

    def after(self, new: Waiting, rows: int) -> "Deferred":
        """Return the state after `rows` more rows."""
        return Deferred(self.absorbed, (*self.waiting, new), self.rows + rows)


class DeferredDrafter(DelegatingDrafter):
    """A drafter whose `absorb` waits for the next draft.

    Attributes:
        read: rows and seconds of the last reading.
        looked: seconds of the last look, if it had many rows; 0 otherwise.
        look_row: expected seconds per row of such a look.
    """

    def __init__(
        self, drafter: Drafter, on_finish: Callable[[int], None], device: torch.device
    ) -> None:
        """
        Args:
            on_finish: called with the tokens of an answer when it has ended.
            device: of the target; reading is timed on it.
        """
        super().__init__(drafter)
        self.on_finish, self.device = on_finish, device
        self.read, self.looked, self.look_row = (0, 0.0), 0.0, LOOK_ROW

    def absorb_batch(self, states: Sequence[Any], traces: Sequence[Trace]) -> list[State]:
        return [
            (Deferred() if state is None else state).after(trace, trace.ids.shape[1])
            for state, trace in zip(states, traces, strict=True)
        ]

    def step_batch(
        self, states: Sequence[State], depth: int, ids: LevelIds, parents: LevelIds
    ) -> tuple[Float[Tensor, "B N Vd"], list[State]]:
        if depth == 1:
            self._read_waiting(states)
            states = [one.absorbed.state for one in states]
        return self.inner.step_batch(states, depth, ids, parents)

    def look(self, states: Sequence[Deferred]) -> list[int | None]:
        """Return how many rows the drafter reads before it drafts; None: it needs no weights.

        A drafter that looks first absorbs the tokens of the rows that wait.
        """
        if not isinstance(self.inner, LookingDrafter):
            return [one.rows for one in states]
        if rows := sum(one.rows for one in states):
            watch = Stopwatch(self.device)
            self._absorb_waiting(states, self.inner.look)
            seconds, self.looked = watch.lap(), 0.0
            if rows > LONG * len(states):
                self.looked = seconds
                self.look_row += LOOK * (seconds / rows - self.look_row)
        return [self.inner.rows_to_read(one.absorbed.state) for one in states]

    def skip_weights(self, states: Sequence[Deferred]) -> bool:
        """Make the next draft one without weights if that drafts anything; return whether."""
        assert isinstance(self.inner, LookingDrafter), "the controller waits with its weights"
        found = [self.inner.without_weights(one.absorbed.state) for one in states]
        if not any(drafts for _, drafts in found):
            return False
        for one, (state, _) in zip(states, found, strict=True):
            one.absorbed = one.absorbed._replace(state=state)
        return True

    def end_draft(self, state: Deferred, drafted: State, depth: int) -> Deferred:
        new = self.inner.end_draft(state.absorbed.state, drafted, depth)
        state.absorbed = state.absorbed._replace(state=new)
        return state

    def finish(self, answer: Sequence[int]) -> None:
        super().finish(answer)
        self.on_finish(len(answer))

    def _read_waiting(self, states: Sequence[Deferred]) -> None:
        """Absorb the rows that the next draft needs, and time it."""
        watch, rows = Stopwatch(self.device), self.look(states)
        if isinstance(self.inner, LookingDrafter):
            late = [one for one, number in zip(states, rows, strict=True) if number is not None]
            read = self.inner.read_waiting([one.absorbed.state for one in late])
            for one, state in zip(late, read, strict=True):
                one.absorbed = one.absorbed._replace(state=state)
        else:
            self._absorb_waiting(states)
        self.read = sum(filter(None, rows)), watch.lap()

    def _absorb_waiting(self, states: Sequence[Deferred], absorb: Absorb | None = None) -> None:
        """Absorb all rows that wait."""
        while late := [one for one in states if one.waiting]:
            pieces = [_first_rows(one.waiting) for one in late]
            traces = [_joined(piece) for piece in pieces]
            new = self.inner.absorb_next([one.absorbed for one in late], traces, absorb)
            for one, piece, trace, absorbed in zip(late, pieces, traces, new, strict=True):
                one.absorbed, one.waiting = absorbed, one.waiting[len(piece) :]
                one.rows -= trace.ids.shape[1]


def _first_rows(waiting: tuple[Waiting, ...]) -> tuple[Waiting, ...]:
    """Return the first waiting rows of one kind: at most PIECE, and at least one entry."""
    rows, kind = 0, type(waiting[0])
    for count, one in enumerate(waiting):
        rows += 1 if isinstance(one, PlainRow) else one.ids.shape[1]
        if count and (rows > PIECE or type(one) is not kind):
            return waiting[:count]
    return waiting


def _joined(waiting: Sequence[Any]) -> Trace:
    """Concatenate waiting rows of one kind, of one prompt."""
    return _trace_of(waiting) if isinstance(waiting[0], PlainRow) else Trace.joined(waiting)


def _trace_of(rows: Sequence[PlainRow]) -> Trace:
    """Return the rows of plain rounds as the engine passes verified rows to a drafter."""
    device = rows[0].states.last.device
    table = torch.tensor([row[:3] for row in rows], device=device).T[:, None]
    taps, last = (
        torch.cat([getattr(row.states, name)[row.slot : row.slot + 1] for row in rows], dim=1)
        for name in ("taps", "last")
    )
    document = torch.zeros_like(table[0])
    return Trace(table[0], table[1], document.bool(), document, table[2], taps, last)
