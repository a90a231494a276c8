"""The pace of the machine: slow by every round, at once by plain rounds that agree."""

import random
from collections.abc import Sequence

import pytest

from outrider.models.decode.costs.factors import FIRST, LEVELS, PAUSE, Factors
from outrider.models.decode.costs.pace import LARGEST, LIMIT, SMALLEST, WEIGHT, Pace

PLAIN, CHAIN = "plain", "chain"


def learnt() -> Factors:
    """Factors of plain rounds and chains that take what the table says."""
    factors = Factors()
    for _ in range(4 * PAUSE):
        factors.add(PLAIN, 1, 1.0, 1.0)
        factors.add(CHAIN, 1, 1.0, 1.0)
    return factors


def after(seconds: Sequence[float], kind: str = PLAIN) -> Factors:
    factors = learnt()
    for one in seconds:
        factors.add(kind, 1, one, 1.0)
    return factors


def test_a_round_moves_the_pace_by_its_weight() -> None:
    assert after([1.2], CHAIN).pace.value == pytest.approx(1 + WEIGHT * 0.2)
    assert after([5.0], CHAIN).pace.value == pytest.approx(1 + WEIGHT * (LIMIT - 1))


@pytest.mark.parametrize("seconds", [(2.0, 1.9), (1.9, 2.0), (0.5, 0.55), (0.55, 0.5)])
def test_two_plain_rounds_set_the_pace_to_the_lesser_change(seconds: tuple[float, ...]) -> None:
    factors = after(seconds)
    assert factors.pace.value == pytest.approx(min(seconds, key=lambda one: abs(1 - one)))
    assert (factors.pace.jumps, factors.pace.differing) == (1, 0)
    assert factors.of(PLAIN, 1).value == pytest.approx(1.0), "the factor is left as it was"


@pytest.mark.parametrize("seconds", [(2.0, 0.5), (2.0, 1.1, 2.0), (1.2, 1.2, 1.2)])
def test_rounds_that_do_not_agree_or_differ_little_do_not(seconds: tuple[float, ...]) -> None:
    assert after(seconds).pace.jumps == 0


def test_a_plain_round_that_differs_counts_later_if_the_next_one_does_not() -> None:
    once, late = after([1.2]), after([2.0, 1.0])
    assert late.pace.value > once.pace.value
    assert late.of(PLAIN, 1).value > 1


def test_rounds_that_draft_tell_and_do_not_set_it() -> None:
    factors = after([2.0] * 3, CHAIN)
    assert (factors.pace.differing, factors.pace.jumps) == (3, 0)
    for kind in (PLAIN, CHAIN, PLAIN):
        factors.add(kind, 1, 3.0, 1.0)
        assert factors.pace.jumps == 0, "no two plain rounds in turn"
    factors.add(PLAIN, 1, 3.0, 1.0)
    assert factors.pace.jumps == 1


@pytest.mark.parametrize("noise", [0.1, 0.2, 0.3])
def test_pace_and_factors_do_not_drift_apart_while_nothing_drafts(noise: float) -> None:
    """The ratio of the factors decides whether drafts pay."""
    draw, factors = random.Random(0), learnt()
    for _ in range(3 * FIRST):
        for kind in (PLAIN, CHAIN):
            factors.add(kind, 1, draw.lognormvariate(0, noise), 1.0)
    before = factors.of(PLAIN, 1).value / factors.of(CHAIN, 1).value
    for _ in range(5000):
        factors.add(PLAIN, 1, draw.lognormvariate(0, noise), 1.0)
    ratio = factors.of(PLAIN, 1).value / factors.of(CHAIN, 1).value
    assert ratio == pytest.approx(before, rel=0.15)
    assert factors.pace.jumps < 150, "the usual noise of rounds does not set it"


def test_the_pace_has_limits() -> None:
    assert after([1e9] * 40).pace.value == LARGEST
    assert after([1e-9] * 40).pace.value == SMALLEST


@pytest.mark.parametrize(("gap", "most"), [(64, 0.1), (256, 0.05)])
def test_the_factors_scatter_little_between_probes(gap: int, most: float) -> None:
    """A machine of constant speed with noise of a tenth; a draft is tried after `gap` rounds."""
    beyond = 0
    for seed in range(5):
        draw, factors = random.Random(seed), learnt()
        for _ in range(40):
            for kind in [PLAIN] * gap + [CHAIN]:
                factors.add(kind, 1, draw.lognormvariate(0, 0.1), 1.0)
            ratio = factors.of(PLAIN, 1).value / factors.of(CHAIN, 1).value
            beyond += abs(ratio - 1) > 0.15
    assert beyond <= most * 200


def test_a_size_whose_first_rounds_were_slow_is_corrected() -> None:
    """Plain rounds alone, with 50 rounds of a batch of 1 and of 4 by turns."""
    draw, factors = random.Random(0), learnt()
    for _ in range(2 * PAUSE):
        factors.add(PLAIN, 1, 1.0, 1.0)
    for _ in range(FIRST):
        factors.add(PLAIN, 4, 1.2, 1.0)
    for i in range(2000):
        batch = 4 if i // 50 % 2 else 1
        factors.add(PLAIN, batch, draw.lognormvariate(0, 0.03), 1.0)
    ratio = factors.of(PLAIN, 4).value / factors.of(PLAIN, 1).value
    assert ratio == pytest.approx(1.0, abs=0.1)
    assert factors.pace.jumps == 0


def test_levels_of_a_table_that_take_less_than_nothing() -> None:
    """A table that was measured beside other programs may say that deeper chains are cheaper."""
    factors = Factors()
    for _ in range(4):
        factors.add(CHAIN, 1, 0.6, 1.0)
    for _ in range(60):
        factors.add(CHAIN, 1, 0.2, 1.0, -0.9)
    expected = factors.value(CHAIN, 1) - 0.9 * factors.value(LEVELS, 1)
    assert expected == pytest.approx(0.2, abs=0.02)


def test_a_held_round_of_another_table_is_dropped() -> None:
    factors = after([2.0])
    factors.new_table()
    factors.add(PLAIN, 1, 1.0, 1.0)
    assert factors.pace == Pace()


def test_rounds_of_different_sizes_do_not_agree() -> None:
    factors = learnt()
    for _ in range(4 * PAUSE):
        factors.add(PLAIN, 4, 1.0, 1.0)
    factors.add(PLAIN, 1, 2.0, 1.0)
    factors.add(PLAIN, 4, 2.0, 1.0)
    assert factors.pace.jumps == 0


def test_a_new_pace_tells_nothing() -> None:
    pace = Pace()
    assert not pace.tell(1.0, 0.0)
    assert pace.tell(1.3, 0.0)
    assert not pace.tell(1.3, 0.2), "three usual distances"
