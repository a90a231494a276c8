"""From logits to a token: warping, drawing, and the coins that verification tosses.

The warped distribution is *the* target distribution p of speculative decoding: what plain
sampling would draw from, and so what the verifier must reproduce. Everything here is in
float32 or wider; the cumulative sums are in float64.

Shape letters: N rows, V vocabulary, K ranked tokens, or weights to choose from.

Source: nucleus sampling, Holtzman et al. 2019, arXiv:1904.09751; min-p, Nguyen et al. 2024,
arXiv:2407.01082; the order temperature, top-k, top-p, min-p is that of transformers.
Differs from transformers: top-k keeps exactly k tokens, and every tie goes to the lower id, so
top_k=1, a vanishing top_p and temperature 0 are one and the same distribution.
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

BLOCK = 128  # tokens per block of the two-level search in `invert`; divides most vocabularies
SPAN = 256  # tokens per block of `first_argmax`
SHORT = 2**13  # numbers up to which `first_argmax` leaves it to torch
AT_ONCE = 2**14  # numbers up to which `first_max` finds largest and place faster at once
LONG = 2**13  # tokens of a row from which on `invert` is faster by blocks
BELOW_ONE = 1 - 2**-52  # times any total (not denormal) is below it
CANDIDATES = 128  # tokens ranked in the first attempt to cover top_p


class NoMass(ValueError):
    """A row that nothing can be drawn from."""

    def __init__(self) -> None:
        super().__init__("cannot draw from a row without finite, positive mass (NaN logits?)")


def warp(
    logits: Float[Tensor, "N V"],
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Float[Tensor, "N V"]:
    """Probabilities after temperature, then top-k, then top-p, then min-p.

    Args:
        logits: any float dtype; computed in float32 (float64 stays float64).
        temperature: >= 0; 0 is greedy: all mass on the argmax, ties to the lowest id.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p, the
            token that crosses the threshold included, so never none; 1 keeps all.
        min_p: keep tokens at least this probable, in shares of the most probable one; 0 keeps all.

    Returns:
        Rows that sum to 1; dropped tokens are exactly 0.

    Raises:
        ValueError: temperature < 0, top_k < 0, top_p outside (0, 1], or min_p outside [0, 1].
    """
    if not temperature >= 0 or top_k < 0 or not 0 < top_p <= 1 or not 0 <= min_p <= 1:
        raise ValueError(
            f"temperature={temperature}, top_k={top_k}, top_p={top_p}, min_p={min_p}: "
            "needs temperature >= 0, top_k >= 0, 0 < top_p <= 1 and 0 <= min_p <= 1"
        )
    logits = _widened(logits)
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    if 0 < top_k < logits.shape[-1]:  # a temperature keeps the order, so ranking may come first
        best, ids = _ranked(logits, top_k)
        leaders = soften(best, temperature)
    elif top_p < 1:
        leaders, ids = _cover(soften(logits, temperature), top_p)
    else:
        return _likely(soften(logits, temperature), min_p)
    kept = _likely(_nucleus(leaders, top_p), min_p)
    return torch.zeros_like(logits).scatter_(-1, ids, kept)


def bound(
    logits: Float[Tensor, "*rows V"], temperature: float, top_k: int, top_p: float, min_p: float
) -> Float[Tensor, "*rows 1"]:
    """About the logit below which `warp` drops: for guesses alone, which owe nobody exactness.

    In a fraction of its time: without care for ties, and a nucleus ends among the first CANDIDATES.

    Args:
        logits: warped by a temperature above 0, and by one at least of the three behind it.
    """
    best = logits.topk(min(top_k or CANDIDATES, logits.shape[-1])).values
    most = best[..., :1]
    least = best[..., -1:]
    if top_p < 1:
        mass = ((best if top_k else logits) - most).div(temperature).logsumexp(-1, keepdim=True)
        shares = ((best - most) / temperature - mass).exp()
        beyond = shares.cumsum(-1) - shares >= top_p
        least = best.masked_fill(beyond, float("inf")).amin(-1, keepdim=True)
    if min_p > 0:
        chosen = most + temperature * math.log(min_p)
        least = torch.maximum(least, chosen) if top_k or top_p < 1 else chosen
    return least


def _widened(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """In float32 or wider."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def soften(logits: Float[Tensor, "*rows V"], temperature: float) -> Float[Tensor, "*rows V"]:
    """`warp` by a temperature alone, above 0; the shift keeps a tiny one from overflowing."""
    logits = _widened(logits)
    if temperature == 1:
        return logits.softmax(-1)
    return (logits - logits.amax(-1, keepdim=True)).div_(temperature).softmax(-1)


def _likely(probs: Float[Tensor, "N K"], min_p: float) -> Float[Tensor, "N K"]:
    """Drop what is less probable than `min_p` times the most probable; renormalise."""
    if min_p == 0:
        return probs
    kept = probs * (probs >= min_p * probs.amax(-1, keepdim=True))
    return kept / kept.sum(-1, keepdim=True)


def _cover(
    probs: Float[Tensor, "N V"], top_p: float
) -> tuple[Float[Tensor, "N K"], Int[Tensor, "N K"]]:
    """Enough of the most probable tokens to reach top_p in every row, best first.

    Ranks ever more tokens until they do: a full sort of a large vocabulary is far slower. Not on a
    GPU, whose host would wait every time to see whether they do.
    """
    if probs.is_cuda:
        return _sorted(probs, probs.shape[-1])
    count = CANDIDATES
    while True:
        leaders, ids = _ranked(probs, count)
        if count >= probs.shape[-1] or bool((leaders.sum(-1, dtype=torch.float64) >= top_p).all()):
            return leaders, ids
        count *= 8


def _nucleus(leaders: Float[Tensor, "N K"], top_p: float) -> Float[Tensor, "N K"]:
    """Keep ranked tokens while the mass before them is below top_p; renormalise."""
    if top_p == 1:
        return leaders
    before = F.pad(leaders.cumsum(-1, dtype=torch.float64)[:, :-1], (1, 0))
    kept = leaders * (before < top_p)
    return kept / kept.sum(-1, keepdim=True)


def _ranked(
    values: Float[Tensor, "N V"], count: int
) -> tuple[Float[Tensor, "N K"], Int[Tensor, "N K"]]:
    """The `count` largest of each row and their ids, best first, ties to the lower id.

    torch.topk promises nothing about ties, neither which of them it takes nor their order.
    """
    if values.is_cuda:
        return _sorted(values, count)
    count = min(count, values.shape[-1])
    best, ids = values.topk(min(count + 1, values.shape[-1]))
    torn = best[:, count - 1] == best[:, -1]  # equal values on both sides of the cut
    best, ids = best[:, :count], ids[:, :count]
    if count < values.shape[-1] and bool(torn.any()):
        ids[torn] = _first_largest(values[torn], best[torn])
    ids = ids.sort(-1).values
    best, order = values.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return best, ids.gather(-1, order)


def _sorted(
    values: Float[Tensor, "N V"], count: int
) -> tuple[Float[Tensor, "N K"], Int[Tensor, "N K"]]:
    """`_ranked` by sorting all, for which no host waits."""
    best, ids = values.sort(dim=-1, descending=True, stable=True)
    return best[:, :count], ids[:, :count]


def _first_largest(values: Float[Tensor, "N V"], best: Float[Tensor, "N K"]) -> Int[Tensor, "N K"]:
    """Ids of the K largest, given their values; of those equal to the last, the first ones."""
    lowest = best[:, -1:]
    ties = values == lowest
    room = (best == lowest).sum(-1, keepdim=True)
    above = ~(values <= lowest)  # a NaN ranks first, as in topk, and spoils the softmax loudly
    keep = above | (ties & (ties.cumsum(-1) <= room))
    return keep.nonzero()[:, 1].view(best.shape)


def draw(probs: Float[Tensor, "N V"], generator: torch.Generator) -> Int[Tensor, " N"]:
    """One token per row, drawn with the row's probabilities; one uniform number per row.

    Args:
        probs: rows need not sum to exactly 1; they count as probs / probs.sum().
        generator: the uniforms come from its device, usually the CPU, so that a seed gives
            the same stream whatever the model runs on.

    Raises:
        NoMass: a row holds a NaN, an infinity, or no mass at all.
    """
    uniforms = torch.rand(
        len(probs), dtype=torch.float64, generator=generator, device=generator.device
    )
    return invert(probs, uniforms.to(probs.device))


def invert(
    probs: Float[Tensor, "*rows V"], uniforms: Float[Tensor, "*rows"], look: bool = True
) -> Int[Tensor, "*rows"]:
    """The token whose slice of [0, 1) holds the uniform: the inverse of the cumulative law.

    Works in two levels, first the block of tokens, then the token in it, because summing
    blocks is many times faster than one long cumulative sum. A token of probability zero has
    an empty slice and is never returned, whatever the rounding.

    Args:
        look: whether all rows have mass, for which the host waits for a GPU; of a row without it
            some token comes otherwise.

    Raises:
        NoMass: with `look`, a row holds a NaN, an infinity, or no mass at all.
    """
    if probs.shape[-1] < LONG and not probs.is_cuda:  # there sums are not monotone to the last bit
        return _in_one(probs, uniforms)
    rows = _widened(probs).flatten(0, -2)
    return _by_blocks(rows, uniforms.flatten(), look).view(uniforms.shape)


def _in_one(
    probs: Float[Tensor, "*rows V"], uniforms: Float[Tensor, "*rows"]
) -> Int[Tensor, "*rows"]:
    """`invert` in one level, for few numbers."""
    ends = probs.cumsum(-1, dtype=torch.float64)
    total = ends[..., -1:]
    if not all(0 < mass < math.inf for mass in total.flatten().tolist()):
        raise NoMass
    # below the total, whatever the rounding
    mark = uniforms.clamp(max=BELOW_ONE)[..., None] * total
    return torch.searchsorted(ends, mark, right=True)[..., 0]


def _in_rows(rows: Float[Tensor, "B *ones V"], numbers: Sequence[float]) -> list[int]:
    """`invert` on a CPU, where the host can read: one row per prompt, each by itself.

    However many there are: sums by blocks end slices elsewhere in the last bits, and what a prompt
    is told must not depend on the batch.
    """
    if len(rows) == 1:
        return [_in_row(rows, *numbers)]
    return [*map(_in_row, rows, numbers)]


def _in_row(row: Float[Tensor, "*ones V"], uniform: float) -> int:
    ends = row.flatten().cumsum(0, dtype=torch.float64).numpy()
    total = ends.item(-1)
    if not 0 < total < math.inf:
        raise NoMass
    return bisect_right(ends, uniform * total)  # below the total: at most 1 - 2**-53 of it


def _by_blocks(
    probs: Float[Tensor, "N V"], uniforms: Float[Tensor, " N"], look: bool
) -> Int[Tensor, " N"]:
    """`invert` in two levels."""
    blocks = F.pad(probs, (0, -probs.shape[-1] % BLOCK)).reshape(len(probs), -1, BLOCK)
    weights = blocks.sum(-1)
    total = weights.sum(-1)
    if look:
        _check_mass(total)
    block, rest = _slice_holding(weights, uniforms)
    rows = torch.arange(len(probs), device=probs.device)
    token, _ = _slice_holding(blocks[rows, block], rest)
    return block * BLOCK + token


def _check_mass(total: Float[Tensor, " N"]) -> None:
    if not bool(((total > 0) & (total < torch.inf)).all()):
        raise NoMass


def _slice_holding(
    weights: Float[Tensor, "N K"], uniforms: Float[Tensor, " N"]
) -> tuple[Int[Tensor, " N"], Float[Tensor, " N"]]:
    """Which slice of the cumulative weights holds each uniform, and how far into it (0..1)."""
    ends = weights.cumsum(-1, dtype=torch.float64)
    total = ends.amax(-1)
    below_total = torch.nextafter(total, torch.zeros_like(total))
    mark = torch.minimum(uniforms * total, below_total)
    # The second condition matters where a parallel sum is not monotone to the last bit.
    index = ((ends > mark[:, None]) & (weights > 0)).to(torch.int8).argmax(-1)
    weight = weights.gather(-1, index[:, None])[:, 0].double()
    start = ends.gather(-1, index[:, None])[:, 0] - weight
    return index, ((mark - start) / weight).clamp(0, 1)


def first_argmax(x: Float[Tensor, "*rows V"]) -> Int[Tensor, "*rows"]:
    """`x.argmax(-1)`, ties to the lowest index, as fast as a CPU can read.

    There torch compares one number at a time, numpy many; what numpy does not know (bfloat16)
    goes by the largest of each block first.
    """
    if x.numel() <= SHORT:
        return x.argmax(-1)
    if x.device.type == "cpu" and x.dtype == torch.float32 and x.dim() > 1:
        return torch.from_numpy((x.detach() if x.requires_grad else x).numpy().argmax(-1))
    if x.is_cuda or x.shape[-1] % SPAN:
        return x.argmax(-1)
    blocks = x.reshape(-1, x.shape[-1] // SPAN, SPAN)
    best = blocks.amax(-1).float().argmax(-1)
    inside = blocks[torch.arange(len(blocks)), best].float().argmax(-1)
    return (best * SPAN + inside).view(x.shape[:-1])


def first_max(
    x: Float[Tensor, "*rows V"],
) -> tuple[Int[Tensor, "*rows"], Float[Tensor, "*rows"]]:
    """`first_argmax`, and what is there: not finite if the row is NaN or +infinity somewhere."""
    if x.is_cuda or x.numel() <= AT_ONCE:
        largest, place = x.max(-1)
        return place, largest
    place = first_argmax(x)
    return place, x.gather(-1, place[..., None])[..., 0]


@runtime_checkable
class Coins(Protocol):
    """All the randomness of a round, in one place where a test can enumerate it (B prompts)."""

    def flip(self, chances: Float[Tensor, "B K"]) -> Bool[Tensor, "B K"]:
        """True with the given chances, all independent; 0 never, 1 always."""
        ...

    def draw(self, rows: Float[Tensor, "B K V"]) -> Int[Tensor, "B K"]:
        """Tokens with the given probabilities, all independent."""
        ...

    def toss(self, chances: list[list[float]]) -> list[list[bool]]:
        """`flip` for the host; what is above 1 counts as 1."""
        return self.flip(torch.tensor(chances, dtype=torch.float64).clamp(max=1.0)).tolist()

    def pick(self, rows: Float[Tensor, "B V"]) -> list[int]:
        """`draw` for the host, a token per prompt."""
        return self.draw(rows[:, None])[:, 0].tolist()


class GeneratorCoins(Coins):
    """The coins of a real run: every flip and draw takes fresh numbers (R6).

    Every prompt has a generator of its own. A flip, draw or toss takes the same count of its
    numbers however many are asked for, and a pick one: what a prompt is told depends neither on the
    batch it is in nor on the padding there. Keep the generators for the whole answer.
    """

    def __init__(self, generators: Sequence[Random], most: int, look: bool = True) -> None:
        """
        Args:
            generators: one per prompt.
            most: the largest K that will be asked for.
            look: refuse rows without mass on a GPU too, for which the host waits at every draw.
        """
        self.generators, self.most, self.look = generators, most, look

    def numbers(self, count: int) -> list[list[float]]:
        """As many numbers in [0, 1) for every prompt."""
        if count > self.most:
            raise ValueError(f"{count} random numbers at once, where {self.most} were foreseen")
        return [[one.random() for _ in range(self.most)][:count] for one in self.generators]

    def uniforms(self, count: int, device: torch.device) -> Float[Tensor, "B K"]:
        """`numbers` on a device, float64."""
        numbers = torch.tensor(self.numbers(count), dtype=torch.float64)
        if device.type == "cuda":  # a copy that nobody waits for
            return numbers.pin_memory().to(device, non_blocking=True)
        return numbers.to(device)

    def flip(self, chances: Float[Tensor, "B K"]) -> Bool[Tensor, "B K"]:
        return self.uniforms(chances.shape[1], chances.device) < chances

    def draw(self, rows: Float[Tensor, "B K V"]) -> Int[Tensor, "B K"]:
        if rows.shape[1] == 1 and rows.device.type == "cpu":
            tokens = _in_rows(rows, [number for (number,) in self.numbers(1)])
            if len(tokens) == 1:
                return torch.full((1, 1), *tokens)  # half of a list's time
            return torch.tensor(tokens)[:, None]
        look = self.look or not rows.is_cuda
        return invert(rows, self.uniforms(rows.shape[1], rows.device), look)

    def toss(self, chances: list[list[float]]) -> list[list[bool]]:
        numbers = self.numbers(len(chances[0]))
        return [[*map(lt, *row)] for row in zip(numbers, chances, strict=True)]

    def pick(self, rows: Float[Tensor, "B V"]) -> list[int]:
        numbers = [one.random() for one in self.generators]
        if rows.device.type == "cpu":
            return _in_rows(rows, numbers)
        uniforms = torch.tensor(numbers, dtype=torch.float64, device=rows.device)
        return invert(rows, uniforms).tolist()
