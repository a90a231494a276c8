"""Calibration of a drafter's confidence: `calibration.json` beside a run's drafter.

Measured by teacher forcing on greedy answers in a report of the run, so nothing is decoded. A
guess at depth d, row t counts where a round could have begun at row t (as in `rank_tables.py`).
Its confidence is `Drafter.log_confidence`, by default the top-1 softmax probability at temperature
1 over its draft vocabulary. A guess is correct if the target's top-1 token is the same. The error
of a depth is the expected calibration error: the mean distance between confidence and accuracy over
ten bins of confidence, weighted by guesses.

Greedy decoding with the same weights maps confidence to this accuracy
(`models/drafting/calibration.py`) before `decode.confidence` compares it and dynamic trees multiply
it along a path.

Source: Guo et al. 2017, "On Calibration of Modern Neural Networks", section 2, arXiv:1706.04599.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from rich.console import Console
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.conf.files import write_json
from outrider.conf.schema import Config
from outrider.conf.tensor_files import fingerprint
from outrider.eval.calibration_file import FILE, FORMAT
from outrider.eval.rank_tables import guesses_to_depth, teacher_pairs
from outrider.eval.report import Report
from outrider.models.decode.acceptance import BINS, bin_of
from outrider.models.drafting.drafter import Drafter
from outrider.models.interface import Trace
from outrider.train.teacher import TargetHead


def calibrate(config: Config, reports: dict[str, Report], console: Console) -> None:
    """Measure a run's drafter and write `<run.dir>/calibration.json`.

    Raises:
        RunError: there is no drafter, or no report with greedy answers.
    """
    from outrider.eval.measure import answered_trace
    from outrider.eval.open_drafter import load_run_models

    folder = Path(config.run.dir)
    greedy = [out for out, r in reports.items() if not r.setting["temperature"] and r.outputs]
    if not greedy or not (folder / "drafter").is_dir():
        message = f"{folder} has no drafter with a report of greedy answers."
        raise RunError(message, f"Measure one first: outrider eval run.dir={folder}")
    (target, *_), drafter = load_run_models(config)
    rows = reports[greedy[0]].outputs
    with console.status("measuring calibration"):
        answers = ((row["prompt_ids"], row["baseline_ids"] or row["output_ids"]) for row in rows)
        traces = (answered_trace(target, *pair) for pair in answers if len(pair[1]) > 1)
        depths = min(config.drafter.depths, drafter.max_depth)
        sums = reliability(drafter, target, traces, depths)
    about = {"report": greedy[0], "drafter": fingerprint(drafter.state_dict())}
    write_json(folder / FILE, {"format": FORMAT, **about, "depths": depth_summaries(sums)})


@torch.no_grad()
def reliability(
    drafter: Drafter, target: TargetHead, traces: Iterable[Trace], depths: int
) -> Float[Tensor, "D bins 3"]:
    """Return sums per depth and bin of confidence: guesses, their confidence, correct guesses.

    The traces have the drafter's taps, and greedy answers of the target.
    """
    sums = torch.zeros(depths, BINS, 3, dtype=torch.float64)
    for trace in traces:
        guesses = guesses_to_depth(drafter, trace, depths)
        for guess, p, logits in teacher_pairs(drafter, target, trace, guesses, 0.0):
            log_q = logits.double().log_softmax(-1)
            confidence = drafter.log_confidence(log_q, guess.depth, guess.hidden).exp()
            token = log_q.argmax(-1, keepdim=True)
            correct = p.gather(1, drafter.vocab.to_target(token))[:, 0]
            terms = torch.stack([torch.ones_like(confidence), confidence, correct], dim=1)
            sums[guess.depth - 1].index_add_(0, bin_of(confidence).cpu(), terms.cpu())
    return sums


def depth_summaries(sums: Float[Tensor, "D bins 3"]) -> list[dict[str, Any]]:
    """Return for json the means of non-empty bins, and the error of every depth."""
    depths = []
    for depth, bins in enumerate(sums.tolist(), start=1):
        count = sum(guesses for guesses, _, _ in bins)
        rows = [
            {"from": i / BINS, "guesses": int(n), "confidence": total / n, "right": correct / n}
            for i, (n, total, correct) in enumerate(bins)
            if n
        ]
        error = sum(abs(total - correct) for _, total, correct in bins) / max(1, count)
        depths.append({"depth": depth, "guesses": int(count), "error": error, "bins": rows})
    return depths
