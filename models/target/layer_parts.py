"""A part of a target's decoder layers, and a way to make a model's own forward run only that part.

Self-speculative drafters run the first layers of the target, the others on given states, or all
layers without some of their attention and MLP sublayers. `FastLlama` loops over a part;
for other families `limit_layers` replaces the forward of the modules that are left out:

    layer      0          1         2        3        first = 2, stop = 3
    runs       .          hidden    yes      .        dots: return their input
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from outrider.conf.errors import RunError

ATTENTION_NAMES = ("self_attn", "attn", "attention")
MLP_NAMES = ("mlp", "block_sparse_moe", "feed_forward")


class Part(NamedTuple):
    """Layers first..stop-1, without some of their sublayers.

    Attributes:
        stop: None: to the last layer and the final norm.
        hidden: input of layer `first`; None: the embedded tokens.
        skip_attention, skip_mlp: layers whose attention or MLP adds nothing.
    """

    first: int = 0
    stop: int | None = None
    hidden: Float[Tensor, "B T H"] | None = None
    skip_attention: frozenset[int] = frozenset()
    skip_mlp: frozenset[int] = frozenset()


WHOLE = Part()


@contextmanager
def limit_layers(layers: nn.ModuleList, part: Part) -> Iterator[None]:
    """Run only a part of the layers inside the context.

    Raises:
        RunError: a sublayer to skip is not found.
    """
    stop = len(layers) if part.stop is None else part.stop
    with ExitStack() as replaced:
        for i, layer in enumerate(layers):
            if part.hidden is not None and i == max(0, part.first - 1):
                replaced.enter_context(replace_forward(layer, _constant(part.hidden)))
            elif not part.first <= i < stop:
                replaced.enter_context(replace_forward(layer, _same))
            if i in part.skip_attention:
                module = _child(layer, ATTENTION_NAMES)
                replaced.enter_context(replace_forward(module, _no_attention))
            if i in part.skip_mlp:
                module = _child(layer, MLP_NAMES)
                replaced.enter_context(replace_forward(module, _zeros_of(module)))
        yield


def _child(layer: nn.Module, names: tuple[str, ...]) -> nn.Module:
    for name, module in layer.named_children():
        if name in names:
            return module
    found = ", ".join(name for name, _ in layer.named_children())
    message = f"A decoder layer has no part named {' or '.join(names)} (it has {found})."
    raise RunError(message, "Its sublayers cannot be skipped.")


def _same(hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return hidden_states


def _constant(hidden: Tensor) -> Callable[..., Tensor]:
    return lambda *_args, **_kwargs: hidden


def _zeros_of(module: nn.Module) -> Callable[..., Any]:
    """Return a forward with zeros for output; in a tuple where experts return their scores too."""
    run, known = module.forward, vars(module)

    def zeros(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if "returns_tuple" not in known:  # one row tells, once
            known["returns_tuple"] = isinstance(run(hidden_states[:, :1], *args, **kwargs), tuple)
        out = torch.zeros_like(hidden_states)
        return (out, None) if known["returns_tuple"] else out

    return zeros


def _no_attention(hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, None]:
    return torch.zeros_like(hidden_states), None


@contextmanager
def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace `forward` of one module; a forward that a library has set is restored afterwards."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
