"""Calibration: a worked example, and equality with a loop over rows."""

from pathlib import Path

import pytest
import torch

from outrider.conf.compose import compose
from outrider.conf.errors import RunError
from outrider.eval.calibration import calibrate, depth_summaries, reliability
from outrider.eval.calibration_file import read_calibration
from outrider.models.decode.acceptance import BINS
from outrider.train.settings import parse
from tests import tiny
from tests.runs import QUIET
from tests.test_rank_tables import noisy_drafter


def test_depth_summaries_worked_example() -> None:
    """Four guesses at 0.55, half of them correct; one correct guess at 0.95."""
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
def test_reliability_equals_loops_over_rows() -> None:
    """The index rule, row by row: the guess at depth d, row t against the target's row t + d."""
    target = tiny.target()
    trace = tiny.packed_trace(target)
    drafter = noisy_drafter(target, trace)
    sums = reliability(drafter, target, [trace], tiny.DEPTHS)
    expected = torch.zeros_like(sums)
    for guess in drafter.unroll(trace):
        counts = torch.stack([trace.supervised_mask(d) for d in range(guess.depth + 1)]).all(0)
        for row, t in counts.nonzero().tolist():
            probabilities = drafter.head(tiny.spread(guess, trace)[row, t]).double().softmax(-1)
            drafted = int(drafter.vocab.to_target(probabilities.argmax()))
            correct_token = int(target.logits(trace.last[row, t + guess.depth]).argmax())
            bin_of = expected[guess.depth - 1, min(BINS - 1, int(probabilities.max() * BINS))]
            bin_of += torch.tensor(
                [1.0, float(probabilities.max()), float(drafted == correct_token)]
            )
    guesses, _, right = sums.sum((0, 1)).tolist()
    assert 0 < right < guesses, "some guesses are correct"
    torch.testing.assert_close(sums, expected)


def test_run_without_greedy_answers_raises(tmp_path: Path) -> None:
    config = parse(compose([f"run.dir={tmp_path}"]))
    with pytest.raises(RunError, match="outrider eval"):
        calibrate(config, {}, QUIET)
    assert read_calibration(tmp_path) is None
