"""Experiment trackers: Weights & Biases and TensorBoard.

Each tracker runs in a thread of its own, which opens it with the first metric. The run never waits
for it: what it does not take in time is dropped and counted. Its first error is printed once, and
the run continues without it. The run folder has everything: `metrics.jsonl`, `eval/`.
"""

import queue
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from outrider.conf.files import write
from outrider.conf.schema import Config, to_dict
from outrider.conf.shown_text import mask_values

IDENTITY = "wandb-id.txt"  # in the run folder: id of the wandb run
QUEUE_SIZE = 1000  # calls that may wait for a tracker
PATIENCE = 30.0  # seconds that the end of a run waits for them


class AnswerSample(NamedTuple):
    """A decoded prompt."""

    id: str
    category: str
    prompt: str
    tau: float | None
    counts: dict[str, int]  # tokens by origin
    marked: str  # its text with the origin of the tokens
    coloured: str  # the same as html


class ReportSummary(NamedTuple):
    """Name, headline numbers, sample answers and files of a report."""

    name: str
    numbers: dict[str, float]
    answers: list[AnswerSample]
    files: list[Path]


class Tracker(Protocol):
    """A service that receives metrics and reports."""

    def log(self, step: int, kind: str, values: dict[str, float]) -> None: ...

    def report(self, summary: ReportSummary) -> None: ...

    def close(self) -> None: ...


class Wandb:
    """Weights & Biases; runs of one sweep share WANDB_RUN_GROUP.

    A continued run continues the same wandb run, which ignores steps that are logged again.
    """

    def __init__(self, config: Config) -> None:
        import wandb

        self.wandb: Any = wandb
        settings, folder = config.train.wandb, Path(config.run.dir)
        self.run = wandb.init(
            project=settings.project, mode=settings.mode, dir=str(folder), name=folder.name,
            config=mask_values(to_dict(config)), id=_identity(folder),
            resume="allow" if settings.mode == "online" else None,
            settings=_with_timeouts(wandb.Settings),
        )  # fmt: skip

    def log(self, step: int, kind: str, values: dict[str, float]) -> None:
        self.run.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    def report(self, summary: ReportSummary) -> None:
        """A table of answers, the numbers as summary, the files as an artifact."""
        origins = list(summary.answers[0].counts)
        table = self.wandb.Table(
            ["id", "category", "prompt", "tau", *origins, "[accepted] ~rejected~", "colours"]
        )
        for a in summary.answers:
            html = self.wandb.Html(a.coloured, inject=False)
            table.add_data(a.id, a.category, a.prompt, a.tau, *a.counts.values(), a.marked, html)
        name, numbers = summary.name, summary.numbers
        self.run.log({f"{name}/answers": table})
        self.run.summary.update({f"{name}/{key}": number for key, number in numbers.items()})
        artifact = self.wandb.Artifact(f"{name}-{self.run.id}", "report", metadata=numbers)
        for file in summary.files:
            artifact.add_file(str(file), policy="immutable")  # not copied
        self.run.log_artifact(artifact)

    def close(self) -> None:
        self.run.finish()


def _with_timeouts(settings: Any) -> Any:
    """Return wandb's settings with timeouts: by default it waits forever when the process ends."""
    timeouts = {"init_timeout": PATIENCE, "finish_timeout": PATIENCE}
    known = settings.model_fields  # older versions lack the second
    return settings(**{name: value for name, value in timeouts.items() if name in known})


def _identity(folder: Path) -> str:
    """Return the id of the wandb run, the same when a run is continued."""
    file = folder / IDENTITY
    if not file.is_file():
        write(file, f"{secrets.token_hex(4)}\n".encode())
    return file.read_text().strip()


class TensorBoard:
    """Event files in `<run.dir>/tensorboard`."""

    def __init__(self, config: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(Path(config.run.dir) / "tensorboard"))

    def log(self, step: int, kind: str, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{kind}/{name}", value, step)

    def report(self, summary: ReportSummary) -> None:
        """The numbers, and the answers as text."""
        for name, value in summary.numbers.items():
            self.writer.add_scalar(f"{summary.name}/{name}", value)
        text = "\n\n".join(f"{a.id}: {a.prompt}\n\n{a.marked}" for a in summary.answers)
        indented = "\n".join(f"    {line}" for line in text.split("\n"))
        self.writer.add_text(f"{summary.name}/answers", indented)

    def close(self) -> None:
        self.writer.close()


@contextmanager
def open_trackers(
    config: Config, show: Callable[[str], None], main: bool
) -> Iterator[list["TrackerThread"]]:
    """Yield the configured trackers of the main rank; close them afterwards."""
    trackers = []
    if main and config.train.wandb.mode != "disabled":
        trackers.append(TrackerThread("wandb", partial(Wandb, config), show))
    if main and config.train.tensorboard:
        trackers.append(TrackerThread("tensorboard", partial(TensorBoard, config), show))
    try:
        yield trackers
    finally:
        for tracker in trackers:
            tracker.close()


class TrackerThread:
    """A tracker that runs in a separate thread."""

    def __init__(
        self, name: str, make: Callable[[], Tracker], show: Callable[[str], None],
        patience: float = PATIENCE,
    ) -> None:  # fmt: skip
        """`make` may fail or block forever; `close` waits `patience` seconds at most."""
        self.name, self._show, self._patience = name, show, patience
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(QUEUE_SIZE)
        self.dropped, self.failed = 0, False
        self._thread = threading.Thread(target=self._run, args=(make,), daemon=True)

    def log(self, step: int, kind: str, values: dict[str, float]) -> None:
        """Queue metrics; never waits."""
        copy = dict(values)
        self._enqueue(lambda tracker: tracker.log(step, kind, copy))

    def report(self, summary: ReportSummary) -> None:
        """Queue a report; never waits."""
        self._enqueue(lambda tracker: tracker.report(summary))

    def _enqueue(self, call: Callable[[Tracker], None]) -> None:
        if self.failed:
            return
        if self._thread.ident is None:
            self._thread.start()
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Wait for the queue, for a limited time."""
        if self._thread.ident is None:  # nothing was queued
            return
        with suppress(queue.Full):
            self._calls.put(None, timeout=self._patience)
        self._thread.join(self._patience)
        left = self._calls.qsize() if self._thread.is_alive() else 0
        if not self.failed and self.dropped + left:
            self._show(
                f"{self.name} did not take {self.dropped + left} lines in time; "
                "the run folder has them all"
            )
        self.failed = True  # later errors are not shown

    def _run(self, make: Callable[[], Tracker]) -> None:
        try:
            tracker = make()
            while (call := self._calls.get()) is not None:
                call(tracker)
            tracker.close()
        except BaseException as error:  # no error of a tracker ends the run
            if self.failed:
                return
            self.failed = True
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._show(f"{self.name} is not available ({first_line}); the run continues without it")
