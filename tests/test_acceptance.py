"""Estimates of acceptance: first values from a measured table, the bias of trees, changed texts."""

from collections.abc import Sequence
from random import Random

import pytest
import torch
from torch import Tensor

from outrider.models.decode.acceptance import (
    AFRESH,
    BINS,
    CALIBRATED,
    GUESSED,
    MEASURED,
    Acceptance,
    AcceptanceTable,
    Bias,
    RequestAcceptance,
)
from outrider.models.decode.auto.chain_growth import ChainGrowth
from outrider.models.decode.auto.choice import ChainCosts, Choice
from outrider.models.decode.auto.outcomes import PASSAGE, Round
from outrider.models.decode.auto.policy import Auto
from outrider.models.decode.costs.factors import LOOK_UP
from outrider.models.decode.costs.round_costs import chain_shape
from outrider.models.decode.draft_context import DraftContext
from outrider.models.decode.policy import Chain, Draft
from outrider.models.decode.request import ACCEPTED, ActiveRequest, Request
from outrider.models.decode.rules.rule_table import BEST
from outrider.models.drafting.calibration import Bin, Calibration
from tests import tiny
from tests.tiny import ScriptedDrafter, random_logits


class Undecided(ScriptedDrafter):
    """It abstains where the row has no finite logit."""

    may_abstain = True


def test_estimates_begin_with_the_measured_table() -> None:
    """Siblings are shares of what the first child misses; the last row stands for deeper levels."""
    table = torch.tensor([[0.5, 0.2, 0.1], [0.4, 0.3, 0.1]])
    shared = Acceptance(table=AcceptanceTable(table))
    one = RequestAcceptance(shared)
    assert [one.mean(depth) for depth in (1, 2, 3, 16, 40)] == pytest.approx([0.5, *[0.4] * 4])
    assert [rate.mean for rate in shared.siblings] == pytest.approx([0.4, 0.2, 0.06])
    for _ in range(5):
        one.add(1, 1.0)
    assert shared.levels[0].mean == pytest.approx((MEASURED * 0.5 + 5) / (MEASURED + 5), abs=0.01)


@pytest.mark.parametrize("table", [[[1.0]], [[0.0]], [[1.0, 0.0]], [[0.0, 1.0], [0.0, 0.0]]])
def test_certain_tables_leave_estimates_that_learn(table: list[list[float]]) -> None:
    shared = Acceptance(table=AcceptanceTable(torch.tensor(table)))
    one = RequestAcceptance(shared)
    for label in (0.0, 1.0) * 50:
        one.add(1, label)
    assert 0.3 < one.mean(1) < 0.7
    assert 0 <= sum(shared.sibling_row(one.mean(1))) <= 2


@pytest.mark.parametrize("drawn", [False, True])
def test_estimates_by_confidence_begin_as_measured(drawn: bool) -> None:
    """Few rows of a bin are mixed with the first guess, many weigh MEASURED; deeper levels too."""
    bins = torch.zeros(2, BINS, 2)
    bins[0, 1] = torch.tensor([4.0, 3.0])
    bins[1, 9] = torch.tensor([4000.0, 1000.0])
    table = AcceptanceTable(torch.full((2, 1), 0.5), bins)
    one = RequestAcceptance(Acceptance(drawn=drawn, table=table))
    low, high = (AFRESH, AFRESH) if drawn else (0.15, 0.95)
    assert one.given(1, 0.19) == pytest.approx((GUESSED * low + 3) / (GUESSED + 4))
    expected = (GUESSED * high + MEASURED / 4) / (GUESSED + MEASURED)
    assert [one.given(depth, 0.99) for depth in (2, 3, 16, 40)] == pytest.approx([expected] * 4)
    assert one.given(1, 0.99) == pytest.approx(high)
    assert one.given(2, 0.19) == pytest.approx(low)
    for _ in range(100):
        one.add(2, 1.0, 0.99)
    assert one.shared.bins[1][9].mean > 0.8


class Mixed(ScriptedDrafter):
    """Its rows are those of several drafters."""

    is_composite = True


@pytest.mark.parametrize("case", ["trained", "calibrated", "composite", "look-up"])
def test_measured_bins_are_used_for_the_confidence_that_they_were_measured_with(case: str) -> None:
    """A calibrated one is mapped to the accuracy, greedily; that of mixed rows is another."""
    bins = torch.zeros(1, BINS, 2)
    bins[0, 5] = torch.tensor([100.0, 100.0])
    drafter = (Mixed if case == "composite" else ScriptedDrafter)(random_logits(8), 8)
    if case == "calibrated":
        drafter.calibration = Calibration([[Bin(0.5, 10, 0.5)]])
    policy = Auto(table=AcceptanceTable(torch.full((1, 1), 0.5), bins))
    policy.wrap(drafter, tiny.target())
    kind = LOOK_UP if case == "look-up" else ""
    greedy, drawn = (RequestAcceptance(policy._shared(kind, one)) for one in (False, True))
    assert greedy.shared.bins[0][0].labels == (CALIBRATED if case == "calibrated" else GUESSED)
    assert (greedy.given(1, 0.55) == pytest.approx(0.55)) is (case != "trained")
    assert (drawn.given(1, 0.55) == pytest.approx(AFRESH)) is (case in ("composite", "look-up"))


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


def probe(accepted: Sequence[int], mean: float) -> tuple[Round, list[RequestAcceptance]]:
    """A round with chains of 4, of requests with this estimate at every depth."""
    table = AcceptanceTable(torch.full((16, 1), mean))
    estimates = [RequestAcceptance(Acceptance(table=table)) for _ in accepted]
    requests = [
        ActiveRequest(slot, Request([0, 1], 8), Random(slot)) for slot in range(len(accepted))
    ]
    for one, count in zip(requests, accepted, strict=True):
        one.out.accepted, one.out.drafted = [count], [4]
    return Round(requests, estimates, Choice(chain_shape(4), 2.0, 1.0), 1.0), estimates


@pytest.mark.parametrize("mean", [0.05, 0.3, 0.6])
@pytest.mark.parametrize(
    "accepted", [(0,), (1,), (3,), (4,), (0, 0, 0), (1, 0, 0), (1, 4, 0), (2, 4, 3)]
)
def test_estimates_begin_afresh_where_the_text_has_probably_changed(
    accepted: Sequence[int], mean: float
) -> None:
    """The odds of a change in the rounds before, times the ratio of the likelihoods, exceed 1."""
    count, rejected = sum(accepted), sum(one < 4 for one in accepted)
    for waited in (1, 2, 4, 8, 64):
        last, estimates = probe(accepted, mean)
        last.restart(waited)
        ratio = (AFRESH / mean) ** count * ((1 - AFRESH) / (1 - mean)) ** rejected
        changed = min(1, waited / PASSAGE) * ratio > 1
        for one, estimate in zip(accepted, estimates, strict=True):
            assert (estimate.mean(1) > mean + 0.01) == (changed and one > 0)


def test_a_text_that_ends_within_its_draft_hides_the_next_level() -> None:
    """Its draft has a token less that is rejected, so that a change is more probable."""
    restarted = set[bool]()
    for reason in ("", "end token"):
        last, (estimate,) = probe([1], 0.3)
        out = last.requests[0].out
        out.stop_reason, out.origins = reason, [ACCEPTED]
        last.restart(6)
        restarted.add(estimate.mean(1) > 0.31)
    assert restarted == {False, True}


def test_a_rejection_where_acceptance_is_high_restarts_nothing() -> None:
    """Of 0.95 accepted tokens a rejected one does not show that the text is better now."""
    last, (estimate,) = probe([1], 0.95)
    last.restart(256)
    assert estimate.mean(1) == pytest.approx(0.95)


def test_one_token_by_chance_restarts_no_batch() -> None:
    """One of four drafts has a right token, as one of four does by the estimates."""
    last, estimates = probe([1, 0, 0, 0], 0.25)
    last.restart(256)
    assert [one.mean(1) for one in estimates] == pytest.approx([0.25] * 4)


def test_a_request_that_abstains_is_not_taught_by_a_level_in_vain() -> None:
    """Two requests, no token submitted: the confidence of the one that abstained says nothing."""

    def row(text: Sequence[int]) -> Tensor:
        return torch.full((8,), float("-inf")) if text[0] == 2 else random_logits(8)(tuple(text))

    estimates = [RequestAcceptance(Acceptance()) for _ in range(2)]
    costs = ChainCosts([0.0, 1.0, 2.0], [1.0, 9.0, 18.0])
    growth = ChainGrowth(estimates, costs, 1.0, 2, BEST)

    class Growing(Chain):
        def propose(self, context: DraftContext) -> Draft:
            return growth.propose(context)

    drafter = Undecided(row, 8)
    tiny.propose(Growing(2), drafter, [(1, 3), (2, 3)], limits=(9, 9), seeds=(0, 0))
    assert growth.confidences == []
    assert [one is None for one in growth.unsubmitted] == [False, True]
    requests = [ActiveRequest(slot, Request([0, 1], 8), Random(slot)) for slot in (0, 1)]
    for one in requests:
        one.out.accepted, one.out.drafted = [0], [0]
    last = Round(requests, estimates, Choice(chain_shape(1), 2.0, 1.0), 1.0)
    last.unsubmitted = growth.unsubmitted
    last.teach()
    assert [one.levels[0].labels for one in estimates] == [1.0, 0.0]
