"""Round times, interpolated between synthetic measurements."""

import pytest

from outrider.models.decode.costs.round_costs import (
    ABSORBED_ROWS,
    PLAIN,
    DecodedRound,
    DraftShape,
    MeasuredTimes,
    TimeGrid,
)
from tests.trees import chain

POINTS: dict[tuple[int, ...], float] = {(1, 8): 10.0, (1, 16): 14.0, (5, 8): 12.0, (5, 16): 20.0}
MEASURED = TimeGrid({"tokens": (1, 5), "context": (8, 16)}, POINTS)


def test_grid_is_exact_at_points_and_linear_between() -> None:
    for (tokens, context), ms in POINTS.items():
        assert MEASURED.at(tokens=tokens, context=context) == ms
    assert MEASURED.at(tokens=2, context=8) == pytest.approx(10.5)
    assert MEASURED.at(tokens=1, context=12) == pytest.approx(12)
    assert MEASURED.at(tokens=3, context=12) == pytest.approx((10 + 14 + 12 + 20) / 4)


def test_points_outside_the_grid_raise() -> None:
    with pytest.raises(ValueError, match="tokens = 6: measured were 1 to 5"):
        MEASURED.at(tokens=6, context=8)
    with pytest.raises(ValueError, match="context = 4"):
        MEASURED.at(tokens=1, context=4)


FORWARDS = TimeGrid(
    {"tokens": (1, 9), "batch": (1, 2), "context": (8,)},
    {(tokens, batch, 8): 10.0 + tokens for tokens in (1, 9) for batch in (1, 2)},
)
STEPS = TimeGrid(
    {"width": (1, 4), "depth": (1, 4), "batch": (1, 2), "context": (8,)},
    {(w, d, b, 8): float(w * d) for w in (1, 4) for d in (1, 4) for b in (1, 2)},
)


def test_without_decoded_rounds_a_round_is_its_forwards() -> None:
    """The first step expands the root; 1 and 3 nodes after it count as 2 per step."""
    timing = MeasuredTimes("here", FORWARDS, STEPS)
    assert timing.parts(PLAIN, 1, 8) == (0.0, 11.0, 0.0)
    assert timing.parts(DraftShape(3, 5, (1, 1, 3)), 1, 8) == pytest.approx((6.0, 16.0, 0.0))


def test_the_rows_that_a_drafter_absorbs_are_an_assumption() -> None:
    """Their number is that of the measurement, not that of the draft's acceptance length."""
    (sentence,) = [s for s in MeasuredTimes("here", FORWARDS, STEPS).assumptions if "absorb" in s]
    assert sentence.startswith(f"The drafter was timed with {ABSORBED_ROWS} accepted rows")
    assert sentence.endswith("however many a draft of this shape has accepted.")


def test_decoded_rounds_are_reproduced_and_others_interpolated() -> None:
    short, long = DraftShape.of(chain(1)), DraftShape.of(chain(4))
    rounds = [DecodedRound(short, 1.0, 2.0, 0.5), DecodedRound(long, 2.0, 2.0, 2.0)]
    timing = MeasuredTimes("here", FORWARDS, STEPS, {1: rounds})
    for decoded in rounds:
        draft, target, _ = timing.forwards_only(decoded.shape, 1, 8)
        cost = timing.parts(decoded.shape, 1, 8)
        assert cost == pytest.approx((decoded.draft * draft, decoded.target * target, decoded.rest))
    middle = timing.parts(DraftShape.of(chain(2)), 1, 8)
    assert middle == pytest.approx((2 * (1 + 1 / 3), 2 * 13.0, 1.0))
    for other in (PLAIN, DraftShape(4, 8, (1, 2, 2, 2))):
        assert timing.parts(other, 1, 8) == timing.forwards_only(other, 1, 8)
    assert timing.parts(long, 2, 8) == timing.forwards_only(long, 2, 8)  # batch 2 was not decoded


def test_three_rounds_define_a_clipped_plane() -> None:
    shapes = (
        DraftShape(1, 4, (1,)),
        DraftShape(4, 8, (1, 2, 2, 2)),
        DraftShape(4, 16, (1, 4, 4, 4)),
    )
    trees = [DecodedRound(s, 1.0, 1.0, 0.1 * s.depth + 0.01 * s.nodes) for s in shapes]
    timing = MeasuredTimes("here", FORWARDS, STEPS, {1: trees})
    assert timing.parts(DraftShape(2, 8, (1, 3)), 1, 8).rest == pytest.approx(0.28)
    assert timing.parts(DraftShape(1, 2, (1,)), 1, 8).rest == pytest.approx(
        0.14
    )  # clipped to the smallest value
