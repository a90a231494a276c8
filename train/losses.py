"""What a row of draft logits costs under the target's distribution: nats per row.

Losses take logits [N, Vd] and the teacher's probabilities [N, Vd] over the same tokens, and return
one number per row; summing, masking and counting are the objective's business. Softmax and sums
run in float32 whatever the input.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def soft_cross_entropy_reference(
    logits: Float[Tensor, "N Vd"], teacher: Float[Tensor, "N Vd"]
) -> Float[Tensor, " N"]:
    """-sum_v p(v) log q(v), as the formula reads (EAGLE-3, arXiv:2503.01840, section 3)."""
    return -(teacher.float() * logits.float().log_softmax(-1)).sum(-1)


def soft_cross_entropy(
    logits: Float[Tensor, "N Vd"], teacher: Float[Tensor, "N Vd"]
) -> Float[Tensor, " N"]:
    """The same with one buffer of [N, Vd] kept for the gradient, which is q * sum(p) - p."""
    out: Tensor = _SoftCrossEntropy.apply(logits, teacher)  # type: ignore[no-untyped-call]
    return out


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, teacher: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        rows = logits.float()
        lse, mass = rows.logsumexp(-1), teacher.sum(-1)
        nats: Tensor = lse * mass - torch.linalg.vecdot(teacher.float(), rows)
        if ctx.needs_input_grad[0]:
            slope = (rows - lse[:, None]).exp_().mul_(mass[:, None]).sub_(teacher)
            ctx.save_for_backward(slope)
            ctx.dtype = logits.dtype
        return nats

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        (slope,) = ctx.saved_tensors
        return slope.mul_(grad[:, None]).to(ctx.dtype), None


LOSSES: dict[str, Loss] = {
    "soft_cross_entropy": soft_cross_entropy,
    "soft_cross_entropy_reference": soft_cross_entropy_reference,
}
