"""Every number of a report, on records small enough to be worked out by hand."""

import math

import pytest

from outrider.eval.metrics import (
    METRICS,
    Record,
    bootstrap,
    median_times,
    predicted_speedups,
    summarise,
)
from outrider.eval.report_auto import SUMMARY
from outrider.models.decode.round_times import RoundTimes

# Rounds of three drafted tokens: two prompts, times in quarters and eighths so that sums are exact.
#   a: prefill 1 token, rounds emit 4 and 2                     7 tokens, 2 rounds, 1.5 s
#   b: prefill 1 token, rounds emit 1, 2 and 2; the last round
#      accepts two drafted tokens, the second ends the answer   6 tokens, 3 rounds, 1.5 s
A = Record(
    id="a",
    dialogue="a",
    category="story",
    tokens=7,
    accepted=(3, 1),
    drafted=(3, 3),
    steps=6,
    times=RoundTimes(prefill=0.5, draft=0.5, target=0.5, verify=0.125, commit=0.25, rounds=1.5),
    baseline_tokens=7,
    baseline=RoundTimes(prefill=0.25, rounds=3.0),
)
B = Record(
    id="b",
    dialogue="b",
    category="sums",
    tokens=6,
    accepted=(0, 1, 2),
    drafted=(3, 3, 3),
    steps=9,
    times=RoundTimes(prefill=1.0, draft=0.25, target=1.0, verify=0.0, commit=0.25, rounds=1.5),
    baseline_tokens=6,
    baseline=RoundTimes(prefill=0.75, rounds=2.0),
)


def plain(record: Record) -> Record:
    """The same prompt, without a measured baseline."""
    fields = {**vars(record), "baseline": None, "baseline_tokens": 0}
    return Record(**fields)


def test_tau_excludes_the_prefill_token() -> None:
    assert summarise([A], depth=3).tau == 6 / 2
    assert summarise([B], depth=3).tau == 5 / 3
    assert summarise([A, B], depth=3).tau == 11 / 5


def test_accept_at_is_a_share_of_all_rounds() -> None:
    """Accepted 3, 1 | 0, 1, 2: four of five rounds accept one, two accept two, one three."""
    total = summarise([A, B], depth=4)
    assert total.accept_at == [4 / 5, 2 / 5, 1 / 5, 0.0]
    assert total.cond_at == [pytest.approx(x) for x in (4 / 5, 1 / 2, 1 / 2, 0.0)]


def test_conditional_rate_is_none_after_zero() -> None:
    total = summarise([Record(**{**vars(A), "accepted": (1, 0)})], depth=3)
    assert (total.accept_at, total.cond_at) == ([0.5, 0.0, 0.0], [0.5, 0.0, None])
    assert summarise([], depth=2).accept_at == [None, None]


def test_rounds_without_room_for_k_tokens_do_not_count_at_k() -> None:
    """A budget of 8 tokens; the prefill writes the first, and the target the last of each round.

    round       1  2  3      round 1 begins after 1 token:  6 draft tokens fit
    room        6  2  1      round 2 begins after 5 tokens: 2 fit
    accepted    3  0  1      round 3 begins after 6 tokens: 1 fits

    k           1    2    3    4    7
    accept@k   2/3  1/2  1/1  0/1   -
    cond@k     2/3  1/1  1/1  0/1   -
    """
    changes = {"tokens": 8, "accepted": (3, 0, 1), "drafted": (3, 2, 1), "room": (6, 2, 1)}
    cut = Record(**{**vars(A), **changes})
    total = summarise([cut], depth=7)
    assert total.accept_at == [2 / 3, 1 / 2, 1.0, 0.0, 0.0, 0.0, None]
    assert total.cond_at == [2 / 3, 1.0, 1.0, 0.0, None, None, None]
    assert total.tau == 7 / 3
    unknown = summarise([Record(**{**vars(cut), "room": ()})], depth=3)  # of an older file
    assert unknown.accept_at == [2 / 3, 1 / 3, 1 / 3]


def test_tau_is_one_plus_sum_of_accept_at_except_for_cut_rounds() -> None:
    for records, cut in (([A], 0), ([A, B], 1)):
        total = summarise(records, depth=3)
        assert total.tau is not None
        rates = [rate for rate in total.accept_at if rate is not None]
        assert total.tau == pytest.approx(1 + sum(rates) - cut / total.rounds)


def test_alpha_counts_the_rejected_token_and_nothing_after_it() -> None:
    """A: 3 tested, then 2. B: 1, 2, and in the cut round the 2 accepted ones only."""
    assert (A.cut, B.cut) == (False, True)
    assert (A.tested, B.tested) == (5, 5)
    assert summarise([A, B], depth=3).alpha == 7 / 10


def test_milliseconds_have_their_units() -> None:
    ms = summarise([A, B], depth=3).ms
    assert ms == {
        "draft": 150.0,  # 0.75 s in 5 rounds
        "target": 300.0,
        "verify": 25.0,
        "commit": 100.0,
        "other": 25.0,  # parts sum to 2.875 of 3.0 s
        "round": 600.0,
        "draft_step": 50.0,  # 0.75 s in 15 steps
        "baseline": pytest.approx(5000 / 11),  # 5 s for 6 + 5 tokens
        "prefill": 750.0,
        "baseline_prefill": 500.0,
    }


def test_shares_sum_to_one_and_overhead_excludes_draft_and_target() -> None:
    total = summarise([A, B], depth=3)
    shares = {name: share for name, share in total.shares.items() if share is not None}
    assert shares["draft"] == 0.25
    assert shares["target"] == 0.5
    assert sum(shares.values()) == pytest.approx(1.0)
    assert total.overhead == pytest.approx(0.25)


def test_speedup_is_the_ratio_of_total_times_per_token() -> None:
    """Plain 5 s / 11 tokens against 3 s / 11 tokens; per prompt: 2 and 4/3."""
    total = summarise([A, B], depth=3)
    assert total.tokens_per_second == pytest.approx(11 / 3)
    assert total.baseline_tokens_per_second == pytest.approx(11 / 5)
    assert total.speedup == pytest.approx(5 / 3)
    assert total.speedup_median == pytest.approx((2 + 4 / 3) / 2)


def test_speedup_is_per_token_if_answer_lengths_differ() -> None:
    """Half the tokens in half the time: speedup 1."""
    longer = Record(**{**vars(A), "baseline_tokens": 13})
    assert summarise([A], depth=3).speedup == pytest.approx(2.0)
    assert summarise([longer], depth=3).speedup == pytest.approx(1.0)


def test_no_speedup_and_no_theory_without_baseline() -> None:
    total = summarise([plain(A), plain(B)], depth=3)
    assert total.tau == 11 / 5
    assert total.speedup is None
    assert total.speedup_95 is None
    assert total.speedup_median is None
    assert total.baseline_tokens_per_second is None
    assert total.ms["baseline"] is None
    assert predicted_speedups(total, 3, chain=True) is None


def test_one_token_answer_has_no_round_and_no_tau() -> None:
    one = Record(
        "c", "c", "story", 1, (), (), 0, RoundTimes(prefill=0.5), 1, RoundTimes(prefill=0.5)
    )
    total = summarise([one], depth=3)
    assert (total.prompts, total.tokens, total.rounds) == (1, 1, 0)
    assert total.tau is None
    assert total.speedup is None
    assert total.overhead is None
    assert summarise([A, one], depth=3).tau == summarise([A], depth=3).tau


def test_median_times_of_odd_and_even_counts() -> None:
    slow, fast, middle = (
        RoundTimes(draft=d, rounds=r) for d, r in ((1.0, 9.0), (5.0, 2.0), (2.0, 4.0))
    )
    assert median_times([slow, fast, middle]) == middle
    assert median_times([fast, middle]) == RoundTimes(draft=3.5, rounds=3.0)
    assert median_times([slow]) == slow


def test_interval_contains_the_estimate() -> None:
    records = [Record(**{**vars(r), "dialogue": str(i)}) for i, r in enumerate([A, B] * 10)]
    total = summarise(records, depth=3, seed=1)
    assert total.tau_95 is not None
    assert total.speedup_95 is not None
    low, high = total.tau_95
    assert 5 / 3 < low < 11 / 5 < high < 3
    assert 4 / 3 < total.speedup_95[0] < 5 / 3 < total.speedup_95[1] < 2


def test_bootstrap_is_deterministic_for_a_seed() -> None:
    first, again, other = (
        bootstrap([(7**i % 101, 1) for i in range(20)], range(20), seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_bootstrap_matches_the_normal_interval() -> None:
    """Mean of 200 values of which half are 1: standard error 0.5 / sqrt(200)."""
    interval = bootstrap([(i % 2, 1) for i in range(200)], range(200), seed=0)
    assert interval is not None
    half = 1.96 * 0.5 / math.sqrt(200)
    assert interval[0] == pytest.approx(0.5 - half, abs=0.012)
    assert interval[1] == pytest.approx(0.5 + half, abs=0.012)


def test_turns_of_a_dialogue_are_resampled_together() -> None:
    """Two turns of one dialogue are one observation, which has no interval."""
    turn = Record(**{**vars(B), "dialogue": "a"})
    assert summarise([A, turn], depth=3).tau_95 is None
    assert summarise([A, B], depth=3).tau_95 == (5 / 3, 3.0)


def test_from_times_equals_the_measured_speedup() -> None:
    total = summarise([A, B], depth=3)
    theory = predicted_speedups(total, 3, chain=True)
    assert theory is not None
    assert theory["from_times"] == pytest.approx(total.speedup)


def test_predicted_speedups_without_overhead_and_verification() -> None:
    """Per round 150 draft + 300 target + 150 rest; a plain step takes 5000/11, tau is 11/5."""
    theory = predicted_speedups(summarise([A, B], depth=3), 3, chain=True)
    assert theory is not None
    gain = 11 / 5 * 5000 / 11  # 1000 ms of plain decoding per round
    assert theory["no_overhead"] == pytest.approx(gain / 450)
    assert theory["free_verify"] == pytest.approx(gain / (150 + 5000 / 11))
    expected = 1 + 0.7 + 0.7**2 + 0.7**3  # alpha = 7/10
    assert theory["iid"] == pytest.approx(expected * (5000 / 11) / 450)


def test_best_gamma_is_zero_if_nothing_is_accepted() -> None:
    wrong = Record(**{**vars(A), "accepted": (0,) * 6, "drafted": (3,) * 6})
    rejected = predicted_speedups(summarise([wrong], depth=3), 3, chain=True)
    perfect = Record(**{**vars(A), "tokens": 9, "accepted": (3, 3)})
    accepted = predicted_speedups(summarise([perfect], depth=3), 3, chain=True)
    assert rejected is not None
    assert accepted is not None
    assert rejected["best_gamma"] == 0
    assert accepted["best_gamma"] == 3


def test_chain_formulas_are_not_applied_to_trees() -> None:
    theory = predicted_speedups(summarise([A, B], depth=3), 3, chain=False)
    assert theory is not None
    assert theory["iid"] is None
    assert theory["best_gamma"] is None


def test_every_field_of_a_summary_has_a_definition() -> None:
    defined = {metric.name for metric in METRICS}
    total = summarise([A, B], depth=3)
    reported = {name for name in vars(total) if name != "ms"} | {f"ms.{name}" for name in total.ms}
    names = {name.strip(" ?") for names in SUMMARY for name in names.split(",")}
    automatic = {f"auto.{name}" for name in names - {"answers", "notes"}}
    assert reported | automatic | {"exact", "forecast"} == defined
    assert len(METRICS) == len(defined)
    assert all(metric.unit and metric.definition for metric in METRICS)
