"""How sure the drafter is, and how often it is right: `calibration.json` beside a run's drafter.

Measured by teacher forcing on answers that the target has written greedily in a report of the run,
so nothing is decoded. A guess at depth d, row t counts where a round could have begun at row t
(as in `ranks.py`). Its confidence is the drafter's softmax chance of its own favourite at
temperature 1, over its draft vocabulary: what `decode.confidence` asks about and what a dynamic
tree multiplies along a path. It is right where the target's favourite is the same token.

A drafter is calibrated where, of the guesses it gives a chance of 0.8, eight in ten are right. The
error of a depth is the mean distance between the two over ten bins of confidence, weighted by
guesses: expected calibration error.

Source: Guo et al. 2017, "On Calibration of Modern Neural Networks", section 2, arXiv:1706.04599.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from rich.console import Console
from torch import Tensor

from outrider.conf.errors import Damaged, RunError
from outrider.conf.files import fingerprint, read_json, write_json
from outrider.eval.rank_tables import guesses_of, pairs
from outrider.eval.report import Report
from outrider.models.drafter import Drafter, Trace
from outrider.train.objective import Teacher
from outrider.train.settings import Config

FILE, FORMAT = "calibration.json", "outrider-calibration-1"
BINS = 10


def calibrate(config: Config, reports: dict[str, Report], console: Console) -> None:
    """Measure a run's drafter and write `<run.dir>/calibration.json`.

    Raises:
        RunError: there is no drafter, or no report with greedy answers.
    """
    from outrider.eval.measure import told
    from outrider.models.formats import native
    from outrider.models.load import load
    from outrider.train import distributed as start

    folder = Path(config.run.dir)
    greedy = [out for out, r in reports.items() if not r.setting["temperature"] and r.outputs]
    if not greedy or not (folder / "drafter").is_dir():
        message = f"{folder} has no drafter with a report of greedy answers."
        raise RunError(message, f"Measure one first: outrider eval run.dir={folder}")
    start.use_cores()
    target = load(config.target, start.device()).target
    drafter, _ = native.load(folder / "drafter", target)
    drafter.change(target)
    target.set_taps(drafter.taps)
    rows = reports[greedy[0]].outputs
    with console.status("the drafter is asked how sure it is"):
        answers = ((row["prompt_ids"], row["baseline_ids"] or row["output_ids"]) for row in rows)
        traces = (told(target, *pair) for pair in answers if len(pair[1]) > 1)
        depths = min(config.drafter.depths, drafter.reach)
        found = reliability(drafter, target, traces, depths)
    about = {"report": greedy[0], "drafter": fingerprint(drafter.state_dict())}
    write_json(folder / FILE, {"format": FORMAT, **about, "depths": described(found)})


@torch.no_grad()
def reliability(
    drafter: Drafter, target: Teacher, traces: Iterable[Trace], depths: int
) -> Float[Tensor, "D bins 3"]:
    """Per depth and bin of confidence: guesses, the sum of their confidence, those that were right.

    Args:
        traces: with the drafter's taps; answers are the target's own greedy words.
    """
    sums = torch.zeros(depths, BINS, 3, dtype=torch.float64)
    for trace in traces:
        guesses = guesses_of(drafter, trace, depths)
        for guess, p, logits in pairs(drafter, target, trace, guesses, 0.0):
            sure, token = logits.double().softmax(-1).max(-1)
            right = p.gather(1, drafter.vocab.to_target(token)[:, None])[:, 0]
            each = torch.stack([torch.ones_like(sure), sure, right], dim=1)
            place = (sure * BINS).long().clamp(max=BINS - 1).cpu()
            sums[guess.depth - 1].index_add_(0, place, each.cpu())
    return sums


def described(found: Float[Tensor, "D bins 3"]) -> list[dict[str, Any]]:
    """For json: means of the bins that have guesses, and the error of every depth."""
    depths = []
    for depth, bins in enumerate(found.tolist(), start=1):
        count = sum(guesses for guesses, _, _ in bins)
        rows = [
            {"from": i / BINS, "guesses": int(n), "confidence": sure / n, "right": right / n}
            for i, (n, sure, right) in enumerate(bins)
            if n
        ]
        error = sum(abs(sure - right) for _, sure, right in bins) / max(1, count)
        depths.append({"depth": depth, "guesses": int(count), "error": error, "bins": rows})
    return depths


def read_calibration(file: Path) -> dict[str, Any] | None:
    """
    Raises:
        Damaged: it is not what `calibrate` writes.
    """
    if not file.is_file():
        return None
    fix = f"Measure it again: outrider report run.dir={file.parent} report.measure=true"
    content = read_json(file, fix)
    if content.get("format") != FORMAT:
        raise Damaged(f"{file} is not a calibration of this format ({FORMAT}).", fix)
    return content
