"""Gradient checkpointing of a part of an unroll.

Source: Chen et al. 2016, arXiv:1604.06174; PyTorch's non-reentrant variant.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


def maybe_checkpoint(enabled: bool, function: Callable[..., T], *inputs: Any) -> T:
    """Return `function(*inputs)`; if enabled, recompute it in the backward pass.

    Then only inputs and outputs are saved, and the recomputation uses the same random numbers.
    """
    if not (enabled and torch.is_grad_enabled()):
        return function(*inputs)
    out: T = checkpoint(function, *inputs, use_reentrant=False)
    return out
