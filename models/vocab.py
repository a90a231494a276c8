"""The reduced draft vocabulary: which target tokens a drafter can propose.

Source: EAGLE-3 (arXiv:2503.01840) and its code: count the supervised tokens, keep the Vd most
frequent, sort them by id. Stored as two maps, the layout that vLLM and SGLang read:

    d2t[i] = target id of draft token i, minus i      int64 [Vd]   (an offset, not an id)
    t2d[v] = target token v is in the draft vocabulary    bool [V]

Differs: fewer distinct tokens than Vd are filled with the lowest unseen ids, ties go to the
lower id, and the invariants are checked whenever the maps are read.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn


class DraftVocab(nn.Module):
    """Maps between draft ids and target ids; the identity when every token is kept."""

    d2t: Int[Tensor, " Vd"]
    t2d: Bool[Tensor, " V"]

    def __init__(self, kept: Int[Tensor, " Vd"], size: int) -> None:
        """
        Args:
            kept: target ids of the draft vocabulary, ascending and distinct.
            size: the target's vocabulary V.

        Raises:
            ValueError: the ids are not ascending, not distinct or out of range.
        """
        super().__init__()
        kept = kept.to(torch.int64)
        if kept.numel() == 0 or kept[0] < 0 or kept[-1] >= size or (kept.diff() <= 0).any():
            raise ValueError(f"draft vocabulary: ids must ascend without repeats in 0..{size - 1}")
        self.full = kept.numel() == size
        t2d = torch.zeros(size, dtype=torch.bool)
        t2d[kept] = True
        self.register_buffer("d2t", kept - torch.arange(kept.numel()))
        self.register_buffer("t2d", t2d)
        self._kept: Tensor | None = None

    @classmethod
    def whole(cls, size: int) -> "DraftVocab":
        return cls(torch.arange(size), size)

    @classmethod
    def from_counts(cls, counts: Int[Tensor, " V"], size: int) -> "DraftVocab":
        """Keep the `size` most frequent tokens; ties and unseen tokens by ascending id."""
        if size >= counts.numel():
            return cls.whole(counts.numel())
        order = torch.sort(counts, descending=True, stable=True).indices  # stable: lower id first
        return cls(order[:size].sort().values, counts.numel())

    def __len__(self) -> int:
        return int(self.d2t.numel())

    @property
    def kept(self) -> Int[Tensor, " Vd"]:
        """Target ids of the draft vocabulary, ascending."""
        if self._kept is None or self._kept.device != self.d2t.device:
            self._kept = self.d2t + torch.arange(len(self), device=self.d2t.device)
        return self._kept

    def to_target(self, ids: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """Target ids of draft ids (int64, as torch finds them)."""
        return ids if self.full else self.kept.take(ids)

    def to_draft(self, ids: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """Draft ids of target ids, -1 for those that cannot be drafted."""
        if self.full:
            return ids
        place = torch.searchsorted(self.kept, ids)
        return torch.where(self.t2d[ids], place, -1)

    def expand(self, probs: Float[Tensor, "*rows Vd"]) -> Float[Tensor, "*rows V"]:
        """Rows over the target's vocabulary: 0 where the drafter cannot propose."""
        if self.full:
            return probs
        out = probs.new_zeros(*probs.shape[:-1], self.t2d.numel())
        out[..., self.kept] = probs
        return out

    def coverage(self, counts: Int[Tensor, " V"]) -> float:
        """Share of the counted tokens that the drafter can propose."""
        total = int(counts.sum())
        return float(counts[self.t2d.to(counts.device)].sum()) / total if total else 0.0

    def check(self) -> None:
        """Raise ValueError unless d2t and t2d describe the same ascending set of tokens."""
        kept = self.kept
        named = torch.nonzero(self.t2d).flatten()
        if kept.shape != named.shape or not torch.equal(kept, named):
            raise ValueError("draft vocabulary: d2t and t2d disagree; the checkpoint is damaged")

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._kept = None
        self.full = len(self) == self.t2d.numel()
        self.check()
