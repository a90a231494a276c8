"""LoRA adapters for the linear maps of frozen layers.

    out = W x + (alpha / rank) B A x

A is random and B zero, so that untrained adapters change nothing. Forward hooks add the second
term, inside `active` or, after `attach`, permanently, for one set of adapters at a time.

Source: Hu et al. 2021, "LoRA", arXiv:2106.09685. Differs: every `nn.Linear` has an adapter (the
paper adapts attention only); no dropout.

Legend: R rank, X inputs and Y outputs of a linear map.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class LoraPair(nn.Module):
    """The adapter of one linear map: (alpha / rank) B A x."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(rank, linear.in_features))
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.scale = alpha / rank
        nn.init.uniform_(self.a, -(linear.in_features**-0.5), linear.in_features**-0.5)

    def forward(self, x: Float[Tensor, "*rows X"]) -> Float[Tensor, "*rows Y"]:
        return F.linear(F.linear(x.to(self.a.dtype), self.a), self.b) * self.scale


class Adapters(nn.Module):
    """One `LoraPair` for every `nn.Linear` of some layers."""

    def __init__(self, layers: nn.Module, rank: int, alpha: float) -> None:
        super().__init__()
        pairs = {name: LoraPair(linear, rank, alpha) for name, linear in linear_layers(layers)}
        if not pairs:  # GPT-2 has `Conv1D`
            raise ValueError("these layers have no nn.Linear to adapt")
        self.pairs = nn.ModuleDict(pairs)

    @contextmanager
    def active(self, layers: nn.Module) -> Iterator[None]:
        """Adapt the layers inside the context, and restore them afterwards."""
        before, _ = _ATTACHED.get(layers, (None, []))
        self.attach(layers)
        try:
            yield
        finally:
            detach_adapters(layers)
            if before is not None:
                before.attach(layers)

    def attach(self, layers: nn.Module) -> None:
        """Adapt the layers permanently, in place of other adapters."""
        detach_adapters(layers)
        hooks = [
            linear.register_forward_hook(partial(_add_output, self.pairs[name]))
            for name, linear in linear_layers(layers)
        ]
        _ATTACHED[layers] = (self, hooks)


_ATTACHED = WeakKeyDictionary[nn.Module, tuple[Adapters, list[RemovableHandle]]]()


def has_adapters(layers: nn.Module) -> bool:
    return layers in _ATTACHED


def detach_adapters(layers: nn.Module) -> None:
    _, hooks = _ATTACHED.pop(layers, (None, []))
    for hook in hooks:
        hook.remove()


def linear_layers(layers: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Return every linear map with its name, such as "0/mlp/up_proj" (a key may hold no dot)."""
    modules = layers.named_modules()
    return [(name.replace(".", "/"), m) for name, m in modules if isinstance(m, nn.Linear)]


def _add_output(pair: nn.Module, _linear: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    delta: Tensor = pair(inputs[0])
    return output + delta.to(output.dtype)
