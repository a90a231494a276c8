"""Runs of a sweep as Slurm jobs, by submitit.

    python train.py -m drafter=eagle,medusa sweep.by=slurm sweep.jobs=8 sweep.partition=a100

A job runs one command and returns its exit code. Near the time limit, or at preemption, the run
saves and the job is requeued. After a killed sweep, the same command finds its jobs by `job.txt`
beside each run's output and waits for them.
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
from typing import Any

from outrider.conf.errors import ConfigError
from outrider.conf.packages import require_package
from outrider.conf.sweeps import SweepConfig
from outrider.launch.processes import INTERRUPTED, POLL_SECONDS, open_log

EXECUTOR = "slurm"  # tests: submitit's "local", which starts processes instead of jobs
MAX_REQUEUES = 1000  # requeue until the run is finished
KILL_DELAY = 60.0  # seconds, longer than the time between Slurm's two signals
FAILED = 1  # exit code of a job without a result: cancelled, or its machine failed


@dataclass
class SlurmTask:
    """The work of a job: start the run, stop it on request, return its exit code."""

    command: list[str]
    environment: dict[str, str]  # variables to add to the job's
    log: Path | None  # file that output is appended to; None: the job's own output
    stop: Path  # file whose appearance makes the run save and exit

    def __call__(self) -> int:
        if self.stop.exists():  # stopped while the job was queued
            return INTERRUPTED
        with open_log(self.log) as output:
            self._run = subprocess.Popen(
                self.command, env={**os.environ, **self.environment}, preexec_fn=_ignore_sigusr2,
                stdout=output, stderr=None if output is None else subprocess.STDOUT,
            )  # fmt: skip
        stopped = False
        while self._run.poll() is None:
            time.sleep(POLL_SECONDS)
            if not stopped and self.stop.exists():
                stopped = True
                self._run.terminate()
        if self._run.returncode == INTERRUPTED and not stopped:
            time.sleep(KILL_DELAY)  # Slurm's signal: its kill follows, and must find no result
        return INTERRUPTED if stopped else self._run.returncode

    def checkpoint(self) -> Any:
        """Save the run and requeue the same work; submitit calls this near the time limit."""
        from submitit.helpers import DelayedSubmission

        self._run.terminate()
        self._run.wait()
        return DelayedSubmission(SlurmTask(self.command, self.environment, self.log, self.stop))


def _ignore_sigusr2() -> None:
    """Ignore submitit's signal, which Slurm sends to all processes and which would kill a run."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


class Job:
    """A queued or running job, with the interface of a process (`RunHandle`)."""

    def __init__(self, job: Any, stop: Path, id_file: Path) -> None:
        self.job, self._stop, self._id_file = job, stop, id_file
        self.returncode: int | None = None

    def poll(self) -> int | None:
        from submitit.core.utils import FailedJobError, UncompletedJobError

        if self.returncode is None and self.job.done():
            try:
                self._end(int(self.job.result()))
            except (FailedJobError, UncompletedJobError):
                self._end(INTERRUPTED if self._stop.exists() else FAILED)
        return self.returncode

    def _end(self, code: int) -> None:
        self.returncode = code
        self._stop.unlink(missing_ok=True)
        self._id_file.unlink(missing_ok=True)

    def terminate(self) -> None:
        """Make the run save and exit; cancel the job if it is still queued."""
        self._stop.touch()
        if self.job.get_info().get("State") == "PENDING":
            with contextlib.suppress(subprocess.CalledProcessError):  # already gone
                self.job.cancel()
            self._end(INTERRUPTED)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(POLL_SECONDS)
        return code


def submit(
    sweep: SweepConfig, command: list[str], environment: dict[str, str], log: Path | None
) -> Job:
    """Queue a run, or return the job that an earlier sweep queued for it."""
    executor, folder = _executor(sweep, environment), _folder(sweep)
    name = re.sub(r"[^\w.-]+", "-", str(log.parent if log else "prepare")).strip("-")
    stop, id_file = folder / f"{name}.stop", (log.parent if log else folder) / "job.txt"
    stop.unlink(missing_ok=True)
    number = id_file.read_text(errors="replace").strip() if id_file.is_file() else ""
    if log is not None and EXECUTOR == "slurm" and number.isdecimal():
        from submitit import SlurmJob

        earlier: Any = SlurmJob(folder, number)
        if not earlier.done(force_check=True):
            return Job(earlier, stop, id_file)
    executor.update_parameters(name=Path(name).name[-40:])
    job = executor.submit(SlurmTask(command, environment, log and log.absolute(), stop))
    id_file.parent.mkdir(parents=True, exist_ok=True)
    id_file.write_text(f"{job.job_id}\n")
    return Job(job, stop, id_file)


def _folder(sweep: SweepConfig) -> Path:
    return Path(sweep.dir).absolute() / "slurm"


def check(sweep: SweepConfig) -> None:
    """Check that runs can be queued: submitit is installed, and there is a Slurm."""
    _executor(sweep, {"PYTHONPATH": ""})


def _executor(sweep: SweepConfig, environment: dict[str, str]) -> Any:
    """Return submitit's executor.

    Raises:
        ConfigError: submitit is not installed, or there is no Slurm.
    """
    require_package("submitit", "sweep.by", "slurm")
    from submitit import AutoExecutor

    try:
        executor: Any = AutoExecutor(
            _folder(sweep), cluster=EXECUTOR, slurm_max_num_timeout=MAX_REQUEUES
        )
    except RuntimeError as error:
        why = f"Slurm is not available on this machine: {error}"
        raise ConfigError("sweep.by", sweep.by, why, "Start the sweep on a login node.") from None
    executor.update_parameters(
        timeout_min=max(1, round(60 * sweep.hours)), gpus_per_node=sweep.gpus or None,
        cpus_per_task=sweep.cores, nodes=1, tasks_per_node=1, stderr_to_stdout=True,
        slurm_partition=sweep.partition, slurm_signal_delay_s=sweep.grace,
        slurm_setup=[f"export PYTHONPATH={shlex.quote(environment['PYTHONPATH'])}"],
    )  # fmt: skip
    return executor
