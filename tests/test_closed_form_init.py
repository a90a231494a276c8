"""models/closed_form_init.py: least squares against scipy and enumeration of what the pieces promise."""

import numpy as np
import pytest
import scipy.linalg
import torch

from outrider.models import closed_form_init as fit


def rows(count: int = 4000, inputs: int = 12, outputs: int = 7) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(count, inputs) @ torch.randn(inputs, inputs)
    weight = torch.randn(outputs, inputs)
    y = x @ weight.mT * torch.linspace(0.1, 5, outputs) + 0.1 * torch.randn(count, outputs)
    return x, y, weight


def filled(x: torch.Tensor, y: torch.Tensor) -> fit.Moments:
    moments = fit.Moments()
    for start in range(0, len(x), 1000):
        moments.add(x[start : start + 1000], y[start : start + 1000])
    return moments


def test_the_ridge_is_least_squares_where_it_hardly_damps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "STRENGTH", 1e-9)
    x, y, _ = rows()
    moments = filled(x, y)
    exact, *_ = scipy.linalg.lstsq(x.double().numpy(), (y / moments.spread).double().numpy())
    assert np.allclose(moments.ridge().mT.numpy(), exact, atol=1e-3)
    assert torch.allclose(moments.spread, y.std(0, correction=0), rtol=1e-3)
    assert moments.count == len(x)


def test_damping_shrinks_the_map() -> None:
    x, y, _ = rows()
    few, many = filled(x[:20], y[:20]).ridge(), filled(x, y).ridge()
    assert few.isfinite().all()
    assert few.norm() < 2 * many.norm()


def test_all_ranks_give_the_map_back_and_few_the_best_part_of_it() -> None:
    x, _, weight = rows()
    covariance = x.mT @ x / len(x)
    out, into = fit.reduced(weight, covariance, 7)
    assert torch.allclose(out @ into, weight, atol=1e-3)
    out, into = fit.reduced(weight, covariance, 3)
    assert out.shape == (7, 3)
    assert into.shape == (3, 12)
    error = (x @ (weight - out @ into).mT).square().sum()
    plain_out, s, plain_into = torch.linalg.svd(weight)  # cuts the map, blind to the inputs
    blind = (plain_out[:, :3] * s[:3]) @ plain_into[:3]
    whole = x @ weight.mT
    left = torch.linalg.svdvals(whole)[3:].square().sum()  # no map of rank 3 leaves less
    assert error == pytest.approx(float(left), rel=1e-3)
    assert error < (x @ (weight - blind).mT).square().sum()


def test_the_constant_direction_stands_in_for_a_bias() -> None:
    x, _, _ = rows()
    tilted = x + 20 * torch.nn.functional.normalize(torch.ones(12), dim=0)
    assert (tilted @ fit.constant(tilted)).mean() == pytest.approx(1, abs=1e-4)
    assert (tilted @ fit.constant(tilted)).std() < 0.6
    assert (x @ fit.constant(x)).std() > 1  # nothing is constant there


@pytest.mark.parametrize("scale", [0.1, 1.0, 2.5])
def test_sharpness_finds_the_scale_that_was_taken_away(scale: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(256, 20)
    assert fit.sharpness(logits / scale, logits.softmax(-1)) == pytest.approx(scale, rel=0.1)
