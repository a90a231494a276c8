"""The pace of the machine: slow by every round, at once by plain rounds that agree."""

from collections.abc import Sequence

import pytest

from outrider.models.decode.costs.pace import LARGEST, LIMIT, WEIGHT, Pace


def after(ratios: Sequence[float], plain: bool = True) -> Pace:
    pace = Pace()
    for ratio in ratios:
        pace.add(ratio, plain)
    return pace


def test_a_round_moves_the_pace_by_its_weight() -> None:
    assert after([1.2]).value == pytest.approx(1 + WEIGHT * 0.2)
    assert after([5.0]).value == pytest.approx(1 + WEIGHT * (LIMIT - 1)), "one long round"


@pytest.mark.parametrize("ratios", [(2.0, 1.9), (1.9, 2.0), (0.5, 0.55), (0.55, 0.5)])
def test_two_plain_rounds_set_the_pace_to_the_lesser_change(ratios: tuple[float, ...]) -> None:
    """The second ratio is over a pace that the first has moved."""
    pace = after(ratios[:1])
    before, least = pace.value, min(ratios, key=lambda one: abs(1 - one))
    left = pace.add(ratios[1], is_plain=True)
    assert left == pytest.approx(ratios[1] / least)
    assert pace.value == pytest.approx(before * least * (1 + WEIGHT * (left - 1)))
    assert (pace.jumps, pace.differing, pace.plain) == (1, 0, 0)


@pytest.mark.parametrize("ratios", [(2.0, 0.5), (2.0, 1.1, 2.0), (1.2, 1.2, 1.2)])
def test_rounds_that_do_not_agree_or_differ_little_do_not(ratios: tuple[float, ...]) -> None:
    assert after(ratios).jumps == 0


def test_rounds_that_draft_tell_and_do_not_set_it() -> None:
    pace = after([2.0] * 3, plain=False)
    assert (pace.differing, pace.jumps) == (3, 0)
    assert pace.value < 1 + 3 * WEIGHT
    pace.add(1.6, is_plain=True)
    assert pace.jumps == 0, "one plain round is not two"
    pace.add(2.0, is_plain=False)
    pace.add(1.6, is_plain=True)
    assert pace.jumps == 0, "plain rounds with a draft between them"
    pace.add(1.6, is_plain=True)
    assert pace.jumps == 1


def test_the_pace_has_limits() -> None:
    assert after([50.0] * 8).value == LARGEST
