"""`AttentionCache`, the base of all key-value caches: the attributes that transformers reads.

A cache of transformers holds an object per layer in `layers`. These caches hold the rows of all
layers themselves, so that `layers` is empty.
"""

from typing import Any

from transformers.cache_utils import Cache


class AttentionCache(Cache):
    """A cache whose subclasses implement `update` and the methods that return its size."""

    is_compileable = False

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.offloading = False
        self.layer_class_to_replicate = None

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the number of columns before the new ones."""
        columns: int = self.get_seq_length(layer_idx)
        return columns
