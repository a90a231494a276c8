"""Checkpoints written in the background, and the retention of old ones."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from outrider.conf.errors import CorruptFile
from outrider.conf.files import remove_folder
from outrider.conf.schema import TrainConfig
from outrider.train import checkpoint


class BackgroundWriter:
    """A thread that runs one job at a time and re-raises its errors."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Start a job once the one before is done, or raise the error of that one."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,))
        self._thread.start()

    def wait(self) -> None:
        """Wait for the job; raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # raised by the next `submit` or `wait`
            self._error = error


class CheckpointWriter(BackgroundWriter):
    """Writes checkpoints of one run folder and removes those that need not stay."""

    def __init__(self, folder: Path, train: TrainConfig) -> None:
        super().__init__()
        self.folder, self.keep_last, self.keep_every = folder, train.keep_last, train.keep_every

    def save(self, tensors: dict[str, Tensor], progress: checkpoint.Progress) -> None:
        """Write a checkpoint while training goes on, which must not change the arguments."""
        self.submit(partial(self._write, tensors, progress))

    def _write(self, tensors: dict[str, Tensor], progress: checkpoint.Progress) -> None:
        folder = self.folder / "checkpoints"
        checkpoint.save(folder, tensors, progress, self.keep_last, self.keep_every)
        # best drafters that no checkpoint refers to, except for the newest one
        saved = checkpoint.list_checkpoints(folder)
        try:
            steps = {checkpoint.read_state(place)[0].best_step for place in saved}
        except CorruptFile:  # what it refers to is unknown: all stay
            return
        for best in checkpoint.list_checkpoints(self.folder / "best"):
            step = checkpoint.step_of(best)
            if step < progress.best_step and step not in steps:
                remove_folder(best)
