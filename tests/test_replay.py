"""Acceptance of trees on a text: by hand, and equal to decoding."""

import pytest

from outrider.eval.measure import answered_trace
from outrider.eval.plan.interleaved import tree_policy
from outrider.eval.plan.replay import (
    RankPath,
    accepted_per_round,
    complete_rounds,
    rank_paths,
    tau,
)
from outrider.models.decode.engine import Engine
from outrider.models.decode.request import Request
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.tree_shapes import Paths, parse
from tests import tiny
from tests.trees import chain, full

# of 7 tokens behind the first: the numbers of the module's example
TEXT: list[RankPath] = [
    (0, 0, 2), (0, 2, None), (2, None, None), (None, 0, 0), (0, 0, None), (0, None), (0,), (),
]  # fmt: skip
TREES = [chain(1), chain(3), full([3]), full([2, 2]), parse([(0,), (1,), (0, 0), (0, 2)])]


def test_a_round_begins_behind_the_last_one() -> None:
    assert list(accepted_per_round(TEXT, chain(2))) == [2, 0, 2]
    assert tau([TEXT], chain(2)) == 1 + 2 / 2
    assert tau([TEXT, TEXT], chain(2)) == 1 + 4 / 4
    assert list(accepted_per_round(TEXT, full([3, 1, 3]))) == [3, 2]
    assert list(accepted_per_round(TEXT, ())) == [0] * 7  # plainly: a token a round


def test_the_last_round_counts_only_where_there_is_no_other() -> None:
    assert complete_rounds([3, 2, 1]) == [3, 2]
    assert complete_rounds([1]) == [1]
    assert tau([TEXT[-2:]], chain(2)) == 2.0
    assert tau([[()]], chain(2)) == 1.0  # one token, by the prompt's own forward


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["eagle3", "medusa", "draft_lm"])
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_decoding_accepts_what_the_replay_predicts(
    name: str, temperature: float, tree: Paths
) -> None:
    """Round for round, but for the last, which drafts no deeper than the budget goes."""
    target = tiny.target()
    drafter = tiny.drafter(name, target).eval()
    for prompt in ([3, 9, 4], [7, 7], [30, 2, 5, 8]):
        engine = Engine(target, drafter, tree_policy(tree), sampling=Sampling(temperature))
        out = engine.generate_all([Request(prompt, 20, seed=len(prompt))], 1)[0]
        target.set_taps(drafter.taps)
        found = rank_paths(drafter, answered_trace(target, prompt, out.ids), 3, 4)
        kept = list(accepted_per_round(found, tree))
        assert (kept[:-1], len(kept)) == (out.accepted[:-1], out.rounds)
    assert tau([found], ()) == 1.0


def test_a_text_too_short_for_a_depth_has_no_ranks_there() -> None:
    target = tiny.target()
    drafter = tiny.drafter("eagle3", target).eval()
    target.set_taps(drafter.taps)
    found = rank_paths(drafter, answered_trace(target, [3, 4], [5, 6]), 3, 4)
    assert [len(way) for way in found] == [1, 0]
