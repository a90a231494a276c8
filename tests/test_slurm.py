"""Runs as Slurm jobs: real processes under submitit, whose local executor stands in for Slurm."""

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
# a run that saves when it is told to end, and ends well when it finds what it saved
SAVES = """
import pathlib, os, signal, sys, time
place = pathlib.Path(sys.argv[1])
def told(*_):
    (place / "saved").touch()
    sys.exit(130)
signal.signal(signal.SIGTERM, told)
print("a run speaks", os.environ["OMP_NUM_THREADS"], flush=True)
(place / "job").write_text(str(os.getppid()))
while not (place / "saved").exists():
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


def crew(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch, retries: int = 0) -> JobPool:
    """Its runs are the script."""
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
def test_a_job_that_fails_is_queued_again_if_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "run" / "output.txt"
    assert crew(tmp_path, FAILS_ONCE, monkeypatch, retries=1).run("train", [], log) == 0
    assert not (tmp_path / "run" / "job.txt").exists(), "no job is under way"


@pytest.mark.slow
@pytest.mark.usefixtures("local")
def test_a_sweep_that_is_stopped_lets_its_jobs_save_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "run" / "output.txt"
    first = crew(tmp_path, SAVES, monkeypatch)

    def stop() -> None:
        await_file(tmp_path / "job")
        first.stop()

    stopper = threading.Thread(target=stop)
    stopper.start()
    assert first.run("train", [], log) == INTERRUPTED
    stopper.join()
    assert (tmp_path / "saved").exists()
    assert log.read_text() == "a run speaks 4\n"
    assert crew(tmp_path, SAVES, monkeypatch).run("train", [], log) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("local")
def test_near_its_limit_a_run_saves_and_is_queued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal that submitit has Slurm send; the sweep sees one run that ends well."""
    log, one = tmp_path / "run" / "output.txt", crew(tmp_path, SAVES, monkeypatch)

    def limit() -> None:
        os.kill(int(await_file(tmp_path / "job")), signal.SIGUSR2)

    thread = threading.Thread(target=limit)
    thread.start()
    assert one.run("train", [], log) == 0
    thread.join()
    assert log.read_text() == "a run speaks 4\n" * 2


def test_a_run_that_slurm_tells_to_end_leaves_no_result_before_the_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result would say that somebody stopped the sweep; without one the job may go on later."""
    monkeypatch.setattr(slurm, "KILL_DELAY", 1.0)
    began, command = time.monotonic(), [sys.executable, "-c", "raise SystemExit(130)"]
    assert slurm.SlurmTask(command, {}, None, tmp_path / "stop")() == INTERRUPTED
    assert time.monotonic() - began > 1.0


SLURM = {  # its commands, for one machine; a job waits where `hold` is
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
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a Slurm that submitit speaks to as to any other."""
    place = tmp_path / "slurm"
    place.mkdir()
    for name, text in SLURM.items():
        body = "\n".join(line.strip() for line in text.splitlines())
        command = place / name
        start = "" if name == "srun" else f"cd {place}\n"
        command.write_text(f"#!/bin/bash\n{start}{body}\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    return place


@pytest.mark.slow
def test_a_job_that_a_killed_sweep_left_behind_is_waited_for(
    queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, one = tmp_path / "run" / "output.txt", crew(tmp_path, SAVES, monkeypatch)
    first = slurm.submit(one.sweep, one.command("train", []), one.run_environment(0), log)
    await_file(tmp_path / "job")
    second = slurm.submit(one.sweep, one.command("train", []), one.run_environment(0), log)
    assert first.job.job_id == second.job.job_id == "101"
    (tmp_path / "saved").touch()
    assert second.wait() == 0
    assert log.read_text() == "a run speaks 4\n"
    third = slurm.submit(one.sweep, one.command("train", []), one.run_environment(0), log)
    assert third.job.job_id == "102", "the first one is done"
    assert third.wait() == 0


@pytest.mark.slow
def test_what_waits_in_the_queue_is_taken_out_when_the_sweep_is_stopped(
    queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (queue / "hold").touch()
    one = crew(tmp_path, SAVES, monkeypatch)
    stopper = threading.Timer(1.0, one.stop)
    stopper.start()
    assert one.run("train", [], tmp_path / "run" / "output.txt") == INTERRUPTED
    assert (queue / "cancelled").read_text() == "101\n"
    assert not (tmp_path / "job").exists(), "it never began"


def test_what_slurm_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that submitit asks is whether there is an `srun`."""
    srun = tmp_path / "srun"
    srun.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = SweepConfig(
        dir=str(tmp_path), by="slurm", partition="a100", hours=1.5, gpus=2, processes=2
    )
    made = slurm._executor(settings, {"PYTHONPATH": "/a b"})
    text = made._executor._make_submission_file_text("python", "1")
    for line in ("partition=a100", "time=90", "gpus-per-node=2", "cpus-per-task=8",
                 "ntasks-per-node=1", "signal=USR2@120"):  # fmt: skip
        assert f"#SBATCH --{line}\n" in text
    assert "export PYTHONPATH='/a b'\n" in text


def test_without_submitit_or_slurm_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["drafter=eagle,medusa", "sweep.by=slurm", f"sweep.dir={tmp_path}"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="finds no Slurm here"):
        sweep(words)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError, match=r"pip install 'outrider\[slurm\]'"):
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
def test_what_cannot_work_is_refused(words: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_sweep(words)
    assert caught.value.key == key


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("local")
def test_two_drafters_are_trained_by_jobs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One of them cannot: the other one ends well, and the sweep says which."""
    spoilt = tmp_path / "eagle" / "checkpoints"
    spoilt.parent.mkdir()
    spoilt.touch()  # a file where a folder is needed
    code = sweep(
        ["drafter=eagle,medusa", *SMALL, "train.max_steps=1",
         f"run.dir='{tmp_path}/${{drafter.name}}'", "sweep.by=slurm", "sweep.gpus=0",
         "sweep.jobs=2", "sweep.cores=1", f"sweep.dir={tmp_path}"]
    )  # fmt: skip
    assert code != 0
    assert (tmp_path / "medusa" / "drafter" / "model.safetensors").is_file()
    assert "failed with exit code" in capfd.readouterr().out
    assert "checkpoints" in (tmp_path / "eagle" / "output.txt").read_text()
