"""Warping: from logits to the distribution that tokens are sampled from.

The warped distribution is the target distribution p of speculative decoding: plain sampling draws
from it, and verification must reproduce it. Everything is computed in float32 or wider; cumulative
sums are in float64.

Shape letters: N rows, V vocabulary, K ranked tokens.

Source: nucleus sampling, Holtzman et al. 2019, arXiv:1904.09751; min-p, Nguyen et al. 2024,
arXiv:2407.01082; the order temperature, top-k, top-p, min-p is that of transformers.
Differs from transformers: top-k keeps exactly k tokens, and every tie goes to the lower id, so
top_k=1, a vanishing top_p and temperature 0 give the same distribution.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

CANDIDATES = 128  # tokens ranked in the first attempt to cover top_p


def warp(
    logits: Float[Tensor, "N V"],
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Float[Tensor, "N V"]:
    """Return probabilities after temperature, then top-k, then top-p, then min-p.

    Args:
        logits: any float dtype; computed in float32 (float64 stays float64).
        temperature: >= 0; 0 is greedy: all mass on the argmax, ties to the lowest id.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches it; 1 keeps all.
        min_p: keep tokens at least min_p times as probable as the most probable one; 0 keeps all.

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
    logits = at_least_float32(logits)
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    if 0 < top_k < logits.shape[-1]:  # temperature keeps the order, so ranking may come first
        values, ids = _ranked(logits, top_k)
        ranked = softmax_at(values, temperature)
    elif top_p < 1:
        ranked, ids = _ranked_to_mass(softmax_at(logits, temperature), top_p)
    else:
        return _apply_min_p(softmax_at(logits, temperature), min_p)
    kept = _apply_min_p(_apply_top_p(ranked, top_p), min_p)
    return torch.zeros_like(logits).scatter_(-1, ids, kept)


def approximate_cutoff(
    logits: Float[Tensor, "*rows V"], temperature: float, top_k: int, top_p: float, min_p: float
) -> Float[Tensor, "*rows 1"]:
    """Return approximately the logit below which `warp` drops tokens, at a temperature > 0.

    Much faster than `warp`, for draft scores only, which do not affect exactness: ties are ignored,
    and a nucleus ends within the first CANDIDATES tokens. One bound at least must drop tokens.
    """
    best = logits.topk(min(top_k or CANDIDATES, logits.shape[-1])).values
    largest, cutoff = best[..., :1], best[..., -1:]
    if top_p < 1:
        mass = ((best if top_k else logits) - largest).div(temperature).logsumexp(-1, keepdim=True)
        probs = ((best - largest) / temperature - mass).exp()
        outside = probs.cumsum(-1) - probs >= top_p
        cutoff = best.masked_fill(outside, float("inf")).amin(-1, keepdim=True)
    if min_p > 0:
        of_min_p = largest + temperature * math.log(min_p)
        cutoff = torch.maximum(cutoff, of_min_p) if top_k or top_p < 1 else of_min_p
    return cutoff


def at_least_float32(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def softmax_at(logits: Float[Tensor, "*rows V"], temperature: float) -> Float[Tensor, "*rows V"]:
    """Return the softmax at a temperature > 0; the shift keeps a tiny temperature finite."""
    logits = at_least_float32(logits)
    if temperature == 1:
        return logits.softmax(-1)
    return (logits - logits.amax(-1, keepdim=True)).div_(temperature).softmax(-1)


def _apply_min_p(probs: Float[Tensor, "N K"], min_p: float) -> Float[Tensor, "N K"]:
    """Drop tokens less probable than `min_p` times the most probable one; renormalise."""
    if min_p == 0:
        return probs
    kept = probs * (probs >= min_p * probs.amax(-1, keepdim=True))
    return kept / kept.sum(-1, keepdim=True)


def _apply_top_p(ranked: Float[Tensor, "N K"], top_p: float) -> Float[Tensor, "N K"]:
    """Keep ranked tokens while the mass before them is below top_p; renormalise."""
    if top_p == 1:
        return ranked
    before = F.pad(ranked.cumsum(-1, dtype=torch.float64)[:, :-1], (1, 0))
    kept = ranked * (before < top_p)
    return kept / kept.sum(-1, keepdim=True)


def _ranked_to_mass(
    probs: Float[Tensor, "N V"], top_p: float
) -> tuple[Float[Tensor, "N K"], Int[Tensor, "N K"]]:
    """Return enough of the most probable tokens to reach top_p in every row, best first.

    Ranks more and more tokens until they do: sorting a large vocabulary is far slower. A GPU sorts
    all, because every attempt would synchronise with the host.
    """
    if probs.is_cuda:
        return _sorted(probs, probs.shape[-1])
    count = CANDIDATES
    while True:
        ranked, ids = _ranked(probs, count)
        if count >= probs.shape[-1] or bool((ranked.sum(-1, dtype=torch.float64) >= top_p).all()):
            return ranked, ids
        count *= 8


def _ranked(
    values: Float[Tensor, "N V"], count: int
) -> tuple[Float[Tensor, "N K"], Int[Tensor, "N K"]]:
    """Return the `count` largest values of each row and their ids, best first.

    Ties go to the lower id; torch.topk specifies neither which it takes nor their order.
    """
    if values.is_cuda:
        return _sorted(values, count)
    count = min(count, values.shape[-1])
    best, ids = values.topk(min(count + 1, values.shape[-1]))
    tied = best[:, count - 1] == best[:, -1]  # equal values on both sides of the cut
    best, ids = best[:, :count], ids[:, :count]
    if count < values.shape[-1] and bool(tied.any()):
        ids[tied] = _first_largest(values[tied], best[tied])
    ids = ids.sort(-1).values
    best, order = values.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return best, ids.gather(-1, order)


def _sorted(
    values: Float[Tensor, "N V"], count: int
) -> tuple[Float[Tensor, "N K"], Int[Tensor, "N K"]]:
    """`_ranked` by a full sort, which does not synchronise with the host."""
    best, ids = values.sort(dim=-1, descending=True, stable=True)
    return best[:, :count], ids[:, :count]


def _first_largest(values: Float[Tensor, "N V"], best: Float[Tensor, "N K"]) -> Int[Tensor, "N K"]:
    """Return the ids of the K largest values; of those equal to the last, the first ones."""
    lowest = best[:, -1:]
    tied = values == lowest
    ties_to_keep = (best == lowest).sum(-1, keepdim=True)
    above = ~(values <= lowest)  # NaN ranks first, as in topk, and then makes the softmax NaN
    keep = above | (tied & (tied.cumsum(-1) <= ties_to_keep))
    return keep.nonzero()[:, 1].view(best.shape)
