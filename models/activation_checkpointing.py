"""Gradient checkpointing: a part of an unroll that is run once more instead of being remembered.

Source: Chen et al. 2016, arXiv:1604.06174; the variant of PyTorch that is not reentrant.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


def again(recompute: bool, part: Callable[..., T], *inputs: Any) -> T:
    """`part(*inputs)`; with `recompute` only inputs and outputs are kept for the backward pass,
    which runs the part again, with the same random numbers.
    """
    if not (recompute and torch.is_grad_enabled()):
        return part(*inputs)
    out: T = checkpoint(part, *inputs, use_reentrant=False)
    return out
