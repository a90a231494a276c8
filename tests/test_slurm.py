"""Runs as Slurm jobs: real processes under submitit, with its local executor instead of Slurm."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from outrider.conf.errors import ConfigError
from outrider.conf.sweeps import SweepConfig, read_sweep
from outrider.launch import slurm
from outrider.launch.job_pool import JobPool
from outrider.launch.processes import INTERRUPTED
from outrider.launch.sweep import sweep
from tests.runs import SMALL

pytest.importorskip("submitit")
# a run that saves on SIGTERM, and exits with 0 if it finds what it saved
SAVES = """
import pathlib, os, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def save(*_):
    (folder / "saved").touch()
    sys.exit(130)
signal.signal(signal.SIGTERM, save)
print("threads:", os.environ["OMP_NUM_THREADS"], flush=True)
(folder / "job").write_text(str(os.getppid()))
while not (folder / "saved").exists():
    time.sleep(0.05)
"""
FAILS_ONCE = """
import pathlib, sys
mark = pathlib.Path(sys.argv[1]) / "tried"
code = 0 if mark.exists() else 7
mark.touch()
sys.exit(code)
"""


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "EXECUTOR", "local")


def job_pool(
    folder: Path, script: str, monkeypatch: pytest.MonkeyPatch, retries: int = 0
) -> JobPool:
    """A pool whose runs are the script."""
    command = [sys.executable, "-c", script, str(folder)]
    monkeypatch.setattr(JobPool, "command", lambda *_: command)
    return JobPool(
        SweepConfig(dir=str(folder / "sweep"), by="slurm", gpus=0, cores=4, retries=retries)
    )


def await_file(file: Path) -> str:
    for _ in range(300):
        if file.is_file() and file.read_text():
            break
        time.sleep(0.1)
    return file.read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("local")
def test_a_failed_job_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "run" / "output.txt"
    assert job_pool(tmp_path, FAILS_ONCE, monkeypatch, retries=1).run("train", [], log) == 0
    assert not (tmp_path / "run" / "job.txt").exists(), "no job is queued"


@pytest.mark.slow
@pytest.mark.usefixtures("local")
def test_a_stopped_sweep_saves_its_jobs_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "run" / "output.txt"
    first = job_pool(tmp_path, SAVES, monkeypatch)

    def stop() -> None:
        await_file(tmp_path / "job")
        first.stop()

    stopper = threading.Thread(target=stop)
    stopper.start()
    assert first.run("train", [], log) == INTERRUPTED
    stopper.join()
    assert (tmp_path / "saved").exists()
    assert log.read_text() == "threads: 4\n"
    assert job_pool(tmp_path, SAVES, monkeypatch).run("train", [], log) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("local")
def test_near_its_time_limit_a_run_saves_and_is_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the signal that submitit makes Slurm send; the sweep sees one successful run."""
    log, pool = tmp_path / "run" / "output.txt", job_pool(tmp_path, SAVES, monkeypatch)

    def limit() -> None:
        os.kill(int(await_file(tmp_path / "job")), signal.SIGUSR2)

    thread = threading.Thread(target=limit)
    thread.start()
    assert pool.run("train", [], log) == 0
    thread.join()
    assert log.read_text() == "threads: 4\n" * 2


def test_a_run_terminated_by_slurm_returns_no_result_before_the_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a result the sweep would count as stopped; without one the job can be requeued."""
    monkeypatch.setattr(slurm, "KILL_DELAY", 1.0)
    start, command = time.monotonic(), [sys.executable, "-c", "raise SystemExit(130)"]
    assert slurm.SlurmTask(command, {}, None, tmp_path / "stop")() == INTERRUPTED
    assert time.monotonic() - start > 1.0


SLURM = {  # its commands, for one machine; jobs stay queued while the file `hold` exists
    "sbatch": """
        id=$(($(ls *.job 2>/dev/null | wc -l) + 101)); touch $id.job
        [ -e hold ] || { SLURM_JOB_ID=$id setsid bash "$1" > $id.out 2>&1 & echo $! > $id.pid; }
        echo "Submitted batch job $id" """,
    "srun": """
        while [ "${1#-}" != "$1" ]; do [ "$1" = --output ] && shift; shift; done; exec "$@" """,
    "sacct": """
        echo "JobID|State|NodeList"
        for job in *.job; do
            id=${job%.job}; state=COMPLETED
            [ -e $id.pid ] && kill -0 $(cat $id.pid) 2>/dev/null && state=RUNNING
            [ -e $id.pid ] || state=PENDING
            echo "$id|$state|here"
        done""",
    "scancel": """
        echo "$1" >> cancelled""",
}


@pytest.fixture
def slurm_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a simulated Slurm, whose commands submitit finds in PATH."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, text in SLURM.items():
        body = "\n".join(line.strip() for line in text.splitlines())
        command = folder / name
        start = "" if name == "srun" else f"cd {folder}\n"
        command.write_text(f"#!/bin/bash\n{start}{body}\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.mark.slow
def test_jobs_of_a_killed_sweep_are_waited_for(
    slurm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, pool = tmp_path / "run" / "output.txt", job_pool(tmp_path, SAVES, monkeypatch)
    first = slurm.submit(pool.sweep, pool.command("train", []), pool.run_environment(0), log)
    await_file(tmp_path / "job")
    second = slurm.submit(pool.sweep, pool.command("train", []), pool.run_environment(0), log)
    assert first.job.job_id == second.job.job_id == "101"
    (tmp_path / "saved").touch()
    assert second.wait() == 0
    assert log.read_text() == "threads: 4\n"
    third = slurm.submit(pool.sweep, pool.command("train", []), pool.run_environment(0), log)
    assert third.job.job_id == "102", "the first job is done"
    assert third.wait() == 0


@pytest.mark.slow
def test_stopping_the_sweep_cancels_queued_jobs(
    slurm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slurm_folder / "hold").touch()
    pool = job_pool(tmp_path, SAVES, monkeypatch)
    stopper = threading.Timer(1.0, pool.stop)
    stopper.start()
    assert pool.run("train", [], tmp_path / "run" / "output.txt") == INTERRUPTED
    assert (slurm_folder / "cancelled").read_text() == "101\n"
    assert not (tmp_path / "job").exists(), "it never started"


def test_the_parameters_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that submitit checks is that `srun` exists."""
    srun = tmp_path / "srun"
    srun.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = SweepConfig(
        dir=str(tmp_path), by="slurm", partition="a100", hours=1.5, gpus=2, processes=2
    )
    executor = slurm._executor(settings, {"PYTHONPATH": "/a b"})
    text = executor._executor._make_submission_file_text("python", "1")
    for line in ("partition=a100", "time=90", "gpus-per-node=2", "cpus-per-task=8",
                 "ntasks-per-node=1", "signal=USR2@120"):  # fmt: skip
        assert f"#SBATCH --{line}\n" in text
    assert "export PYTHONPATH='/a b'\n" in text


def test_missing_submitit_or_slurm_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["drafter=eagle,medusa", "sweep.by=slurm", f"sweep.dir={tmp_path}"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="Slurm is not available on this machine"):
        sweep(words)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError, match=r"submitit.*\n.*pip install 'outrider\[slurm\]'"):
        sweep(words)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["sweep.by=pbs"], "sweep.by"),
        (["sweep.by=slurm", "sweep.devices=['0']"], "sweep.devices"),
        (["sweep.by=slurm", "sweep.processes=4"], "sweep.gpus"),
        (["sweep.hours=0"], "sweep.hours"),
    ],
)
def test_invalid_settings_are_refused(words: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_sweep(words)
    assert caught.value.key == key


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("local")
def test_jobs_train_two_drafters(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One of them fails; the other succeeds, and the sweep reports the failure."""
    invalid = tmp_path / "eagle" / "checkpoints"
    invalid.parent.mkdir()
    invalid.touch()  # a file where a folder is needed
    code = sweep(
        ["drafter=eagle,medusa", *SMALL, "train.max_steps=1",
         f"run.dir='{tmp_path}/${{drafter.name}}'", "sweep.by=slurm", "sweep.gpus=0",
         "sweep.jobs=2", "sweep.cores=1", f"sweep.dir={tmp_path}"]
    )  # fmt: skip
    assert code != 0
    assert (tmp_path / "medusa" / "drafter" / "model.safetensors").is_file()
    assert "failed with exit code" in capfd.readouterr().out
    assert "checkpoints" in (tmp_path / "eagle" / "output.txt").read_text()
