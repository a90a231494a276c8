"""Key-value cache of a batch: one slot per prompt, with separate lengths.

transformers writes to it through `update`. Decoding appends a tree to every slot, keeps the rows of
the accepted paths and drops the rest, in place. The rows of several layers of one shape are in one
block, so that one operation moves them. `select_slots` sets which slots a forward runs on. The
states of recurrent layers (`recurrent_states.py`) follow every operation on the rows.

Worked example, three slots of lengths 5, 2 and 4, two new tokens: the forward has 7 columns.

    slot   columns 0..6            content
    0      o o o o o n n           old rows, then the new ones
    1      o o n n . . .           dots: stale rows, which the mask must exclude
    2      o o o o n n .
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.models.cache.attention_cache import AttentionCache
from outrider.models.cache.recurrent_states import RecurrentStates, States
from outrider.models.small_matmul import gqa_attention


class BlockViews(NamedTuple):
    """Views of a block for one forward.

    Attributes:
        columns: per layer, the attended columns.
        goals: per layer, the new columns, if all slots share them.
        at: prompts and new columns, on the device of the block.
    """

    columns: tuple[Tensor, ...]
    goals: tuple[Tensor, ...]
    at: tuple[Tensor, Tensor]


class KVCache(AttentionCache):
    """Slots of `capacity` rows, allocated when a layer first writes."""

    def __init__(self, slots: int, capacity: int, depth: int, device: torch.device) -> None:
        """
        Args:
            depth: layers per block.
            device: of the positions; rows are on the devices of their layers.
        """
        super().__init__()
        self.slots, self.capacity, self.depth = slots, capacity, depth
        self.lengths = [0] * slots
        self.states = RecurrentStates(slots)
        self._window = (0, slots)
        self._blocks: list[tuple[tuple[Any, ...], Tensor, int]] = []  # shape, rows, how many used
        # of each layer, where its keys and its values are: (block, index)
        self._locations: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}
        self._positions = torch.zeros(slots, capacity, dtype=torch.long, device=device)
        self._new_columns = self._positions[:, :0]
        self._prompts = self._positions[:, :0]
        self._count = self._start = self._width = 0  # of the current forward
        self._equal_lengths = True  # of the selected slots
        self._views = list[BlockViews]()  # of that forward

    def __len__(self) -> int:
        """Number of layers that have written."""
        return len(self._locations)

    def select_slots(self, first: int, count: int) -> None:
        """Select slots first..first+count-1 for the next forwards."""
        self._window = (first, first + count)
        self.states.select_slots(first, count)

    @property
    def active_lengths(self) -> list[int]:
        """Lengths of the selected slots."""
        return self.lengths[slice(*self._window)]

    @property
    def active_slots(self) -> range:
        """The selected slots."""
        return range(*self._window)

    def ensure_capacity(self, capacity: int) -> None:
        """Grow every slot to this many rows; existing rows are kept."""
        if capacity <= self.capacity:
            return
        more = capacity - self.capacity
        self._positions = torch.nn.functional.pad(self._positions, (0, more))
        for i, (shape, block, used) in enumerate(self._blocks):
            wider = block.new_zeros(*block.shape[:3], capacity, block.shape[4])
            wider[:, :, :, : self.capacity] = block
            self._blocks[i] = (shape, wider, used)
        self.capacity = capacity

    def move_slot(self, source: int, slot: int) -> None:
        """Copy a prompt to another slot."""
        length = self.lengths[slot] = self.lengths[source]
        self._positions[slot, :length] = self._positions[source, :length]
        for _, block, _ in self._blocks:
            block[:, slot, :, :length] = block[:, source, :, :length]
        self.states.move_slot(source, slot)

    def crop(self, slot: int, length: int) -> None:
        """Drop everything in a slot after its first `length` rows.

        Raises:
            ValueError: it has fewer rows, or recurrent states that cannot go back so far.
        """
        dropped = self.lengths[slot] - length
        if length < 0 or dropped < 0:
            raise ValueError(f"cannot crop {self.lengths[slot]} rows to {length}")
        if length == 0:
            self.states.clear(slot)
        elif dropped:
            self.states.keep({slot: length})
        self.lengths[slot] = length

    def restore(self, slot: int, length: int, states: States) -> None:
        """Return to the first `length` rows of a slot, and to a copy of its states then."""
        self.states.restore(slot, states)
        self.lengths[slot] = length

    def drop_newest(self, count: int) -> None:
        """Drop the newest rows of every selected slot, as if the last forward had not had them."""
        for slot in range(*self._window):
            self.crop(slot, self.lengths[slot] - count)
        self._count -= count

    @contextmanager
    def after_draft(self, count: int) -> Iterator[None]:
        """Inside, every selected slot has `count` more rows: those of draft tokens.

        Lengths are restored afterwards; rows written inside stay until others replace them.
        """
        before = list(self.lengths)
        self.add_written_rows(count)
        try:
            yield
        finally:
            self.lengths = before

    def add_written_rows(self, count: int) -> None:
        """Add rows that were written in `after_draft` to the lengths of the selected slots."""
        for slot in range(*self._window):
            self.lengths[slot] += count

    # ---- a forward ----

    def reserve(self, count: int) -> None:
        """Set the columns of `count` new rows; raise ValueError if they do not fit."""
        active = self.active_lengths
        longest = max(active)
        if longest + count > self.capacity:
            raise ValueError(
                f"slots of {self.capacity} rows hold {longest}; {count} more do not fit"
            )
        self._count, self._start, self._width = count, active[0], longest + count
        self._equal_lengths = all(length == self._start for length in active)
        device = self._positions.device
        self._new_columns = torch.arange(self._start, self._start + count, device=device)
        self._new_columns = self._new_columns.expand(len(active), -1)
        self._prompts = torch.arange(len(active), device=device)[:, None]
        if not self._equal_lengths:
            shifts = torch.tensor(active, device=device) - self._start
            self._new_columns = self._new_columns + shifts[:, None]
        self.states.reserve(active, count, count <= self.undo_rows)
        # all views of a forward at once: one by one they cost as much as its copies
        self._views = [self._slice_block(block) for _, block, _ in self._blocks]

    def column_positions(self, positions: Int[Tensor, "B T"]) -> Int[Tensor, "B S"]:
        """Return the position of every column, those of the new tokens included."""
        first, stop = self._window
        self._positions[first:stop].scatter_(1, self._new_columns, positions)
        return self._positions[first:stop, : self._width]

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Float[Tensor, "B A S C"], Float[Tensor, "B A S Cv"]]:
        """Append rows and return all as views; called by every attention layer."""
        if layer_idx not in self._locations:
            depth = (2 if key.shape == value.shape else 1) * self.depth
            places = self._allocate(key, depth), self._allocate(value, depth)
            self._locations[layer_idx] = places
        place_of_key, place_of_value = self._locations[layer_idx]
        return self._append(key, *place_of_key), self._append(value, *place_of_value)

    def attend(
        self,
        query: Float[Tensor, "B G T C"],
        key: Float[Tensor, "B A T C"],
        value: Float[Tensor, "B A T C"],
        layer: int,
        mask: Float[Tensor, "B 1 T S"],
        scale: float,
    ) -> Float[Tensor, "B G T C"]:
        """Append rows and attend to all; called by every layer of `FastLlama`."""
        return gqa_attention(query, *self.update(key, value, layer), mask, scale)

    def _append(self, rows: Tensor, block: int, index: int) -> Tensor:
        view = self._views[block]
        columns = view.columns[index]
        if self._equal_lengths:
            view.goals[index].copy_(rows)
        else:
            # not scatter_, which in half precision takes the time of all columns on a CPU
            columns.transpose(1, 2)[view.at] = rows.transpose(1, 2)
        return columns

    def _slice_block(self, block: Tensor) -> "BlockViews":
        columns = block[:, slice(*self._window), :, : self._width]
        goal = columns[:, :, :, self._start : self._start + self._count]
        at = self._prompts.to(block.device), self._new_columns.to(block.device)
        return BlockViews(columns.unbind(), goal.unbind(), at)

    def _allocate(self, rows: Tensor, depth: int) -> tuple[int, int]:
        """Return (block, index) in a block of this shape, usually shared by all layers."""
        _, heads, _, size = rows.shape
        shape = (heads, size, rows.dtype, rows.device)
        for i, (known, block, used) in enumerate(self._blocks):
            if known == shape and used < len(block):
                self._blocks[i] = (known, block, used + 1)
                return i, used
        block = rows.new_zeros(depth, self.slots, heads, self.capacity, size)
        self._blocks.append((shape, block, 1))
        self._views.append(self._slice_block(block))
        return len(self._blocks) - 1, 0

    def commit(self, positions: Int[Tensor, "B T"]) -> None:
        """Add the new rows to the lengths of the selected slots, after all layers have written."""
        first, stop = self._window
        self._positions[first:stop].scatter_(1, self._new_columns, positions)
        self.states.commit()
        self.add_written_rows(self._count)

    @property
    def appended(self) -> int:
        """Number of rows that the last forward appended to every selected slot."""
        return self._count

    def keep_rows(
        self,
        paths: Sequence[Sequence[int]],
        paths_on_device: Int[Tensor, "B P"] | None = None,
        appended: int | None = None,
    ) -> None:
        """Keep these of the rows appended last; drop the others.

        Args:
            paths: rows of each selected slot, strictly ascending.
            paths_on_device: the same, padded; None if every path is a prefix.
            appended: how many rows were appended; None: those of the last forward.
        """
        first, stop = self._window
        count = self.appended if appended is None else appended
        starts = [length - count for length in self.active_lengths]
        for slot, start, path in zip(range(first, stop), starts, paths, strict=True):
            self.lengths[slot] = start + len(path)
        shorter = [s for s, path in enumerate(paths, first) if len(path) < count]
        self.states.keep({slot: self.lengths[slot] for slot in shorter})
        if is_prefix(paths):
            return
        assert paths_on_device is not None, "rows that move need their indices on the device"
        longest = max(map(len, paths))
        self._gather_rows(starts, paths_on_device[:, :longest].to(self._positions.device))

    def _gather_rows(self, starts: list[int], paths: Int[Tensor, "B P"]) -> None:
        """Move these rows after `starts` to the first columns there."""
        first, stop = self._window
        widest, device = paths.shape[1], self._positions.device
        if len(paths) == 1:
            self._move_rows(first, starts[0], paths[0] + starts[0])
            return
        offsets = torch.tensor(starts, device=device)[:, None]
        source, goal = paths + offsets, torch.arange(widest, device=device) + offsets
        positions = self._positions[first:stop]
        positions.scatter_(1, goal, positions.gather(1, source))
        prompts = torch.arange(len(paths), device=device)[:, None]
        for _, block, used in self._blocks:
            part = block[:used, first:stop].permute(1, 3, 0, 2, 4)
            at, before, after = (index.to(block.device) for index in (prompts, source, goal))
            part[at, after] = part[at, before]

    def _move_rows(self, slot: int, start: int, source: Int[Tensor, " P"]) -> None:
        """Move whole rows of one slot, which is faster than gather and scatter."""
        goal = slice(start, start + len(source))
        positions = self._positions[slot]
        positions[goal] = positions.index_select(0, source)
        for _, block, used in self._blocks:
            part = block[:used, slot]
            part[:, :, goal] = part.index_select(2, source.to(block.device))

    def positions(self, slot: int = 0) -> Int[Tensor, "1 S"]:
        """Return the positions of a slot's rows."""
        return self._positions[slot : slot + 1, : self.lengths[slot]]

    def rows(
        self, layer: int, slot: int = 0
    ) -> tuple[Float[Tensor, "1 A S C"], Float[Tensor, "1 A S Cv"]]:
        """Return the keys and values of one layer in a slot."""
        key, value = (self._blocks[block][1][i] for block, i in self._locations[layer])
        length = self.lengths[slot]
        return key[slot : slot + 1, :, :length], value[slot : slot + 1, :, :length]

    # ---- interface of transformers ----

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.active_lengths)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return max(self.active_lengths) + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.capacity


def is_prefix(paths: Sequence[Sequence[int]]) -> bool:
    """Return whether all ascending paths are prefixes of the rows, so that none moves."""
    return all(not path or path[-1] == len(path) - 1 for path in paths)
