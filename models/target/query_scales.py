"""Scales of queries and relative distances, computed from the positions of the tokens.

Llama-4 multiplies the queries of its layers without rotary embedding by
log(1 + floor((position + 1) / floor_scale)) * attn_scale + 1. transformers takes the number of
cached rows plus the index of the row for the position, which is another one for the nodes of a
tree, and for packed documents. Inkling's attention adds a bias by distance, which transformers
takes from the length of the longest prompt, and multiplies queries and bias by
1 + log_scaling_alpha * log(max(1, (position + 1) / log_scaling_n_floor)), of the same length.

Legend: B rows of a batch, T tokens, Q query columns, S columns of a cache, A heads.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from outrider.models.target.layer_parts import replace_forward


@contextmanager
def scale_queries(layers: nn.ModuleList, positions: Int[Tensor, "B T"]) -> Iterator[None]:
    """Scale queries by `positions` inside the context, where the layers scale them at all."""
    with ExitStack() as undo:
        for attention in _scaling(layers):
            scale = _query_scale(attention, positions)
            hook = attention.q_proj.register_forward_hook(partial(_multiply, scale))
            undo.enter_context(hook)
            undo.callback(setattr, attention, "attn_temperature_tuning", True)
            attention.attn_temperature_tuning = False
        for attention in _log_scaling(layers):
            scale = _log_scale(attention.config, positions)
            parts = {attention.q_norm: scale[..., None, None],
                     attention.rel_logits_proj: scale[:, None, :, None]}  # fmt: skip
            for part, factor in parts.items():
                undo.enter_context(part.register_forward_hook(partial(_multiply, factor)))
            undo.callback(setattr, attention, "config", attention.config)
            attention.config = copy.copy(attention.config)
            attention.config.log_scaling_n_floor = None
        yield


def _scaling(layers: nn.ModuleList) -> list[Any]:
    """Return the attention modules that scale their queries."""
    found: list[Any] = [getattr(layer, "self_attn", None) for layer in layers]
    found = [each for each in found if getattr(each, "attn_temperature_tuning", False)]
    return [attention for attention in found if not attention.use_rope]


def _query_scale(attention: Any, positions: Int[Tensor, "B T"]) -> Float[Tensor, "B T 1"]:
    steps = torch.log1p(torch.floor((positions.float() + 1) / attention.floor_scale))
    out: Tensor = (steps * attention.attn_scale + 1)[..., None]
    return out


def _log_scaling(layers: nn.ModuleList) -> list[Any]:
    """Return Inkling's attention modules that scale queries and bias."""
    found: list[Any] = [getattr(layer, "self_attn", None) for layer in layers]
    return [
        each
        for each in found
        if hasattr(each, "rel_logits_proj")
        and hasattr(each, "q_norm")  # Inkling-2 computes its scales from the positions
        and not each.is_sliding
        and getattr(each.config, "log_scaling_n_floor", None) is not None
    ]


def _log_scale(config: Any, positions: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    steps = (positions.float() + 1) / config.log_scaling_n_floor
    out: Tensor = 1.0 + config.log_scaling_alpha * torch.log(steps.clamp(min=1.0))
    return out


def _multiply(
    scale: Float[Tensor, "..."], _module: nn.Module, _args: Any, out: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    return (out * scale.to(out.device)).to(out.dtype)


def distance_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose forward takes the positions of queries and of keys."""
    wanted = {"query_positions", "key_positions"}
    named = [(m, getattr(type(m).forward, "__code__", None)) for m in model.modules()]
    return [module for module, code in named if code and wanted <= {*code.co_varnames}]


@contextmanager
def set_distances(
    modules: Sequence[nn.Module], positions: Int[Tensor, "B T"], columns: Int[Tensor, "B S"]
) -> Iterator[None]:
    """Run these modules with the positions of every prompt inside the context."""
    with ExitStack() as undo:
        for module in modules:
            run = partial(_run_each, module.forward, positions, columns)
            undo.enter_context(replace_forward(module, run))
        yield


def _run_each(
    forward: Any, positions: Tensor, columns: Tensor, states: Tensor, *_: Any
) -> Float[Tensor, "B A T S"]:
    each = zip(states.split(1), positions, columns, strict=True)
    return torch.cat([forward(*prompt) for prompt in each])
