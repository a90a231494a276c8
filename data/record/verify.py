"""Comparison of a recorded trace with a plain forward of the model, one document at a time.

Serving engines and batched extractors are known to return states of the wrong rows (reports name
padding, prefix caching and chunked prefill), and a recording would keep the error.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from outrider.models.interface import Trace
from outrider.models.target.target import Target

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}  # rounding in batches


class Difference(NamedTuple):
    """Largest distance of a row from the plain forward's, relative to the row's norm."""

    taps: float
    last: float
    tolerance: float

    @property
    def within_tolerance(self) -> bool:
        return max(self.taps, self.last) <= self.tolerance

    def __str__(self) -> str:
        return f"taps differ by {self.taps:.1%}, last states by {self.last:.1%}"


@torch.no_grad()
def compare_with_plain_forward(target: Target, trace: Trace) -> Difference:
    """Compare the trace of one document (B = 1) with the model's own forward of its ids."""
    plain = dict[int, Tensor]()  # `hidden_states` begin with the embedding in most families only

    def keep(tap: int, _module: nn.Module, _args: Any, output: Any) -> None:
        plain[tap] = output[0] if isinstance(output, tuple) else output

    with ExitStack() as hooks:
        for tap in target.taps:
            hooks.enter_context(target.layers[tap].register_forward_hook(partial(keep, tap)))
        out = target.model(
            input_ids=trace.ids.to(target.layer_device), output_hidden_states=True, use_cache=False
        )
    states = zip(target.taps, trace.taps.chunk(max(1, len(target.taps)), -1), strict=False)
    taps = max((_relative_distance(rows, plain[tap]) for tap, rows in states), default=0.0)
    last = _relative_distance(trace.last, out.hidden_states[-1])
    return Difference(taps, last, TOLERANCE.get(target.dtype, 0.25))


def _relative_distance(rows: Float[Tensor, "1 S H"], plain: Float[Tensor, "1 S H"]) -> float:
    """Return the largest of all rows but the last one, which no loss reads."""
    rows, plain = rows.float().cpu(), plain.float().cpu()
    distance = (rows - plain).norm(dim=-1) / plain.norm(dim=-1).clamp(min=1e-6)
    return float(distance[:, :-1].max())
