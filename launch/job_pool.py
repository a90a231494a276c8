"""A pool of runs: several at a time, each on its own devices, restarted after a failure.

Every run is a process, local or in a Slurm job (slurm.py), so runs share no memory or settings.
Stopping a sweep stops its runs: they save, and the same command resumes them.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.conf.sweeps import SweepConfig
from outrider.launch.processes import (
    INTERRUPTED,
    POLL_SECONDS,
    ROOT,
    RunHandle,
    open_log,
    train_command,
)
from outrider.models.target.process import THREADS, available_cores

GRACE = 300  # seconds that torchrun gives ranks to save
ShouldStop = Callable[[], bool]


class JobPool:
    """Pool of `sweep.jobs` slots for runs. As a context manager it forwards SIGTERM to its runs."""

    def __init__(self, sweep: SweepConfig) -> None:
        self.sweep, self.stopped = sweep, False
        self._running: set[RunHandle] = set()
        self._slots: queue.Queue[int] = queue.Queue()
        for slot in range(sweep.jobs):
            self._slots.put(slot)

    @property
    def prints(self) -> bool:
        """Whether a run may print to the terminal: one at a time, on this machine."""
        return self.sweep.jobs == 1 and self.sweep.by == "local"

    def __enter__(self) -> "JobPool":
        if threading.current_thread() is threading.main_thread():
            self._previous_handler: Any = signal.signal(signal.SIGTERM, lambda *_: self.stop())
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.stop()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._previous_handler)

    def stop(self) -> None:
        """Make all runs save and exit, and start no more."""
        self.stopped = True
        for process in list(self._running):
            process.terminate()

    def run(
        self, verb: str, words: list[str], log: Path | None = None,
        should_stop: ShouldStop | None = None,
    ) -> int:  # fmt: skip
        """Wait for a slot, run to the end, and restart a failed run up to `sweep.retries` times.

        Args:
            log: file for its output; None: the terminal.
            should_stop: called repeatedly; True makes the run save and end with INTERRUPTED.
        """
        slot = self._slots.get()
        try:
            for _ in range(self.sweep.retries + 1):
                if self.stopped:
                    return INTERRUPTED
                code = self._wait(self._start(verb, words, slot, log), should_stop)
                if code in (0, INTERRUPTED):
                    break
            return code
        finally:
            self._slots.put(slot)

    def _start(self, verb: str, words: list[str], slot: int, log: Path | None) -> RunHandle:
        command, environment = self.command(verb, words), self.run_environment(slot)
        if self.sweep.by == "slurm":
            from outrider.launch.slurm import submit

            return submit(self.sweep, command, environment, log)
        with open_log(log) as output:
            return subprocess.Popen(
                command, env={**os.environ, **environment},
                stdout=output, stderr=None if output is None else subprocess.STDOUT,
            )  # fmt: skip

    def _wait(self, process: RunHandle, should_stop: ShouldStop | None) -> int:
        terminated = False
        self._running.add(process)
        if self.stopped:  # since the check in `run`
            process.terminate()
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                if should_stop is not None and not terminated and should_stop():
                    terminated = True
                    process.terminate()
        except KeyboardInterrupt:  # the run got it too, and saves; a second one ends the waiting
            self.stop()
            process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            self._running.discard(process)
        code = process.returncode
        return INTERRUPTED if terminated or self.stopped or code is None else code

    def command(self, verb: str, words: list[str]) -> list[str]:
        """Return the command of a run: one process, or a launcher of several."""
        if self.sweep.processes == 1 or verb != "train":
            return [sys.executable, "-m", "outrider.launch.cli", verb, *words]
        return [*train_command(self.sweep.processes), *words]

    def run_environment(self, slot: int) -> dict[str, str]:
        """Return the variables to set for a run: its GPUs, its share of the cores."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        group = os.environ.get("WANDB_RUN_GROUP", Path(self.sweep.dir).name)
        grace = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE))
        environment = {
            "PYTHONPATH": path, "WANDB_RUN_GROUP": group, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": grace
        }  # fmt: skip
        if self.sweep.devices:
            environment["CUDA_VISIBLE_DEVICES"] = self.sweep.devices[slot]
        is_slurm, jobs = self.sweep.by == "slurm", self.sweep.jobs
        if is_slurm or jobs > 1:  # ranks share cores
            cores = self.sweep.cores if is_slurm else available_cores() // jobs
            threads = str(max(1, cores // self.sweep.processes))
            environment["OMP_NUM_THREADS"] = environment[THREADS] = threads
        return environment
