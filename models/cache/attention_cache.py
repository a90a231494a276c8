"""`AttentionCache`, the base of all caches: what `Target.forward` and transformers use.

A cache of transformers holds an object per layer in `layers`. These caches hold the rows and the
recurrent states of all layers themselves, so that `layers` is empty.
"""

from abc import abstractmethod
from typing import Any

from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import Cache

from outrider.models.cache.recurrent_states import RecurrentStates


class AttentionCache(Cache):
    """A key-value cache.

    The layers append rows between `reserve` and `commit`: modules of transformers through `update`,
    `FastLlama` through `attend`. Subclasses also implement the methods of transformers that return
    sizes.

    Attributes:
        states: of recurrent layers, which read and write them through the methods of transformers.
        undo_rows: a forward of at most so many rows may drop some of them afterwards, recurrent
            states included; rows of attention layers may always be dropped.
    """

    is_compileable = False
    undo_rows = 0
    states: RecurrentStates

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

    # ---- interface of transformers for recurrent layers ----

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.read(("conv", layer_idx, state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0,
        conv_kernel_size: int | None = None, **_kwargs: Any,
    ) -> Tensor:  # fmt: skip
        key = ("conv", layer_idx, state_idx)
        return self.states.append_columns(key, conv_states, conv_kernel_size)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.read(("recurrent", layer_idx, state_idx))

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: Any
    ) -> Tensor:
        return self.states.write(("recurrent", layer_idx, state_idx), recurrent_states)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """MiniMax's method."""
        return self.states.read(("linear", layer_idx, 0))

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """MiniMax's method."""
        self.states.write(("linear", layer_idx, 0), linear_cache)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: `states` records it."""
        return False
