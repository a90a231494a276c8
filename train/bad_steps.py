"""Steps that are left out: their loss is not a number, or far above those before them.

What is judged is the loss of the whole step, summed over micro-batches and ranks, before any weight
changes, so that all ranks decide alike. A run that has left out `train.skip_bad` steps stops at the
next bad one. The recent losses are part of a run's progress: continued, it judges as before.

Source: loss-spike handling of PaLM (arXiv:2204.02311, section 5.1: skip the batches around a
spike). Differs: the spike's own step is left out, nothing is rolled back.
"""

import math
import statistics
from typing import Any

RECENT = 64  # losses that a spike is measured against
ENOUGH = 8  # of them; before that nothing is called a spike


class Guard:
    """Judges steps; remembers in `progress` what it has seen."""

    def __init__(self, progress: Any, skip_bad: int, spike: float | None) -> None:
        """
        Args:
            progress: has `recent`, losses of steps that were taken, and `skipped`.
            skip_bad: steps that may be left out in the whole run.
            spike: a loss so many times the median of the recent ones is bad; None: no loss is.
        """
        self.progress, self.skip_bad, self.spike = progress, skip_bad, spike

    @property
    def on(self) -> bool:
        """Whether anything is to be judged that does not simply stop the run."""
        return self.skip_bad > 0 or self.spike is not None

    def wrong(self, loss: float) -> str:
        """What is wrong with a step of this loss; "" where nothing is, and it is remembered."""
        recent = self.progress.recent
        if not math.isfinite(loss):
            return f"its loss is {loss}"
        if self.spike is not None and len(recent) >= ENOUGH:
            usual = statistics.median(recent)
            if loss > self.spike * usual:
                return f"its loss is {loss:.4g}, and {usual:.4g} was usual"
        recent.append(loss)
        del recent[:-RECENT]
        return ""

    def may_skip(self) -> bool:
        """Count a bad step; whether the run may go on without it."""
        if self.progress.skipped >= self.skip_bad:
            return False
        self.progress.skipped += 1
        return True
