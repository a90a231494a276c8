"""Between trees and tensors: where a round's tokens stand, and the rows of it that are kept.

Shape letters: B prompts, N nodes, P nodes of a path, S columns of the cache, R of a kept mask, K
taps, H hidden size.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from outrider.eval.decode.tree import Tree
from outrider.models.base import Trace
from outrider.models.target import Seen

RULER = 512  # columns by which a kept mask grows


def rows_of(part: Shaped[Tensor, "B N ..."], paths: Int[Tensor, "B P"]) -> Tensor:
    """The rows of the paths: [B, N, ...] -> [B, P, ...]."""
    if len(part) == 1:  # whole rows at once
        return part.index_select(1, paths[0])
    shape = (*paths.shape, *part.shape[2:])
    return part.gather(1, paths.view(*paths.shape, *[1] * (part.dim() - 2)).expand(shape))


def traces_along(
    texts: Sequence[list[int]], starts: Sequence[int], seen: Seen, paths: Int[Tensor, "B P"] | None
) -> list[Trace]:
    """The kept rows of every prompt, as the drafter reads them.

    Args:
        texts: the rows' tokens and the one behind the last.
        starts: position of the first row.
        paths: where the rows lie; None: they are the first ones.
    """
    taps, last = seen.taps, seen.last
    if paths is not None:
        taps, last = rows_of(taps, paths), rows_of(last, paths)
    rows = zip(texts, starts, _each(taps), _each(last), strict=True)
    return [trace_of(*what) for what in rows]


def traces_known(
    counts: Sequence[int],
    ids: Int[Tensor, "B N"],
    next_ids: Int[Tensor, "B N"],
    positions: Int[Tensor, "B N"],
    seen: Seen,
    paths: Int[Tensor, "B P"] | None,
) -> list[Trace]:
    """The same where the device knows what follows every row: greedily, the target's choice.

    Args:
        counts: of every prompt's rows, how many were kept.
    """
    if paths is not None:
        ids, next_ids, positions = (rows_of(part, paths) for part in (ids, next_ids, positions))
        seen = Seen(rows_of(seen.taps, paths), rows_of(seen.last, paths))
    traces = []
    for slot, count in enumerate(counts):
        own = slice(slot, slot + 1), slice(count)
        document, answer = _one_document(count, ids.device)
        said = ids[own], next_ids[own], answer, document, positions[own]
        traces.append(Trace(*said, seen.taps[own], seen.last[own]))
    return traces


def _each(rows: Tensor) -> Sequence[Tensor]:
    """[B, ...] as B times [1, ...]; most often there is one prompt, and nothing to cut."""
    return (rows,) if len(rows) == 1 else rows.split(1)


def trace_of(
    text: list[int],
    start: int,
    taps: Float[Tensor, "1 N KH"],
    last: Float[Tensor, "1 N H"],
) -> Trace:
    """The kept rows of one prompt, as the drafter reads them."""
    count = len(text) - 1
    row = torch.tensor([[*text, *range(start, start + count)]], device=last.device)
    document, answer = _one_document(count, last.device)
    return Trace(
        ids=row[:, :count],
        next_ids=row[:, 1 : count + 1],
        answer=answer,
        document=document,
        positions=row[:, count + 1 :],
        taps=taps[:, :count],
        last=last[:, :count],
    )


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept for all who come
def _one_document(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What a decoded row belongs to, and that nothing is said of answers."""
    document = torch.zeros(1, count, dtype=torch.long, device=device)
    return document, document.bool()


def laid_out(tree: Tree, prefix: list[int]) -> tuple[Int[Tensor, "B N"], Bool[Tensor, "B N S"]]:
    """Where every node stands, and what it sees: its slot's prefix, its ancestors and itself."""
    start, size = prefix[0], tree.size
    depths = tree.depths  # what is not real stands at the root: there may be no positions beyond it
    depths = depths if tree.whole else depths.masked_fill(~tree.real, 0)
    if all(length == start for length in prefix):
        if tree.straight and tree.whole:
            return _chain(len(depths), size, start, depths.device)
        return depths + start, torch.nn.functional.pad(tree.seen, (start, 0), value=True)
    at = torch.tensor(prefix, device=tree.ids.device)[:, None]
    columns = torch.arange(max(prefix) + size, device=at.device)
    visible = (columns < at)[:, None].repeat(1, size, 1)
    own = (at + columns[:size])[:, None].expand(-1, size, -1)
    return depths + at, visible.scatter_(2, own, tree.seen)


def _chain(
    batch: int, size: int, start: int, device: torch.device
) -> tuple[Int[Tensor, "B N"], Bool[Tensor, "B N S"]]:
    """The same of chains behind `start` columns: cut from what is kept."""
    wide = -(-start // RULER) * RULER
    positions, visible = _ruler(batch, size, wide, device)
    return positions[:, start : start + size], visible[:, :, wide - start :]


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # kept for all who come
def _ruler(
    batch: int, size: int, wide: int, device: torch.device
) -> tuple[Int[Tensor, "B R"], Bool[Tensor, "B N R"]]:
    """All positions up to a chain behind `wide` columns, and what it sees of them."""
    positions = torch.arange(wide + size, device=device)
    visible = positions <= positions[wide:, None]
    return positions.expand(batch, -1), visible.expand(batch, -1, -1)
