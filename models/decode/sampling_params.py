"""Sampling parameters, and the penalties and bans that depend on earlier tokens.

Penalties and bans change logits before they are warped, of target and drafter alike. They depend on
the tokens before a position, and in a tree every node has its own: the prompt, the answer so far,
and the tokens from the root down to the node (rule R7).

Shape letters: B prompts, N nodes, P tokens of a path, V the target's vocabulary, Vd the drafter's.

Source: repetition penalty, Keskar et al. 2019, "CTRL", section 4.1, arXiv:1909.05858; it includes
the prompt, as in transformers. Presence and frequency penalties are those of OpenAI's API; they
count the answer alone, as vLLM does.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.models.decode.tree import Tree
from outrider.models.decode.warping import approximate_cutoff, softmax_at, warp

OFFSET, SLOPE = 2.0, 3.0  # of `Sampling.drafter_scores`, found by experiment (docs/log.md)
SMALLEST = 1e-30  # divisor of logits; by less they are infinite


class TextTokens(NamedTuple):
    """Which tokens occur in the text of each node.

    Attributes:
        occurs: in the prompt or the answer.
        counts: how often, in the answer alone; None: not needed.
    """

    occurs: Bool[Tensor, "B N V"]
    counts: Int[Tensor, "B N V"] | None = None


class Sampling(NamedTuple):
    """How tokens are sampled; temperature 0 is greedy.

    Attributes:
        repetition_penalty: logits of tokens that occur in the text are divided by it where positive
            and multiplied where negative; 1 changes nothing.
        banned: token ids that are never emitted.
        presence_penalty: subtracted from the logits of tokens that occur in the answer.
        frequency_penalty: subtracted once for every time that a token occurs in the answer.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    banned: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def keeps_all_tokens(self) -> bool:
        """Whether top-k, top-p and min-p drop no token."""
        return self.top_k == 0 and self.top_p == 1 and self.min_p == 0

    @property
    def has_no_processors(self) -> bool:
        """Whether there is neither a penalty nor a ban."""
        return self.repetition_penalty == 1 and not self.banned and not self.counts_tokens

    @property
    def counts_tokens(self) -> bool:
        """Whether the number of a token's occurrences in the answer matters."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    def check(self, vocab: int) -> "Sampling":
        """Return the parameters; raise ValueError if they are invalid for `vocab` tokens."""
        for name in ("temperature", "repetition_penalty"):
            if 0 < getattr(self, name) < SMALLEST:
                least = f"must be at least {SMALLEST}"
                raise ValueError(f"{name}={getattr(self, name)}: {least}; temperature 0 is greedy")
        warp(torch.zeros(1, 2), self.temperature, self.top_k, self.top_p, self.min_p)
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty={self.repetition_penalty}: must be positive")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)}: must be finite")
        unknown = [token for token in self.banned if not 0 <= token < vocab]
        if unknown:
            raise ValueError(f"banned={unknown[0]}: the target's tokens are 0..{vocab - 1}")
        if len(set(self.banned)) >= vocab:
            raise ValueError("banned: every token is banned")
        return self

    def probs(self, logits: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
        """Return warped probabilities."""
        if self.temperature > 0 and self.keeps_all_tokens:
            return softmax_at(logits, self.temperature)
        flat = logits.reshape(-1, logits.shape[-1])
        out = warp(flat, self.temperature, self.top_k, self.top_p, self.min_p)
        return out.view(logits.shape)

    def scores(self, logits: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
        """Return log `probs` times the temperature, up to a constant per row: logits, or -inf."""
        logits = logits.float()
        if self.keeps_all_tokens:
            return logits
        return logits.masked_fill(self.probs(logits) == 0, float("-inf"))

    def drafter_scores(self, logits: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
        """Return `scores` of a drafter, where tokens below the cutoff are lowered, not dropped.

        The target may keep a token that the drafter's own cutoff drops, and a tree can hold it. The
        score falls by OFFSET temperatures at the cutoff, and SLOPE times faster below it.
        """
        logits = logits.float()
        if self.keeps_all_tokens:
            return logits
        cutoff = approximate_cutoff(logits, self.temperature, self.top_k, self.top_p, self.min_p)
        penalty = OFFSET * self.temperature + SLOPE * (cutoff - logits)
        return torch.where(logits < cutoff, logits - penalty, logits)

    def adjust(
        self,
        logits: Float[Tensor, "B N Vd"],
        text: TextTokens,
        target_ids: Int[Tensor, " Vd"] | None = None,
    ) -> Float[Tensor, "B N Vd"]:
        """Apply the penalties and the bans.

        Args:
            text: which tokens occur in the text of each node.
            target_ids: target ids of a reduced draft vocabulary; None: it is the target's.
        """
        logits = logits.float()
        if self.repetition_penalty != 1:
            penalty = self.repetition_penalty
            occurs = text.occurs if target_ids is None else text.occurs[..., target_ids]
            penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(occurs, penalised, logits)
        if text.counts is not None:
            counts = text.counts if target_ids is None else text.counts[..., target_ids]
            logits = logits - self.frequency_penalty * counts - self.presence_penalty * (counts > 0)
        if self.banned:
            banned = torch.tensor(self.banned, device=logits.device)
            ids = torch.arange(logits.shape[-1], device=logits.device)
            ids = ids if target_ids is None else target_ids
            logits = logits.masked_fill(torch.isin(ids, banned), float("-inf"))
        return logits


class TokenHistory:
    """Which tokens occur in each prompt's text, and how often in its answer: one row per slot."""

    def __init__(
        self, slots: int, vocab: int, device: torch.device, with_counts: bool = False
    ) -> None:
        self.occurs = torch.zeros(slots, vocab, dtype=torch.bool, device=device)
        self.counts = torch.zeros_like(self.occurs, dtype=torch.int32) if with_counts else None

    def start(self, slot: int, prompt: Sequence[int]) -> None:
        """Replace the text of a slot by a prompt without an answer."""
        self.occurs[slot] = False
        self.occurs[slot, self._tensor(prompt)] = True
        if self.counts is not None:
            self.counts[slot] = 0

    def add(self, slot: int, ids: Sequence[int]) -> None:
        """Add tokens of the answer."""
        tokens = self._tensor(ids)
        self.occurs[slot, tokens] = True
        if self.counts is not None:
            self.counts[slot].scatter_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int32))

    def move(self, source: int, slot: int) -> None:
        self.occurs[slot] = self.occurs[source]
        if self.counts is not None:
            self.counts[slot] = self.counts[source]

    def along(self, paths: Int[Tensor, "B N P"], first: int = 0) -> TextTokens:
        """Return the texts of B slots from `first` on, each extended by N paths.

        A path begins with the root, which the text has already.
        """
        is_new = torch.ones_like(paths, dtype=torch.bool)
        is_new[..., 0] = False
        return self._extended(paths, is_new, first)

    def at_nodes(self, tree: Tree, first: int = 0) -> TextTokens:
        """Return the text of every node: with its ancestors and itself."""
        ids = tree.ids[:, None, :].expand(tree.ancestor_mask.shape)
        is_new = tree.ancestor_mask.clone()
        is_new[..., 0] = False  # the root
        paths = torch.where(tree.ancestor_mask, ids, tree.ids[:, :1, None])
        return self._extended(paths, is_new, first)

    def _extended(
        self, paths: Int[Tensor, "B N P"], is_new: Bool[Tensor, "B N P"], first: int
    ) -> TextTokens:
        batch, nodes, _ = paths.shape
        occurs = self.occurs[first : first + batch, None].repeat(1, nodes, 1)
        occurs.scatter_(2, paths, True)
        if self.counts is None:
            return TextTokens(occurs)
        counts = self.counts[first : first + batch, None].repeat(1, nodes, 1)
        return TextTokens(occurs, counts.scatter_add_(2, paths, is_new.to(counts.dtype)))

    def _tensor(self, ids: Sequence[int]) -> Int[Tensor, " S"]:
        return torch.tensor(list(ids), device=self.occurs.device)
