"""States of recurrent layers: one per slot and layer, of constant size, beside the rows of a cache.

A state holds all rows that a layer has read and cannot drop one. Before a forward over rows that
may be dropped, the states are copied, and the forward records what enters every recurrent module.
`keep` then restores the states of the slots that keep fewer rows, and runs only the recurrent
modules again, on the inputs of the rows that are kept. Two slots, four rows, of which two and four
are kept:

    slot   before   after    rows kept   then
    0      s        ssss     2           back to the copy; modules run on rows 0..1
    1      s        ssss     4           nothing

Modules whose code reads several rows only from an empty state (Mamba-1) run row by row, and the
state after every row is kept instead of the inputs.

Legend: B selected slots, C channels, K columns of a convolution's state, T rows of a forward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor

from outrider.conf.errors import RunError

Key = tuple[str, int, int]  # kind of state, layer, and which of the layer's states of this kind
States = dict[Key, Tensor]  # [slots, ...] each


class Call(NamedTuple):
    """A call of a recurrent module: its forward and what entered it."""

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        return self.forward(*self.args, **self.kwargs)

    def part(self, count: int, rows: slice, prompts: Tensor | None = None) -> "Call":
        """Return the call on some rows of some prompts.

        Args:
            count: T; tensors [B, T, ...] are cut, everything else is passed on.
            prompts: indices of prompts; None: all.
        """

        def cut(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return type(value)(map(cut, value))
            if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != count:
                return value
            value = value[:, rows]
            return value if prompts is None or len(value) == 1 else value[prompts]

        kwargs = {name: cut(value) for name, value in self.kwargs.items()}
        return Call(self.forward, tuple(map(cut, self.args)), kwargs)


@dataclass
class Undo:
    """What it takes to drop rows of the last forward.

    Attributes:
        first: the first of the slots.
        starts: how many rows each slot had.
        count: T.
        filled: whether the slots had states.
        before: their states before the forward.
        calls: of the recurrent modules.
        after_rows: states after each row, of modules that ran row by row.
    """

    first: int
    starts: list[int]
    count: int
    filled: bool
    before: States
    calls: list[Call] = field(default_factory=list)
    after_rows: dict[Key, list[Tensor]] = field(default_factory=dict)


class RecurrentStates:
    """The states of all recurrent layers, allocated when a layer first writes."""

    def __init__(self, slots: int) -> None:
        self._slots, self._states = slots, States()
        self._filled = [False] * slots  # whether a slot has read a row
        self._window = slice(0, slots)
        self.count = 0  # rows of the current forward
        self._written = set[Key]()  # in the current forward
        self._touched = set[Key]()  # by the current module
        self._undo: Undo | None = None
        self._part: RecurrentStates | None = None  # reads and writes go there instead

    def __len__(self) -> int:
        """Number of layers that have written."""
        return len({layer for _, layer, _ in self._states})

    # ---- slots ----

    def select_slots(self, first: int, count: int) -> None:
        self._window = slice(first, first + count)

    def move_slot(self, source: int, slot: int) -> None:
        self._undo = None
        self._filled[slot] = self._filled[source]
        for state in self._states.values():
            state[slot] = state[source]

    def clear(self, slot: int) -> None:
        """Forget everything that a slot has read."""
        self._filled[slot] = False

    def copy_of(self, slot: int) -> States:
        """Return a copy of a slot's states; empty if there are none."""
        return {key: state[slot].clone() for key, state in self._states.items()}

    def restore(self, slot: int, states: States) -> None:
        """Set a slot's states to a copy."""
        self._undo = None
        self._filled[slot] = bool(states)
        for key, state in states.items():
            self._states[key][slot] = state

    # ---- a forward ----

    def reserve(self, starts: list[int], count: int, undo: bool) -> None:
        """Begin a forward of `count` rows.

        Args:
            starts: rows of each selected slot.
            undo: some of the new rows may be dropped after the forward.
        """
        self.count, self._written, self._undo = count, set(), None
        if undo and self._states:
            before = {key: state[self._window].clone() for key, state in self._states.items()}
            first, filled = self._window.start, self._are_filled
            self._undo = Undo(first, starts, count, filled, before)

    def commit(self) -> None:
        """End a forward."""
        if self._written:
            self._filled[self._window] = [True] * len(self._filled[self._window])

    @property
    def _are_filled(self) -> bool:
        filled = self._filled[self._window]
        assert all(filled) or not any(filled), "prompts with and without rows in one forward"
        return filled[0]

    def read(self, key: Key) -> Shaped[Tensor, "B ..."] | None:
        """Return the states of the selected slots, which may be modified; None before any row."""
        if self._part is not None:
            return self._part.read(key)
        if key not in self._states or not (self._are_filled or key in self._written):
            return None
        self._touched.add(key)
        return self._states[key][self._window]

    def write(self, key: Key, value: Shaped[Tensor, "B ..."]) -> Tensor:
        """Set the states of the selected slots.

        Raises:
            RunError: the layer is on another device than its states.
        """
        if self._part is not None:
            return self._part.write(key, value)
        if key not in self._states:
            self._states[key] = value.new_zeros(self._slots, *value.shape[1:])
        state = self._states[key]
        if state.device != value.device:
            message = f"A recurrent state is on {state.device}, and its layer on {value.device}."
            raise RunError(message, "Start a new dialogue or batch after the target has moved.")
        self._written.add(key)
        self._touched.add(key)
        return state[self._window].copy_(value)

    def append_columns(
        self, key: Key, new: Shaped[Tensor, "B C T"], size: int | None
    ) -> Shaped[Tensor, "B C KT"]:
        """Append columns to a convolution's state, and return them with those before.

        Args:
            size: K; None: that of the state, or of the first columns.
        """
        old = self.read(key)
        columns = new if old is None else torch.cat([old, new], dim=-1)
        size = size or (new if old is None else old).shape[-1]
        missing = max(0, size - columns.shape[-1])
        self.write(key, torch.nn.functional.pad(columns[..., -size:], (missing, 0)))
        return columns

    def run(self, call: Call, by_rows: bool) -> Any:
        """Run a module of a recurrent layer on the rows of the forward.

        Args:
            by_rows: one row at a time, unless the slots are empty.
        """
        if self.count == 1:
            return call.run()
        if not by_rows or not self._are_filled:
            if self._undo is not None:
                self._undo.calls.append(call)
            return call.run()
        outputs = list[Any]()
        for row in range(self.count):
            self._touched.clear()
            outputs.append(call.part(self.count, slice(row, row + 1)).run())
            if self._undo is not None:
                for key in self._touched:
                    after = self._states[key][self._window].clone()
                    self._undo.after_rows.setdefault(key, []).append(after)
        return join_rows(outputs)

    @property
    def continues_text(self) -> bool:
        """Whether several rows continue slots that have read some: what not all modules can do."""
        return self.count > 1 and self._are_filled

    def ignores_state(self, call: Call) -> bool:
        """Return whether a module's output does not depend on its recurrent state."""
        outputs, keys = list[tuple[Tensor, ...]](), set[Key]()
        for shift in (0, 1):
            states = {key: state[self._window].clone() for key, state in self._states.items()}
            for key in states.keys() & keys:
                states[key] += shift
            with self._replaced(states, True) as part:
                out = call.run()
            outputs.append(out if isinstance(out, tuple) else (out,))
            keys = {key for key in part._touched if key[0] != "conv"}
        return bool(keys) and all(map(torch.equal, *outputs))

    # ---- dropping rows ----

    def keep(self, lengths: Mapping[int, int]) -> None:
        """Drop rows of the last forward.

        Args:
            lengths: rows that are left, of each slot that drops some.

        Raises:
            ValueError: rows of an earlier forward, or of one that was begun without `undo`.
        """
        undo, groups = self._undo, dict[int, list[int]]()
        for slot, length in lengths.items() if self._states else ():
            kept = -1 if undo is None else length - undo.starts[slot - undo.first]
            if kept < 0:
                raise ValueError(f"recurrent states of slot {slot} cannot go back to row {length}")
            groups.setdefault(kept, []).append(slot)
        for kept, slots in groups.items():
            assert undo is not None, "checked above"
            self._rewind(undo, slots, kept)

    def _rewind(self, undo: Undo, slots: Sequence[int], count: int) -> None:
        device = next(iter(self._states.values())).device
        prompts = torch.tensor([slot - undo.first for slot in slots], device=device)
        kept = {key: state[prompts.to(state.device)] for key, state in undo.before.items()}
        if count:
            with self._replaced(kept, undo.filled):
                for call in undo.calls:
                    call.part(undo.count, slice(count), prompts).run()
        for key, after in undo.after_rows.items() if count else ():
            kept[key] = after[count - 1][prompts.to(after[0].device)]
        for slot in slots:
            self._filled[slot] = undo.filled or count > 0
        for key, state in kept.items():
            self._states[key][slots] = state

    @contextmanager
    def _replaced(self, states: States, filled: bool) -> Iterator["RecurrentStates"]:
        """Read and write these states inside, which are modified, instead of the slots'."""
        part = RecurrentStates(len(next(iter(states.values()))))
        part._states, part._filled = states, [filled] * part._slots
        self._part = part
        try:
            yield part
        finally:
            self._part = None


def join_rows(outputs: Sequence[Any]) -> Any:
    """Concatenate the rows of a module's outputs."""
    if isinstance(outputs[0], tuple):
        return tuple(map(join_rows, zip(*outputs, strict=True)))
    return torch.cat(list(outputs), dim=1) if isinstance(outputs[0], Tensor) else outputs[-1]
