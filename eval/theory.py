"""Closed-form speedups of speculative decoding: expected tokens, wall-clock factor, best gamma.

They start either from one acceptance rate alpha, assumed independent of depth and context (as in
the papers), or from measured survival per depth and measured times (no assumption).

    alpha       probability that a draft token is accepted, given that all before it were
    gamma       draft tokens per round; 0 is plain decoding
    tau         tokens emitted per target forward, bonus included, >= 1
    accept_at   accept_at[k - 1] is accept@k: share of rounds whose first k draft tokens passed
    cond_at     cond_at[k - 1] is cond@k: the same given that the first k - 1 passed
    c           time of one drafter step / time of one target step

Factors are relative to plain decoding; above 1 is a gain. Times are in milliseconds.

Source: Leviathan et al. 2023, theorem 3.8 and section 3.3, arXiv:2211.17192.
Differs: verification may cost more than a plain step (verify_cost), as it does on a CPU. Speedups
over batches and long contexts (MagicDec) come from the roofline of `eval/plan/roofline.py`.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from operator import mul


def survival(cond_at: Sequence[float]) -> list[float]:
    """Return accept@1, accept@2, ... from the conditional rates: their running product."""
    _check_rates("cond_at", cond_at)
    return list(accumulate(cond_at, mul))


def expected_tokens(alpha: float, gamma: int) -> float:
    """Return tokens per round, 1 + alpha + ... + alpha^gamma."""
    return expected_tokens_from_survival(survival([alpha] * gamma))


def expected_tokens_from_survival(accept_at: Sequence[float]) -> float:
    """Return tokens per round (tau) from survival: 1 + sum of accept@k.

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


def speedup_from_alpha(alpha: float, gamma: int, c: float, verify_cost: float = 1.0) -> float:
    """Return the speedup of a chain of gamma: expected tokens / (gamma * c + verify_cost).

    Args:
        verify_cost: time of the target forward over the gamma + 1 tokens of a round, in
            plain target steps; 1 where decoding is bound by memory.
    """
    return expected_tokens(alpha, gamma) / (gamma * c + verify_cost)


def speedup_from_times(
    tau: float, draft_ms: float, verify_ms: float, overhead_ms: float, target_ms: float
) -> float:
    """Return the speedup from measured times: tau * target_ms / (draft + verify + overhead).

    Args:
        draft_ms: all drafter steps of one round together.
        target_ms: one step of plain decoding.
    """
    return tau * target_ms / (draft_ms + verify_ms + overhead_ms)


def best_gamma(
    cond_at: Sequence[float],
    draft_ms: float,
    verify_ms_by_gamma: Mapping[int, float],
    target_ms: float,
) -> int:
    """Return the gamma with the largest speedup, or 0 where plain decoding is at least as fast.

    Args:
        cond_at: a gamma beyond its end is not considered.
        draft_ms: ONE drafter step, that is one more draft token.
        verify_ms_by_gamma: time of the target forward over gamma + 1 tokens.
        target_ms: one step of plain decoding.
    """
    best, fastest = 0, 1.0
    for gamma, verify_ms in sorted(verify_ms_by_gamma.items()):
        if not 1 <= gamma <= len(cond_at):
            continue
        tau = expected_tokens_from_survival(survival(cond_at[:gamma]))
        speedup = speedup_from_times(tau, gamma * draft_ms, verify_ms, 0.0, target_ms)
        if speedup > fastest:
            best, fastest = gamma, speedup
    return best


def _check_rates(name: str, rates: Sequence[float]) -> None:
    for k, rate in enumerate(rates, start=1):
        if not 0 <= rate <= 1:
            raise ValueError(f"{name}: {rate} at depth {k} is not a share in [0, 1]")
