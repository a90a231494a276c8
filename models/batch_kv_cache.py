"""The key-value cache of a batch: a slot per prompt, each with a length of its own.

Decoding appends a tree to every slot, keeps the rows of the accepted paths and forgets the rest,
in place. The rows of all layers of one shape lie in one block, so that thinning them is one
operation, and prompts may come and go: `focus` says which slots a forward runs on.

Worked example, three slots of lengths 5, 2 and 4, two new tokens: the forward sees 7 columns.

    slot   columns 0..6            what is there
    0      o o o o o n n           old rows, then the new ones
    1      o o n n . . .           behind them whatever was there before: nobody may look
    2      o o o o n n .
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache


class SlotCache(Cache):
    """Slots of `capacity` rows, allocated when the layers first write."""

    is_compileable = False

    def __init__(self, slots: int, capacity: int, layers: int, device: torch.device) -> None:
        self.layers: list[Any] = []  # transformers looks here; the rows live in `_blocks`
        self.offloading = False
        self.layer_class_to_replicate = None
        self.slots, self.capacity, self.depth = slots, capacity, layers
        self.lengths = [0] * slots
        self._window = (0, slots)
        self._blocks: list[tuple[tuple[Any, ...], Tensor, int]] = []  # shape, rows, how many used
        self._place: dict[tuple[int, int], tuple[int, int]] = {}  # layer, key or value -> where
        self._positions = torch.zeros(slots, capacity, dtype=torch.long, device=device)
        self._fresh = self._positions[:, :0]  # columns of the new rows
        self._count = self._start = self._wide = 0  # of the forward under way
        self._level = True  # all slots in focus have one length
        self._views: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []  # of that forward

    def __len__(self) -> int:
        return len({layer for layer, _ in self._place})

    # ---- which slots ----

    def focus(self, first: int, count: int) -> None:
        """The next forwards run on slots first..first+count-1."""
        self._window = (first, first + count)

    @property
    def active(self) -> list[int]:
        """Lengths of the slots in focus."""
        return self.lengths[slice(*self._window)]

    def ensure(self, capacity: int) -> None:
        """Room for so many rows in every slot; rows that are there stay."""
        if capacity <= self.capacity:
            return
        more = capacity - self.capacity
        self._positions = torch.nn.functional.pad(self._positions, (0, more))
        for i, (shape, block, used) in enumerate(self._blocks):
            wider = block.new_zeros(*block.shape[:3], capacity, block.shape[4])
            wider[:, :, :, : self.capacity] = block
            self._blocks[i] = (shape, wider, used)
        self.capacity = capacity

    def move(self, source: int, slot: int) -> None:
        """One prompt takes the place of another."""
        length = self.lengths[slot] = self.lengths[source]
        self._positions[slot, :length] = self._positions[source, :length]
        for _, block, _ in self._blocks:
            block[:, slot, :, :length] = block[:, source, :, :length]

    def crop(self, slot: int, length: int) -> None:
        """Forget everything of a slot behind its first `length` rows."""
        if not 0 <= length <= self.lengths[slot]:
            raise ValueError(f"cannot crop {self.lengths[slot]} rows to {length}")
        self.lengths[slot] = length

    # ---- a forward ----

    def reserve(self, count: int) -> None:
        """Refuse loudly before a forward that would not fit; say where the new rows go."""
        active = self.active
        longest = max(active)
        if longest + count > self.capacity:
            raise ValueError(
                f"slots of {self.capacity} rows hold {longest}; {count} more do not fit"
            )
        self._count, self._start, self._wide = count, active[0], longest + count
        self._level = all(length == self._start for length in active)
        device = self._positions.device
        fresh = torch.arange(count, device=device)
        self._fresh = torch.tensor(active, device=device)[:, None] + fresh
        self._views = []

    def columns(self, positions: Int[Tensor, "B T"]) -> Int[Tensor, "B S"]:
        """Position of every column that the new tokens find, their own included."""
        first, stop = self._window
        self._positions[first:stop].scatter_(1, self._fresh, positions)
        return self._positions[first:stop, : self._wide]

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Float[Tensor, "B A S C"], Float[Tensor, "B A S Cv"]]:
        """Called by every attention layer: append rows, return all of them as views."""
        return self._append(key, layer_idx, 0), self._append(value, layer_idx, 1)

    def _append(self, rows: Tensor, layer: int, kind: int) -> Tensor:
        place = self._place.get((layer, kind))
        if place is None:
            place = self._place[layer, kind] = self._allocate(rows)
            self._views = []
        if not self._views:
            self._views = [self._cut(block, used) for _, block, used in self._blocks]
        held, goal = (part[place[1]] for part in self._views[place[0]])
        if self._level:
            goal.copy_(rows)
        else:
            held.scatter_(2, self._fresh[:, None, :, None].expand(rows.shape), rows)
        return held

    def _cut(self, block: Tensor, used: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Of every layer what attention sees, and where new rows go if all go to one place.

        All views of a forward are cut at once: one by one they would cost as much as its copies.
        """
        first, stop = self._window
        held = block[:used, first:stop, :, : self._wide]
        goal = block[:used, first:stop, :, self._start : self._start + self._count]
        return held.unbind(), goal.unbind()

    def _allocate(self, rows: Tensor) -> tuple[int, int]:
        """A place in the block of this shape: one for keys and values of all layers, as a rule."""
        _, heads, _, size = rows.shape
        shape = (heads, size, rows.dtype, rows.device)
        for i, (known, block, used) in enumerate(self._blocks):
            if known == shape and used < len(block):
                self._blocks[i] = (known, block, used + 1)
                return i, used
        block = rows.new_zeros(2 * self.depth, self.slots, heads, self.capacity, size)
        self._blocks.append((shape, block, 1))
        return len(self._blocks) - 1, 0

    def commit(self, positions: Int[Tensor, "B T"]) -> None:
        """All layers have written: the new rows are part of the slots in focus."""
        first, stop = self._window
        self._positions[first:stop].scatter_(1, self._fresh, positions)
        for slot in range(first, stop):
            self.lengths[slot] += self._count

    def keep(self, paths: Sequence[Sequence[int]], there: Int[Tensor, "B P"] | None = None) -> None:
        """Of the rows appended last keep these, no others.

        Args:
            paths: of every slot in focus, rows in strictly ascending order.
            there: the same on the device, of each as many as `paths` says; None where all lie in
                front.
        """
        first, stop = self._window
        starts = [length - self._count for length in self.active]
        for slot, start, path in zip(range(first, stop), starts, paths, strict=True):
            self.lengths[slot] = start + len(path)
        if in_front(paths):
            return  # they lie where they belong
        assert there is not None, "the device must know which rows move"
        widest, device = max(map(len, paths)), self._positions.device
        if len(paths) == 1:
            self._move_rows(first, starts[0], there[0, :widest] + starts[0])
            return
        behind = torch.tensor(starts, device=device)[:, None]
        source, goal = there[:, :widest] + behind, self._fresh[:, :widest]
        held = self._positions[first:stop]
        held.scatter_(1, goal, held.gather(1, source))
        for _, block, used in self._blocks:
            part = block[:used, first:stop]
            shape = (used, stop - first, block.shape[2], widest, block.shape[4])
            taken = part.gather(3, source[None, :, None, :, None].expand(shape))
            part.scatter_(3, goal[None, :, None, :, None].expand(shape), taken)

    def _move_rows(self, slot: int, start: int, source: Int[Tensor, " P"]) -> None:
        """The same for one slot, whole rows at once."""
        goal = slice(start, start + len(source))
        held = self._positions[slot]
        held[goal] = held.index_select(0, source)
        for _, block, used in self._blocks:
            part = block[:used, slot]
            part[:, :, goal] = part.index_select(2, source)

    def positions(self, slot: int = 0) -> Int[Tensor, "1 S"]:
        """Of the rows that a slot holds."""
        return self._positions[slot : slot + 1, : self.lengths[slot]]

    def rows(
        self, layer: int, slot: int = 0
    ) -> tuple[Float[Tensor, "1 A S C"], Float[Tensor, "1 A S Cv"]]:
        """What a slot holds for one layer."""
        key, value = (self._blocks[block][1][i] for block, i in self._both(layer))
        length = self.lengths[slot]
        return key[slot : slot + 1, :, :length], value[slot : slot + 1, :, :length]

    def _both(self, layer: int) -> tuple[tuple[int, int], tuple[int, int]]:
        return self._place[layer, 0], self._place[layer, 1]

    # what transformers asks of a cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.active)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return max(self.active)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return max(self.active) + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.capacity


def in_front(paths: Sequence[Sequence[int]]) -> bool:
    """Whether the rows of ascending paths are the first ones, so that none has to move."""
    return all(not path or path[-1] == len(path) - 1 for path in paths)
