"""Gradient checkpointing changes memory and time only."""

import pytest
import torch
from torch import Tensor

from outrider.models import drafters
from outrider.models.drafting.drafter import Drafter
from outrider.models.interface import Trace
from outrider.models.target import target
from outrider.models.target.target import Target
from outrider.train.objective import Objective
from tests import tiny

WITH_LAYERS = (".draft_lm", ".eagle", ".eagle3", ".hass", ".layerskip", ".mtp")


@pytest.fixture(scope="module")
def frozen() -> Target:
    return tiny.target()


@pytest.fixture(params=drafters.trained_names())
def drafter(request: pytest.FixtureRequest, frozen: Target) -> Drafter:
    return tiny.drafter(request.param, frozen).train()


def step(drafter: Drafter, frozen: Target, trace: Trace) -> tuple[float, list[Tensor], int]:
    """The loss, the gradients, and the bytes saved for the backward pass."""
    depths = tiny.DEPTHS
    objective = Objective(drafter, frozen, weights=[1.0] * depths)
    divide, sizes = torch.ones(depths), dict[int, int]()

    def keep(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    torch.manual_seed(0)  # of the noise, for those that add some
    objective.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss, _ = objective(trace, divide)
    loss.backward()
    grads = [p.grad.clone() for p in objective.parameters() if p.grad is not None]
    return float(loss.detach()), grads, sum(sizes.values())


def test_loss_and_gradients_are_equal_with_less_saved(drafter: Drafter, frozen: Target) -> None:
    """Drafters with decoder layers save less; a Medusa head, say, is one layer."""
    frozen.set_taps(drafter.taps)
    trace = tiny.packed_trace(frozen)
    loss, grads, saved = step(drafter, frozen, trace)
    drafter.gradient_checkpointing = True
    again, same, saved_with_checkpoints = step(drafter, frozen, trace)
    assert again == loss
    assert len(same) == len(grads) > 0
    for one, other in zip(grads, same, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
    recomputes = type(drafter).__module__.endswith(WITH_LAYERS)
    assert saved_with_checkpoints <= (0.3 if recomputes else 1.0) * saved


def test_a_long_text_is_read_in_chunks(frozen: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen.set_taps((0, 1))
    whole = tiny.packed_trace(frozen)
    monkeypatch.setattr(target, "MASK_ELEMENTS", 7 * whole.ids.numel())
    chunked = frozen.trace(whole.ids, whole.answer, whole.document, whole.positions)
    for name in ("taps", "last"):
        torch.testing.assert_close(getattr(chunked, name), getattr(whole, name))
    assert whole.ids.shape[1] > 14, "at least three chunks"
