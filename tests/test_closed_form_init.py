"""models/drafting/closed_form_init.py: least squares against scipy, and properties of its parts."""

import numpy as np
import pytest
import scipy.linalg
import torch

from outrider.models.drafting import closed_form_init


def rows(count: int = 4000, inputs: int = 12, outputs: int = 7) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(count, inputs) @ torch.randn(inputs, inputs)
    weight = torch.randn(outputs, inputs)
    y = x @ weight.mT * torch.linspace(0.1, 5, outputs) + 0.1 * torch.randn(count, outputs)
    return x, y, weight


def moments_of(x: torch.Tensor, y: torch.Tensor) -> closed_form_init.RegressionMoments:
    moments = closed_form_init.RegressionMoments()
    for start in range(0, len(x), 1000):
        moments.add(x[start : start + 1000], y[start : start + 1000])
    return moments


def test_ridge_is_least_squares_for_small_damping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_form_init, "RIDGE", 1e-9)
    x, y, _ = rows()
    moments = moments_of(x, y)
    exact, *_ = scipy.linalg.lstsq(x.double().numpy(), (y / moments.output_std).double().numpy())
    assert np.allclose(moments.ridge().mT.numpy(), exact, atol=1e-3)
    assert torch.allclose(moments.output_std, y.std(0, correction=0), rtol=1e-3)
    assert moments.count == len(x)


def test_damping_shrinks_the_weights() -> None:
    x, y, _ = rows()
    few, many = moments_of(x[:20], y[:20]).ridge(), moments_of(x, y).ridge()
    assert few.isfinite().all()
    assert few.norm() < 2 * many.norm()


def test_low_rank_is_exact_at_full_rank_and_optimal_below() -> None:
    x, _, weight = rows()
    covariance = x.mT @ x / len(x)
    out, into = closed_form_init.low_rank(weight, covariance, 7)
    assert torch.allclose(out @ into, weight, atol=1e-3)
    out, into = closed_form_init.low_rank(weight, covariance, 3)
    assert out.shape == (7, 3)
    assert into.shape == (3, 12)
    error = (x @ (weight - out @ into).mT).square().sum()
    svd_out, s, svd_into = torch.linalg.svd(weight)  # truncated without regard to the inputs
    unweighted = (svd_out[:, :3] * s[:3]) @ svd_into[:3]
    whole = x @ weight.mT
    left = torch.linalg.svdvals(whole)[3:].square().sum()  # no map of rank 3 leaves less
    assert error == pytest.approx(float(left), rel=1e-3)
    assert error < (x @ (weight - unweighted).mT).square().sum()


def test_bias_direction_is_constant_over_rows() -> None:
    x, _, _ = rows()
    tilted = x + 20 * torch.nn.functional.normalize(torch.ones(12), dim=0)
    assert (tilted @ closed_form_init.bias_direction(tilted)).mean() == pytest.approx(1, abs=1e-4)
    assert (tilted @ closed_form_init.bias_direction(tilted)).std() < 0.6
    assert (x @ closed_form_init.bias_direction(x)).std() > 1  # nothing is constant there


@pytest.mark.parametrize("scale", [0.1, 1.0, 2.5])
def test_optimal_logit_scale_recovers_the_scale(scale: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(256, 20)
    assert closed_form_init.optimal_logit_scale(
        logits / scale, logits.softmax(-1)
    ) == pytest.approx(scale, rel=0.1)
