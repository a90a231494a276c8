"""A view of a `KVCache` for drafting: of the committed rows, a draft token reads a few only.

Committed rows of a prompt are read in two parts, and rows in between are not:

    columns of the cache    f f . . . . . t t t d d      f: front, t: tail, d: draft rows
    columns of the view     f f t t t d d

The front is the first rows of the cache (sinks, as in StreamingLLM), or rows that were selected per
key head and copied (SnapKV). Tail and draft rows are the cache's own, and draft rows are written
there. Keys keep the rotation of their positions, so both readers of the cache share its rows.

Prompts of several lengths: the view is as wide as the longest tail with its draft rows. If their
tails are in nearly the same columns, one slice has them all; else each prompt has its own.

    slot   columns of the cache        one slice          own slices
    0      f f . t t t d d             t t t d d x x      t t t d d
    1      f f . . . t t t d d         x x t t t d d      t t t d d      x: excluded by the mask

Legend: B prompts, A key heads, N new rows, M draft rows, K rows of the front, W columns of the
tails, V = K + W columns of the view, S all columns of the cache, C numbers of a head.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.models.cache.attention_cache import AttentionCache
from outrider.models.cache.kv_cache import KVCache
from outrider.models.small_matmul import gqa_attention, split_attention

Rows = tuple[Float[Tensor, "B A K C"], Float[Tensor, "B A K Cv"]]  # keys and values of a layer


class Front(NamedTuple):
    """The rows in front of the tails.

    Attributes:
        size: K.
        rows: copies, of each layer; None: the first K columns of the cache.
    """

    size: int
    rows: Sequence[Rows] | None = None


class BudgetView(AttentionCache):
    """The rows of the selected slots that draft tokens read, for one forward.

    Attributes:
        columns: of the view, K + W: how many rows of every layer a forward reads per prompt.
        starts: of each prompt, the column of the cache where its W columns start.
    """

    def __init__(
        self, cache: KVCache, lengths: Sequence[int], tails: Sequence[int], drafted: int,
        front: Front,
    ) -> None:  # fmt: skip
        """
        Args:
            lengths: committed rows of each prompt.
            tails: the first row of each tail; 0: all rows are visible, without a front.
            drafted: M, the rows of the coming forward included.
        """
        super().__init__()
        self.cache, self.front = cache, front
        self._lengths, self._tails = list(lengths), list(tails)
        ends = [length + drafted for length in lengths]
        width = max(end - tail for end, tail in zip(ends, tails, strict=True))
        together = max(ends) - min(tails)
        self._one_slice = together <= 2 * width  # copies read and write `width` rows
        if self._one_slice:
            self.starts = [min(tails)] * len(ends)
        else:
            self.starts = [max(0, end - width) for end in ends]
        self.width = together if self._one_slice else width
        self.columns = front.size + self.width

    @property
    def prefix(self) -> list[int]:
        """Of each prompt, how many of its W columns precede its draft rows."""
        return [length - s for length, s in zip(self._lengths, self.starts, strict=True)]

    def limit(self, branch: Bool[Tensor, "B N W"]) -> Bool[Tensor, "B N V"]:
        """Return the mask of all columns, from that of rows up to `prefix` and draft rows."""
        count, batch = self.front.size, len(self._tails)
        branch = branch.expand(batch, -1, -1)
        skipped = [t - s for t, s in zip(self._tails, self.starts, strict=True)]
        if any(skipped):
            columns = torch.arange(self.width, device=branch.device)
            first = torch.tensor(skipped, device=branch.device)
            branch = branch & (columns >= first[:, None])[:, None]
        if all(self._tails):
            return F.pad(branch, (count, 0), value=True)
        shortened = torch.tensor([t > 0 for t in self._tails], device=branch.device)
        front = shortened[:, None, None].expand(-1, branch.shape[1], count)
        return torch.cat([front, branch], dim=2)

    # ---- a forward ----

    def reserve(self, count: int) -> None:
        self.cache.reserve(count)

    def commit(self, positions: Int[Tensor, "B T"]) -> None:
        self.cache.commit(positions)

    def column_positions(self, positions: Int[Tensor, "B T"]) -> Int[Tensor, "B V"]:
        """Return the position of every column, for layers with a window.

        In such layers the rows that precede a tail are its front, if the front holds copies.
        """
        rows = self.cache.column_positions(positions)
        own = torch.stack(
            [row[s : s + self.width] for row, s in zip(rows, self.starts, strict=True)]
        )
        if self.front.rows is None:
            return torch.cat([rows[:, : self.front.size], own], dim=1)
        tails = torch.tensor(self._tails, device=rows.device)[:, None]
        before = torch.arange(-self.front.size, 0, device=rows.device)
        return torch.cat([tails + before, own], dim=1)

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Float[Tensor, "B A V C"], Float[Tensor, "B A V Cv"]]:
        """Append rows to the cache, and return a copy of the columns of the view."""
        keys, values = self.cache.update(key, value, layer_idx)
        fronts = self._fronts(keys, values, layer_idx)
        return self._read(keys, fronts[0]), self._read(values, fronts[1])

    def _fronts(self, keys: Tensor, values: Tensor, layer: int) -> Rows:
        if self.front.rows is not None:
            return self.front.rows[layer]
        count = self.front.size
        return keys[:, :, :count], values[:, :, :count]

    def attend(
        self, query: Float[Tensor, "B G T C"], key: Tensor, value: Tensor, layer: int,
        mask: Float[Tensor, "B 1 T V"], scale: float,
    ) -> Float[Tensor, "B G T C"]:  # fmt: skip
        """Append rows and attend to them where they are; called by every layer of `FastLlama`."""
        rows = self.cache.update(key, value, layer)
        fronts, out = self._fronts(*rows, layer), list[Tensor]()
        together = [(slice(None), self.starts[0])]
        for prompts, start in together if self._one_slice else self._single_prompts:
            columns = slice(start, start + self.width)
            keys, values = (part[prompts, :, columns] for part in rows)
            parts = [(fronts[0][prompts], fronts[1][prompts]), (keys, values)]
            if self.front.size:
                attended = split_attention(query[prompts], parts, mask[prompts], scale)
            else:
                attended = gqa_attention(query[prompts], keys, values, mask[prompts], scale)
            out.append(attended)
        return torch.cat(out)

    @property
    def _single_prompts(self) -> list[tuple[slice, int]]:
        return [(slice(i, i + 1), start) for i, start in enumerate(self.starts)]

    def _read(
        self, rows: Float[Tensor, "B A S C"], front: Float[Tensor, "B A K C"]
    ) -> Float[Tensor, "B A V C"]:
        count, start = self.front.size, self.starts[0]
        if self._one_slice:
            tails = rows[:, :, start : start + self.width]
            return torch.cat([front, tails], dim=2) if count else tails
        batch, heads, _, size = rows.shape
        out = rows.new_empty(batch, heads, self.columns, size)
        out[:, :, :count] = front
        for own, row, first in zip(out, rows, self.starts, strict=True):
            own[:, count:] = row[:, first : first + self.width]
        return out

    # ---- interface of transformers ----

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns - self.cache.appended

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.columns, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.columns
