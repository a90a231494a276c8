"""`AttentionCache`, the base of all key-value caches: what `Target.forward` and transformers use.

A cache of transformers holds an object per layer in `layers`. These caches hold the rows of all
layers themselves, so that `layers` is empty.
"""

from abc import abstractmethod
from typing import Any

from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import Cache


class AttentionCache(Cache):
    """A key-value cache.

    The layers append rows between `reserve` and `commit`: modules of transformers through `update`,
    `FastLlama` through `attend`. Subclasses also implement the methods of transformers that return
    sizes.
    """

    is_compileable = False

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.offloading = False
        self.layer_class_to_replicate = None

    @abstractmethod
    def reserve(self, count: int) -> None:
        """Set the columns of `count` new tokens."""

    @abstractmethod
    def commit(self, positions: Int[Tensor, "B T"]) -> None:
        """Count the new tokens, after all layers have written."""

    @abstractmethod
    def column_positions(self, positions: Int[Tensor, "B T"]) -> Int[Tensor, "B S"]:
        """Return the position of every column, those of the new tokens included."""

    @abstractmethod
    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, A, T, C] of a layer, and return those of all columns."""

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the number of columns before the new ones."""
        columns: int = self.get_seq_length(layer_idx)
        return columns
