"""Files that are endless, huge, deeply nested or not regular, and places that cannot be used."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.conf import files, tensor_files
from outrider.conf.errors import CorruptFile, RunError, exit_on_error
from outrider.eval.publish.verify_folder import Unreadable, read_object
from outrider.models.decode import tree_shapes

FIX = "Restore it."
DEEP = "[" * 100_000 + "]" * 100_000
BELOW_RECURSION = '{"a": ' * 100 + "1" + "}" * 100
Reader = Callable[[Path], object]
READERS: dict[str, Reader] = {
    "json": lambda file: files.read_json(file, FIX),
    "lines": lambda file: files.read_lines(file, FIX),
    "tree": tree_shapes.read,
    "index": lambda file: read_object(file, "weight_map"),
}


def hostile(kind: str, file: Path) -> None:
    if kind == "fifo":
        os.mkfifo(file)
    elif kind in ("zero", "null"):
        file.symlink_to(f"/dev/{kind}")
    elif kind == "folder":
        file.mkdir()
    elif kind == "huge":  # sparse
        with file.open("wb") as stream:
            stream.truncate(1 << 40)
    else:
        deep = DEEP if kind == "deep" else BELOW_RECURSION
        file.write_text({"binary": "\x00\x01", "surrogate": '{"a": "\\ud800"}',
                         "digits": '{"a": ' + "9" * 10_000 + "}"}.get(kind, deep))  # fmt: skip


KINDS = (
    "fifo",
    "zero",
    "null",
    "folder",
    "huge",
    "deep",
    "nested",
    "binary",
    "surrogate",
    "digits",
)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_file_is_one_error_at_once(kind: str, reader: str, tmp_path: Path) -> None:
    file, start = tmp_path / "file.json", time.monotonic()
    hostile(kind, file)
    with pytest.raises((RunError, Unreadable)) as caught:
        READERS[reader](file)
    assert "file" in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("kind", ["fifo", "zero"])
def test_hash_and_tensors_refuse_endless_files(kind: str, tmp_path: Path) -> None:
    hostile(kind, tmp_path / "file")
    with pytest.raises(OSError, match="regular"):
        files.sha256_of(tmp_path / "file")
    with pytest.raises(CorruptFile, match="regular"):
        tensor_files.read_tensors(tmp_path / "file", None, FIX)


def test_tensors_that_exceed_the_memory_are_refused(tmp_path: Path) -> None:
    hostile("huge", tmp_path / "file")
    with pytest.raises(CorruptFile, match="are more than"):
        tensor_files.read_tensors(tmp_path / "file", "", FIX)


def test_valid_json_is_read_as_before(tmp_path: Path) -> None:
    value = {
        "a": [1, 2.5, None, {"b": "\u00e9 \U0001f600"}],
        "deep": json.loads("[" * 40 + "]" * 40),
    }
    files.write_json(tmp_path / "file", value)
    assert files.read_json(tmp_path / "file", FIX) == value


@pytest.mark.parametrize("name", ["file", "file/below", "/dev/null", "/dev/null/below", "x" * 300])
def test_unusable_folder_is_one_message(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("the user's")
    place = tmp_path / name
    for use in (
        lambda: files.folder_lock(place).__enter__(),
        lambda: files.write(place / "a", b""),
    ):
        with pytest.raises(SystemExit) as stopped, exit_on_error("train.py"):
            use()
        assert stopped.value.code in (1, 2)
        assert "could not be written" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "the user's"


def test_any_error_of_a_place_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped, exit_on_error("train.py"):
        (tmp_path / ("x" * 300)).stat()
    assert stopped.value.code == 1
    message = capsys.readouterr().err
    assert "xxx: File name too long" in message
    assert "Choose another place" in message
