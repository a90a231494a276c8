"""LoRA: low-rank pairs beside the linear maps of layers that belong to someone else.

    out = W x + (alpha / rank) B A x

A is random and B zero, so that fresh pairs change nothing. The layers keep their own weights and
hold no reference to a pair: the second term is added by forward hooks, either inside `active` or,
after `stay`, for good. In a list of layers only one set of pairs acts at a time.

Source: Hu et al. 2021, "LoRA", arXiv:2106.09685. Differs: a pair beside every `nn.Linear`, where
the paper adapts attention alone; no dropout.

Legend: R rank, X inputs and Y outputs of a linear map.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class Pair(nn.Module):
    """(alpha / rank) B A x."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(rank, linear.in_features))
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.scale = alpha / rank
        nn.init.uniform_(self.a, -(linear.in_features**-0.5), linear.in_features**-0.5)

    def forward(self, x: Float[Tensor, "*rows X"]) -> Float[Tensor, "*rows Y"]:
        return F.linear(F.linear(x.to(self.a.dtype), self.a), self.b) * self.scale


class Adapters(nn.Module):
    """A pair for every `nn.Linear` of some layers."""

    def __init__(self, layers: nn.Module, rank: int, alpha: float) -> None:
        """
        Raises:
            ValueError: the layers have no `nn.Linear` (GPT-2's are of another kind).
        """
        super().__init__()
        found = {name: Pair(linear, rank, alpha) for name, linear in linears(layers)}
        if not found:
            raise ValueError("these layers have no nn.Linear that a pair could stand beside")
        self.pairs = nn.ModuleDict(found)

    @contextmanager
    def active(self, layers: nn.Module) -> Iterator[None]:
        """The layers are adapted inside, and afterwards what they were before."""
        before, _ = _ACTING.get(layers, (None, []))
        self.stay(layers)
        try:
            yield
        finally:
            release(layers)
            if before is not None:
                before.stay(layers)

    def stay(self, layers: nn.Module) -> None:
        """The layers are adapted from now on; pairs that acted there before no longer do."""
        release(layers)
        hooks = [
            linear.register_forward_hook(_adding(self.pairs[name]))
            for name, linear in linears(layers)
        ]
        _ACTING[layers] = (self, hooks)


_ACTING: WeakKeyDictionary[nn.Module, tuple[Adapters, list[RemovableHandle]]] = WeakKeyDictionary()


def adapted(layers: nn.Module) -> bool:
    """Whether pairs act in these layers now."""
    return layers in _ACTING


def release(layers: nn.Module) -> None:
    """The layers are what their own weights say."""
    _, hooks = _ACTING.pop(layers, (None, []))
    for hook in hooks:
        hook.remove()


def linears(layers: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Every linear map with its name, such as "0/mlp/up_proj" (a key may hold no dot)."""
    return [
        (name.replace(".", "/"), module)
        for name, module in layers.named_modules()
        if isinstance(module, nn.Linear)
    ]


def _adding(pair: nn.Module) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    def hook(_linear: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        added: Tensor = pair(inputs[0])
        return output + added.to(output.dtype)

    return hook
