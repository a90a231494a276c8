"""Selection of a prompt's rows by the attention of its last tokens (SnapKV).

Source: Li et al. 2024, "SnapKV", arXiv:2404.14469, section 4. The last W tokens of a prompt of P
are read once more, and attend to its P rows in the cache; nothing is written. Per key head,

    score(row) = sum of softmax(q k * scale) over the W queries    softmax in float32, over all rows
    score      = average of `pool` neighbours, then the sum over the query heads of the group

and the rows before the last W with the highest scores are selected. The order of these steps is
the paper's: pooling is linear, so that the sum over the group may come first.

Layers with a window select the rows just before the last W: later queries attend to no others.

Legend: G query heads, A key heads, W observing queries, P rows, K selected rows, C head size.
"""

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.conf.errors import RunError
from outrider.models.cache.attention_cache import AttentionCache
from outrider.models.cache.kv_cache import KVCache
from outrider.models.small_matmul import gqa_attention

OBSERVED = "outrider_observed"  # name of the attention function that passes queries to an observer


class PromptObserver(AttentionCache):
    """The rows of one prompt in a cache, for a forward that writes nothing.

    Attributes:
        scores: of each observed layer, before pooling.
    """

    def __init__(self, cache: KVCache, slot: int, observed: Collection[int]) -> None:
        """
        Args:
            observed: layers.
        """
        super().__init__()
        self.cache, self.slot, self.observed = cache, slot, observed
        self.scores: dict[int, Float[Tensor, "A P"]] = {}

    @property
    def length(self) -> int:
        return self.cache.lengths[self.slot]

    def observe(
        self, layer: int, query: Float[Tensor, "1 G W C"], key: Float[Tensor, "1 A P C"],
        mask: Float[Tensor, "1 1 W P"], scale: float, softcap: float | None = None,
    ) -> None:  # fmt: skip
        """Add up the attention probabilities of all queries, per key head."""
        if layer not in self.observed:
            return
        heads, (_, groups, width, size) = key.shape[1], query.shape
        rows = query[0].float().reshape(heads, -1, size)  # the queries of a group
        logits = rows @ key[0].float().mT * scale
        logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
        by_query = logits.view(heads, groups // heads, width, -1) + mask[0].float()
        self.scores[layer] = by_query.softmax(-1).sum((1, 2))

    def selected(self, layer: int, count: int, window: int, pool: int) -> Int[Tensor, "A K"]:
        """Return the selected rows of an observed layer, ascending.

        Raises:
            RunError: the layer's attention was not observed.
        """
        if layer not in self.scores:
            message = "The attention of this target does not use transformers' attention functions."
            raise RunError(message, "Use drafter.method=streaming.")
        return select_rows(self.scores[layer][:, : self.length - window], count, pool)

    # ---- a forward ----

    def reserve(self, count: int) -> None:
        """Do nothing: the rows are in the cache."""

    def commit(self, positions: Int[Tensor, "1 W"]) -> None:
        """Do nothing, as above."""

    def column_positions(self, positions: Int[Tensor, "1 W"]) -> Int[Tensor, "1 P"]:
        return self.cache.positions(self.slot)

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Float[Tensor, "1 A P C"], Float[Tensor, "1 A P Cv"]]:
        """Return the rows of the cache, which has those of these tokens already."""
        return self.cache.rows(layer_idx, self.slot)

    def attend(
        self, query: Float[Tensor, "1 G W C"], key: Tensor, value: Tensor, layer: int,
        mask: Float[Tensor, "1 1 W P"], scale: float,
    ) -> Float[Tensor, "1 G W C"]:  # fmt: skip
        """Observe and attend; called by every layer of `FastLlama`."""
        keys, values = self.update(key, value, layer)
        self.observe(layer, query, keys, mask, scale)
        return gqa_attention(query, keys, values, mask, scale)

    # ---- interface of transformers ----

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.length


def select_rows(scores: Float[Tensor, "A P"], count: int, pool: int) -> Int[Tensor, "A K"]:
    """Return the `count` rows with the highest averages over `pool` neighbours, ascending."""
    pooled = F.avg_pool1d(scores, pool, stride=1, padding=pool // 2)
    return pooled.topk(count, dim=-1).indices.sort(dim=-1).values


@contextmanager
def observed_modules(config: Any, observer: PromptObserver) -> Iterator[None]:
    """Inside, attention modules of transformers pass their queries to the observer.

    Args:
        config: of the model's text layers, which names their attention function.
    """
    before = config._attn_implementation

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **settings: Any
    ) -> Any:
        scale = settings.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        observer.observe(module.layer_idx, query, key, mask, scale, settings.get("softcap"))
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        run: Any = ALL_ATTENTION_FUNCTIONS.get_interface(before, eager)
        return run(module, query, key, value, mask, **settings)

    ALL_ATTENTION_FUNCTIONS[OBSERVED] = attention
    config._attn_implementation = OBSERVED
    try:
        yield
    finally:
        config._attn_implementation = before
        del ALL_ATTENTION_FUNCTIONS[OBSERVED]
