"""Folders that cannot be used: one message with the path, before anything is loaded.

Root may write anywhere. So these tests use /proc and /sys, which refuse files to everyone, a small
file system that is mounted read-only (skipped without the right to), the effective user `nobody`,
and errors with the system's numbers.
"""

import errno
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.conf import files
from outrider.conf.errors import DiskFull, RunError, UnusablePlace, exit_on_error
from outrider.launch import cli
from outrider.models.target import load

NOBODY = 65534
PLACES = (
    "file", "file/below", "loop/below", "/dev/null", "/dev/null/below", "x" * 300, "/proc/run",
    "/sys/run",
)  # fmt: skip


@pytest.fixture
def loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        pytest.fail("loads the target")

    monkeypatch.setattr(load, "load_target", fail)


@pytest.fixture
def read_only(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield a folder that cannot be written, on a file system or for this user."""
    if request.param == "mount":
        mount = ["mount", "-t", "tmpfs", "-o", "ro,size=1M", "tmpfs", str(tmp_path)]
        try:
            subprocess.run(mount, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no file system can be mounted here: {error}")
        yield tmp_path
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
    elif request.param == "mode":
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # above it all may read
            Path(folder).chmod(0o555)
            user = os.geteuid()
            os.seteuid(NOBODY if user == 0 else user)
            yield Path(folder)
            os.seteuid(user)
            Path(folder).chmod(0o755)
    else:
        yield Path(request.param)


READ_ONLY = pytest.mark.parametrize("read_only", ["mount", "mode", "/proc", "/sys"], indirect=True)


def message_of(capsys: pytest.CaptureFixture[str], action: Callable[[], Any], code: int) -> str:
    """Run an action that ends with this exit code; return its only message."""
    start = time.monotonic()
    with pytest.raises(SystemExit) as stopped, exit_on_error("train.py"):
        action()
    message = capsys.readouterr().err
    assert stopped.value.code == code
    assert time.monotonic() - start < 60
    assert message.count("error:") == 1
    assert "Traceback" not in message
    return message


def lock(folder: Path) -> None:
    with files.folder_lock(folder):
        pass


@pytest.mark.usefixtures("loads_nothing")
@pytest.mark.parametrize("name", PLACES)
def test_unusable_run_folder_ends_training_before_anything_is_loaded(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("the user's")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    place = tmp_path / name
    message = message_of(capsys, lambda: cli.main(["train", f"run.dir='{place}'"]), 1)
    assert str(place).rstrip("/") in message
    assert "could not be written" in message
    assert (tmp_path / "file").read_text() == "the user's"


@pytest.mark.usefixtures("loads_nothing")
def test_second_start_ends_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with files.folder_lock(tmp_path):
        message = message_of(capsys, lambda: cli.main(["train", f"run.dir={tmp_path}"]), 2)
    assert f"Another process is using {tmp_path}." in message


@READ_ONLY
@pytest.mark.parametrize("name", ["", "below/it"])
def test_read_only_folder_is_one_message(
    read_only: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for action in (
        lambda: lock(read_only / name),
        lambda: files.write(read_only / name / "file", b"x"),
    ):
        message = message_of(capsys, action, 1)
        assert f"{read_only / name}" in message
        assert "Choose another place" in message


@pytest.mark.parametrize("cache", ["/proc/cache", "/sys/cache", "/dev/null"])
@pytest.mark.parametrize("verb", ["prepare", "train"])
def test_read_only_cache_is_one_message(
    verb: str, cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("OUTRIDER_CACHE", cache)
    words = [verb, "target=tiny", "data=self", f"run.dir={tmp_path / 'run'}"]
    assert f"{cache}/self" in message_of(capsys, lambda: cli.main(words), 1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "open"])
def test_every_error_of_a_place_names_it(
    number: int, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that the system raises without a name, as flushing does."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(*((os, "fsync", fail) if call == "fsync" else (Path, "open", fail)))
    full = number in (errno.ENOSPC, errno.EDQUOT)
    for use in (lock, lambda folder: files.write(folder / "file", b"x"), files.sync_folder):
        if call == "open" and use in (files.sync_folder, lock):
            continue
        with pytest.raises(DiskFull if full else UnusablePlace, match=str(tmp_path)) as caught:
            use(tmp_path)
        assert caught.value.code == 1
    assert not [file for file in tmp_path.iterdir() if file.name != ".lock"]


@pytest.mark.parametrize("use", [files.read_bytes, files.sha256_of])
def test_a_file_that_cannot_be_read_is_named(
    use: Callable[[Path], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The system refuses to read this one from its start, and its error has no name."""
    file = Path("/proc/self/mem")
    message = message_of(capsys, lambda: use(file), 1)
    assert "/proc/self/mem: Input/output error." in message
    with pytest.raises(RunError, match="/proc/self/mem cannot be read: Input/output error"):
        files.read_json(file, "Restore it.")


def test_an_error_of_a_stream_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    assert "A file or stream: Input/output error." in message_of(capsys, fail, 1)


@pytest.mark.parametrize("existed", [False, True])
def test_an_error_while_loading_leaves_the_place_as_it_was(
    existed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fail(*_: Any) -> None:
        assert (tmp_path / "run" / ".lock").is_file()
        raise RunError("It cannot be loaded.", "Copy it again.")

    monkeypatch.setattr(load, "load_target", fail)
    if existed:
        (tmp_path / "run").mkdir()
    words = ["train", f"run.dir={tmp_path / 'run'}"]
    assert "cannot be loaded" in message_of(capsys, lambda: cli.main(words), 2)
    assert (tmp_path / "run").exists() == existed
