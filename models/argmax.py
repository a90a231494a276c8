"""Argmax with ties to the lowest index, at the memory bandwidth of a CPU."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

BLOCK = 256  # values per block of `first_argmax`
SMALL = 2**13  # number of values up to which `first_argmax` uses torch
FUSED = 2**14  # number of values up to which one `max` beats argmax and gather in `first_max`


def first_argmax(x: Float[Tensor, "*rows V"]) -> Int[Tensor, "*rows"]:
    """Return `x.argmax(-1)`, ties to the lowest index.

    On a CPU torch compares one value at a time and numpy many; dtypes that numpy lacks (bfloat16)
    go by the maximum of each block first.
    """
    if x.numel() <= SMALL:
        return x.argmax(-1)
    if x.device.type == "cpu" and x.dtype == torch.float32 and x.dim() > 1:
        return torch.from_numpy((x.detach() if x.requires_grad else x).numpy().argmax(-1))
    if x.is_cuda or x.shape[-1] % BLOCK:
        return x.argmax(-1)
    blocks = x.reshape(-1, x.shape[-1] // BLOCK, BLOCK)
    best = blocks.amax(-1).float().argmax(-1)
    within = blocks[torch.arange(len(blocks)), best].float().argmax(-1)
    return (best * BLOCK + within).view(x.shape[:-1])


def first_max(
    x: Float[Tensor, "*rows V"],
) -> tuple[Int[Tensor, "*rows"], Float[Tensor, "*rows"]]:
    """Return `first_argmax` and the maxima, not finite if a row holds NaN or +infinity."""
    if x.is_cuda or x.numel() <= FUSED:
        maxima, index = x.max(-1)
        return index, maxima
    index = first_argmax(x)
    return index, x.gather(-1, index[..., None])[..., 0]
