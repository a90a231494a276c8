"""The data that a target, a drafter and training exchange, and the index rule it follows.

The index rule is the only shift convention in this project:

    A guess at depth d, row t, predicts token x_{t+1+d}. Its teacher is the target's row t+d.
    Depths start at 1. At row t the target has read x_0..x_t, and x_{t+1} is already decided.

Worked example with six tokens, row t = 1 (o: read by the target, *: given, ?: predicted):

    token      x0  x1  x2  x3  x4  x5
    depth 1     o   o   *   ?              x2 is decided; teacher: the target's row 2
    depth 2     o   o   *   *   ?          x3 is the depth-1 token, taken from the text; row 3

Legend of shape letters; a file that uses others has its own legend:
    B rows of a batch    T tokens of a row     H hidden size of the target    K tapped layers
    V target vocabulary  Vd draft vocabulary   N nodes of one tree level      D drafter width
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor


class Batch(NamedTuple):
    """Input rows of the target: the columns of `pack.Rows` with int64 indices."""

    ids: Int64[Tensor, "B T"]
    answer: Bool[Tensor, "B T"]  # True for answer tokens, the supervised kind
    document: Int64[Tensor, "B T"]  # index; -1 is padding
    positions: Int64[Tensor, "B T"]  # rotary, counted from 0 in every document


class TopKTeacher(NamedTuple):
    """A teacher distribution over the draft vocabulary, stored as its k most probable tokens.

    `share`, the probability of the draft vocabulary under the whole one, is a separate factor,
    because products with it can underflow in 16 bits.
    """

    ids: Int[Tensor, "*rows k"]  # draft ids, most probable first
    p: Float[Tensor, "*rows k"]
    rest: Float[Tensor, "*rows"]  # of the other tokens of the draft vocabulary: 1 - p.sum(-1)
    share: Float[Tensor, "*rows"]

    def scatter(self, size: int) -> Float[Tensor, "*rows Vd"]:
        """Return the dense distribution; the other tokens share `rest` equally."""
        each = self.rest / max(1, size - self.p.shape[-1])
        dense = each[..., None].expand(*each.shape, size).contiguous()
        return dense.scatter(-1, self.ids, self.p)


@dataclass(frozen=True)
class Trace:
    """Output of the target for a batch of packed rows: all that a drafter may read.

    `answer`, `document` and `positions` are as in `Batch`.
    """

    ids: Int[Tensor, "B T"]  # x_t, the token of each row
    next_ids: Int[Tensor, "B T"]  # x_{t+1}, already decided at each row; 0 after the last one
    answer: Bool[Tensor, "B T"]
    document: Int[Tensor, "B T"]
    positions: Int[Tensor, "B T"]
    taps: Float[Tensor, "B T KH"]  # of K decoder layers, before any norm, concatenated
    last: Float[Tensor, "B T H"]  # after the target's final norm: the input of its head
    # argmax of the target's logits, -1 where not recorded; training then needs no full head
    top1_ids: Int[Tensor, "B T"] | None = None
    topk_teacher: TopKTeacher | None = None  # where recorded; `last` may then have no columns

    @classmethod
    def from_batch(
        cls,
        batch: Batch,
        taps: Float[Tensor, "B T KH"],
        last: Float[Tensor, "B T H"],
        top1_ids: Int[Tensor, "B T"] | None = None,
        topk_teacher: TopKTeacher | None = None,
    ) -> "Trace":
        """Return the trace of packed rows; `next_ids` is `ids` shifted left by one."""
        next_ids = F.pad(batch.ids[:, 1:], (0, 1))
        return cls(batch.ids, next_ids, *batch[1:], taps, last, top1_ids, topk_teacher)

    @classmethod
    def joined(cls, traces: Sequence["Trace"]) -> "Trace":
        """Concatenate rows of one prompt, without teachers, each trace after the one before."""
        if len(traces) == 1:
            return traces[0]
        names = [name for name, value in vars(traces[0]).items() if isinstance(value, Tensor)]
        parts: dict[str, Any] = {
            name: torch.cat([getattr(one, name) for one in traces], dim=1) for name in names
        }
        return cls(**parts)

    def to(self, device: torch.device | str) -> "Trace":
        top = self.topk_teacher
        top = None if top is None else TopKTeacher(*(part.to(device) for part in top))
        fields = {n: v.to(device) for n, v in vars(self).items() if isinstance(v, Tensor)}
        return Trace(**fields, topk_teacher=top)

    def tokens_ahead(self, depth: int) -> Int[Tensor, "B T"]:
        """Return x_{t+depth} at row t; 0 after the end of the row.

        ids = [7 8 9], depth 1 -> [8 9 0] (when next_ids ends in 0), depth 2 -> [9 0 0].
        """
        return F.pad(self.next_ids, (0, depth - 1))[:, depth - 1 :]

    def supervised_mask(self, depth: int) -> Bool[Tensor, "B T"]:
        """Return True where the guess of row t at this depth is supervised.

        That is: x_{t+1+depth} is an answer token of the same document, so the first token of an
        answer is predicted from a row of the prompt. Depth 0 is the target's own prediction.
        """
        shift = depth + 1
        answer = F.pad(self.answer, (0, shift))[:, shift:]
        document = F.pad(self.document, (0, shift), value=-1)[:, shift:]
        return answer & (document == self.document) & (document >= 0)

    def supervised_rows(self, depth: int) -> Int[Tensor, " N"]:
        """Return the indices of the supervised rows among the B*T flattened rows."""
        return torch.nonzero(self.supervised_mask(depth).flatten()).flatten()


class Guess(NamedTuple):
    """Hidden states of one depth at some rows; the logits of row t predict token x_{t+1+depth}.

    A guess holds states instead of logits, so that the objective can apply `Drafter.head` in
    chunks. Its rows are those that the drafter has computed, all of `Drafter.trained_mask` among
    them; the states of rows outside `Trace.supervised_mask(depth)` are not read. A guess of depth 0
    is a prediction of x_{t+1} by a target that the drafter changes.
    """

    depth: int
    rows: Int[Tensor, " N"]  # t, as indices of the B*T flattened rows: ascending, each once
    hidden: Float[Tensor, "N D"]
    weight: float = 1.0  # of its loss, a factor on the weight of its depth

    @classmethod
    def everywhere(cls, depth: int, hidden: Float[Tensor, "B T D"], weight: float = 1.0) -> "Guess":
        """Return the guess of a drafter that computes every row."""
        hidden = hidden.flatten(0, 1)
        return cls(depth, torch.arange(len(hidden), device=hidden.device), hidden, weight)

    def states(self, rows: Int[Tensor, " M"]) -> Float[Tensor, "M D"]:
        """Return the states of some of its rows.

        Raises:
            ValueError: the drafter has not computed one of them.
        """
        at = torch.searchsorted(self.rows, rows)
        if bool((at >= len(self.rows)).any()) or not torch.equal(self.rows[at], rows):
            raise ValueError(f"the guess of depth {self.depth} lacks some of the rows {rows}")
        return self.hidden[at]


def shifted_guesses(
    rows: Int[Tensor, " N"], states: Float[Tensor, "N D"], depths: int
) -> Iterator[Guess]:
    """Yield the guesses of a drafter whose depths are one function of the text before a token.

    Args:
        rows: of the states, ascending indices of the flattened rows.
        states: the state after x_0..x_t at row t; its logits predict x_{t+1}. So the guess of depth
            d at row t is the state of row t + d. All depths share these states.
    """
    for depth in range(1, depths + 1):
        first = int(torch.searchsorted(rows, depth))
        yield Guess(depth, rows[first:] - depth, states[first:])


class ModelShape(NamedTuple):
    """Sizes and constants of a transformer that a drafter is built to match."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    rope_theta: float
    activation: str  # of the MLP: silu or gelu
    max_positions: int


@runtime_checkable
class TargetEnds(Protocol):
    """The embedding and the head of a target: what a drafter may use without owning it."""

    @property
    def embedding_scale(self) -> float: ...

    def shape(self) -> ModelShape: ...

    def embed(self, ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows H"]: ...

    def logits(self, last: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows V"]: ...

    def logits_of(
        self, last: Float[Tensor, "*rows H"], ids: Int[Tensor, " Vd"]
    ) -> Float[Tensor, "*rows Vd"]: ...
