"""Scaling fits recover their parameters from exact points; ranges grow with uncertainty."""

import numpy as np
import pytest

from outrider.launch.scaling_law import (
    ScalingFit,
    candidate_fits,
    fit_line,
    fit_saturating,
    forecast,
    saturates,
    scaling_fit,
)

TOKENS = (2e3, 4e3, 8e3, 16e3)
TRUE = ScalingFit("saturating", 3.2, 0.9, 0.4, 2e3, 5.0)


def points(fit: ScalingFit, noise: float = 0.0, repeats: int = 1) -> list[tuple[float, float]]:
    rng = np.random.default_rng(0)
    return [(n, fit.at(n) + noise * rng.standard_normal()) for _ in range(repeats) for n in TOKENS]


def test_the_saturating_curve_is_recovered_from_its_points() -> None:
    fit = fit_saturating(points(TRUE), most=5.0)
    assert (fit.a, fit.b, fit.c) == pytest.approx((TRUE.a, TRUE.b, TRUE.c), abs=1e-3)
    far = forecast(points(TRUE), 2e5, most=5.0)
    assert far.now == pytest.approx(TRUE.at(2e5), abs=1e-3)
    assert far.gain == pytest.approx(TRUE.at(4e5) - TRUE.at(2e5), abs=1e-3)
    assert far.low <= far.gain <= far.high


def test_the_line_is_recovered_and_used_for_two_sizes() -> None:
    true = ScalingFit("line", 1.5, 0.25, 0.0, 2e3, 5.0)
    fit = scaling_fit(points(true)[:2], most=5.0)
    assert fit.kind == "line"
    assert (fit.a, fit.b) == pytest.approx((1.5, 0.25))
    assert fit.at(8e3) == pytest.approx(1.5 + 0.25 * np.log(4))
    with pytest.raises(ValueError, match="two sizes"):
        fit_line([(5.0, 1.0), (5.0, 2.0)], most=5.0)


def test_no_forecast_exceeds_the_longest_acceptance() -> None:
    steep = [(1e3, 1.0), (2e3, 2.0), (4e3, 2.9)]
    assert all(fit.at(1e9) <= 3.0 for fit in candidate_fits(steep, most=3.0))


def test_decreasing_points_give_a_constant() -> None:
    fit = fit_saturating([(1e3, 2.2), (2e3, 2.1), (4e3, 2.0)], most=5.0)
    assert fit.at(1e6) - fit.at(1e3) == pytest.approx(0.0, abs=0.02)


def test_the_range_of_a_far_forecast_from_a_line_includes_zero_gain() -> None:
    """Near the points the gain of doubling is the line's; far away it may be zero."""
    straight = [(2e3, 1.7), (4e3, 2.1), (8e3, 2.5)]
    assert saturates(points(TRUE), most=5.0)
    assert not saturates(straight, most=5.0)
    assert forecast(straight, 8e3, most=5.0).low > 0.2
    far = forecast(straight, 2e5, most=5.0)
    assert far.low == 0.0
    assert far.now_low == pytest.approx(2.5, abs=0.05), "the value of the largest pilot"
    assert forecast(points(TRUE), 2e5, most=5.0).low > 0.0


def test_noise_widens_the_range_which_contains_the_true_gain() -> None:
    """Four sizes with three pilots each, and noise of the size of real pilots."""
    exact = forecast(points(TRUE), 3.2e4, most=5.0)
    noisy = forecast(points(TRUE, noise=0.03, repeats=3), 3.2e4, most=5.0)
    assert noisy.high - noisy.low > exact.high - exact.low
    assert noisy.low <= TRUE.at(6.4e4) - TRUE.at(3.2e4) <= noisy.high
