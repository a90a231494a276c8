"""Recurrent modules of a model (linear attention, Mamba, short convolutions), found by their code.

A module is recurrent if its code writes a state of a cache through transformers' methods, whatever
the module is called. Inside `recorded`, a cache of Outrider runs these modules: see
`cache/recurrent_states.py`.
"""

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache as once
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor, nn

from outrider.conf.errors import ConfigError
from outrider.models.cache.attention_cache import AttentionCache
from outrider.models.cache.recurrent_states import Call
from outrider.models.target.layer_parts import replace_forward

STATE_METHODS = {"update_conv_state", "update_recurrent_state", "set_linear_cache"}
SHORT = 16  # rows of a forward that need no chunks of the usual size
ROW_METHODS = {"update"}
INDEX_METHODS = {"update_indexer"}  # of sparse attention
# kinds of layers in `layer_types` of configurations
RECURRENT_KINDS = ("linear", "mamba", "recurrent", "conv", "ssm", "rwkv", "hybrid")


def has_recurrent_layers(config: Any) -> bool:
    """Return whether the configuration of a text model names layers with a recurrent state."""
    kinds = [*(getattr(config, "layer_types", None) or ()), getattr(config, "model_type", "")]
    return any(word in str(kind) for kind in kinds for word in RECURRENT_KINDS)


def refuse_unknown_states(model: Any, name: str) -> None:
    """Raise ConfigError for a model with recurrent states that no known method writes."""
    config = model.config.get_text_config(decoder=True)
    if has_recurrent_layers(config) or getattr(model, "_is_stateful", False):
        why = (
            f"Its family ({config.model_type}) keeps recurrent states, and not in the caches of "
            "transformers: rejected draft tokens could not be removed from them."
        )
        fix = "Use a newer transformers, or another target."
        raise ConfigError("target", name, why, fix)


def refuse_index(model: nn.Module, name: str) -> None:
    """Raise ConfigError for a model with a module that keeps an index of keys in its cache."""
    for module in model.modules():
        if _calls(module, INDEX_METHODS):
            why = (
                f"Its attention selects keys by an index ({type(module).__name__}), which is kept "
                "beside keys and values and which Outrider's cache does not have."
            )
            raise ConfigError("target", name, why, "Its family is not supported: use another.")


def recurrent_modules(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that write a state of a cache, in the order of the model."""
    if _calls(model, STATE_METHODS):
        return [model]
    return [found for child in model.children() for found in recurrent_modules(child)]


def writes_rows(model: nn.Module) -> bool:
    """Return whether a module of the model writes keys and values to a cache."""
    return any(_calls(module, ROW_METHODS) for module in model.modules())


def _calls(module: nn.Module, methods: set[str]) -> bool:
    """Return whether the code of a module's class, without its submodules, names a method."""
    if type(module).__module__.startswith("torch."):
        return False
    functions = [*filter(callable, vars(type(module)).values())]
    codes = [getattr(inspect.unwrap(function), "__code__", None) for function in functions]
    return any(code is not None and methods & {*code.co_names} for code in codes)


@contextmanager
def recorded(
    modules: Sequence[nn.Module], cache: AttentionCache, by_rows: dict[type, bool]
) -> Iterator[None]:
    """Let the cache run the modules inside.

    Args:
        by_rows: by class, whether a module reads several rows only from an empty state; filled by
            an experiment the first time that it matters.
    """
    with ExitStack() as replaced:
        for module in modules:
            run = partial(_run, cache, module, module.forward, by_rows)
            replaced.enter_context(replace_forward(module, run))
        yield


def _run(
    cache: AttentionCache, module: nn.Module, forward: Any, by_rows: dict[type, bool],
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    states, kind = cache.states, type(module)
    if states.count <= SHORT and next(module.parameters()).device.type == "cpu":
        forward = partial(_run_short, module, forward, states.count)
    call = Call(forward, args, kwargs)
    if kind not in by_rows and states.continues_text:
        by_rows[kind] = states.ignores_state(call)
    return states.run(call, by_rows.get(kind, False))


def _run_short(module: Any, forward: Any, rows: int, *args: Any, **kwargs: Any) -> Any:
    """Run a few rows with chunks of about their number.

    transformers' reference kernels pad the rows to whole chunks of 64 or 256. The result does not
    depend on the size of chunks, but for rounding.
    """
    size, kind = 1 << (rows - 1).bit_length(), module.__class__
    if chunks_are_arguments(kind):
        return forward(*args, chunk_size=size, **kwargs)
    before = getattr(module, "chunk_size", None)
    if before is None:
        return forward(*args, **kwargs)
    module.chunk_size = min(size, before)
    try:
        return forward(*args, **kwargs)
    finally:
        module.chunk_size = before


@once
def chunks_are_arguments(kind: type) -> bool:
    """Return whether the forward of a class passes an argument `chunk_size` on to its kernel."""
    sizes = [inspect.signature(one).parameters.get("chunk_size") for one in kernels_of(kind)]
    return any(size is not None and size.default is not inspect.Parameter.empty for size in sizes)


def kernels_of(kind: type) -> list[Any]:
    """Return the functions and classes of its file that the forward of a class names."""
    forward = inspect.unwrap(vars(kind)["forward"])
    file = vars(sys.modules[kind.__module__])
    return [file[name] for name in forward.__code__.co_names if callable(file.get(name))]


def documents_by_length(document: Int[Tensor, "B T"]) -> Iterator[Int[Tensor, "N L"]]:
    """Yield, for every length L, the places of its N documents in the flattened rows.

    Negative numbers are padding, which is left out.
    """
    groups = dict[int, list[Tensor]]()
    places = torch.arange(document.numel(), device=document.device).view(document.shape)
    for row, numbers in zip(places, document, strict=True):
        starts = (torch.nonzero(numbers.diff()).flatten() + 1).tolist()
        real = numbers[[0, *starts]] >= 0
        for part, kept in zip(row.tensor_split(starts), real.tolist(), strict=True):
            if kept:
                groups.setdefault(len(part), []).append(part)
    yield from map(torch.stack, groups.values())


def are_sharded(layers: nn.ModuleList) -> bool:
    """Return whether layers are gathered while they run, so that no part of one runs alone."""
    return hasattr(layers[0], "unshard")


def most_on_a_rank(layers: nn.ModuleList, count: int) -> int:
    """Return the largest count on a rank, where sharded layers make all ranks run together."""
    if not dist.is_initialized() or not are_sharded(layers):
        return count
    device = next(layers.parameters()).device
    counts = torch.tensor(count, device=device)
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    return int(counts)
