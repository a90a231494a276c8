"""What speculation should be worth: expected tokens, wall-clock and operation factors, best gamma.

The formulas stand beside the measurements, so that a gap between them is visible. Two ways
in: from one acceptance rate alpha, taken as independent of depth and context (the papers'
assumption), or from measured survival per depth and measured times (no assumption).

    alpha       chance that a drafted token is accepted, given that all before it were
    gamma       tokens drafted per round; 0 is plain decoding
    tau         tokens emitted per target forward, bonus included, >= 1
    accept_at   accept_at[k - 1] is accept@k: share of rounds whose first k drafts all passed
    cond_at     cond_at[k - 1] is cond@k = accept@k / accept@(k - 1)
    c           time of one drafter step / time of one target step

All factors are relative to plain decoding; above 1 is a gain for wall-clock factors and a cost
for the operations factor. Times are in milliseconds.

Source: Leviathan et al. 2023, theorems 3.8, 3.11 and section 3.3-3.5, arXiv:2211.17192.
Differs: verification may cost more than a plain step (verify_cost), as on a CPU.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from operator import mul


def survival(cond_at: Sequence[float]) -> list[float]:
    """accept@1, accept@2, ... from the conditional rates: their running product."""
    _check_rates("cond_at", cond_at)
    return list(accumulate(cond_at, mul))


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens per round, 1 + alpha + ... + alpha^gamma = (1 - alpha^(gamma+1)) / (1 - alpha)."""
    _check_gamma(gamma)
    return expected_tokens_from_survival(survival([alpha] * gamma))


def expected_tokens_from_survival(accept_at: Sequence[float]) -> float:
    """Tokens per round (tau) from survival: 1 + sum of accept@k.

    Raises:
        ValueError: a rate outside [0, 1], or survival that grows with depth.
    """
    _check_rates("accept_at", accept_at)
    for k, (shallow, deep) in enumerate(pairwise(accept_at), start=1):
        if deep > shallow:
            raise ValueError(
                f"accept@{k + 1} = {deep} exceeds accept@{k} = {shallow}: survival cannot grow "
                "with depth (are these conditional rates? then use survival() first)"
            )
    return 1.0 + sum(accept_at)


def walltime_factor(alpha: float, gamma: int, c: float, verify_cost: float = 1.0) -> float:
    """Speedup of a chain of gamma: expected tokens / (gamma * c + verify_cost).

    Args:
        alpha: chance that a drafted token is accepted.
        gamma: drafted tokens per round.
        c: time of one drafter step, in plain target steps, >= 0.
        verify_cost: time of the target forward over the gamma + 1 tokens of a round, in
            plain target steps; 1 where decoding is bound by memory.
    """
    _check_costs(c=c)
    _check_positive(verify_cost=verify_cost)
    return expected_tokens(alpha, gamma) / (gamma * c + verify_cost)


def walltime_from_times(
    tau: float, draft_ms: float, verify_ms: float, overhead_ms: float, target_ms: float
) -> float:
    """Speedup from measured times: tau * target_ms / (draft_ms + verify_ms + overhead_ms).

    Args:
        tau: tokens per round, bonus included.
        draft_ms: all drafter steps of one round together.
        verify_ms: the target forward of one round.
        overhead_ms: everything else in one round.
        target_ms: one step of plain decoding, which emits one token.
    """
    _check_costs(draft_ms=draft_ms, overhead_ms=overhead_ms)
    _check_positive(tau=tau, verify_ms=verify_ms, target_ms=target_ms)
    return tau * target_ms / (draft_ms + verify_ms + overhead_ms)


def operations_factor(alpha: float, gamma: int, c_hat: float) -> float:
    """Arithmetic per emitted token: (gamma * c_hat + gamma + 1) / expected tokens, >= 1.

    Args:
        alpha: chance that a drafted token is accepted.
        gamma: drafted tokens per round.
        c_hat: operations of one drafter step / operations of one target step.
    """
    _check_costs(c_hat=c_hat)
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def best_gamma(alpha: float, c: float, limit: int) -> int:
    """The gamma in 0..limit with the largest walltime_factor; the shorter one of equals.

    0 means that speculation does not pay, which is so exactly when alpha <= c.
    """
    _check_gamma(limit)
    return max(range(limit + 1), key=lambda gamma: walltime_factor(alpha, gamma, c))


def best_gamma_from_times(
    cond_at: Sequence[float] | float,
    draft_ms: float,
    verify_ms_by_gamma: Mapping[int, float],
    target_ms: float,
) -> int:
    """The measured gamma with the largest speedup, or 0 where plain decoding is at least as fast.

    Args:
        cond_at: conditional acceptance per depth, or one alpha for all depths.
        draft_ms: ONE drafter step, that is one more drafted token.
        verify_ms_by_gamma: gamma -> time of the target forward over gamma + 1 tokens.
            Depths beyond the end of cond_at were not measured and are not considered.
        target_ms: one step of plain decoding.
    """
    _check_costs(draft_ms=draft_ms)
    _check_positive(target_ms=target_ms)
    best, fastest = 0, 1.0
    for gamma, verify_ms in sorted(verify_ms_by_gamma.items()):
        _check_gamma(gamma)
        rates = [cond_at] * gamma if isinstance(cond_at, float | int) else cond_at[:gamma]
        if gamma == 0 or len(rates) < gamma:
            continue
        tau = expected_tokens_from_survival(survival(rates))
        speedup = walltime_from_times(tau, gamma * draft_ms, verify_ms, 0.0, target_ms)
        if speedup > fastest:
            best, fastest = gamma, speedup
    return best


def _check_rates(name: str, rates: Sequence[float]) -> None:
    for k, rate in enumerate(rates, start=1):
        if not 0 <= rate <= 1:
            raise ValueError(f"{name}: {rate} at depth {k} is not a share in [0, 1]")


def _check_gamma(gamma: int) -> None:
    if gamma < 0:
        raise ValueError(f"gamma={gamma}: a round drafts 0 tokens or more")


def _check_costs(**costs: float) -> None:
    for name, cost in costs.items():
        if not cost >= 0:
            raise ValueError(f"{name}={cost}: must be 0 or more")


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value}: must be above 0")
