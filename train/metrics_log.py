"""The metrics of a run: `metrics.jsonl`, a progress bar and the configured trackers.

`METRICS` defines every metric; `x@d` is x at depth d.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.conf.errors import CorruptFile
from outrider.conf.files import LINES_BYTES, append, parse_json, read_bytes, write
from outrider.conf.json_shapes import number, read_rows
from outrider.conf.schema import Config
from outrider.data.reporter import LINE


class Metric(NamedTuple):
    """The definition of a logged number."""

    unit: str
    reduction: str
    meaning: str


METRICS = {
    "loss": Metric("nats", "mean over supervised rows",
                   "the terms of drafter.loss together, depth d"),
    "term.<name>": Metric("nats", "mean over rows it counts",
                          "a single term, if the loss has several"),
    "agree": Metric("share", "mean over supervised rows", "drafter's top-1 token is the target's"),
    "alpha": Metric("share", "mean over supervised rows", "sum of min(p, q) at temperature 1"),
    "accept_length": Metric("tokens", "emitted / expected rounds",
                            "greedy tau of a chain of drafter.depths"),
    "accept_length_sampling": Metric("tokens", "emitted / expected rounds",
                                     "the same at temperature 1"),
    "target_loss": Metric("nats", "mean over answer rows", "loss of the changed target"),
    "objective": Metric("nats", "sum of weights x losses", "what is minimised"),
    "grad_norm": Metric("1", "of the last step", "norm of the gradient before clipping"),
    "update_ratio": Metric("1", "of the last step",
                           "norm of the step / norm of the weights (not under zero3)"),
    "skipped": Metric("steps", "since the start", "bad steps that were skipped"),
    "lr": Metric("1", "of the last step", "learning rate"),
    "tokens_per_second": Metric("1/s", "average since the start",
                                "tokens trained on, all ranks, evaluations included"),
}  # fmt: skip


# kinds of lines: held-out text and the target's own answers; the same with averaged weights
EVALUATIONS = ("held", "own", "held_ema", "own_ema")
LINE_SHAPE = {"step": int, "kind": str, str: (number, str, None)}


@runtime_checkable
class Logger(Protocol):
    """What `MetricsLog` passes its lines to."""

    def log(self, step: int, kind: str, values: dict[str, float]) -> None: ...


class MetricsLog:
    """Log of the metrics of a run, written by the main rank only."""

    def __init__(
        self, config: Config, console: Console, main: bool,
        trackers: Sequence[Logger] = (),
    ) -> None:  # fmt: skip
        self.file, self.console = Path(config.run.dir) / "metrics.jsonl", console
        self.main, self.last_line = main, time.monotonic()
        self.bar = Progress(
            TextColumn("training"), BarColumn(), TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(), console=console, disable=not (main and console.is_terminal),
        )  # fmt: skip
        self.task = self.bar.add_task("training", total=1.0, status="")
        self.trackers = trackers

    def __enter__(self) -> "MetricsLog":
        self.bar.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.bar.stop()

    def rewind(self, step: int) -> None:
        """Remove lines after a step that training continues from; it logs that step again."""
        if self.main and self.file.exists():
            try:
                text = read_bytes(self.file, LINES_BYTES).decode()
            except (OSError, ValueError) as error:
                fix = "Remove it, and the run continues with an empty one."
                raise CorruptFile(f"{self.file} cannot be read: {error}", fix) from None
            lines = [x for x in map(_parse_line, text.splitlines()) if x]
            earlier = [
                x
                for x in lines
                if x["step"] < step or (x["step"] == step and x["kind"] in EVALUATIONS)
            ]
            write(self.file, "".join(json.dumps(line) + "\n" for line in earlier).encode())

    def log(self, step: int, kind: str, values: dict[str, float]) -> None:
        """Append a line: {"step": .., "kind": "train", "skipped" or one of EVALUATIONS, ...}."""
        if not self.main:
            return
        append(self.file, json.dumps({"step": step, "kind": kind, **values}) + "\n")
        for tracker in self.trackers:
            tracker.log(step, kind, values)

    def update_progress(self, fraction: float, status: str) -> None:
        """Move the bar; without a terminal, print a line per minute."""
        now = time.monotonic()
        if self.main and not self.console.is_terminal and now - self.last_line > LINE:
            self.last_line = now
            self.console.print(f"{fraction:.0%}  {status}")
        self.bar.update(self.task, completed=fraction, status=status)

    def print(self, text: str) -> None:
        if self.main:
            self.bar.console.print(text)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Read the `metrics.jsonl` of a run, also while it is written; [] without one."""
    file, fix = folder / "metrics.jsonl", "Restore it from a copy, or train again."
    return read_rows(file, fix, LINE_SHAPE, torn=True) if file.is_file() else []


def _parse_line(line: str) -> dict[str, Any]:
    """Return a line of the log; {} for one that a crash truncated, or that has no step and kind."""
    try:
        value = parse_json(line)
    except ValueError:
        return {}
    known = isinstance(value, dict) and type(value.get("step")) is int and "kind" in value
    return value if known else {}
