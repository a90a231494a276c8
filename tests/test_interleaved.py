"""Interleaved rounds: drift, calibration shapes, and rounds cut by the budget."""

import pytest

from outrider.eval.plan import interleaved as module
from outrider.eval.plan.interleaved import (
    NO_DRAFT,
    REPEATS,
    BatchRun,
    InterleavedRuns,
    Repetition,
    calibration_shapes,
    decode,
    tree_policy,
)
from outrider.eval.plan.round_costs import RoundCost
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.request import Output, Request
from outrider.models.decode.round_times import RoundTimes
from outrider.models.decode.rules import BEST
from outrider.models.decode.static_tree import StaticTree
from outrider.models.decode.tree_shapes import Paths
from tests import tiny
from tests.trees import chain, full


def turn(pace: float, *ms: float, tau: float = 1.0) -> Repetition:
    """On a machine that is `pace` times slower."""
    draft, target, rest = (pace * part for part in ms)
    return Repetition(RoundCost(draft, target, rest), tau)


def test_drift_cancels_relative_to_plain_rounds_of_a_repetition() -> None:
    """A machine that is three times slower now and then: the ratios stay."""
    guessed = chain(2)
    seen = [
        {NO_DRAFT: turn(pace, 0.0, 2.0, 0.1), guessed: turn(pace, 1.0, 3.0, 0.2, tau=3.0)}
        for pace in (1.0, 3.0, 1.0, 1.0, 3.0)
    ]
    turns = InterleavedRuns({4: seen})
    assert turns.parts(4, NO_DRAFT) == pytest.approx((0.0, 2.0, 0.1))
    assert turns.parts(4, guessed) == pytest.approx((1.0, 3.0, 0.2))
    assert turns.tau(4, guessed) == 3.0
    assert turns.speedup(4, guessed) == pytest.approx(3.0 * 2.1 / 4.2)


def test_calibration_shapes_are_those_that_all_others_lie_between() -> None:
    narrow, wide = full([2, 1, 1]), full([3, 3])
    middle, small = full([2, 2]), full([3])
    found = [chain(3), chain(1), wide, middle, chain(2), narrow, small]
    assert calibration_shapes(found) == [NO_DRAFT, chain(1), chain(3), small, narrow, wide]
    assert calibration_shapes([chain(2)]) == [NO_DRAFT, chain(2)]
    assert calibration_shapes([small]) == [NO_DRAFT, small]
    assert calibration_shapes([]) == [NO_DRAFT]


def test_a_shape_is_decoded_with_the_top_tokens() -> None:
    assert tree_policy(NO_DRAFT) is None
    assert tree_policy(chain(3)) == Chain(3, BEST)
    assert tree_policy(full([2, 1])) == StaticTree(full([2, 1]))


def test_every_shape_of_every_batch_is_repeated_after_plain_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompt by prompt where they are decoded one by one, else all at once."""
    order: list[tuple[int, int, int]] = []

    def asked(batch: int) -> list[Request]:
        return [Request([3], 4)] * 2 * batch

    def spent(engine: Engine, requests: list[Request], batch: int) -> BatchRun:
        order.append((batch, len(requests), 0 if engine.policy is None else engine.policy.nodes))
        times = RoundTimes(draft=1.0, target=2.0, rounds=3.5)
        return [Output(accepted=[1, 3, 0], times=times)], 2

    target = tiny.target()
    drafter = tiny.drafter("eagle3", target).eval()

    def engine(policy: Policy | None) -> Engine:
        return Engine(target, None if policy is None else drafter, policy)

    monkeypatch.setattr(module, "_decode_shape", spent)
    shapes: dict[int, list[Paths]] = {1: [NO_DRAFT, chain(2)], 3: [NO_DRAFT, full([2])]}
    turns = decode(shapes, engine, asked)
    assert order == [*[(1, 1, 0), (1, 1, 2)] * 2, (3, 6, 0), (3, 6, 2)] * REPEATS
    assert {batch: len(seen) for batch, seen in turns.repetitions.items()} == {
        1: REPEATS,
        3: REPEATS,
    }
    assert turns.repetitions[1][0][chain(2)] == Repetition(RoundCost(500.0, 1000.0, 250.0), 3.0)


def test_a_turn_is_a_round_of_the_batch_and_its_parts() -> None:
    target = tiny.target()
    drafter = tiny.drafter("eagle3", target).eval()
    requests = [Request([3, 5, 7], 12, seed) for seed in range(4)]
    engine = Engine(target, drafter, Chain(2, BEST))
    parts, tau = module._repetition([module._decode_shape(engine, requests, 2)])
    assert min(parts) > 0
    outputs = engine.generate_all(requests, 2)
    kept = [count for out in outputs for count in out.accepted[:-1]]
    assert tau == 1 + sum(kept) / len(kept)
