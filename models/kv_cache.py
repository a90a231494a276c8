"""Key-value cache of one forward batch: preallocated, and edited in place.

transformers writes to it through `update`; the engine controls its length. Decoding appends a whole
tree, keeps the rows of the accepted path (`keep_rows`) and drops the rest, without copying the
prefix. Rows are stored per layer as [B, A, capacity, C].
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache


class KVCache(Cache):
    """One buffer of `capacity` rows per layer, allocated when the layer first writes."""

    is_compileable = False

    def __init__(self, capacity: int) -> None:
        self.layers: list[Any] = []  # read by transformers; the rows are in `_keys`, `_values`
        self.offloading = False
        self.layer_class_to_replicate = None
        self.capacity = capacity
        self.length = 0
        self.positions: Int[Tensor, "B S"] = torch.zeros(1, 0, dtype=torch.long)
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def layers_written(self) -> int:
        return len(self._keys)

    def past_positions(self) -> Int[Tensor, "B S"]:
        """Return the positions of the rows that `update` returns before the new ones."""
        return self.positions

    def column_positions(self, positions: Int[Tensor, "B T"]) -> Int[Tensor, "B S"]:
        """Return the position of every row that `update` returns, the new ones included."""
        past = self.past_positions().to(positions.device).expand(len(positions), -1)
        return torch.cat([past, positions], dim=1)

    def reserve(self, count: int) -> None:
        """Raise ValueError if `count` more rows do not fit."""
        if self.length + count > self.capacity:
            raise ValueError(
                f"cache of {self.capacity} rows holds {self.length}; {count} more do not fit"
            )

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Float[Tensor, "B A S C"], Float[Tensor, "B A S Cv"]]:
        """Append rows and return all as views; called by every attention layer."""
        stop = self.length + key.shape[2]
        if layer_idx not in self._keys:
            self._keys[layer_idx] = self._allocate(key)
            self._values[layer_idx] = self._allocate(value)
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[:, :, self.length : stop] = key
        values[:, :, self.length : stop] = value
        return keys[:, :, :stop], values[:, :, :stop]

    def _allocate(self, rows: Tensor) -> Tensor:
        batch, heads, _, size = rows.shape
        return rows.new_zeros(batch, heads, self.capacity, size)

    def commit(self, positions: Int[Tensor, "B T"]) -> None:
        """Count the new rows as part of the cache, after all layers have written."""
        past = self.positions.to(positions.device).expand(len(positions), -1)
        self.positions = torch.cat([past, positions], dim=1)
        self.length = self.positions.shape[1]

    def crop(self, length: int) -> None:
        """Drop everything after the first `length` rows."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop {self.length} rows to {length}")
        self.length = length
        self.positions = self.positions[:, :length]

    def keep_rows(self, start: int, rows: Int[Tensor, " R"]) -> None:
        """Keep the first `start` rows and then `rows` (absolute, ascending); drop the others."""
        stop = start + len(rows)
        if not torch.equal(rows, torch.arange(start, stop, device=rows.device)):
            for buffer in (*self._keys.values(), *self._values.values()):
                buffer[:, :, start:stop] = buffer[:, :, rows]  # the right side is gathered first
        self.positions = torch.cat([self.positions[:, :start], self.positions[:, rows]], dim=1)
        self.length = stop

    def rows(self, layer: int) -> tuple[Float[Tensor, "B A S C"], Float[Tensor, "B A S Cv"]]:
        """Return the keys and values of one layer."""
        return self._keys[layer][:, :, : self.length], self._values[layer][:, :, : self.length]

    # interface of transformers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.capacity
