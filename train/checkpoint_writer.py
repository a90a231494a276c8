"""Checkpoints written in the background, and the retention of old ones."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from outrider.conf.files import read_json, remove_folder
from outrider.conf.schema import TrainConfig
from outrider.train import checkpoint


class BackgroundWriter:
    """A thread that runs one job at a time and re-raises its errors."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Start a job once the one before is done.

        Raises:
            Exception: the error of the job before.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,))
        self._thread.start()

    def wait(self) -> None:
        """Wait for the job.

        Raises:
            Exception: its error.
        """
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


class CheckpointWriter:
    """Writes checkpoints of one run folder and removes those that need not stay."""

    def __init__(self, folder: Path, train: TrainConfig) -> None:
        self.folder = folder
        self.retention = checkpoint.RetentionPolicy(train.keep_last, train.keep_every)
        self._background = BackgroundWriter()

    def submit(self, tensors: dict[str, Tensor], progress: checkpoint.Progress) -> None:
        """Write a checkpoint while training goes on.

        Args:
            tensors, progress: copies that training does not change.

        Raises:
            Exception: the error of the checkpoint before.
        """
        self._background.submit(partial(self._write, tensors, progress))

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            Exception: the error of the last checkpoint.
        """
        self._background.wait()

    def _write(self, tensors: dict[str, Tensor], progress: checkpoint.Progress) -> None:
        checkpoint.save(self.folder / "checkpoints", tensors, progress, self.retention)
        self._remove_drafters(progress.best_step)

    def _remove_drafters(self, best_step: int) -> None:
        """Remove best drafters that no checkpoint refers to, except for the newest one."""
        files = [f / "state.json" for f in checkpoint.list_checkpoints(self.folder / "checkpoints")]
        steps = {read_json(f, checkpoint.FIX)["progress"]["best_step"] for f in files}
        for folder in (self.folder / "best").glob("step-*"):
            step = int(folder.name.removeprefix("step-"))
            if step < best_step and step not in steps:
                remove_folder(folder)
