"""Is what is about to be recorded what the model says? A document, run alone and plainly.

Serving engines and batched extractors have returned states of the wrong rows without a word
(field reports name padding, prefix caching and chunked prefill); a recording would keep them for
ever.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.models.drafter import Trace
from outrider.models.target import Target

SLACK = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}  # rounding, batched


class Difference(NamedTuple):
    """Largest distance of a row from the plain forward's, relative to its size."""

    taps: float
    last: float
    slack: float

    @property
    def fine(self) -> bool:
        return max(self.taps, self.last) <= self.slack

    def __str__(self) -> str:
        return f"taps differ by {self.taps:.1%}, last states by {self.last:.1%}"


@torch.no_grad()
def compare(target: Target, trace: Trace) -> Difference:
    """The trace of one document (B = 1) against the model's own forward of its ids."""
    out = target.model(
        input_ids=trace.ids.to(target.lies), output_hidden_states=True, use_cache=False
    )
    # entry k + 1 is the output of layer k, but for the last one, which has been normed
    pairs = [
        (own, out.hidden_states[tap + 1])
        for tap, own in zip(
            target.taps, trace.taps.chunk(max(1, len(target.taps)), -1), strict=False
        )
        if tap + 1 < target.depth
    ]
    taps = max((_apart(own, plain) for own, plain in pairs), default=0.0)
    last = _apart(trace.last, out.hidden_states[-1])
    return Difference(taps, last, SLACK.get(target.dtype, 0.25))


def _apart(own: Float[Tensor, "1 S H"], plain: Float[Tensor, "1 S H"]) -> float:
    own, plain = own.float().cpu(), plain.float().cpu()
    distance = (own - plain).norm(dim=-1) / plain.norm(dim=-1).clamp(min=1e-6)
    return float(distance[:, :-1].max())  # nobody reads the last row: no token follows it
