"""Interleaved rounds: drift, calibration shapes, and rounds cut by the budget."""

import pytest

from outrider.data.reporter import Reporter
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
from outrider.models.decode.costs.round_costs import RoundCost
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.request import Output, Request
from outrider.models.decode.round_times import RoundTimes
from outrider.models.decode.rules.rule_table import BEST
from outrider.models.decode.static_tree import StaticTree
from outrider.models.decode.tree_shapes import Paths
from tests import tiny
from tests.trees import chain, full


def repetition(pace: float, *ms: float, tau: float = 1.0) -> Repetition:
    """On a machine that is `pace` times slower."""
    draft, target, rest = (pace * part for part in ms)
    return Repetition(RoundCost(draft, target, rest), tau)


def test_drift_between_repetitions_cancels() -> None:
    """Ratios do not change if some repetitions are three times slower."""
    draft_paths = chain(2)
    repetitions = [
        {
            NO_DRAFT: repetition(pace, 0.0, 2.0, 0.1),
            draft_paths: repetition(pace, 1.0, 3.0, 0.2, tau=3.0),
        }
        for pace in (1.0, 3.0, 1.0, 1.0, 3.0)
    ]
    runs = InterleavedRuns({4: repetitions})
    assert runs.parts(4, NO_DRAFT) == pytest.approx((0.0, 2.0, 0.1))
    assert runs.parts(4, draft_paths) == pytest.approx((1.0, 3.0, 0.2))
    assert runs.tau(4, draft_paths) == 3.0
    assert runs.speedup(4, draft_paths) == pytest.approx(3.0 * 2.1 / 4.2)


def test_calibration_shapes_bound_all_others() -> None:
    narrow, wide = full([2, 1, 1]), full([3, 3])
    middle, small = full([2, 2]), full([3])
    paths = [chain(3), chain(1), wide, middle, chain(2), narrow, small]
    assert calibration_shapes(paths) == [NO_DRAFT, chain(1), chain(3), small, narrow, wide]
    assert calibration_shapes([chain(2)]) == [NO_DRAFT, chain(2)]
    assert calibration_shapes([small]) == [NO_DRAFT, small]
    assert calibration_shapes([]) == [NO_DRAFT]


def test_tree_policy_uses_the_top_k_tokens() -> None:
    assert tree_policy(NO_DRAFT) is None
    assert tree_policy(chain(3)) == Chain(3, BEST)
    assert tree_policy(full([2, 1])) == StaticTree(full([2, 1]))


def test_order_of_interleaved_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompt by prompt for batch 1, otherwise all prompts at once."""
    order: list[tuple[int, int, int]] = []

    def requests_of(batch: int) -> list[Request]:
        return [Request([3], 4)] * 2 * batch

    def fake_decode(engine: Engine, requests: list[Request], batch: int) -> BatchRun:
        order.append((batch, len(requests), 0 if engine.policy is None else engine.policy.nodes))
        times = RoundTimes(draft=1.0, target=2.0, rounds=3.5)
        return [Output(accepted=[1, 3, 0], times=times)], 2

    target = tiny.target()
    drafter = tiny.drafter("eagle3", target).eval()

    def engine(policy: Policy | None) -> Engine:
        return Engine(target, None if policy is None else drafter, policy)

    monkeypatch.setattr(module, "_decode_shape", fake_decode)
    shapes: dict[int, list[Paths]] = {1: [NO_DRAFT, chain(2)], 3: [NO_DRAFT, full([2])]}
    runs = decode(shapes, engine, requests_of, Reporter.silent())
    assert order == [*[(1, 1, 0), (1, 1, 2)] * 2, (3, 6, 0), (3, 6, 2)] * REPEATS
    assert {batch: len(repetitions) for batch, repetitions in runs.repetitions.items()} == {
        1: REPEATS,
        3: REPEATS,
    }
    assert runs.repetitions[1][0][chain(2)] == Repetition(RoundCost(500.0, 1000.0, 250.0), 3.0)


def test_repetition_has_parts_and_tau_of_a_round() -> None:
    target = tiny.target()
    drafter = tiny.drafter("eagle3", target).eval()
    requests = [Request([3, 5, 7], 12, seed) for seed in range(4)]
    engine = Engine(target, drafter, Chain(2, BEST))
    parts, tau = module._repetition([module._decode_shape(engine, requests, 2)])
    assert min(parts) > 0
    outputs = engine.generate_all(requests, 2)
    accepted = [count for out in outputs for count in out.accepted[:-1]]
    assert tau == 1 + sum(accepted) / len(accepted)
