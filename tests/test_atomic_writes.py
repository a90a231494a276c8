"""Atomic writes: a concurrent reader of a run's folders sees complete files only."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from outrider.conf.errors import RunError
from outrider.conf.files import copy_folder, folder_lock, remove_folder, write, write_json
from outrider.train.checkpoint import Progress, RetentionPolicy, list_checkpoints, save

PARTS = {"state.json", "state.safetensors"}


def looked_at(folder: Path) -> bool | None:
    """Whether a folder is whole; None where it went while it was looked at."""
    try:
        about = json.loads((folder / "state.json").read_text())
        content = (folder / "state.safetensors").read_bytes()
        names = {file.name for file in folder.iterdir()}
        whole = names == PARTS and hashlib.sha256(content).hexdigest() == about["sha256"]
    except FileNotFoundError:
        whole = False
    return whole if whole or folder.exists() else None


@contextmanager
def watched(place: Path, pattern: str) -> Iterator[list[bool | None]]:
    """A thread looks at all that matches, until the block is over."""
    seen, over = list[bool | None](), threading.Event()

    def watch() -> None:
        while not over.is_set():
            seen.extend(looked_at(folder) for folder in sorted(place.glob(pattern)))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def test_no_checkpoint_is_ever_half_visible(tmp_path: Path) -> None:
    """A hundred are written; all but the last two and a milestone are removed again."""
    tensors = {f"parameter.{i}": torch.randn(64, 64) for i in range(8)}
    with watched(tmp_path, "step-*") as seen:
        for step in range(1, 101):
            save(tmp_path, tensors, Progress(step=step), RetentionPolicy(2, every=50))
    assert [f.name[-3:] for f in list_checkpoints(tmp_path)] == ["050", "099", "100"]
    assert seen.count(True) > 50
    assert seen.count(False) == 0
    assert not list(tmp_path.glob(".*")), "nothing is left behind"


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    write(tmp_path / "old" / "a", b"old")
    write(tmp_path / "new" / "b", b"new")
    for source in ("old", "new"):
        copy_folder(tmp_path / source, tmp_path / "final")
    assert [f.read_bytes() for f in (tmp_path / "final").iterdir()] == [b"new"]
    assert {f.name for f in tmp_path.iterdir()} == {"old", "new", "final"}


def test_the_watcher_sees_what_is_half_there(tmp_path: Path) -> None:
    """The test above could fail."""
    (tmp_path / "step-1").mkdir()
    assert looked_at(tmp_path / "step-1") is False
    write(tmp_path / "step-1" / "state.safetensors", b"x")
    write_json(tmp_path / "step-1" / "state.json", {"sha256": "of something else"})
    assert looked_at(tmp_path / "step-1") is False


def test_what_a_kill_left_of_a_removal_is_no_hindrance(tmp_path: Path) -> None:
    write(tmp_path / ".old.gone" / "half", b"x")
    write(tmp_path / "old" / "whole", b"x")
    remove_folder(tmp_path / "old")
    remove_folder(tmp_path / "old")
    assert not list(tmp_path.iterdir())


def test_a_waiting_process_gets_the_folder_when_it_is_free(tmp_path: Path) -> None:
    met, order = threading.Event(), list[str]()

    def second() -> None:
        with folder_lock(tmp_path, met.set):
            order.append("second")

    thread = threading.Thread(target=second)
    with folder_lock(tmp_path):
        with pytest.raises(RunError, match="at work"), folder_lock(tmp_path):
            pass
        thread.start()
        assert met.wait(10)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
