"""Checkpoints changed by hand or by damage, and folders of the user's beside them."""

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from outrider.conf.errors import CorruptFile
from outrider.train import checkpoint, resume
from outrider.train.checkpoint import Progress
from outrider.train.checkpoint_writer import CheckpointWriter
from outrider.train.metrics_log import MetricsLog

pytestmark = pytest.mark.untyped  # files hold values of any type

USERS = ("step-00000014.bak", "step-14", "step-0000001x", "my-step-00000001", "step-000000014",
         ".step-mine", ".step-00000014.old", "notes")  # fmt: skip


def write(folder: Path, *steps: int) -> None:
    for step in steps:
        tensors = {"parameter.weight": torch.full((1, 2), float(step))}
        progress = Progress(step=step, recent=[1.5, 2.0], phases={"data": 0.1}, seconds=3.0)
        checkpoint.save(folder, tensors, progress, last=9, every=None)


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "state.json"
    about = json.loads(file.read_text())
    edit(about)
    file.write_text(json.dumps(about))


def newest(folder: Path) -> tuple[Progress, float, list[CorruptFile]]:
    model = nn.Linear(2, 1, bias=False)
    places = checkpoint.list_checkpoints(folder)
    progress, errors = checkpoint.load_newest(places, model, SimpleNamespace(state={}))
    return progress, model.weight[0, 0].item(), errors


def set_progress(**values: Any) -> Callable[[dict[str, Any]], object]:
    """Of a file of an earlier version, too, that has neither version nor hash of its own."""

    def edit(about: dict[str, Any]) -> None:
        about.pop("sha256_state")
        about["progress"].pop("version")
        about["progress"].update(values)

    return edit


@pytest.mark.parametrize("edit", [
    lambda about: about.clear(),
    lambda about: about["progress"].update(best=9.0),
    lambda about: about["progress"].update(step=1),
    lambda about: about.update(progress=[[[]]]),
    lambda about: about.update(sha256_state=7),
    lambda about: (about.pop("sha256_state"), about.pop("sha256")),
    lambda about: (about.pop("sha256_state"), about.update(progress="x")),
    lambda about: about.pop("sha256_state"), lambda about: about.update(sha256_state=None),
    lambda about: about.pop("progress"), lambda about: about["progress"].pop("version"),
    lambda about: (about.pop("sha256_state"), about["progress"].update(best=9.0)),
    lambda about: about["progress"].update(version=1),
    set_progress(step=1), set_progress(step=True), set_progress(step="2"), set_progress(extra=1),
    set_progress(recent=5), set_progress(recent=["x"]), set_progress(phases={"data": [[]]}),
    set_progress(skipped=None), set_progress(finished=1), set_progress(best={"a": {}}),
    set_progress(best=math.nan), set_progress(seconds=math.inf), set_progress(recent=[math.nan]),
    set_progress(seconds=10**400), set_progress(phases={"data": -math.inf}),
    set_progress(skipped=3), set_progress(skipped=-1), set_progress(best_step=10**12),
])  # fmt: skip
def test_changed_state_falls_back_to_the_checkpoint_before(
    edit: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    write(tmp_path, 1, 2)
    change(tmp_path / "step-00000002", edit)
    progress, weight, errors = newest(tmp_path)
    assert (progress.step, weight) == (1, 1.0)
    assert len(errors) == 1
    assert "step-00000002/state.json" in str(errors[0])


@pytest.mark.parametrize("text", ["{}", "[]", "", '{"progress": ' * 100_000, "\x00"])
def test_unreadable_state_falls_back(text: str, tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / "state.json").write_text(text)
    assert newest(tmp_path)[0].step == 1


@pytest.mark.parametrize("text", ["{}", "7", '{"progress": '])
def test_the_message_is_whole_sentences(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / "state.json").write_text(text)
    for name in ("require_same_settings", "require_same_text", "require_same_activation"):
        monkeypatch.setattr(resume, name, lambda _: None)
    settings = SimpleNamespace(
        train=SimpleNamespace(resume="auto"), launch=SimpleNamespace(name="single")
    )
    run: Any = SimpleNamespace(
        config=settings, checkpoints=lambda: checkpoint.list_checkpoints(tmp_path), main=True,
        objective=nn.Linear(2, 1, bias=False), optimizer=SimpleNamespace(state={}), average=None,
        bad_steps=SimpleNamespace(), accelerator=SimpleNamespace(wait_for_everyone=lambda: None),
    )  # fmt: skip
    (message,) = resume.resume(run) or [""]
    assert re.search(r"state\.json .*\w\)?\. Continuing from step 1\.$", message)


@pytest.mark.parametrize("joules", [3.0, None])
def test_checkpoints_of_earlier_versions_load(joules: float | None, tmp_path: Path) -> None:
    write(tmp_path, 1)
    change(tmp_path / "step-00000001", set_progress(joules=joules, seconds=4))
    progress, weight, errors = newest(tmp_path)
    assert (progress.step, progress.seconds, weight, errors) == (1, 4, 1.0, [])


def test_saving_again_keeps_the_hash_valid(tmp_path: Path) -> None:
    write(tmp_path, 1)
    checkpoint.save(tmp_path, {}, Progress(step=1, finished=True), last=1, every=None)
    assert newest(tmp_path)[0].finished


def test_folders_of_the_user_stay(tmp_path: Path) -> None:
    for place in ("checkpoints", "best"):
        for name in USERS:
            (tmp_path / place / name).mkdir(parents=True)
            (tmp_path / place / name / "theirs").write_text("x")
    train: Any = SimpleNamespace(keep_last=1, keep_every=None)
    writer = CheckpointWriter(tmp_path, train)
    for step in (1, 2, 3):
        (tmp_path / "best" / f"step-{step:08d}").mkdir()
        tensors = {"parameter.weight": torch.zeros(1, 2)}
        writer.save(tensors, Progress(step=step, best_step=step))
    writer.wait()
    own = {"step-00000003"}
    for place in ("checkpoints", "best"):
        assert {f.name for f in (tmp_path / place).iterdir()} == own | set(USERS)
    assert newest(tmp_path / "checkpoints")[0].step == 3
    checkpoint.quarantine(tmp_path / "checkpoints" / "step-00000003")
    for place in ("checkpoints", "best"):
        checkpoint.remove_all(tmp_path / place)
        assert {f.name for f in (tmp_path / place).iterdir()} == set(USERS)
        assert all((tmp_path / place / name / "theirs").is_file() for name in USERS)


def test_no_damaged_checkpoint_replaces_another(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path, 1)
        (tmp_path / "step-00000001" / "turn").write_text(str(number))
        checkpoint.quarantine(tmp_path / "step-00000001")
    names = ["damaged-2-step-00000001", "damaged-3-step-00000001", "damaged-step-00000001"]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    assert [(tmp_path / name / "turn").read_text() for name in names] == ["1", "2", "0"]
    (tmp_path / "damaged-x-step-00000001").mkdir()
    checkpoint.remove_all(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["damaged-x-step-00000001"]


def test_best_drafters_stay_while_a_checkpoint_is_unreadable(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints", 1)
    (tmp_path / "checkpoints" / "step-00000001" / "state.json").write_text("{}")
    (tmp_path / "best" / "step-00000001").mkdir(parents=True)
    train: Any = SimpleNamespace(keep_last=2, keep_every=None)
    writer = CheckpointWriter(tmp_path, train)
    writer.save({"parameter.weight": torch.zeros(1, 2)}, Progress(step=2, best_step=2))
    writer.wait()
    assert (tmp_path / "best" / "step-00000001").is_dir()


def rewind(folder: Path) -> None:
    log: Any = SimpleNamespace(main=True, file=folder / "metrics.jsonl")
    MetricsLog.rewind(log, 5)


def test_binary_metrics_are_one_message_and_stay(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(CorruptFile, match=r"metrics\.jsonl cannot be read"):
        rewind(tmp_path)
    assert file.read_bytes() == b"\xff\xfe\x00binary"


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_metrics_that_are_no_file_are_one_message(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    make: dict[str, Callable[[], None]] = {
        "fifo": lambda: os.mkfifo(file), "folder": file.mkdir,
        "device": lambda: file.symlink_to("/dev/zero"),
    }  # fmt: skip
    make[kind]()
    with pytest.raises(CorruptFile, match="not a regular file"):
        rewind(tmp_path)


def test_lines_that_are_no_metrics_are_skipped(tmp_path: Path) -> None:
    kept = '{"step": 1, "kind": "train"}\n'
    other = '{}\n[]\n{"step": "1", "kind": 2}\n{"step": 2}\n' + "[" * 100_000 + "\n"
    (tmp_path / "metrics.jsonl").write_text(kept + other + '{"step": 9, "kind": "train"}\n')
    rewind(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == kept
