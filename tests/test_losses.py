"""The cost of a row: against the formula, by hand, and under any input."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.train.losses import LOSSES, Loss, soft_cross_entropy, soft_cross_entropy_reference

every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def value_and_slope(loss: Loss, logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Nats per row, and their gradient when row i is weighed by i + 1."""
    leaf = logits.clone().requires_grad_()
    nats = loss(leaf, teacher)
    nats.backward(torch.arange(1.0, len(nats) + 1))
    assert leaf.grad is not None
    return nats.detach(), leaf.grad


def random_rows(
    seed: int, rows: int, size: int, scale: float, mass: float
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, size, generator=generator)
    teacher = (scale * torch.randn(rows, size, generator=generator)).softmax(-1) * mass
    return logits, teacher


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    rows=st.integers(1, 5),
    size=st.integers(1, 40),
    scale=st.floats(0.01, 30.0),
    mass=st.floats(0.0, 1.0),
)
def test_value_and_gradient_equal_those_of_the_formula(
    seed: int, rows: int, size: int, scale: float, mass: float
) -> None:
    """The formula in float64; a teacher need not sum to 1 (it may be a part of a distribution)."""
    logits, teacher = random_rows(seed, rows, size, scale, mass)
    nats, slope = value_and_slope(soft_cross_entropy, logits, teacher)
    leaf = logits.double().requires_grad_()
    exact = -(teacher.double() * leaf.log_softmax(-1)).sum(-1)
    exact.backward(torch.arange(1.0, rows + 1).double())
    assert leaf.grad is not None
    tolerance = 1e-5 * max(1.0, scale)
    torch.testing.assert_close(nats.double(), exact.detach(), atol=tolerance, rtol=1e-5)
    torch.testing.assert_close(slope.double(), leaf.grad, atol=1e-5, rtol=1e-5)


@every_loss
def test_a_row_by_hand(loss: Loss) -> None:
    """With q = (1/2, 1/4, 1/4), p = (1/4, 3/4, 0): 1/4 ln 2 + 3/4 ln 4; the gradient is q - p."""
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log() + 7.0  # a shift means nothing
    nats, slope = value_and_slope(loss, logits, torch.tensor([[0.25, 0.75, 0.0]]))
    torch.testing.assert_close(nats, 1.75 * torch.tensor([2.0]).log())
    torch.testing.assert_close(slope, torch.tensor([[0.25, -0.5, 0.25]]))


@every_loss
def test_the_gradient_of_a_partial_teacher_is_its_mass_times_q_minus_p(loss: Loss) -> None:
    logits, teacher = random_rows(1, 1, 6, 2.0, mass=0.3)
    _, slope = value_and_slope(loss, logits, teacher)
    torch.testing.assert_close(slope, 0.3 * logits.softmax(-1) - teacher)


@every_loss
def test_the_cost_is_least_where_the_draft_is_the_teacher(loss: Loss) -> None:
    """Gibbs: cross-entropy >= entropy, with equality and zero gradient at q = p."""
    logits, teacher = random_rows(2, 4, 9, 2.0, mass=1.0)
    entropy = torch.distributions.Categorical(probs=teacher).entropy()
    perfect, slope = value_and_slope(loss, teacher.log(), teacher)
    torch.testing.assert_close(perfect, entropy)
    torch.testing.assert_close(slope, torch.zeros_like(slope))
    assert (loss(logits, teacher) > entropy).all()


@every_loss
def test_a_teacher_of_one_token_gives_the_ordinary_cross_entropy(loss: Loss) -> None:
    logits, _ = random_rows(3, 3, 5, 1.0, 1.0)
    labels = torch.tensor([4, 0, 2])
    teacher = torch.nn.functional.one_hot(labels, 5).float()
    ordinary = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(loss(logits, teacher), ordinary)


@every_loss
def test_softmax_and_sums_run_in_float32(loss: Loss) -> None:
    """1000 equal bfloat16 logits cost ln 1000; bfloat16 itself would say 6.9 +- 0.016."""
    logits = torch.zeros(2, 1000, dtype=torch.bfloat16)
    nats, slope = value_and_slope(loss, logits, torch.full((2, 1000), 1e-3))
    assert nats.dtype == torch.float32
    assert slope.dtype == torch.bfloat16
    torch.testing.assert_close(nats, torch.full((2,), 1000.0).log(), atol=1e-5, rtol=0)


@every_loss
def test_huge_logits_stay_finite(loss: Loss) -> None:
    """The draft is (1, e^-2e4, e^-4e4): the cost is 2e4 nats, not infinity."""
    logits = torch.tensor([[1e4, -1e4, -3e4]])
    nats, slope = value_and_slope(loss, logits, torch.tensor([[0.0, 1.0, 0.0]]))
    torch.testing.assert_close(nats, torch.tensor([2e4]))
    torch.testing.assert_close(slope, torch.tensor([[1.0, -1.0, 0.0]]))


def test_one_matrix_is_kept_for_the_gradient() -> None:
    """The formula keeps two: the teacher and the softmax."""
    kept: list[int] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    logits, teacher = random_rows(4, 8, 16, 1.0, 1.0)
    for loss, expected in ((soft_cross_entropy, 1), (soft_cross_entropy_reference, 2)):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss(logits.clone().requires_grad_(), teacher)
        assert sum(size == 8 * 16 for size in kept) == expected
