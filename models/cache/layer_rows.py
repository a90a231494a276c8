"""Keys and values of a drafter's layer: rows of verified tokens, which grow in place, and a branch.

A state is a value: appending returns another one, and neither changes what the other holds. States
share a buffer, so that verified rows are copied only when it is full:

    buffer    r r r r r n n . . .      capacity 10
    state 1   - - - - -                5 rows; appending two to it writes behind them
    state 2   - - - - - - -            7 rows; appending to state 1 again copies its 5 rows first

Rows of draft tokens belong to a round and are few; they are kept apart and concatenated.

Legend: L verified rows, M drafted rows, N new ones, A key heads, C head size,
G query heads.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from outrider.models.small_matmul import gqa_attention, split_attention

SPARE_ROWS = 64  # at least, of a new buffer


@dataclass(eq=False)
class _Buffer:
    """Rows of several states; the first `used` are written."""

    rows: Float[Tensor, "_ *row"]
    used: int


@dataclass(frozen=True, eq=False)
class GrowingRows:
    """The first `length` rows of a buffer."""

    _buffer: _Buffer
    length: int

    @classmethod
    def empty_like(cls, rows: Float[Tensor, "_ *row"]) -> "GrowingRows":
        """Return no rows, of the shape, dtype and device of these."""
        return cls(_Buffer(rows.new_empty(0, *rows.shape[1:]), 0), 0)

    def last(self, count: int) -> "GrowingRows":
        """Return the last rows only, `count` at most, of the same memory."""
        rows = self.rows[-count:]
        return GrowingRows(_Buffer(rows, len(rows)), len(rows))

    @property
    def rows(self) -> Float[Tensor, "{self.length} *row"]:
        return self._buffer.rows[: self.length]

    def append(self, new: Float[Tensor, "N *row"]) -> "GrowingRows":
        if not len(new):
            return self
        buffer, end = self._buffer, self.length + len(new)
        if buffer.used > self.length or end > len(buffer.rows):
            wider = new.new_empty(end + max(SPARE_ROWS, end // 4), *new.shape[1:])
            wider[: self.length] = self.rows
            buffer = _Buffer(wider, self.length)
        buffer.rows[self.length : end] = new
        buffer.used = end
        return GrowingRows(buffer, end)


@dataclass(frozen=True, eq=False)
class LayerRows:
    """Keys and values of one layer and prompt; `branch` are those of draft tokens."""

    keys: GrowingRows
    values: GrowingRows
    branch: tuple[Float[Tensor, "M A C"], Float[Tensor, "M A C"]] | None = None

    @classmethod
    def empty_like(cls, key: Float[Tensor, "N A C"], value: Float[Tensor, "N A C"]) -> "LayerRows":
        return cls(GrowingRows.empty_like(key), GrowingRows.empty_like(value))

    def __len__(self) -> int:
        """Number of verified rows."""
        return self.keys.length

    def last(self, count: int) -> "LayerRows":
        """Return the last verified rows only, `count` at most, and the branch."""
        return LayerRows(self.keys.last(count), self.values.last(count), self.branch)

    def append(self, key: Float[Tensor, "N A C"], value: Float[Tensor, "N A C"]) -> "LayerRows":
        """Append rows of verified tokens; a branch is dropped."""
        return LayerRows(self.keys.append(key), self.values.append(value))

    def append_draft(
        self, key: Float[Tensor, "N A C"], value: Float[Tensor, "N A C"]
    ) -> "LayerRows":
        """Append rows of draft tokens to the branch."""
        if self.branch is not None:
            key, value = (torch.cat(pair) for pair in zip(self.branch, (key, value), strict=True))
        return replace(self, branch=(key, value))

    def attend(
        self,
        q: Float[Tensor, "N G C"],
        bias: Float[Tensor, "N M"] | None,
        scale: float | None = None,
    ) -> Float[Tensor, "N G C"]:
        """Attend to all rows; `bias` is added to the scores of the last M.

        Verified rows and a branch are attended to where they are, under one softmax.
        """
        parts = [(self.keys.rows, self.values.rows), *([self.branch] if self.branch else [])]
        by_head = [(k.transpose(0, 1)[None], v.transpose(0, 1)[None]) for k, v in parts]
        q = q.transpose(0, 1)[None]
        if self.branch is not None:
            bias = None if bias is None else bias[None, None]
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            return split_attention(q, by_head, bias, scale)[0].transpose(0, 1)
        if bias is not None:
            bias = F.pad(bias, (len(self) - bias.shape[1], 0))[None, None]
        return gqa_attention(q, *by_head[0], bias, scale)[0].transpose(0, 1)
