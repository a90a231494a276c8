"""Sampling tokens by inverting the cumulative distribution, and the random sources of a round.

Shape letters: B prompts, N rows, V vocabulary, K numbers per prompt, or weights to choose from.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from operator import lt
from random import Random
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.models.decode.warping import at_least_float32

BLOCK = 128  # tokens per block of the two-level search in `inverse_cdf`; divides most vocabularies
LONG = 2**13  # vocabulary size from which on `inverse_cdf` is faster by blocks
BELOW_ONE = 1 - 2**-52  # times any total (not denormal) is below it


class EmptyDistribution(ValueError):
    """A row of probabilities without finite, positive mass."""

    def __init__(self) -> None:
        super().__init__("cannot draw from a row without finite, positive mass (NaN logits?)")


def draw(probs: Float[Tensor, "N V"], generator: torch.Generator) -> Int[Tensor, " N"]:
    """Draw one token per row, from one uniform number per row.

    Args:
        probs: rows need not sum to exactly 1; they count as probs / probs.sum().
        generator: on the CPU it gives the same stream whatever the model runs on.

    Raises:
        EmptyDistribution: a row holds a NaN, an infinity, or no mass at all.
    """
    uniforms = torch.rand(
        len(probs), dtype=torch.float64, generator=generator, device=generator.device
    )
    return inverse_cdf(probs, uniforms.to(probs.device))


def inverse_cdf(
    probs: Float[Tensor, "*rows V"], uniforms: Float[Tensor, "*rows"], check_mass: bool = True
) -> Int[Tensor, "*rows"]:
    """Return the token whose slice of [0, 1) holds the uniform.

    Works in two levels, first the block of tokens, then the token in it: summing blocks is many
    times faster than one long cumulative sum. A token of probability zero is never returned,
    whatever the rounding.

    Args:
        check_mass: check that all rows have mass, which synchronises with a GPU; else a row without
            mass gives an arbitrary token.

    Raises:
        EmptyDistribution: with `check_mass`, a row holds a NaN, an infinity, or no mass at all.
    """
    if probs.shape[-1] < LONG and not probs.is_cuda:  # a GPU's sums are not exactly monotone
        return _invert_directly(probs, uniforms)
    rows = at_least_float32(probs).flatten(0, -2)
    return _invert_by_blocks(rows, uniforms.flatten(), check_mass).view(uniforms.shape)


def _invert_directly(
    probs: Float[Tensor, "*rows V"], uniforms: Float[Tensor, "*rows"]
) -> Int[Tensor, "*rows"]:
    ends = probs.cumsum(-1, dtype=torch.float64)
    total = ends[..., -1:]
    if not all(0 < mass < math.inf for mass in total.flatten().tolist()):
        raise EmptyDistribution
    marks = uniforms.clamp(max=BELOW_ONE)[..., None] * total  # below the total
    return torch.searchsorted(ends, marks, right=True)[..., 0]


def _invert_rows(rows: Float[Tensor, "B *ones V"], uniforms: Sequence[float]) -> list[int]:
    """`inverse_cdf` on a CPU by rows: an answer must not depend on its batch to the last bit."""
    if len(rows) == 1:
        return [_invert_row(rows, *uniforms)]
    return [*map(_invert_row, rows, uniforms)]


def _invert_row(row: Float[Tensor, "*ones V"], uniform: float) -> int:
    ends = row.flatten().cumsum(0, dtype=torch.float64).numpy()
    total = ends.item(-1)
    if not 0 < total < math.inf:
        raise EmptyDistribution
    return bisect_right(ends, uniform * total)  # below the total: uniform <= 1 - 2**-53


def _invert_by_blocks(
    probs: Float[Tensor, "N V"], uniforms: Float[Tensor, " N"], check_mass: bool
) -> Int[Tensor, " N"]:
    blocks = F.pad(probs, (0, -probs.shape[-1] % BLOCK)).reshape(len(probs), -1, BLOCK)
    weights = blocks.sum(-1)
    total = weights.sum(-1)
    if check_mass and not bool(((total > 0) & (total < torch.inf)).all()):
        raise EmptyDistribution
    block, within = _find_slice(weights, uniforms)
    rows = torch.arange(len(probs), device=probs.device)
    token, _ = _find_slice(blocks[rows, block], within)
    return block * BLOCK + token


def _find_slice(
    weights: Float[Tensor, "N K"], uniforms: Float[Tensor, " N"]
) -> tuple[Int[Tensor, " N"], Float[Tensor, " N"]]:
    """Return the slice of the cumulative weights that holds each uniform, and how far in (0..1)."""
    ends = weights.cumsum(-1, dtype=torch.float64)
    total = ends.amax(-1)
    below_total = torch.nextafter(total, torch.zeros_like(total))
    mark = torch.minimum(uniforms * total, below_total)
    # The second condition matters where a parallel sum is not monotone to the last bit.
    index = ((ends > mark[:, None]) & (weights > 0)).to(torch.int8).argmax(-1)
    weight = weights.gather(-1, index[:, None])[:, 0].double()
    start = ends.gather(-1, index[:, None])[:, 0] - weight
    return index, ((mark - start) / weight).clamp(0, 1)


@runtime_checkable
class RandomSource(Protocol):
    """Interface to all random decisions of a round; a test can enumerate them."""

    def flip(self, chances: Float[Tensor, "B K"]) -> Bool[Tensor, "B K"]:
        """Return True with the given probabilities, all independent; 0 never, 1 always."""
        ...

    def draw(self, rows: Float[Tensor, "B K V"]) -> Int[Tensor, "B K"]:
        """Draw a token from every row, all independent."""
        ...

    def flip_host(self, chances: list[list[float]]) -> list[list[bool]]:
        """`flip` on the host; probabilities above 1 count as 1."""
        return self.flip(torch.tensor(chances, dtype=torch.float64).clamp(max=1.0)).tolist()

    def draw_host(self, rows: Float[Tensor, "B V"]) -> list[int]:
        """`draw` on the host, one token per prompt."""
        return self.draw(rows[:, None])[:, 0].tolist()


class GeneratorSource(RandomSource):
    """The random source of a real round: every flip and draw takes fresh numbers (R6).

    A call takes `max_count` numbers of every prompt's generator however many it uses, and
    `draw_host` takes one, so that an answer does not depend on its batch and the padding there.

    Attributes:
        max_count: the largest K of any call.
        check_mass: refuse rows without mass on a GPU too, which synchronises at every draw.
    """

    def __init__(
        self, generators: Sequence[Random], max_count: int, check_mass: bool = True
    ) -> None:
        self.generators, self.max_count, self.check_mass = generators, max_count, check_mass

    def numbers(self, count: int) -> list[list[float]]:
        if count > self.max_count:
            raise ValueError(f"{count} random numbers at once, and max_count={self.max_count}")
        return [[one.random() for _ in range(self.max_count)][:count] for one in self.generators]

    def uniforms(self, count: int, device: torch.device) -> Float[Tensor, "B K"]:
        """`numbers` on a device, in float64."""
        numbers = torch.tensor(self.numbers(count), dtype=torch.float64)
        if device.type == "cuda":
            return numbers.pin_memory().to(device, non_blocking=True)
        return numbers.to(device)

    def flip(self, chances: Float[Tensor, "B K"]) -> Bool[Tensor, "B K"]:
        return self.uniforms(chances.shape[1], chances.device) < chances

    def draw(self, rows: Float[Tensor, "B K V"]) -> Int[Tensor, "B K"]:
        if rows.shape[1] == 1 and rows.device.type == "cpu":
            tokens = _invert_rows(rows, [number for (number,) in self.numbers(1)])
            if len(tokens) == 1:
                return torch.full((1, 1), *tokens)  # half the time of a list
            return torch.tensor(tokens)[:, None]
        check_mass = self.check_mass or not rows.is_cuda
        return inverse_cdf(rows, self.uniforms(rows.shape[1], rows.device), check_mass)

    def flip_host(self, chances: list[list[float]]) -> list[list[bool]]:
        numbers = self.numbers(len(chances[0]))
        return [[*map(lt, *row)] for row in zip(numbers, chances, strict=True)]

    def draw_host(self, rows: Float[Tensor, "B V"]) -> list[int]:
        numbers = [one.random() for one in self.generators]
        if rows.device.type == "cpu":
            return _invert_rows(rows, numbers)
        uniforms = torch.tensor(numbers, dtype=torch.float64, device=rows.device)
        return inverse_cdf(rows, uniforms).tolist()
