"""Runs of a sweep as Slurm jobs, by submitit.

    python train.py -m drafter=eagle,medusa sweep.by=slurm sweep.jobs=8 sweep.partition=a100

A job holds one run: the command that would have been started here is started there, and its exit
code is the job's result. Near the time limit, or when Slurm takes the machine away, the run is told
to save, and the job waits in the queue again. A sweep that was killed finds the jobs it left behind
by `job.txt` beside the run's output, and waits for them.
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from outrider.conf.errors import ConfigError
from outrider.conf.sweeps import SweepConfig
from outrider.launch.job_pool import INTERRUPTED, LOOK, opened

CLUSTER = "slurm"  # in tests submitit's "local": the same interface, processes in place of jobs
AGAIN = 1000  # times that a job may be queued again; the run itself knows when it is done
TAKEN = 60.0  # seconds between Slurm's two signals, and some more
FAILED = 1  # a job that left no exit code: cancelled by somebody, or its machine is gone


@dataclass
class Work:
    """What a job does: start the run, tell it to end when somebody wants that, return its code.

    Attributes:
        command: the run.
        told: what it finds in its environment beside what the job has.
        log: file that its output is added to; None: the job's own.
        stop: when this file appears, the run is to save and end.
    """

    command: list[str]
    told: dict[str, str]
    log: Path | None
    stop: Path

    def __call__(self) -> int:
        if self.stop.exists():  # while it waited in the queue
            return INTERRUPTED
        with opened(self.log) as output:
            self._run = subprocess.Popen(
                self.command, env={**os.environ, **self.told}, preexec_fn=_deaf,
                stdout=output, stderr=None if output is None else subprocess.STDOUT,
            )  # fmt: skip
        asked = False
        while self._run.poll() is None:
            time.sleep(LOOK)
            if not asked and self.stop.exists():
                asked = True
                self._run.terminate()
        if self._run.returncode == INTERRUPTED and not asked:
            time.sleep(TAKEN)  # Slurm told it: the kill comes next, and no result means no end
        return INTERRUPTED if asked else self._run.returncode

    def checkpoint(self) -> Any:
        """Asked by submitit near the limit: the run saves, and the same work is queued again."""
        from submitit.helpers import DelayedSubmission

        self._run.terminate()
        self._run.wait()
        return DelayedSubmission(Work(self.command, self.told, self.log, self.stop))


def _deaf() -> None:
    """Slurm sends submitit's signal to all processes of a job; to a run it would be the end."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


class Job:
    """A job in the queue or at work, with the face of a process."""

    def __init__(self, job: Any, stop: Path, paper: Path) -> None:
        self.job, self._stop, self._paper = job, stop, paper
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and self.job.done():
            self._end(self._code())
        return self.returncode

    def _code(self) -> int:
        from submitit.core.utils import FailedJobError, UncompletedJobError

        try:
            return int(self.job.result())
        except (FailedJobError, UncompletedJobError):
            return INTERRUPTED if self._stop.exists() else FAILED

    def _end(self, code: int) -> None:
        self.returncode = code
        self._stop.unlink(missing_ok=True)
        self._paper.unlink(missing_ok=True)

    def terminate(self) -> None:
        """A run saves and ends; what still waits in the queue is taken out of it."""
        self._stop.touch()
        if self.job.get_info().get("State") == "PENDING":
            with contextlib.suppress(subprocess.CalledProcessError):  # it is gone already
                self.job.cancel()
            self._end(INTERRUPTED)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(LOOK)
        return code


def submit(sweep: SweepConfig, command: list[str], told: dict[str, str], log: Path | None) -> Job:
    """Queue a run, or find the job that an earlier sweep has left at work on it.

    Raises:
        ConfigError: there is no submitit, or no Slurm.
    """
    executor, folder = _executor(sweep, told), _folder(sweep)
    name = re.sub(r"[^\w.-]+", "-", str(log.parent if log else "prepare")).strip("-")
    stop, paper = folder / f"{name}.stop", (log.parent if log else folder) / "job.txt"
    stop.unlink(missing_ok=True)
    if log is not None and (left := _left(paper, folder)) is not None:
        return Job(left, stop, paper)
    executor.update_parameters(name=Path(name).name[-40:])
    job = executor.submit(Work(command, told, log and log.absolute(), stop))
    paper.parent.mkdir(parents=True, exist_ok=True)
    paper.write_text(f"{job.job_id}\n")
    return Job(job, stop, paper)


def _folder(sweep: SweepConfig) -> Path:
    return Path(sweep.dir).absolute() / "slurm"


def check(sweep: SweepConfig) -> None:
    """
    Raises:
        ConfigError: there is no submitit, or no Slurm.
    """
    _executor(sweep, {"PYTHONPATH": ""})


def _executor(sweep: SweepConfig, told: dict[str, str]) -> Any:
    submitit = _submitit()
    folder = _folder(sweep)
    try:
        executor = submitit.AutoExecutor(folder, cluster=CLUSTER, slurm_max_num_timeout=AGAIN)
    except RuntimeError as error:
        why = f"submitit finds no Slurm here: {error}"
        raise ConfigError("sweep.by", sweep.by, why, "Start the sweep on a login node.") from None
    executor.update_parameters(
        timeout_min=max(1, round(60 * sweep.hours)), gpus_per_node=sweep.gpus or None,
        cpus_per_task=sweep.cores, nodes=1, tasks_per_node=1, stderr_to_stdout=True,
        slurm_partition=sweep.partition, slurm_signal_delay_s=sweep.grace,
        slurm_setup=[f"export PYTHONPATH={shlex.quote(told['PYTHONPATH'])}"],
    )  # fmt: skip
    return executor


def _submitit() -> ModuleType:
    try:
        import submitit
    except ImportError:
        why, fix = "Slurm is spoken to by submitit.", "pip install 'outrider[slurm]'"
        raise ConfigError("sweep.by", "slurm", why, fix) from None
    return submitit


def _left(paper: Path, folder: Path) -> Any:
    """A job that waits or works; None where there is none."""
    from submitit import SlurmJob

    if CLUSTER != "slurm" or not paper.is_file():
        return None
    job: Any = SlurmJob(folder, paper.read_text().strip())
    return None if job.done(force_check=True) else job
