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
from outrider.conf.files import copy_files, folder_lock, remove_folder, write, write_json
from outrider.models.formats.atomic_folder import atomic_folder
from outrider.train.checkpoint import Progress, list_checkpoints, save

PARTS = {"state.json", "state.safetensors"}


def is_complete(folder: Path) -> bool | None:
    """Return whether a checkpoint is complete; None if it was removed meanwhile."""
    try:
        about = json.loads((folder / "state.json").read_text())
        content = (folder / "state.safetensors").read_bytes()
        names = {file.name for file in folder.iterdir()}
        complete = names == PARTS and hashlib.sha256(content).hexdigest() == about["sha256"]
    except FileNotFoundError:
        complete = False
    return complete if complete or folder.exists() else None


@contextmanager
def watched(place: Path, pattern: str) -> Iterator[list[bool | None]]:
    """Check all matching folders in a thread until the block ends."""
    seen, stop = list[bool | None](), threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.extend(is_complete(folder) for folder in sorted(place.glob(pattern)))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def test_partial_checkpoint_is_never_visible(tmp_path: Path) -> None:
    """A hundred are written; the last two and a milestone remain."""
    tensors = {f"parameter.{i}": torch.randn(64, 64) for i in range(8)}
    with watched(tmp_path, "step-*") as seen:
        for step in range(1, 101):
            save(tmp_path, tensors, Progress(step=step), last=2, every=50)
    assert [f.name[-3:] for f in list_checkpoints(tmp_path)] == ["050", "099", "100"]
    assert seen.count(True) > 50
    assert seen.count(False) == 0
    assert not list(tmp_path.glob(".*")), "no temporary folder remains"


def test_copied_files_replace_only_those_of_their_names(tmp_path: Path) -> None:
    write(tmp_path / "final" / "notes", b"the user's")
    for source in (b"old", b"new"):
        write(tmp_path / "source" / "a", source)
        copy_files(tmp_path / "source", tmp_path / "final", ["a"])
        found = {file.name: file.read_bytes() for file in (tmp_path / "final").iterdir()}
        assert found == {"a": source, "notes": b"the user's"}
    assert {file.name for file in tmp_path.iterdir()} == {"source", "final"}


def test_is_complete_detects_partial_folder(tmp_path: Path) -> None:
    """So that the test above can fail."""
    (tmp_path / "step-1").mkdir()
    assert is_complete(tmp_path / "step-1") is False
    write(tmp_path / "step-1" / "state.safetensors", b"x")
    write_json(tmp_path / "step-1" / "state.json", {"sha256": "of something else"})
    assert is_complete(tmp_path / "step-1") is False


def test_leftovers_of_a_killed_removal_are_removed(tmp_path: Path) -> None:
    write(tmp_path / ".old.gone" / "half", b"x")
    write(tmp_path / "old" / "complete", b"x")
    remove_folder(tmp_path / "old")
    remove_folder(tmp_path / "old")
    assert not list(tmp_path.iterdir())


def test_waiting_process_acquires_released_lock(tmp_path: Path) -> None:
    waiting, order = threading.Event(), list[str]()

    def second() -> None:
        with folder_lock(tmp_path, waiting.set):
            order.append("second")

    thread = threading.Thread(target=second)
    with folder_lock(tmp_path):
        with pytest.raises(RunError, match="is using"), folder_lock(tmp_path):
            pass
        thread.start()
        assert waiting.wait(10)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


@pytest.mark.parametrize("name", ["notes.txt", "golden/notes.txt", ".git/config"])
@pytest.mark.parametrize("listed", [True, False])
def test_folder_with_files_of_others_is_not_replaced(
    tmp_path: Path, name: str, listed: bool
) -> None:
    """`golden.json` names the files of a published folder, so that it is refused at once."""
    out, entered = tmp_path / "out", False
    hashes = {"model.safetensors": "0", "golden/outputs.safetensors": "0"}
    for file in ("config.json", "README.md", *hashes, name):
        write(out / file, b"old")
    for file in ("outrider.json", "golden.json") if listed else ("outrider.json",):
        write_json(out / file, {"sha256": hashes})

    def publish() -> None:
        nonlocal entered
        with atomic_folder(out) as partial:
            entered = True
            for file in ("config.json", *hashes):
                write(partial / file, b"new")

    with pytest.raises(RunError, match=name):
        publish()
    assert entered != listed
    assert (out / name).read_bytes() == (out / "config.json").read_bytes() == b"old"
    (out / name).unlink()
    publish()
    assert (out / "config.json").read_bytes() == b"new"
