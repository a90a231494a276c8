"""How sure the drafter is against how often it is right: bins by hand, and against a loop."""

from pathlib import Path

import pytest
import torch

from outrider.conf.compose import compose
from outrider.conf.errors import RunError
from outrider.eval.calibration import (
    BINS,
    calibrate,
    depth_summaries,
    read_calibration,
    reliability,
)
from outrider.train.settings import parse
from tests import tiny
from tests.runs import QUIET
from tests.test_rank_tables import disturbed


def test_means_and_error_of_the_bins_by_hand() -> None:
    """Four guesses at 0.55, half of them right; one at 0.95 that was right."""
    sums = torch.zeros(1, BINS, 3)
    sums[0, 5] = torch.tensor([4.0, 2.2, 2.0])
    sums[0, 9] = torch.tensor([1.0, 0.95, 1.0])
    (depth,) = depth_summaries(sums)
    assert (depth["depth"], depth["guesses"]) == (1, 5)
    assert [row["from"] for row in depth["bins"]] == [0.5, 0.9]
    assert depth["bins"][0]["confidence"] == pytest.approx(0.55)
    assert depth["bins"][0]["right"] == 0.5
    assert depth["error"] == pytest.approx((0.2 + 0.05) / 5)


@torch.no_grad()
def test_every_place_where_a_round_could_begin_is_counted_once() -> None:
    """The index rule, row by row: the guess at depth d, row t against the target's row t + d."""
    target = tiny.target()
    trace = tiny.packed_trace(target)
    drafter = disturbed(target, trace)
    found = reliability(drafter, target, [trace], tiny.DEPTHS)
    slow = torch.zeros_like(found)
    for guess in drafter.unroll(trace):
        counts = torch.stack([trace.supervised_mask(d) for d in range(guess.depth + 1)]).all(0)
        for row, t in counts.nonzero().tolist():
            chances = drafter.head(guess.hidden[row, t]).double().softmax(-1)
            favourite = int(drafter.vocab.to_target(chances.argmax()))
            said = int(target.logits(trace.last[row, t + guess.depth]).argmax())
            bin_of = slow[guess.depth - 1, min(BINS - 1, int(chances.max() * BINS))]
            bin_of += torch.tensor([1.0, float(chances.max()), float(favourite == said)])
    guesses, _, right = found.sum((0, 1)).tolist()
    assert 0 < right < guesses, "right now and then"
    torch.testing.assert_close(found, slow)


def test_a_run_without_greedy_answers_is_refused_with_a_fix(tmp_path: Path) -> None:
    config = parse(compose([f"run.dir={tmp_path}"]))
    with pytest.raises(RunError, match="outrider eval"):
        calibrate(config, {}, QUIET)
    assert read_calibration(tmp_path / "calibration.json") is None
