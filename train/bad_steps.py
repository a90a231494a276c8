"""Detection of bad steps: a loss that is NaN or infinite, or far above the recent ones.

The loss of the whole step, summed over micro-batches and ranks, is checked before any weight
changes, so that all ranks decide alike. The recent losses are part of a run's progress, so that a
continued run decides as an uninterrupted one.

Source: loss-spike handling of PaLM (arXiv:2204.02311, section 5.1: skip the batches around a
spike). Differs: only the spike's own step is skipped, and nothing is rolled back.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from outrider.conf.errors import RunError
from outrider.conf.tensor_files import write_tensors
from outrider.models.interface import Batch
from outrider.train.checkpoint import Progress

RECENT = 64  # losses that a spike is compared with
ENOUGH = 8  # losses before the first step can be a spike


class BadStepGuard:
    """Detector of bad steps by `train.skip_bad` and `train.spike`; counts skipped steps."""

    def __init__(self, progress: Progress, skip_bad: int, spike: float | None) -> None:
        self.progress, self.skip_bad, self.spike = progress, skip_bad, spike

    @property
    def enabled(self) -> bool:
        """Whether steps may be skipped or spikes are detected."""
        return self.skip_bad > 0 or self.spike is not None

    def problem(self, loss: float) -> str:
        """Return what is wrong with a step of this loss; "" if nothing is, and store the loss."""
        recent = self.progress.recent
        if not math.isfinite(loss):
            return f"its loss is {loss}"
        if self.spike is not None and len(recent) >= ENOUGH:
            median = statistics.median(recent)
            if loss > self.spike * median:
                return f"its loss is {loss:.4g}, and the recent median is {median:.4g}"
        recent.append(loss)
        del recent[:-RECENT]
        return ""

    def skip(self, problem: str, file: Path) -> str:
        """Skip the current step, or stop with a `RunError`; return the message for the user."""
        message = f"Step {self.progress.step} is bad: {problem}; its batch is in {file}."
        if self.progress.skipped >= self.skip_bad:
            fix = "Look at the batch, lower train.lr, or allow more with train.skip_bad."
            raise RunError(message, fix)
        self.progress.skipped += 1
        return f"{message} Skipped ({self.progress.skipped} of {self.skip_bad})."


def save_batch(folder: Path, step: int, rank: int, batches: Sequence[Batch]) -> Path:
    """Write the rows of a bad step on this rank; return the file."""
    file = folder / f"bad-batch-step-{step:08d}-rank-{rank}.safetensors"
    rows = Batch(*(torch.cat(field) for field in zip(*batches, strict=True)))
    write_tensors(file, rows._asdict(), {})
    return file
