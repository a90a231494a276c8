"""Gumbel coupling: the drafter and the target sample with the same noise.

The argmax of log p plus Gumbel noise is a draw from p. Every position of an answer has its own
noise, and the draft token and the target's token there are both chosen with it: mostly the same
token, where their distributions are similar. The emitted token is always the target's, whatever was
drafted, so that sampled answers equal those of plain sampling with this noise.

    position               0     1     2     3
    drafter's argmax             sat   on    mat      log q + noise of the position
    target's argmax        cat   sat   on    the      log p + the same noise
    accepted                     sat   on             and "the" is emitted in place of "mat"

The noise of a position outlives the rounds that draft there (R6 is about random numbers that decide
acceptance; here none do). It must not be combined with other rules: a residual drawn with the noise
that chose the rejected token is biased, as it was in vLLM (its pull request 54282).

Shape letters: B prompts, N nodes, n nodes of a level, R rows, V tokens, Vd draft tokens.

Source: Daliri, Musco, Suresh 2024, "Coupling without Communication and Drafter-Invariant
Speculative Decoding", arXiv:2408.07978.
Differs: any tree, whose siblings are the largest of one row with noise, and so are drawn without
replacement.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.models.argmax import first_max
from outrider.models.decode.tree import Tree

CHUNK = 2**15  # numbers generated at once, where a row is shorter


class GumbelNoise:
    """The noise of one answer: a row per position, generated when needed, then discarded.

    Rows are logarithms of exponential variates: negated Gumbel noise, subtracted from logits.
    """

    def __init__(self, seed: int, vocab: int, device: torch.device) -> None:
        # A fixed number of rows at once: what a GPU generates depends on the number requested, and
        # the noise must not depend on the requests.
        self.vocab, self.step = vocab, max(1, CHUNK // vocab)
        self.uniforms = _uniforms(seed, device)
        self.first, self.table = 0, torch.empty(0, vocab, device=device)

    def rows(self, position: int, count: int) -> Float[Tensor, "count V"]:
        """Return the rows of `count` positions from `position` on, which must not decrease."""
        start = position - self.first
        if start + count > len(self.table):
            parts = [self.table]
            while sum(map(len, parts)) < start + count:
                parts.append(log_exponential(self.uniforms(self.step, self.vocab)))
            self.table = torch.cat(parts)[start:]
            self.first, start = position, 0
        return self.table[start : start + count]


def _uniforms(seed: int, device: torch.device) -> Callable[[int, int], Float[Tensor, "R V"]]:
    """Return a generator of float64 numbers in [0, 1); on a CPU numpy takes a third of the time."""
    if device.type == "cpu":
        numpy_generator = np.random.Generator(np.random.SFC64(seed))
        return lambda *shape: torch.from_numpy(numpy_generator.random(shape))
    generator = torch.Generator(device).manual_seed(seed)
    return lambda *shape: torch.rand(shape, dtype=torch.float64, device=device, generator=generator)


def log_exponential(uniforms: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
    """Return logarithms of exponential variates, in float32.

    Float64 uniforms resolve the tails; below 1, no token wins with certainty; 0 never wins.
    """
    return uniforms.log_().neg_().float().log_()


class RoundNoise:
    """The noise of a round: the positions from each prompt's next token on.

    In units of logits, like the scores it is subtracted from (`Sampling.scores`): it grows with the
    temperature, and at temperature 0 a tree that is pruned by probability is the greedy one.
    """

    def __init__(
        self,
        noises: Sequence[GumbelNoise],
        positions: Sequence[int],
        count: int,
        temperature: float,
    ) -> None:
        rows = [noise.rows(start, count) for noise, start in zip(noises, positions, strict=True)]
        self.rows = rows[0][None] if len(rows) == 1 else torch.stack(rows)
        if temperature != 1:
            self.rows = self.rows * temperature
        self.by_depth = self.rows.split(1, dim=1)

    def draft_scores(
        self, scores: Float[Tensor, "B n Vd"], depth: int, target_ids: Int[Tensor, " Vd"] | None
    ) -> Float[Tensor, "B n Vd"]:
        """Return the drafter's scores at a depth with noise; see Verifier.draft_scores."""
        noise: Tensor = self.by_depth[depth - 1]
        return scores - (noise if target_ids is None else noise[..., target_ids])

    def target_scores(self, scores: Float[Tensor, "B N V"], tree: Tree) -> Float[Tensor, "B N V"]:
        """Return the target's scores after every node with noise."""
        if tree.is_chain:
            return scores - self.rows[:, : tree.size]
        prompts = torch.arange(len(tree.depths), device=scores.device)[:, None]
        return scores - self.rows[prompts, tree.depths]


class NoiseDraws:
    """A source for `token_rules_cpu.match`; its n-th draw is the argmax with depth n's noise."""

    def __init__(self, noise: RoundNoise) -> None:
        self.by_depth = iter(noise.by_depth)

    def draw_host(self, rows: Float[Tensor, "B V"]) -> list[int]:
        """Return the argmax with noise; raise FloatingPointError if it is NaN or infinite."""
        choice, maxima = first_max(rows - next(self.by_depth)[:, 0])
        if not all(map(math.isfinite, maxima.tolist())):
            raise FloatingPointError
        return choice.tolist()
