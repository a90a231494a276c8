"""Background checkpoints: one at a time, in order, and every error is raised."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.conf.errors import RunError
from outrider.data.training_data import TrainingData
from outrider.models.target.load import LoadedTarget
from outrider.train import checkpoint, loop
from outrider.train.checkpoint_writer import BackgroundWriter
from outrider.train.trainer import Trainer
from tests.runs import QUIET, config


def test_jobs_run_one_at_a_time() -> None:
    writer, gate, done = BackgroundWriter(), threading.Event(), list[int]()

    def first() -> None:
        gate.wait()
        done.append(1)

    writer.submit(first)
    assert done == [], "submit does not wait for its own job"
    gate.set()
    writer.submit(lambda: done.append(2))
    writer.wait()
    assert done == [1, 2]


def test_next_call_raises_error_once() -> None:
    writer = BackgroundWriter()

    def fails() -> None:
        raise RunError("The disk is full.", "Make room.")

    writer.submit(fails)
    with pytest.raises(RunError, match="disk is full"):
        writer.submit(lambda: None)
    writer.wait()


def test_training_continues_while_checkpoint_is_written(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint has the state at the time of the call."""
    words = ("train.schedule=constant", "train.save_every=3", "train.eval_every=100",
             "train.keep_last=9")  # fmt: skip
    loop.fit(config(tmp_path / "quick", *words), loaded, made, QUIET)
    save, began = checkpoint.save, list[int]()

    def slow(folder: Path, tensors: Any, progress: checkpoint.Progress, *keep: Any) -> None:
        steps = (folder.parent / "metrics.jsonl").read_text().count("train")
        late = time.monotonic() + 60
        while progress.step == 3 and time.monotonic() < late:  # until two more steps are done
            if (folder.parent / "metrics.jsonl").read_text().count("train") >= steps + 2:
                began.append(progress.step)
                break
            time.sleep(0.01)
        save(folder, tensors, progress, *keep)

    monkeypatch.setattr(checkpoint, "save", slow)
    loop.fit(config(tmp_path / "slow", *words), loaded, made, QUIET)
    assert began == [3]
    for step in (3, 6):
        place = Path("checkpoints") / f"step-{step:08d}" / "state.safetensors"
        a, b = load_file(tmp_path / "quick" / place), load_file(tmp_path / "slow" / place)
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_second_signal_does_not_end_the_last_save(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C during step 2, and again while its checkpoint is written."""
    save, seed_step = checkpoint.save, Trainer.seed_step

    def interrupted(run: Trainer, step: int) -> None:
        seed_step(run, step)
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    def slow(folder: Path, tensors: Any, progress: checkpoint.Progress, *keep: Any) -> None:
        if progress.step == 3:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        save(folder, tensors, progress, *keep)

    monkeypatch.setattr(Trainer, "seed_step", interrupted)
    monkeypatch.setattr(checkpoint, "save", slow)
    assert loop.fit(config(tmp_path), loaded, made, QUIET) is None
    assert (tmp_path / "checkpoints" / "step-00000003").is_dir()


def test_failed_checkpoint_stops_the_run(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RunError("state.safetensors could not be written: no space left", "Free some space.")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(RunError, match="no space left"):
        loop.fit(config(tmp_path), loaded, made, QUIET)
    assert checkpoint.list_checkpoints(tmp_path / "checkpoints") == []
