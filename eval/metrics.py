"""Metrics of a decoder: pure functions over per-prompt records.

`METRICS` defines every number of a report. Means are a sum over prompts divided by a sum over
prompts, so that short answers do not count for more than long ones, except `speedup_median`.

Worked example, two rounds that drafted 3 tokens each and accepted 3 and 1: the rounds emitted
4 + 2 tokens, the prefill one before them, so tokens = 7, tau = 6 / 2 = 3.0 and

    k            1     2     3
    accept@k    2/2   1/2   1/2
    cond@k      2/2   1/2   1/1

A round near the end of the token budget has room for fewer draft tokens: it does not count for
those that it could not verify. Had the second round had room for one token, accept@2 were 1/1.

A number without a value (no baseline, no round) is None, never 0.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import inf
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from outrider.eval import theory
from outrider.models.decode.round_times import RoundTimes

RESAMPLES = 2000  # of the bootstrap
ROUND_PARTS = ("draft", "target", "verify", "commit")  # measured parts of a round


class Metric(NamedTuple):
    """One number of a report."""

    name: str
    unit: str
    definition: str


METRICS = (
    Metric("tau", "tokens/round", "tokens of the rounds / rounds, with bonus, without prefill"),
    Metric("forecast", "tokens/round", "tau of a chain, predicted by teacher forcing on this text"),
    Metric("tau_95", "tokens/round", "95 % interval of tau, bootstrap over dialogues"),
    Metric("accept_at", "share", "accept@k: rounds that accepted k drafts / those with room for k"),
    Metric("cond_at", "share", "cond@k: of rounds with room for k that accepted k-1, share with k"),
    Metric("alpha", "share", "accepted / tested draft tokens; the rejected one was tested"),
    Metric("prompts", "prompts", "answers decoded; every turn of a dialogue is one"),
    Metric("tokens", "tokens", "new tokens with speculation, end and prefill tokens included"),
    Metric("rounds", "rounds", "target forwards after the prefill"),
    Metric("tokens_per_second", "tokens/s", "tokens of the rounds / seconds of the rounds"),
    Metric("baseline_tokens_per_second", "tokens/s", "the same engine without a drafter"),
    Metric("speedup", "factor", "plain seconds per token / speculative seconds per token"),
    Metric("speedup_95", "factor", "95 % interval of speedup, bootstrap over dialogues"),
    Metric("speedup_median", "factor", "median over prompts of each prompt's own speedup"),
    Metric("ms.draft", "ms/round", "the drafter: its steps, and absorbing verified rows"),
    Metric("ms.target", "ms/round", "the target's forward over the tree, and its head"),
    Metric("ms.verify", "ms/round", "accepting and rejecting draft tokens"),
    Metric("ms.commit", "ms/round", "keeping the accepted rows of the cache"),
    Metric("ms.other", "ms/round", "the rest: building the tree and its mask, the loop itself"),
    Metric("ms.round", "ms/round", "a whole round"),
    Metric("ms.draft_step", "ms/step", "one level of a draft: time of drafting / drafter steps"),
    Metric("ms.baseline", "ms/token", "a step of plain decoding"),
    Metric("ms.prefill", "ms/prompt", "with speculation; the drafter absorbs the prompt too"),
    Metric("ms.baseline_prefill", "ms/prompt", "without a drafter"),
    Metric("shares", "share of round", "ms.draft, target, verify, commit, other / ms.round"),
    Metric("overhead", "share of round", "(ms.verify + ms.commit + ms.other) / ms.round"),
    Metric("auto.real", "s", "decode=auto: seconds of the answers and prefill, without pauses"),
    Metric("auto.plain", "s", "decode=auto: estimate for plain decoding of the same tokens"),
    Metric("auto.bound", "s", "decode=auto: (1 + eps) x auto.plain + 10 plain steps per answer"),
    Metric("auto.kept", "answers", "decode=auto: within their bound after every round"),
    Metric("auto.baseline", "s", "decode=auto: of plain decoding, as the report has measured it"),
    Metric("auto.worst_share", "share", "decode=auto: most time beyond auto.plain, c0 aside"),
    Metric("auto.choices", "rounds", "decode=auto: rounds by what was drafted"),
    Metric("auto.paused", "s", "decode=auto: pauses of the machine within rounds, left out"),
    Metric("exact", "yes/no", "greedy or coupled: every answer equals plain decoding exactly"),
)


@dataclass(frozen=True)
class Record:
    """One prompt, decoded with speculation and (perhaps) plainly."""

    id: str
    dialogue: str  # its prompts are resampled together, since they are correlated
    category: str
    tokens: int  # new ones, the prefill's one included
    accepted: tuple[int, ...]  # per round, draft tokens that were accepted and emitted
    drafted: tuple[int, ...]  # per round, depth of the verified tree
    steps: int  # of the drafter in all rounds; levels may be drafted and not verified
    times: RoundTimes
    baseline_tokens: int = 0
    baseline: RoundTimes | None = None  # of the plain answer, if it was measured
    room: tuple[int, ...] = ()  # per round, draft tokens that fit the budget; (): unknown

    @classmethod
    def from_output(cls, row: Mapping[str, Any]) -> "Record":
        """Return the record of a line of `<out>.outputs.jsonl`."""
        plain = row["baseline_seconds"]
        return cls(
            id=row["id"],
            dialogue=row["dialogue"],
            category=row["category"],
            tokens=len(row["output_ids"]),
            accepted=tuple(row["accepted"]),
            drafted=tuple(row["drafted"]),
            steps=row["steps"],
            times=RoundTimes(**row["seconds"]),
            baseline_tokens=len(row["baseline_ids"] or ()),
            baseline=None if plain is None else RoundTimes(**plain),
            room=tuple(row["room"]),
        )

    @property
    def emitted(self) -> int:
        """Tokens of the rounds, without the prefill's one."""
        return max(0, self.tokens - 1)

    @property
    def cut(self) -> bool:
        """Whether the end token was a draft token, so that the last round emitted no bonus."""
        return sum(self.accepted) + len(self.accepted) > self.emitted

    @property
    def tested(self) -> int:
        """Draft tokens tested by the target: the accepted ones, and the rejected one."""
        tested = [min(a + 1, d) for a, d in zip(self.accepted, self.drafted, strict=True)]
        return sum(tested) - (self.cut and tested[-1] > self.accepted[-1])

    @property
    def baseline_emitted(self) -> int:
        return max(0, self.baseline_tokens - 1)

    @property
    def speedup(self) -> float | None:
        """Speedup of this prompt alone; None without a round or a baseline."""
        if self.baseline is None:
            return None
        plain = ratio(self.baseline.rounds, self.baseline_emitted)
        fast = ratio(self.times.rounds, self.emitted)
        return None if plain is None or not fast else plain / fast


@dataclass(frozen=True)
class Summary:
    """The numbers of `METRICS` over some prompts, under their names in the report."""

    prompts: int
    tokens: int
    rounds: int
    tau: float | None
    tau_95: tuple[float, float] | None
    accept_at: list[float | None]
    cond_at: list[float | None]
    alpha: float | None
    tokens_per_second: float | None
    baseline_tokens_per_second: float | None
    speedup: float | None
    speedup_95: tuple[float, float] | None
    speedup_median: float | None
    ms: dict[str, float | None]
    shares: dict[str, float | None]
    overhead: float | None


def summarise(records: Sequence[Record], depth: int, seed: int = 0) -> Summary:
    """Return all numbers of a set of prompts.

    Args:
        depth: maximum depth of a draft; the length of accept_at and cond_at.
    """
    rounds = sum(len(record.accepted) for record in records)
    emitted = sum(record.emitted for record in records)
    seconds = sum(record.times.rounds for record in records)
    ms = _milliseconds(records, rounds)
    drafts = [pair for r in records for pair in pair_with_room(r.accepted, r.room)]
    speedups = [record.speedup for record in records if record.speedup is not None]
    dialogues = [record.dialogue for record in records]
    shares = {part: ratio(ms[part], ms["round"]) for part in (*ROUND_PARTS, "other")}
    plain = ratio(1000.0, ms["baseline"])
    speedup_terms = [
        (r.baseline.rounds if r.baseline else 0.0, r.baseline_emitted, r.times.rounds, r.emitted)
        for r in records
    ]
    return Summary(
        prompts=len(records),
        tokens=sum(record.tokens for record in records),
        rounds=rounds,
        tau=ratio(emitted, rounds),
        tau_95=bootstrap([(r.emitted, len(r.accepted)) for r in records], dialogues, seed),
        accept_at=[ratio(*count_accepted(drafts, k)) for k in range(1, depth + 1)],
        cond_at=[ratio(*count_accepted(drafts, k, k - 1)) for k in range(1, depth + 1)],
        alpha=ratio(sum(sum(r.accepted) for r in records), sum(r.tested for r in records)),
        tokens_per_second=ratio(emitted, seconds),
        baseline_tokens_per_second=plain,
        speedup=ratio(ratio(emitted, seconds), plain),
        speedup_95=bootstrap(speedup_terms, dialogues, seed),
        speedup_median=median(speedups) if speedups else None,
        ms=ms,
        shares=shares,
        overhead=None if not rounds else sum(shares[p] or 0 for p in ("verify", "commit", "other")),
    )


def pair_with_room(accepted: Iterable[int], room: Sequence[int]) -> list[tuple[int, float]]:
    """Return (accepted draft tokens, room) of every round; unlimited where the room is unknown.

    [3, 1], [9, 2] -> [(3, 9), (1, 2)]
    """
    return list(zip(accepted, room or repeat(inf), strict=False))


def count_accepted(drafts: Iterable[tuple[int, float]], k: int, given: int = 0) -> tuple[int, int]:
    """Return how many rounds accepted k or more draft tokens, and of how many.

    Only rounds with room for k that accepted `given` or more count.

    [(3, 9), (0, 9), (1, 1)], k = 2 -> (1, 2); given 1 -> (1, 1)
    """
    counted = [accepted for accepted, room in drafts if room >= k and accepted >= given]
    return sum(accepted >= k for accepted in counted), len(counted)


def ratio(over: float | None, under: float | None) -> float | None:
    """Return `over / under`; None if either is missing or `under` is 0."""
    return None if over is None or not under else over / under


def median_times(repeats: Sequence[RoundTimes]) -> RoundTimes:
    """Return the times of the repeat with the median time of rounds.

    Of an even number the two middle ones are averaged. All parts come from the same repeats, so
    that they still add up to the total.
    """
    ranked, middle = sorted(repeats, key=lambda times: times.rounds), RoundTimes()
    for times in (ranked[(len(ranked) - 1) // 2], ranked[len(ranked) // 2]):
        middle.add(times, 0.5)
    return middle


def bootstrap(
    terms: Sequence[Sequence[float]] | np.ndarray, groups: Sequence[Hashable], seed: int
) -> tuple[float, float] | None:
    """Return the 95 % percentile interval of a ratio of sums, groups drawn with replacement.

    Args:
        terms: [N, 2], rows (a, b) for sum a / sum b; or [N, 4], rows (a, b, c, d) for
            (sum a / sum b) / (sum c / sum d).
        groups: one per row; rows of a group (a dialogue) are drawn together.

    Returns:
        None with fewer than two groups, or if the ratio of some resample is undefined.
    """
    sums: dict[Hashable, np.ndarray] = {}
    for row, group in zip(terms, groups, strict=True):
        sums[group] = sums.get(group, 0.0) + np.array(row, float)
    count = len(sums)
    if count < 2:
        return None
    return _percentiles(_draws(count, np.random.default_rng(seed)) @ np.stack(list(sums.values())))


def crossed_bootstrap(terms: np.ndarray, seed: int) -> tuple[float, float] | None:
    """Return `bootstrap` where repetitions and groups are both drawn with replacement.

    Args:
        terms: [S, D, K], those of `bootstrap` for every repetition (a seed of training) and group
            (a dialogue).

    Returns:
        None with fewer than two repetitions or groups, or if the ratio of some resample is
        undefined.
    """
    if min(terms.shape[:2]) < 2:
        return None
    rng = np.random.default_rng(seed)
    repetitions, groups = (_draws(count, rng) for count in terms.shape[:2])
    return _percentiles(np.einsum("rs,rd,sdk->rk", repetitions, groups, terms, optimize=True))


def _draws(count: int, rng: np.random.Generator) -> np.ndarray:
    """Return how often each of `count` is drawn, for every resample."""
    return rng.multinomial(count, [1 / count] * count, size=RESAMPLES)


def _percentiles(totals: np.ndarray) -> tuple[float, float] | None:
    """Return the interval of the ratio of sums, one row per resample."""
    with np.errstate(divide="ignore", invalid="ignore"):
        values = totals[:, 0] / totals[:, 1]
        values = values / (totals[:, 2] / totals[:, 3]) if totals.shape[1] == 4 else values
    if not np.isfinite(values).all():
        return None
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def predicted_speedups(
    summary: Summary, depth: int, chain: bool
) -> dict[str, float | int | None] | None:
    """Return the speedups that theory predicts; None without a baseline or a round.

    Returns:
        from_times: tau x plain step / round; the measured speedup if the times are consistent.
        no_overhead: the same with verify, commit and other at no cost.
        free_verify: moreover with the forward over the tree at the cost of a plain step.
        iid: Leviathan's formula, one alpha for all depths (chains only).
        best_gamma: the chain length with the largest predicted speedup, at most the measured
            depth; 0 if none is faster. Target time is assumed linear in the length (chains only).
    """
    ms, tau, plain = summary.ms, summary.tau, summary.ms["baseline"]
    if tau is None or plain is None or not ms["target"]:
        return None
    draft, forward, step = ms["draft"] or 0.0, ms["target"], ms["draft_step"] or 0.0
    extra = sum(ms[part] or 0.0 for part in ("verify", "commit", "other"))
    out: dict[str, float | int | None] = {
        "from_times": theory.speedup_from_times(tau, draft, forward, extra, plain),
        "no_overhead": theory.speedup_from_times(tau, draft, forward, 0.0, plain),
        "free_verify": theory.speedup_from_times(tau, draft, plain, 0.0, plain),
        "iid": None,
        "best_gamma": None,
    }
    if chain and summary.alpha is not None:
        verify_cost = forward / plain
        out["iid"] = theory.speedup_from_alpha(summary.alpha, depth, step / plain, verify_cost)
        slope = (forward - plain) / depth
        costs = {gamma: plain + slope * gamma + extra for gamma in range(1, depth + 1)}
        rates = [rate for rate in summary.cond_at if rate is not None]
        out["best_gamma"] = theory.best_gamma(rates, step, costs, plain)
    return out


def _milliseconds(records: Sequence[Record], rounds: int) -> dict[str, float | None]:
    """Return the `ms` field: per round, per plain token, per prompt."""
    times = [record.times for record in records]
    plain = [record.baseline for record in records if record.baseline is not None]
    total = sum(t.rounds for t in times)
    seconds = {part: sum(float(getattr(t, part)) for t in times) for part in ROUND_PARTS}
    seconds["other"] = total - sum(seconds.values())
    steps = sum(record.steps for record in records)
    plain_steps = sum(record.baseline_emitted for record in records)
    return {
        **{part: ratio(1000 * value, rounds) for part, value in seconds.items()},
        "round": ratio(1000 * total, rounds),
        "draft_step": ratio(1000 * seconds["draft"], steps),
        "baseline": ratio(1000 * sum(t.rounds for t in plain), plain_steps),
        "prefill": ratio(1000 * sum(t.prefill for t in times), len(times)),
        "baseline_prefill": ratio(1000 * sum(t.prefill for t in plain), len(plain)),
    }
