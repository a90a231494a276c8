"""What speculation should be worth: expected tokens, factors of time, work and traffic, best gamma.

The formulas stand beside the measurements, so that a gap between them is visible. Two ways
in: from one acceptance rate alpha, taken as independent of depth and context (the papers'
assumption), or from measured survival per depth and measured times (no assumption).

    alpha       chance that a drafted token is accepted, given that all before it were
    gamma       tokens drafted per round; 0 is plain decoding
    tau         tokens emitted per target forward, bonus included, >= 1
    accept_at   accept_at[k - 1] is accept@k: share of rounds whose first k drafts all passed
    cond_at     cond_at[k - 1] is cond@k = accept@k / accept@(k - 1)
    c           time of one drafter step / time of one target step
    B, S        prompts of a batch, and cached tokens of each

All factors are relative to plain decoding; above 1 is a gain for wall-clock factors and a cost
for those of operations and traffic. Times are in milliseconds unless a name says seconds.

Source: Leviathan et al. 2023, theorems 3.8, 3.11 and section 3.3-3.5, arXiv:2211.17192; long
contexts and large batches: Chen et al. 2024, "MagicDec", section 3, arXiv:2408.11049.
Differs: verification may cost more than a plain step (verify_cost), as on a CPU; traffic counts the
drafter's reads and the rows of the drafted tree, which the paper leaves out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

import torch
from jaxtyping import Float
from torch import Tensor


def acceptance(p: Float[Tensor, "*rows V"], q: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows"]:
    """Chance that a token drawn from q is accepted: sum of min(p, q) = 1 - TV(p, q).

    alpha is its mean over the rows that drafting visits.

    Args:
        p: distributions of the target, after temperature and truncation.
        q: distributions the drafter drew from, after the same.
    """
    return torch.minimum(p, q).sum(-1)


def coupled_acceptance(
    p: Float[Tensor, "*rows V"], q: Float[Tensor, "*rows V"]
) -> Float[Tensor, "*rows"]:
    """Chance that one noise gives p and q the same winner: `acceptance` of coupled guesses.

    Token x wins both iff its exponential number is below everybody's, e_y >= e_x m_y with m_y =
    max(p_y / p_x, q_y / q_x); over e_x that is 1 / sum_y m_y. Never above 1 - TV, nor below
    (1 - TV) / (1 + TV). Takes V times the memory of a row.

    Source: Daliri, Musco, Suresh 2024, section 3, arXiv:2408.07978.
    """
    alive = (p > 0) & (q > 0)
    one = torch.ones_like(p)
    shares = (row[..., None, :] / torch.where(alive, row, one)[..., None] for row in (p, q))
    least = torch.maximum(*shares).sum(-1)  # of y, for every x
    return torch.where(alive, 1 / least, 0 * one).sum(-1)


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


@dataclass(frozen=True)
class Load:
    """What a forward of one model asks of a machine.

    A forward takes `tokens` new tokens of each of `batch` prompts, each behind `context` cached
    ones. The last of the new tokens sees its siblings too, so rows = context + tokens - 1: a
    plain step reads what is cached, a tree also reads itself.

    Attributes:
        weights: bytes, read once per forward whatever the batch (W).
        row: bytes of one cached token of one prompt, keys and values of all layers (kappa).
        operations: per new token.
        row_operations: per new token and row that it attends to.
    """

    weights: int | float
    row: int | float
    operations: int | float = 0
    row_operations: int | float = 0

    def traffic(self, batch: int, tokens: int, context: int) -> int | float:
        """Bytes read: W + B * rows * kappa."""
        return self.weights + batch * (context + tokens - 1) * self.row

    def arithmetic(self, batch: int, tokens: int, context: int) -> int | float:
        """Operations: every new token meets every weight and every row."""
        rows = context + tokens - 1
        return batch * tokens * (self.operations + rows * self.row_operations)

    def seconds(
        self, batch: int, tokens: int, context: int, bandwidth: float, flops: float
    ) -> float:
        """The longer of reading and calculating, which overlap.

        Args:
            bandwidth: bytes per second.
            flops: operations per second.
        """
        _check_positive(bandwidth=bandwidth, flops=flops)
        reading = self.traffic(batch, tokens, context) / bandwidth
        return max(reading, self.arithmetic(batch, tokens, context) / flops)


NOTHING = Load(0, 0)


def traffic_factor(
    tau: float,
    nodes: int,
    target: Load,
    drafter: Load = NOTHING,
    steps: int = 0,
    batch: int = 1,
    context: int = 0,
    budget: int | None = None,
) -> float:
    """Bytes read per emitted token; below 1 is a saving.

    With a free drafter and no rows of the tree to read it is 1 / tau (section 3.5 of the paper).

    Args:
        tau: tokens per round, bonus included.
        nodes: drafted tokens that the target verifies in a round; a chain of gamma has gamma.
        steps: forwards of the drafter in a round.
        budget: cached tokens that the drafter reads at most (MagicDec); None: all.
    """
    _check_positive(tau=tau, weights=float(target.weights))
    short = context if budget is None else min(budget, context)
    drafted = steps * drafter.traffic(batch, 1, short)
    verified = target.traffic(batch, nodes + 1, context)
    return (drafted + verified) / (tau * target.traffic(batch, 1, context))


def magicdec_factor(
    alpha: float,
    gamma: int,
    target: Load,
    drafter: Load,
    *,
    batch: int,
    context: int,
    budget: int,
    bandwidth: float,
    flops: float,
) -> float:
    """Speedup of a chain for a batch of long prompts: expected tokens / (gamma T_D + T_V) * T_T.

    Where keys and values outweigh the weights, T_V / T_T -> 1, and for a target that drafts for
    itself T_D / T_T -> budget / context; short prompts make both T_D and T_T the weights'.

    Args:
        budget: cached tokens that the drafter reads at most.
    """
    _check_gamma(gamma)
    plain = target.seconds(batch, 1, context, bandwidth, flops)
    draft = drafter.seconds(batch, 1, min(budget, context), bandwidth, flops)
    verify = target.seconds(batch, gamma + 1, context, bandwidth, flops)
    return walltime_factor(alpha, gamma, draft / plain, verify / plain)


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
