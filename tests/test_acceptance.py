"""Estimates of acceptance: first values from a measured table, the bias of trees, changed texts."""

from random import Random

import pytest
import torch

from outrider.models.decode.acceptance import (
    AFRESH,
    MEASURED,
    Acceptance,
    Bias,
    RequestAcceptance,
)
from outrider.models.decode.auto.choice import Choice
from outrider.models.decode.auto.outcomes import PASSAGE, Round
from outrider.models.decode.costs.round_costs import chain_shape
from outrider.models.decode.request import ActiveRequest, Request


def test_estimates_begin_with_the_measured_table() -> None:
    """Siblings are shares of what the first child misses; the last row stands for deeper levels."""
    table = torch.tensor([[0.5, 0.2, 0.1], [0.4, 0.3, 0.1]])
    shared = Acceptance(table=table)
    one = RequestAcceptance(shared)
    assert [one.mean(depth) for depth in (1, 2, 3, 16, 40)] == pytest.approx([0.5, *[0.4] * 4])
    assert [rate.mean for rate in shared.siblings] == pytest.approx([0.4, 0.2, 0.06])
    for _ in range(5):
        one.add(1, 1.0)
    assert shared.levels[0].mean == pytest.approx((MEASURED * 0.5 + 5) / (MEASURED + 5), abs=0.01)


@pytest.mark.parametrize("table", [[[1.0]], [[0.0]], [[1.0, 0.0]], [[0.0, 1.0], [0.0, 0.0]]])
def test_certain_tables_leave_estimates_that_learn(table: list[list[float]]) -> None:
    shared = Acceptance(table=torch.tensor(table))
    one = RequestAcceptance(shared)
    for label in (0.0, 1.0) * 50:
        one.add(1, label)
    assert 0.3 < one.mean(1) < 0.7
    assert 0 <= sum(shared.sibling_row(one.mean(1))) <= 2


def test_the_bias_is_the_ratio_of_accepted_to_expected_tokens() -> None:
    """Rounds accept 0, 1, 2, 3 at random where half as much was expected without the bias."""
    draw, bias, values = Random(0), Bias(), list[float]()
    for n in range(2000):
        bias.add(draw.choice((0, 1, 2, 3)), bias.value * 0.75)
        if n > 500:
            values.append(bias.value)
    assert sum(values) / len(values) == pytest.approx(2.0, rel=0.1)
    assert min(values) > 1.5
    for _ in range(2000):
        bias.forget()
    assert bias.value == pytest.approx(1.0)


def probe(accepted: int, mean: float) -> tuple[Round, RequestAcceptance]:
    """A round of one request that has accepted tokens with this estimate at every depth."""
    estimate = RequestAcceptance(Acceptance(table=torch.full((16, 1), mean)))
    request = ActiveRequest(0, Request([0, 1], 8), Random(0))
    request.out.accepted = [accepted]
    return Round([request], [estimate], Choice(chain_shape(4), 2.0, 1.0), 1.0), estimate


@pytest.mark.parametrize(("accepted", "mean"), [(1, 0.05), (1, 0.3), (3, 0.3), (4, 0.6), (0, 0.3)])
def test_estimates_begin_afresh_where_the_text_has_probably_changed(
    accepted: int, mean: float
) -> None:
    """The odds of a change in the rounds before, times the ratio of the likelihoods, exceed 1."""
    for waited in (1, 2, 4, 8, 64):
        last, estimate = probe(accepted, mean)
        last.restart(waited)
        changed = accepted > 0 and waited / PASSAGE * (AFRESH / mean) ** accepted > 1
        assert (estimate.mean(1) > mean + 0.01) == changed
