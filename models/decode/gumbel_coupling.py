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

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.models.decode.sampling import first_max
from outrider.models.decode.tree import Tree

AT_ONCE = 2**15  # numbers made at once, where a row is shorter


class Noise:
    """The noise of one answer: a row per place, made as it is needed, forgotten behind.

    Rows are logarithms of exponential numbers, Gumbel noise negated: they are taken off logits.
    """

    def __init__(self, seed: int, vocab: int, device: torch.device) -> None:
        # always as many rows at once: what a GPU draws depends on how many numbers are asked for,
        # and the noise must not depend on who asks
        self.vocab, self.step = vocab, max(1, AT_ONCE // vocab)
        self.uniforms = _uniforms(seed, device)
        self.first, self.table = 0, torch.empty(0, vocab, device=device)

    def rows(self, place: int, count: int) -> Float[Tensor, "count V"]:
        """Of `count` places from `place` on, which never goes back."""
        start = place - self.first
        if start + count > len(self.table):
            parts = [self.table]
            while sum(map(len, parts)) < start + count:
                parts.append(log_exponential(self.uniforms(self.step, self.vocab)))
            self.table = torch.cat(parts)[start:]
            self.first, start = place, 0
        return self.table[start : start + count]


def _uniforms(seed: int, device: torch.device) -> Callable[[int, int], Float[Tensor, "R V"]]:
    """Numbers in [0, 1), float64, made on the device; on a CPU numpy's take a third of the time."""
    if device.type == "cpu":
        made = np.random.Generator(np.random.SFC64(seed))
        return lambda *shape: torch.from_numpy(made.random(shape))
    generator = torch.Generator(device).manual_seed(seed)
    return lambda *shape: torch.rand(shape, dtype=torch.float64, device=device, generator=generator)


def log_exponential(uniforms: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
    """Logarithms of exponential numbers, in float32.

    Args:
        uniforms: in float64, fine enough for every tail; 1 is not among them, so that nobody wins
            for certain, and of 0 comes infinity, which never wins.
    """
    return uniforms.log_().neg_().float().log_()


class Race:
    """A round of a batch: the noise of the places from each prompt's next token on.

    In units of logits, as the scores it is taken off (`Sampling.scores`): the larger the
    temperature, the more it weighs, and a tree that is cut by chances is at 0 the greedy one.
    """

    def __init__(
        self, noises: Sequence[Noise], places: Sequence[int], count: int, temperature: float
    ) -> None:
        rows = [noise.rows(place, count) for noise, place in zip(noises, places, strict=True)]
        self.rows = rows[0][None] if len(rows) == 1 else torch.stack(rows)
        if temperature != 1:
            self.rows = self.rows * temperature
        self.ahead = self.rows.split(1, dim=1)

    def guesses(
        self, scores: Float[Tensor, "B n Vd"], depth: int, kept: Int[Tensor, " Vd"] | None
    ) -> Float[Tensor, "B n Vd"]:
        """The drafter's scores of children at a depth, with the noise there.

        Args:
            kept: target ids of a reduced draft vocabulary; None: it is the target's.
        """
        noise: Tensor = self.ahead[depth - 1]
        return scores - (noise if kept is None else noise[..., kept])

    def decided(self, scores: Float[Tensor, "B N V"], tree: Tree) -> Float[Tensor, "B N V"]:
        """The target's scores behind every node, with the noise there."""
        if tree.straight:
            return scores - self.rows[:, : tree.size]
        prompts = torch.arange(len(tree.depths), device=scores.device)[:, None]
        return scores - self.rows[prompts, tree.depths]


class Winners:
    """In place of coins, for `on_cpu.match`: what it picks n-th wins with the noise at depth n."""

    def __init__(self, race: Race) -> None:
        self.noise = iter(race.ahead)

    def pick(self, rows: Float[Tensor, "B V"]) -> list[int]:
        """
        Raises:
            FloatingPointError: a row is NaN or infinite.
        """
        winner, lead = first_max(rows - next(self.noise)[:, 0])
        if not all(map(math.isfinite, lead.tolist())):
            raise FloatingPointError
        return winner.tolist()
