"""One noise for drafter and target: sampled words that no draft can change.

The largest of log p plus Gumbel noise is a draw from p. Here every place of an answer has noise of
its own, and whoever guesses the token there and whoever decides it take the same. Where drafter and
target give like chances, their winners are mostly the same token; and what is said is the winner of
the target's row, whatever was guessed: token for token what plain sampling says with this noise, so
that sampling can be checked as greedy decoding is.

    place of the answer     0     1     2     3
    drafter's winners             sat   on    mat      log q + noise of the place
    target's winners        cat   sat   on    the      log p + the same noise
    kept                          sat   on             and "the" is said in place of "mat"

The noise of a place outlives the rounds that guess there in vain (R6 means coins that decide what
is kept, and here nothing is tossed). It must meet no other rule than this: residuals drawn with the
noise that made the rejected guess are biased, as they were in vLLM (its pull request 54282).

Shape letters: B prompts, N nodes, n nodes of a level, R rows, V tokens, Vd draft tokens.

Source: Daliri, Musco, Suresh 2024, "Coupling without Communication and Drafter-Invariant
Speculative Decoding", arXiv:2408.07978.
Differs: any tree, whose siblings are the largest of one row, and so, by the same trick, drawn
without replacement.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.eval.decode.tree import Tree

AT_ONCE = 2**15  # numbers made at once, where a row is shorter


def log_exponential(
    rows: int, vocab: int, generator: torch.Generator
) -> Float[Tensor, "rows vocab"]:
    """Logarithms of exponential numbers: what is taken off logits, for it is Gumbel noise negated.

    Made in float64, whose uniforms are fine enough for every tail; 1 is not among them, so that
    nobody wins for certain, and of 0 comes infinity, which never wins.
    """
    uniforms = torch.rand(
        rows, vocab, dtype=torch.float64, generator=generator, device=generator.device
    )
    return uniforms.log_().neg_().log_().float()


class Noise:
    """The noise of one answer: a row per place, made as it is needed, forgotten behind.

    Always as many rows at once: a GPU's numbers depend on how many are asked for, and the noise
    must not depend on who asks.
    """

    def __init__(self, seed: int, vocab: int, device: torch.device) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.vocab, self.step = vocab, max(1, AT_ONCE // vocab)
        self.first, self.table = 0, torch.empty(0, vocab, device=device)

    def rows(self, place: int, count: int) -> Float[Tensor, "count V"]:
        """Of `count` places from `place` on, which never goes back."""
        missing = place + count - self.first - len(self.table)
        if missing > 0:
            made = [
                log_exponential(self.step, self.vocab, self.generator)
                for _ in range(-(-missing // self.step))
            ]
            self.table = torch.cat([self.table[place - self.first :], *made])
            self.first = place
        start = place - self.first
        return self.table[start : start + count]


class Race:
    """A round of a batch: each prompt's noise, from the place of its next token on."""

    def __init__(self, noises: Sequence[Noise], places: Sequence[int]) -> None:
        self.noises, self.places = noises, places

    def guesses(
        self,
        scores: Float[Tensor, "B n Vd"],
        depth: int,
        kept: Int[Tensor, " Vd"] | None,
    ) -> Float[Tensor, "B n Vd"]:
        """The drafter's log-probabilities of children at a depth, with the noise there.

        Args:
            kept: target ids of a reduced draft vocabulary; None: it is the target's.
        """
        noise = self._rows(depth - 1, 1)
        return scores - (noise if kept is None else noise[..., kept])

    def decided(self, scores: Float[Tensor, "B N V"], tree: Tree) -> Float[Tensor, "B N V"]:
        """The target's log-probabilities behind every node, with the noise there."""
        if tree.straight:
            return scores - self._rows(0, tree.size)
        prompts = torch.arange(len(tree.depths), device=scores.device)[:, None]
        return scores - self._rows(0, tree.levels + 1)[prompts, tree.depths]

    def _rows(self, first: int, count: int) -> Float[Tensor, "B R V"]:
        rows = [
            noise.rows(place, first + count)[first:]
            for noise, place in zip(self.noises, self.places, strict=True)
        ]
        return rows[0][None] if len(rows) == 1 else torch.stack(rows)
