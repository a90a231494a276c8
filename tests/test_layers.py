"""Norm, rotary embedding and MLP."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.drafting.layers import Mlp, Norm, apply_rotary


def test_norm_divides_by_the_root_mean_square() -> None:
    norm = Norm(4, eps=0.0)
    norm.weight.data = torch.tensor([1.0, 1.0, 2.0, 1.0])
    out = norm(torch.tensor([[1.0, -1.0, 5.0, 3.0]]))  # mean square 36 / 4 = 9
    torch.testing.assert_close(out, torch.tensor([[1 / 3, -1 / 3, 10 / 3, 1.0]]))


def test_norm_is_computed_in_float32_and_returns_the_input_dtype() -> None:
    """256 and 1: squares that bfloat16 would add up to 65536."""
    out = Norm(2, eps=0.0)(torch.tensor([256.0, 16.0], dtype=torch.bfloat16))
    exact = torch.tensor([256.0, 16.0]) / ((256.0**2 + 16.0**2) / 2) ** 0.5
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, exact.bfloat16())


def test_rotary_rotates_a_pair_by_its_position() -> None:
    """Two numbers are one pair, of frequency 1: position p turns by p radians."""
    out = apply_rotary(
        torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]]), torch.tensor([0, 2]), theta=10000.0
    )
    angle = torch.tensor(2.0)
    torch.testing.assert_close(out[:, 0], torch.tensor([[1.0, 0.0], [angle.cos(), angle.sin()]]))


def test_pairs_are_halves_and_later_ones_rotate_slower() -> None:
    """Size 4: (0, 2) turns by p, (1, 3) by p / sqrt(theta)."""
    out = apply_rotary(torch.tensor([[[1.0, 1.0, 0.0, 0.0]]]), torch.tensor([3]), theta=100.0)[0, 0]
    fast, slow = torch.tensor(3.0), torch.tensor(0.3)
    torch.testing.assert_close(out, torch.stack([fast.cos(), slow.cos(), fast.sin(), slow.sin()]))


def test_scores_of_rotated_vectors_depend_on_the_distance_alone() -> None:
    q, k = torch.linspace(-1, 1, 8)[None, None], torch.linspace(2, 1, 8)[None, None]

    def score(i: int, j: int) -> Tensor:
        turned = apply_rotary(q, torch.tensor([i]), 1e4) * apply_rotary(k, torch.tensor([j]), 1e4)
        return turned.sum()

    torch.testing.assert_close(score(9, 4), score(105, 100), atol=1e-4, rtol=1e-4)
    assert (score(9, 4) - score(9, 5)).abs() > 0.1


@pytest.mark.parametrize(
    ("activation", "act"),
    [("silu", F.silu), ("gelu", lambda x: F.gelu(x, approximate="tanh"))],
)
def test_mlp_is_gated(activation: str, act: Callable[[Tensor], Tensor]) -> None:
    mlp, x = Mlp(4, 6, activation), torch.randn(3, 4)
    gate, up, down = (p.detach() for p in mlp.parameters())
    torch.testing.assert_close(mlp(x), (act(x @ gate.T) * (x @ up.T)) @ down.T)
