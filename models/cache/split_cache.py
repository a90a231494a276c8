"""Key-value cache of consecutive ranges of layers, each with lengths of its own.

An early exit appends draft tokens to its range, and verification appends them to the others.
Outside a round all ranges hold the same rows.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.models.cache.attention_cache import AttentionCache
from outrider.models.cache.kv_cache import KVCache
from outrider.models.cache.recurrent_states import RecurrentStates


class SplitCache(AttentionCache):
    """A `KVCache` per range of layers, with the interface of one where all hold the same rows.

    Attributes:
        parts: the caches of the ranges, in order.
    """

    def __init__(
        self, slots: int, capacity: int, layers: int, device: torch.device, splits: Sequence[int]
    ) -> None:
        """
        Args:
            splits: first layers of the ranges after the first one, ascending.

        Raises:
            ValueError: a range would be empty.
        """
        super().__init__()
        bounds = [0, *splits, layers]
        sizes = [stop - first for first, stop in pairwise(bounds)]
        if min(sizes) < 1:
            raise ValueError(f"layers 0..{layers - 1} cannot be split at {list(splits)}")
        self.states = RecurrentStates(
            slots
        )  # of no layer: its targets have none that are recurrent
        self.splits = tuple(splits)
        self.parts = [KVCache(slots, capacity, size, device) for size in sizes]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def range_of(self, layer: int) -> KVCache:
        """Return the cache of the range that holds a layer."""
        return self.parts[bisect_right(self.splits, layer)]

    @property
    def slots(self) -> int:
        return self.parts[0].slots

    @property
    def capacity(self) -> int:
        return min(part.capacity for part in self.parts)

    @property
    def lengths(self) -> list[int]:
        return self.parts[-1].lengths

    @property
    def active_lengths(self) -> list[int]:
        return self.parts[-1].active_lengths

    def select_slots(self, first: int, count: int) -> None:
        for part in self.parts:
            part.select_slots(first, count)

    def ensure_capacity(self, capacity: int) -> None:
        for part in self.parts:
            part.ensure_capacity(capacity)

    def move_slot(self, source: int, slot: int) -> None:
        for part in self.parts:
            part.move_slot(source, slot)

    def crop(self, slot: int, length: int) -> None:
        for part in self.parts:
            part.crop(slot, length)

    def drop_newest(self, count: int) -> None:
        for part in self.parts:
            part.drop_newest(count)

    def keep_rows(
        self, paths: Sequence[Sequence[int]], paths_on_device: Int[Tensor, "B P"] | None = None
    ) -> None:
        """Keep rows of the last verification, which runs on all tokens in the last range only."""
        for part in self.parts:
            part.keep_rows(paths, paths_on_device, self.parts[-1].appended)

    # ---- a forward of all layers ----

    def reserve(self, count: int) -> None:
        for part in self.parts:
            part.reserve(count)

    def commit(self, positions: Int[Tensor, "B T"]) -> None:
        for part in self.parts:
            part.commit(positions)

    def column_positions(self, positions: Int[Tensor, "B T"]) -> Int[Tensor, "B S"]:
        return self.parts[-1].column_positions(positions)

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Float[Tensor, "B A S C"], Float[Tensor, "B A S Cv"]]:
        return self.range_of(layer_idx).update(key, value, layer_idx)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int, mask: Tensor, scale: float
    ) -> Tensor:
        return self.range_of(layer).attend(query, key, value, layer, mask, scale)

    # ---- rows ----

    def positions(self, slot: int = 0) -> Int[Tensor, "1 S"]:
        return self.parts[-1].positions(slot)

    def rows(
        self, layer: int, slot: int = 0
    ) -> tuple[Float[Tensor, "1 A S C"], Float[Tensor, "1 A S Cv"]]:
        return self.range_of(layer).rows(layer, slot)

    # ---- interface of transformers ----

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.range_of(layer_idx).get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.range_of(layer_idx).get_mask_sizes(query_length)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.capacity
