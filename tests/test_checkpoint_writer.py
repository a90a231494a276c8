"""Work behind the run's back: in order, one at a time, and every error is said."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.conf.errors import RunError
from outrider.data.prepare import Material
from outrider.models.load import Loaded
from outrider.train import checkpoint, loop
from outrider.train.background import Behind
from tests.runs import QUIET, config


def test_the_next_piece_waits_for_the_one_before() -> None:
    behind, gate, done = Behind(), threading.Event(), list[int]()

    def first() -> None:
        gate.wait()
        done.append(1)

    behind.begin(first)
    assert done == [], "nobody has waited"
    gate.set()
    behind.begin(lambda: done.append(2))
    behind.wait()
    assert done == [1, 2]


def test_an_error_is_said_once_at_the_next_occasion() -> None:
    behind = Behind()

    def fails() -> None:
        raise RunError("The disk is full.", "Make room.")

    behind.begin(fails)
    with pytest.raises(RunError, match="disk is full"):
        behind.begin(lambda: None)
    behind.wait()


def test_steps_go_on_while_a_checkpoint_is_written(
    loaded: Loaded, made: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written is what was there when it was asked for, however late it is written."""
    words = ("train.schedule=constant", "train.save_every=3", "train.eval_every=100",
             "train.keep_last=9")  # fmt: skip
    loop.fit(config(tmp_path / "quick", *words), loaded, made, QUIET)
    whole, began = checkpoint.save, list[int]()

    def slow(folder: Path, tensors: Any, progress: checkpoint.Progress, keep: Any) -> None:
        steps = (folder.parent / "metrics.jsonl").read_text().count("train")
        late = time.monotonic() + 60
        while progress.step == 3 and time.monotonic() < late:  # until two more steps are done
            if (folder.parent / "metrics.jsonl").read_text().count("train") >= steps + 2:
                began.append(progress.step)
                break
            time.sleep(0.01)
        whole(folder, tensors, progress, keep)

    monkeypatch.setattr(checkpoint, "save", slow)
    loop.fit(config(tmp_path / "slow", *words), loaded, made, QUIET)
    assert began == [3]
    for step in (3, 6):
        place = Path("checkpoints") / f"step-{step:08d}" / "state.safetensors"
        a, b = load_file(tmp_path / "quick" / place), load_file(tmp_path / "slow" / place)
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_checkpoint_that_cannot_be_written_ends_the_run(
    loaded: Loaded, made: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RunError("state.safetensors could not be written: no space left", "Free some space.")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(RunError, match="no space left"):
        loop.fit(config(tmp_path), loaded, made, QUIET)
    assert checkpoint.found(tmp_path / "checkpoints") == []
