"""How tokens are drawn, and what the tokens said so far do to the next one.

Penalties and bans change logits before they are warped. They depend on the text in front of a
token, and in a tree every node has a text of its own: the prompt, the answer so far, and the
tokens from the root down to the node (rule R7). Target and drafter are treated alike, so that the
drafter does not propose what the target has been forbidden.

Shape letters: B prompts, N nodes, V the target's vocabulary, Vd the drafter's.

Source: repetition penalty, Keskar et al. 2019, "CTRL", section 4.1, arXiv:1909.05858; the prompt
counts as said, as in transformers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.models.decode.sampling import bound, first_argmax, first_max, soften, warp
from outrider.models.decode.tree import Tree

STEP, FALL = 2.0, 3.0  # of `hopes`, found by trying (docs/log.md)


class Sampling(NamedTuple):
    """How tokens are drawn; temperature 0 is greedy.

    Attributes:
        repetition_penalty: logits of tokens already said are divided by it where positive and
            multiplied where negative; 1 changes nothing.
        banned: tokens that are never said.
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
    def whole(self) -> bool:
        """No token is dropped for its small chance."""
        return self.top_k == 0 and self.top_p == 1 and self.min_p == 0

    @property
    def plain(self) -> bool:
        """Logits are warped as they are."""
        return self.repetition_penalty == 1 and not self.banned

    def check(self, vocab: int) -> "Sampling":
        """Itself, if it makes sense for a target of so many tokens.

        Raises:
            ValueError: a value out of its range.
        """
        warp(torch.zeros(1, 2), self.temperature, self.top_k, self.top_p, self.min_p)
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty={self.repetition_penalty}: must be positive")
        wrong = [token for token in self.banned if not 0 <= token < vocab]
        if wrong:
            raise ValueError(f"banned={wrong[0]}: the target's tokens are 0..{vocab - 1}")
        if len(set(self.banned)) >= vocab:
            raise ValueError("banned: no token is left to say")
        return self

    def rows(self, logits: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
        """Warped probabilities."""
        if self.temperature > 0 and self.whole:
            return soften(logits, self.temperature)
        flat = logits.reshape(-1, logits.shape[-1])
        out = warp(flat, self.temperature, self.top_k, self.top_p, self.min_p)
        return out.view(logits.shape)

    def scores(self, logits: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
        """Logits, where `rows` drops none: their logarithms times the temperature, up to a number
        per row.
        """
        logits = logits.float()
        if self.whole:
            return logits
        return logits.masked_fill(self.rows(logits) == 0, float("-inf"))

    def hopes(self, logits: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
        """`scores` of a drafter: what its own bounds drop, the target's may keep, and a tree has
        room for it. Below the bound is a step, in temperatures, and further logits count for more.
        """
        logits = logits.float()
        if self.whole:
            return logits
        least = bound(logits, self.temperature, self.top_k, self.top_p, self.min_p)
        below = STEP * self.temperature + FALL * (least - logits)
        return torch.where(logits < least, logits - below, logits)

    def choice(self, logits: Float[Tensor, "*rows V"]) -> Int[Tensor, "*rows"]:
        """The greedy token."""
        return first_argmax(logits)

    def favourites(
        self, logits: Float[Tensor, "*rows V"]
    ) -> tuple[Int[Tensor, "*rows"], Float[Tensor, "*rows"]]:
        """The greedy tokens and their logits: not finite if a row is NaN or +infinity somewhere."""
        return first_max(logits)

    def adjust(
        self,
        logits: Float[Tensor, "B N Vd"],
        said: Bool[Tensor, "B N V"],
        kept: Int[Tensor, " Vd"] | None = None,
    ) -> Float[Tensor, "B N Vd"]:
        """Penalty and bans.

        Args:
            said: which tokens stand in each node's text.
            kept: target ids of a reduced draft vocabulary; None: the logits are over all tokens.
        """
        logits = logits.float()
        if self.repetition_penalty != 1:
            penalty = self.repetition_penalty
            said = said if kept is None else said[..., kept]
            changed = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(said, changed, logits)
        if self.banned:
            logits = logits.masked_fill(self._ban(logits, kept), float("-inf"))
        return logits

    def _ban(self, logits: Tensor, kept: Tensor | None) -> Bool[Tensor, " Vd"]:
        ids = torch.arange(logits.shape[-1], device=logits.device) if kept is None else kept
        return torch.isin(ids, torch.tensor(self.banned, device=logits.device))


class History:
    """Which tokens stand in each prompt's text, answer included: a row per slot."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self.said = torch.zeros(slots, vocab, dtype=torch.bool, device=device)

    def start(self, slot: int, text: Sequence[int]) -> None:
        self.said[slot] = False
        self.add(slot, text)

    def add(self, slot: int, text: Sequence[int]) -> None:
        self.said[slot, torch.tensor(list(text), device=self.said.device)] = True

    def move(self, source: int, slot: int) -> None:
        self.said[slot] = self.said[source]

    def along(self, paths: Int[Tensor, "B N P"], first: int = 0) -> Bool[Tensor, "B N V"]:
        """The texts of B slots from the first one given, each continued by N paths."""
        batch, nodes, _ = paths.shape
        said = self.said[first : first + batch, None].repeat(1, nodes, 1)
        return said.scatter_(2, paths, True)

    def at_nodes(self, tree: Tree, first: int = 0) -> Bool[Tensor, "B N V"]:
        """The text of every node: of its ancestors and itself; others count as the root."""
        ids = tree.ids[:, None, :].expand(tree.seen.shape)
        return self.along(torch.where(tree.seen, ids, tree.ids[:, :1, None]), first)
