"""The teacher: the target's distribution over the draft vocabulary, computed or recorded.

Legend: N rows, H the target's hidden size, V vocabulary, Vd draft vocabulary.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.models.argmax import first_argmax
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import TopKTeacher

CHUNK = 2**23  # logits held at once, the target's or the drafter's: 32 MB in float32
CHUNK_GPU = 2**27  # small matrix products leave most of a GPU idle


def max_logits(device: torch.device) -> int:
    """Return how many logits are held at once on this device."""
    return CHUNK_GPU if device.type == "cuda" else CHUNK


@runtime_checkable
class TargetHead(Protocol):
    """The part of a target that computes logits from last states, e.g. `models.target.Target`."""

    @property
    def vocab_size(self) -> int: ...

    def logits(self, last: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows V"]: ...

    def logits_of(
        self, last: Float[Tensor, "*rows H"], ids: Int[Tensor, " Vd"]
    ) -> Float[Tensor, "*rows Vd"]: ...


class TeacherRows(NamedTuple):
    """The teacher at some rows."""

    p: Float[Tensor, "N Vd"]  # sums to 1 over the draft vocabulary; without `renormalise`, p_full
    p_full: Float[Tensor, "N Vd"]  # the target's; the same as p where they are not needed
    argmax: Int[Tensor, " N"]  # the target's top-1 token, of the whole vocabulary
    argmax_in_vocab: Bool[Tensor, " N"]  # that token is in the draft vocabulary


class Teacher:
    """The target's distribution, restricted to the draft vocabulary."""

    def __init__(self, target: TargetHead, vocab: DraftVocab, renormalise: bool) -> None:
        self.target, self.vocab, self.renormalise = target, vocab, renormalise

    def compute(
        self, last: Float[Tensor, "N H"], argmax: Int[Tensor, " N"] | None, full: bool
    ) -> TeacherRows:
        """Run the target's head.

        Args:
            argmax: if known, the head runs for the draft vocabulary only.
            full: compute `p_full`, which needs the whole head.
        """
        vocab = self.vocab
        if vocab.is_full or full or argmax is None:
            logits = self.target.logits(last)
            argmax = first_argmax(logits) if argmax is None else argmax
            inside = logits if vocab.is_full else logits[:, vocab.target_ids]
        else:
            inside = self.target.logits_of(last, vocab.target_ids)
        p = p_full = inside.float().softmax(-1)
        if full:
            share = (inside.float().logsumexp(-1) - _logsumexp(logits)).exp()
            p_full = p * share[:, None]
        return self._rows(p, p_full, argmax)

    def from_recording(self, top: TopKTeacher, argmax: Int[Tensor, " N"]) -> TeacherRows:
        """Expand a recorded distribution; no head runs."""
        p = top.scatter(len(self.vocab))
        p = p / p.sum(-1, keepdim=True)  # 16 bits do not sum to 1 exactly
        return self._rows(p, p * top.share[..., None], argmax)

    def _rows(self, p: Tensor, p_full: Tensor, argmax: Tensor) -> TeacherRows:
        return TeacherRows(
            p if self.renormalise else p_full, p_full, argmax, self.vocab.t2d[argmax]
        )


def _logsumexp(logits: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
    """Reduce in float32 without a float32 copy of all logits."""
    parts = [part.float().logsumexp(-1) for part in logits.split(2**15, dim=-1)]
    return torch.stack(parts).logsumexp(0)
