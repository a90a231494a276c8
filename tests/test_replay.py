"""Replay of trees on a text: worked examples, and equality with decoding."""

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

# 7 tokens after the first: the module's worked example
TEXT: list[RankPath] = [
    (0, 0, 2), (0, 2, None), (2, None, None), (None, 0, 0), (0, 0, None), (0, None), (0,), (),
]  # fmt: skip
TREES = [chain(1), chain(3), full([3]), full([2, 2]), parse([(0,), (1,), (0, 0), (0, 2)])]


def test_accepted_per_round_worked_example() -> None:
    assert list(accepted_per_round(TEXT, chain(2))) == [2, 0, 2]
    assert tau([TEXT], chain(2)) == 1 + 2 / 2
    assert tau([TEXT, TEXT], chain(2)) == 1 + 4 / 4
    assert list(accepted_per_round(TEXT, full([3, 1, 3]))) == [3, 2]
    assert list(accepted_per_round(TEXT, ())) == [0] * 7  # plain decoding: one token per round


def test_last_round_counts_only_if_it_is_the_only_one() -> None:
    assert complete_rounds([3, 2, 1]) == [3, 2]
    assert complete_rounds([1]) == [1]
    assert tau([TEXT[-2:]], chain(2)) == 2.0
    assert tau([[()]], chain(2)) == 1.0  # one token, from the prefill


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["eagle3", "medusa", "draft_lm"])
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_replay_equals_decoding(name: str, temperature: float, tree: Paths) -> None:
    """Round by round, except the last, whose depth the budget limits."""
    target = tiny.target()
    drafter = tiny.drafter(name, target).eval()
    for prompt in ([3, 9, 4], [7, 7], [30, 2, 5, 8]):
        engine = Engine(target, drafter, tree_policy(tree), sampling=Sampling(temperature))
        out = engine.generate_all([Request(prompt, 20, seed=len(prompt))], 1)[0]
        target.set_taps(drafter.taps)
        paths = rank_paths(drafter, answered_trace(target, prompt, out.ids), 3, 4)
        accepted = list(accepted_per_round(paths, tree))
        assert (accepted[:-1], len(accepted)) == (out.accepted[:-1], out.rounds)
    assert tau([paths], ()) == 1.0


def test_rank_paths_end_with_the_answer() -> None:
    target = tiny.target()
    drafter = tiny.drafter("eagle3", target).eval()
    target.set_taps(drafter.taps)
    paths = rank_paths(drafter, answered_trace(target, [3, 4], [5, 6]), 3, 4)
    assert [len(path) for path in paths] == [1, 0]
