"""Between trees and tensors: where a round's tokens stand, and the rows of it that are kept.

Shape letters: B prompts, N nodes, P nodes of a path, S columns of the cache, R of a kept mask.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from outrider.models.batch_kv_cache import in_front
from outrider.models.decode.tree import Tree
from outrider.models.drafter import Trace
from outrider.models.target import Seen

RULER = 512  # columns by which a kept mask grows


def _rows_of(part: Shaped[Tensor, "B N ..."], paths: Int[Tensor, "B P"]) -> Tensor:
    """The rows of the paths: [B, N, ...] -> [B, P, ...]."""
    if len(part) == 1:  # whole rows at once
        return part.index_select(1, paths[0])
    shape = (*paths.shape, *part.shape[2:])
    return part.gather(1, paths.view(*paths.shape, *[1] * (part.dim() - 2)).expand(shape))


class Rows(NamedTuple):
    """What is known on the device of the rows that are kept, of every prompt the first ones.

    Attributes:
        ids: their tokens.
        next_ids: the tokens behind them.
        positions: where they stand.
        paths: where they lie; None: in front, as a chain's do.
    """

    ids: Int[Tensor, "B P"]
    next_ids: Int[Tensor, "B P"]
    positions: Int[Tensor, "B P"]
    paths: Int[Tensor, "B P"] | None = None


def send_rows(
    texts: Sequence[list[int]],
    starts: Sequence[int],
    paths: Sequence[list[int]],
    device: torch.device,
) -> Rows:
    """Sends what the host knows in one table, however many prompts there are.

    Behind a shorter prompt's rows come token 0, node 0 and further positions: nobody reads them.

    Args:
        texts: the rows' tokens and the one behind the last.
        starts: position of the first row.
        paths: where the rows lie, ascending.
    """
    longest, front = max(map(len, paths)), in_front(paths)
    table = []
    for text, start, path in zip(texts, starts, paths, strict=True):
        fill = [0] * (longest - len(path))
        place = () if front else (*path, *fill)
        table.append([*text, *fill, *range(start, start + longest), *place])
    told, behind = torch.tensor(table, device=device), 2 * longest + 1
    return Rows(
        told[:, :longest],
        told[:, 1 : longest + 1],
        told[:, longest + 1 : behind],
        None if front else told[:, behind:],
    )


def traces(counts: Sequence[int], rows: Rows, seen: Seen) -> list[Trace]:
    """The kept rows of every prompt, as the drafter reads them.

    Args:
        counts: how many each prompt has.
    """
    taps, last = seen.taps, seen.last
    if rows.paths is not None:
        taps, last = _rows_of(taps, rows.paths), _rows_of(last, rows.paths)
    handed = []
    for slot, count in enumerate(counts):
        document, answer = _one_document(count, last.device)
        handed.append(
            Trace(
                ids=_cut(rows.ids, slot, count),
                next_ids=_cut(rows.next_ids, slot, count),
                answer=answer,
                document=document,
                positions=_cut(rows.positions, slot, count),
                taps=_cut(taps, slot, count),
                last=_cut(last, slot, count),
            )
        )
    return handed


def _cut(part: Shaped[Tensor, "B N ..."], slot: int, count: int) -> Tensor:
    """The first rows of one prompt; what is that already is not cut, for that costs too."""
    part = part if len(part) == 1 else part[slot : slot + 1]
    return part if part.shape[1] == count else part[:, :count]


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
