"""Rows of prompts that draft tokens read in place of all rows (SnapKV).

In every layer the selected rows are copied out of the cache. Layers with a window select the rows
just before the observing tokens, which are the only ones they can see.

Legend: A key heads, P rows, K selected rows, C head size, W observing tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.models.cache.attention_masks import sliding_layers
from outrider.models.cache.budget_view import Rows
from outrider.models.cache.kv_cache import KVCache
from outrider.models.cache.prompt_observer import PromptObserver, observed_modules
from outrider.models.target.target import Target


@dataclass(frozen=True)
class Selection:
    """Rows of one prompt that were selected.

    Attributes:
        tail: the first row after them; 0: the budget covers the prompt, and there are none.
        rows: copies, of each layer.
    """

    tail: int
    rows: tuple[Rows, ...] = ()


def select(
    model: Target, cache: KVCache, slot: int, newest: Int[Tensor, " W"], count: int, pool: int
) -> Selection:
    """Select `count` rows before the newest tokens, by the attention of these.

    Args:
        model: its rows are in the cache.
        newest: the last tokens of the slot, which are read once more.
        pool: neighbouring rows whose scores are averaged.
    """
    slides = sliding_layers(model.text_config, model.num_layers)
    observed = [layer for layer, is_sliding in enumerate(slides) if not is_sliding]
    observer = PromptObserver(cache, slot, observed)
    if observed:
        _read_again(model, newest, observer)
    tail, rows = cache.lengths[slot] - len(newest), list[Rows]()
    for layer, is_sliding in enumerate(slides):
        keys, values = cache.rows(layer, slot)
        if is_sliding:
            span = slice(tail - count, tail)
            rows.append((keys[:, :, span].clone(), values[:, :, span].clone()))
        else:
            chosen = observer.selected(layer, count, len(newest), pool)
            rows.append((_take(keys, chosen), _take(values, chosen)))
    return Selection(tail, tuple(rows))


def stack(selections: Sequence[Selection]) -> list[Rows]:
    """Return the rows of several prompts, of each layer.

    A prompt without selected rows gets zeros, which the mask excludes.
    """
    model = next(each for each in selections if each.tail)
    none = tuple((torch.zeros_like(k), torch.zeros_like(v)) for k, v in model.rows)
    parts = [each.rows or none for each in selections]
    return [
        (torch.cat([k for k, _ in layer]), torch.cat([v for _, v in layer]))
        for layer in zip(*parts, strict=True)
    ]


def _read_again(model: Target, ids: Int[Tensor, " W"], observer: PromptObserver) -> None:
    """Read the newest tokens of a prompt once more, so that the observer sees their queries."""
    length, last = observer.length, model.shape().max_positions - 1
    rows = torch.arange(length - len(ids), length, device=ids.device)
    visible = torch.arange(length, device=ids.device) <= rows[:, None]
    with observed_modules(model.text_config, observer):
        model.forward(ids[None], rows[None].clamp(max=last), visible[None], observer)


def _take(rows: Float[Tensor, "1 A P C"], chosen: Int[Tensor, "A K"]) -> Float[Tensor, "1 A K C"]:
    """Return the chosen rows of each key head."""
    return rows.gather(2, chosen[None, :, :, None].expand(-1, -1, -1, rows.shape[3]))
