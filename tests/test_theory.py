"""The formulas of speculative decoding, against the published table and closed sums."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.eval.theory import (
    best_gamma,
    expected_tokens,
    expected_tokens_from_survival,
    speedup_from_alpha,
    speedup_from_times,
    survival,
)

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
TABLE = {  # c -> best gamma / speedup there, one cell per alpha
    0.01: "5/1.88 7/2.30 9/2.97 14/4.23 24/7.49 40/12.5",
    0.05: "3/1.63 4/1.92 6/2.35 8/3.09 13/4.67 21/6.60",
    0.1: "2/1.46 3/1.67 4/1.98 6/2.47 10/3.43 15/4.48",
    0.2: "1/1.25 2/1.40 3/1.58 4/1.87 7/2.37 10/2.87",
    0.3: "1/1.15 1/1.23 2/1.37 3/1.55 5/1.87 8/2.18",
}
CELLS = [
    (c, alpha, *cell.split("/"))
    for c, row in TABLE.items()
    for alpha, cell in zip(ALPHAS, row.split(), strict=True)
]

rates = st.floats(0, 1)
gammas = st.integers(0, 40)


def best_gamma_at(alpha: float, c: float, limit: int) -> int:
    """With verification at the cost of a plain step of 100 ms."""
    verify_ms = dict.fromkeys(range(1, limit + 1), 100.0)
    return best_gamma([alpha] * limit, 100 * c, verify_ms, 100.0)


@pytest.mark.parametrize(("c", "alpha", "gamma", "speedup"), CELLS)
def test_best_gamma_and_speedup_match_the_published_table(
    c: float, alpha: float, gamma: str, speedup: str
) -> None:
    assert best_gamma_at(alpha, c, limit=100) == int(gamma)
    digits = len(speedup.split(".")[1])
    assert round(speedup_from_alpha(alpha, int(gamma), c), digits) == float(speedup)


@given(alpha=rates, gamma=gammas)
def test_expected_tokens_is_the_mean_of_a_truncated_geometric_distribution(
    alpha: float, gamma: int
) -> None:
    """P(A accepted) = alpha^A (1 - alpha), or alpha^gamma for A = gamma; A + 1 are emitted."""
    probabilities = [alpha**a * (1 - alpha) for a in range(gamma)] + [alpha**gamma]
    mean = sum((a + 1) * p for a, p in enumerate(probabilities))
    assert math.isclose(expected_tokens(alpha, gamma), mean, rel_tol=1e-9)


@given(alpha=st.floats(0, 0.999), gamma=gammas)
def test_expected_tokens_equals_the_closed_form(alpha: float, gamma: int) -> None:
    closed = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    assert math.isclose(expected_tokens(alpha, gamma), closed, rel_tol=1e-9)


def test_expected_tokens_at_extreme_alpha() -> None:
    assert expected_tokens(1.0, 7) == 8
    assert expected_tokens(0.0, 7) == 1
    assert expected_tokens(0.9, 0) == 1


def test_survival_is_a_product_and_tau_a_sum() -> None:
    """FastMTP's cumulative 81/56/36 % make 2.73 tokens per round."""
    assert survival([0.5, 0.5, 0.8]) == [0.5, 0.25, 0.2]
    assert expected_tokens_from_survival([0.81, 0.56, 0.36]) == pytest.approx(2.73)
    assert expected_tokens_from_survival([]) == 1


@given(alpha=rates, gamma=gammas, c=st.floats(0, 2), cost=st.floats(0.5, 3))
def test_walltime_factor_agrees_with_walltime_from_times(
    alpha: float, gamma: int, c: float, cost: float
) -> None:
    """40 ms per target step, c * 40 per draft step, nothing else in the round."""
    tau = expected_tokens(alpha, gamma)
    timed = speedup_from_times(tau, gamma * c * 40, cost * 40, 0.0, 40.0)
    assert math.isclose(timed, speedup_from_alpha(alpha, gamma, c, cost), rel_tol=1e-9)


def test_walltime_from_times_counts_all_parts() -> None:
    """2 tokens per round of 6 + 44 + 10 = 60 ms against 40 ms per token: 4/3."""
    assert speedup_from_times(2.0, 6.0, 44.0, 10.0, 40.0) == pytest.approx(4 / 3)


@given(alpha=st.floats(0.01, 1), c=st.floats(0, 1))
def test_speedup_exists_iff_alpha_exceeds_c(alpha: float, c: float) -> None:
    """It is at least (1 + alpha) / (1 + c): Leviathan et al., corollary 3.9."""
    gamma = best_gamma_at(alpha, c, limit=30)
    if alpha > c + 1e-9:
        assert gamma >= 1
        assert speedup_from_alpha(alpha, gamma, c) >= (1 + alpha) / (1 + c) - 1e-12
    elif alpha < c - 1e-9:
        assert gamma == 0


def test_best_gamma_from_measured_times() -> None:
    """Speedups 1.5/1.1, 1.75/1.2 and 1.95/1.8: verification of four tokens is slower."""
    cond_at = [0.5, 0.5, 0.8]
    verify_ms = {1: 40.0, 2: 40.0, 3: 60.0}
    assert best_gamma(cond_at, 4.0, verify_ms, 40.0) == 2
    assert best_gamma(cond_at, 4.0, verify_ms | {2: 60.0}, 40.0) == 1


def test_best_gamma_skips_unmeasured_depths() -> None:
    """Gamma 3 would be fastest, but its third acceptance rate is unknown."""
    free = {1: 10.0, 2: 10.0, 3: 9.0}
    assert best_gamma([0.9, 0.9], 0.0, free, 10.0) == 2
    assert best_gamma([0.9] * 3, 0.0, free, 10.0) == 3
    assert best_gamma([0.9, 0.9, 0.9], 0.0, {2: 10.0}, 10.0) == 2


def test_best_gamma_is_zero_if_plain_decoding_is_faster() -> None:
    assert best_gamma([0.1] * 2, 5.0, {1: 10.0, 2: 10.0}, 10.0) == 0
    assert best_gamma([0.0], 0.0, {0: 10.0, 1: 10.0}, 10.0) == 0


def test_rates_outside_zero_to_one_raise() -> None:
    with pytest.raises(ValueError, match=r"1\.2 at depth 2"):
        survival([0.5, 1.2])
    with pytest.raises(ValueError, match="cannot grow"):
        expected_tokens_from_survival([0.5, 0.6])
