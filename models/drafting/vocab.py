"""The draft vocabulary: the subset of target tokens that a drafter can propose.

Source: EAGLE-3 (arXiv:2503.01840) and its code: count the supervised tokens, keep the Vd most
frequent, sort them by id. Stored as two maps, the layout that vLLM and SGLang read:

    d2t[i] = target id of draft token i, minus i      int64 [Vd]   (an offset, not an id)
    t2d[v] = target token v is in the draft vocabulary    bool [V]

Differs: fewer distinct tokens than Vd are filled with the lowest unseen ids, ties go to the
lower id, and the invariants are checked whenever the maps are read.
"""

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from outrider.conf.errors import ConfigError


class DraftVocab(nn.Module):
    """Maps between draft ids and target ids; the identity if every token is in it."""

    d2t: Int[Tensor, " Vd"]
    t2d: Bool[Tensor, " V"]

    def __init__(self, ids: Int[Tensor, " Vd"], size: int) -> None:
        """`ids` are target ids, ascending and distinct; `size` is the target's vocabulary V."""
        super().__init__()
        ids = ids.to(torch.int64)
        if ids.numel() == 0 or ids[0] < 0 or ids[-1] >= size or (ids.diff() <= 0).any():
            raise ValueError(f"draft vocabulary: ids must ascend without repeats in 0..{size - 1}")
        self.is_full = ids.numel() == size
        t2d = torch.zeros(size, dtype=torch.bool)
        t2d[ids] = True
        self.register_buffer("d2t", ids - torch.arange(ids.numel()))
        self.register_buffer("t2d", t2d)
        self._target_ids: Tensor | None = None

    @classmethod
    def identity(cls, size: int) -> "DraftVocab":
        return cls(torch.arange(size), size)

    @staticmethod
    def ids_of_offsets(d2t: Shaped[Tensor, "*any"]) -> Int[Tensor, " Vd"]:
        """Return the target ids that `d2t` of a file names; ValueError if it is no list."""
        if d2t.ndim != 1 or d2t.is_floating_point() or d2t.is_complex() or d2t.dtype == torch.bool:
            raise ValueError(f"d2t is {list(d2t.shape)} of {d2t.dtype}, not a list of integers")
        return d2t.long() + torch.arange(len(d2t))

    @classmethod
    def from_offsets(cls, d2t: Shaped[Tensor, "*any"], size: int) -> "DraftVocab":
        """Read `d2t` of a file; ValueError if it is no list of offsets to ascending ids."""
        return cls(cls.ids_of_offsets(d2t), size)

    @classmethod
    def from_counts(cls, counts: Int[Tensor, " V"], size: int) -> "DraftVocab":
        """Keep the `size` most frequent tokens; ties and unseen tokens by ascending id."""
        if size >= counts.numel():
            return cls.identity(counts.numel())
        order = torch.sort(counts, descending=True, stable=True).indices  # stable: lower id first
        return cls(order[:size].sort().values, counts.numel())

    def require_full(self) -> None:
        """Raise ConfigError if tokens are left out, for drafters that can draft every token."""
        if not self.is_full:
            why = "This drafter can draft every token of the target."
            raise ConfigError("drafter.draft_vocab_size", len(self), why, "Use null.")

    def __len__(self) -> int:
        return int(self.d2t.numel())

    @property
    def target_ids(self) -> Int[Tensor, " Vd"]:
        if self._target_ids is None or self._target_ids.device != self.d2t.device:
            self._target_ids = self.d2t + torch.arange(len(self), device=self.d2t.device)
        return self._target_ids

    def to_target(self, ids: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        return ids if self.is_full else self.target_ids.take(ids)

    def to_draft(self, ids: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """Return draft ids of target ids, -1 for tokens outside the draft vocabulary."""
        if self.is_full:
            return ids
        index = torch.searchsorted(self.target_ids, ids)
        return torch.where(self.t2d[ids], index, -1)

    def expand(self, probs: Float[Tensor, "*rows Vd"]) -> Float[Tensor, "*rows V"]:
        """Expand rows to the target's vocabulary, with 0 outside the draft vocabulary."""
        if self.is_full:
            return probs
        out = probs.new_zeros(*probs.shape[:-1], self.t2d.numel())
        out[..., self.target_ids] = probs
        return out

    def expand_logits(self, logits: Float[Tensor, "*rows Vd"]) -> Float[Tensor, "*rows V"]:
        """Return logits over the target's tokens in float32, -inf for those outside."""
        if self.is_full:
            return logits.float()
        shape = (*logits.shape[:-1], self.t2d.numel())
        out = logits.new_full(shape, float("-inf"), dtype=torch.float32)
        out[..., self.target_ids] = logits.float()
        return out

    def coverage(self, counts: Int[Tensor, " V"]) -> float:
        """Return the share of the counted tokens that the drafter can propose."""
        total = int(counts.sum())
        return float(counts[self.t2d.to(counts.device)].sum()) / total if total else 0.0

    def validate(self) -> None:
        """Raise ValueError unless d2t and t2d describe the same ascending set of tokens."""
        if not torch.equal(self.target_ids, torch.nonzero(self.t2d).flatten()):
            raise ValueError("draft vocabulary: d2t and t2d disagree; the checkpoint is damaged")

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._target_ids = None
        self.is_full = len(self) == self.t2d.numel()
        self.validate()
