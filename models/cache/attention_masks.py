"""Attention masks: boolean ones (True: may attend), and the additive ones that transformers takes.

Legend: B rows of a batch, T tokens, N new tokens, S columns (cached and new), M nodes of a branch.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


def causal_mask(count: int, device: torch.device) -> Bool[Tensor, "count count"] | None:
    """Return the causal mask of new rows; None for a single row, which needs no mask."""
    if count == 1:
        return None
    return torch.ones(count, count, dtype=torch.bool, device=device).tril()


def document_mask(document: Int[Tensor, "B T"], new: slice = slice(None)) -> Bool[Tensor, "B N S"]:
    """Return the causal mask within each document, in which padding attends to padding.

    Only the `new` rows attend; the columns end with the last of them.
    """
    start, stop, _ = new.indices(document.shape[1])
    causal = torch.ones(stop - start, stop, dtype=torch.bool, device=document.device).tril(start)
    same = document[:, start:stop, None] == document[:, None, :stop]
    return causal & same


def extend_ancestor_mask(mask: Bool[Tensor, "B N M"]) -> Bool[Tensor, "B N MN"]:
    """Add one tree level: each node attends to what its parent attended to, and to itself."""
    count = mask.shape[1]
    if count == 1:
        return F.pad(mask, (0, 1), value=True)
    itself = torch.eye(count, dtype=torch.bool, device=mask.device)
    return torch.cat([mask, itself.expand(len(mask), -1, -1)], dim=2)


def branch_mask(prefix: Sequence[int], ancestors: Bool[Tensor, "B N M"]) -> Bool[Tensor, "B N S"]:
    """Return a mask of the committed rows and of those of M nodes that follow them.

    Args:
        prefix: how many rows of each prompt are committed.
        ancestors: which of the M nodes each of N new nodes attends to.
    """
    start, (_, count, nodes) = prefix[0], ancestors.shape
    if all(length == start for length in prefix):
        return F.pad(ancestors, (start, 0), value=True)
    starts = torch.tensor(prefix, device=ancestors.device)[:, None]
    columns = torch.arange(max(prefix) + nodes, device=starts.device)
    visible = (columns < starts)[:, None].repeat(1, count, 1)
    own = (starts + columns[:nodes])[:, None].expand(-1, count, -1)
    return visible.scatter_(2, own, ancestors)


def additive_mask(mask: Bool[Tensor, "B T S"], dtype: torch.dtype) -> Float[Tensor, "B 1 T S"]:
    """Return 0 where attention is allowed, the dtype's minimum elsewhere."""
    out = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return out.masked_fill_(~mask, torch.finfo(dtype).min)[:, None]


def window_size(config: Any) -> int | None:
    """Return the attention window of a model's text configuration, None if no layer has one."""
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
    used = "sliding_attention" in kinds and getattr(config, "use_sliding_window", True)
    return getattr(config, "sliding_window", None) if used else None


def chunk_size(config: Any) -> int | None:
    """Return the size of the chunks that attention does not cross, None if no layer has them."""
    kinds = getattr(config, "layer_types", None) or ()
    return getattr(config, "attention_chunk_size", None) if "chunked_attention" in kinds else None


def additive_masks(
    config: Any,
    mask: Bool[Tensor, "B T S"],
    positions: Int[Tensor, "B T"],
    columns: Int[Tensor, "B S"],
    dtype: torch.dtype,
) -> Any:
    """Return the additive mask of a model; a dict by layer type where its layers differ.

    Args:
        positions, columns: the position of every new token and of every column. Windows and chunks
            (Llama-4: positions 0..c-1, c..2c-1, ..) are ranges of positions.
    """
    full, window, chunk = additive_mask(mask, dtype), window_size(config), chunk_size(config)
    if window is not None:
        kind, near = "sliding_attention", positions[:, :, None] - columns[:, None] < window
    elif chunk is not None:
        kind, near = (
            "chunked_attention",
            positions[:, :, None] // chunk == columns[:, None] // chunk,
        )
    else:
        return full
    limited = additive_mask(mask & near, dtype)
    if len(set(getattr(config, "layer_types", None) or ())) > 1:
        return {"full_attention": full, kind: limited}
    return limited


def hybrid_masks(
    config: Any,
    mask: Bool[Tensor, "B T S"],
    positions: Int[Tensor, "B T"],
    columns: Int[Tensor, "B S"],
    dtype: torch.dtype,
) -> dict[str, Tensor | None]:
    """Return the masks of a model with recurrent layers by layer type; these layers take none."""
    window = getattr(config, "sliding_window", None)
    limited = full = additive_mask(mask, dtype)
    if window is not None:
        near = positions[:, :, None] - columns[:, None] < window
        limited = additive_mask(mask & near, dtype)
    if config.model_type == "minimax":  # its window is that of all attention layers
        full = limited
    kinds = dict.fromkeys(("linear_attention", "conv", *config.layer_types))
    attention = {"full_attention": full, "hybrid": full}
    return kinds | attention | dict.fromkeys(("sliding_attention", "hybrid_sliding"), limited)


def sliding_layers(config: Any, layers: int) -> list[bool]:
    """Return of every decoder layer whether its attention has a window."""
    if window_size(config) is None:
        return [False] * layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return [kind == "sliding_attention" for kind in kinds]
