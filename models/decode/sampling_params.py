"""Sampling parameters, and the penalties and bans that depend on earlier tokens.

Penalties and bans change logits before they are warped, of target and drafter alike. They depend on
the tokens before a position, and in a tree every node has its own: the prompt, the answer so far,
and the tokens from the root down to the node (rule R7).

Shape letters: B prompts, N nodes, P tokens of a path, V the target's vocabulary, Vd the drafter's.

Source: repetition penalty, Keskar et al. 2019, "CTRL", section 4.1, arXiv:1909.05858; it includes
the prompt, as in transformers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.models.decode.tree import Tree
from outrider.models.decode.warping import approximate_cutoff, softmax_at, warp

OFFSET, SLOPE = 2.0, 3.0  # of `Sampling.drafter_scores`, found by experiment (docs/log.md)
SMALLEST = 1e-30  # divisor of logits; by less they are infinite


class Sampling(NamedTuple):
    """How tokens are sampled; temperature 0 is greedy.

    Attributes:
        repetition_penalty: logits of tokens that occur in the text are divided by it where positive
            and multiplied where negative; 1 changes nothing.
        banned: token ids that are never emitted.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    banned: tuple[int, ...] = ()

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
        return self.repetition_penalty == 1 and not self.banned

    def check(self, vocab: int) -> "Sampling":
        """Return the parameters; raise ValueError if they are invalid for `vocab` tokens."""
        for name in ("temperature", "repetition_penalty"):
            if 0 < getattr(self, name) < SMALLEST:
                least = f"must be at least {SMALLEST}"
                raise ValueError(f"{name}={getattr(self, name)}: {least}; temperature 0 is greedy")
        warp(torch.zeros(1, 2), self.temperature, self.top_k, self.top_p, self.min_p)
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty={self.repetition_penalty}: must be positive")
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
        occurs: Bool[Tensor, "B N V"],
        target_ids: Int[Tensor, " Vd"] | None = None,
    ) -> Float[Tensor, "B N Vd"]:
        """Apply the penalty and the bans.

        Args:
            occurs: which tokens occur in the text of each node.
            target_ids: target ids of a reduced draft vocabulary; None: it is the target's.
        """
        logits = logits.float()
        if self.repetition_penalty != 1:
            penalty = self.repetition_penalty
            occurs = occurs if target_ids is None else occurs[..., target_ids]
            penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(occurs, penalised, logits)
        if self.banned:
            banned = torch.tensor(self.banned, device=logits.device)
            ids = torch.arange(logits.shape[-1], device=logits.device)
            ids = ids if target_ids is None else target_ids
            logits = logits.masked_fill(torch.isin(ids, banned), float("-inf"))
        return logits


class TokenHistory:
    """Which tokens occur in each prompt's text, answer included: one row per slot."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self.occurs = torch.zeros(slots, vocab, dtype=torch.bool, device=device)

    def start(self, slot: int, ids: Sequence[int]) -> None:
        """Replace the text of a slot."""
        self.occurs[slot] = False
        self.add(slot, ids)

    def add(self, slot: int, ids: Sequence[int]) -> None:
        self.occurs[slot, torch.tensor(list(ids), device=self.occurs.device)] = True

    def move(self, source: int, slot: int) -> None:
        self.occurs[slot] = self.occurs[source]

    def along(self, paths: Int[Tensor, "B N P"], first: int = 0) -> Bool[Tensor, "B N V"]:
        """Return the texts of B slots from `first` on, each extended by N paths."""
        batch, nodes, _ = paths.shape
        occurs = self.occurs[first : first + batch, None].repeat(1, nodes, 1)
        return occurs.scatter_(2, paths, True)

    def at_nodes(self, tree: Tree, first: int = 0) -> Bool[Tensor, "B N V"]:
        """Return the text of every node: with its ancestors and itself."""
        ids = tree.ids[:, None, :].expand(tree.ancestor_mask.shape)
        return self.along(torch.where(tree.ancestor_mask, ids, tree.ids[:, :1, None]), first)
