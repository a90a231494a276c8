"""A full disk: one message with the file and the room there is, code 1, and the run goes on later.

On a small file system of its own (tmpfs), which takes the right to mount one; skipped elsewhere.
"""

import errno
import io
import json
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.conf import errors
from outrider.conf.errors import DiskFull, RunError, exit_on_error
from outrider.conf.files import append, copy_folder, write
from outrider.data import generate
from outrider.data.generated_store import GeneratedStore
from outrider.data.prepare import record
from outrider.data.record.folder import RecordingFolder
from outrider.data.training_data import TrainingData
from outrider.eval.report_tables import show_and_save
from outrider.launch import cli
from outrider.models.load import LoadedTarget
from outrider.train import best_drafter, checkpoint, loop
from outrider.train.metrics_log import MetricsLog
from outrider.train.trainer import Trainer
from tests.runs import QUIET, SMALL, config, generated_text


class Disk:
    """A file system of 64 MB, and a file that takes all that is left of it."""

    def __init__(self, place: Path) -> None:
        self.place, self.filler = place, place / "filler"

    def fill(self, leave: int = 0) -> None:
        state = os.statvfs(self.place)
        with self.filler.open("wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, state.f_bavail * state.f_frsize - leave)

    def empty(self) -> None:
        self.filler.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64M", "tmpfs", str(place)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no small file system can be mounted here: {error}")
    yield Disk(place)
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def refused(capfd: pytest.CaptureFixture[str], action: Callable[[], Any]) -> str:
    """Its message; the exit code is 1."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as left, exit_on_error("train.py"):
        action()
    said = capfd.readouterr()
    assert left.value.code == 1
    assert "Traceback" not in said.out + said.err
    assert "No space left on device" in said.err
    assert "free there" in said.err
    assert errors.FREE_SPACE in said.err
    return said.err


def test_a_file_that_does_not_fit_leaves_the_old_one(disk: Disk) -> None:
    write(disk.place / "file", b"old")
    disk.fill(leave=8192)
    why = r"file \(1.0 MB\) could not be written: No space left.*; [\d.]+ (kB|bytes) are free there"
    with pytest.raises(DiskFull, match=why):
        write(disk.place / "file", b"x" * 10**6)
    assert (disk.place / "file").read_bytes() == b"old"
    assert names(disk.place) == {"file", "filler"}


def test_a_line_that_does_not_fit(disk: Disk) -> None:
    append(disk.place / "log", "first\n")
    disk.fill()
    with pytest.raises(DiskFull, match=r"log \(1.0 MB\) could not be written: No space left"):
        append(disk.place / "log", "x" * 10**6)
    assert (disk.place / "log").read_text().startswith("first\n")


def test_a_folder_that_does_not_fit_leaves_the_old_one(disk: Disk) -> None:
    write(disk.place / "final" / "a", b"old")
    write(disk.place / "new" / "a", b"small")
    write(disk.place / "new" / "b", b"x" * 10**6)
    disk.fill(leave=10**5)
    with pytest.raises(DiskFull, match=r"/b \(1.0 MB\)"):
        copy_folder(disk.place / "new", disk.place / "final")
    assert names(disk.place) == {"final", "new", "filler"}
    assert names(disk.place / "final") == {"a"}


def test_a_checkpoint_that_does_not_fit_gives_its_room_back(disk: Disk) -> None:
    checkpoint.save(disk.place, {"a": torch.zeros(1000)}, checkpoint.Progress(step=1), 1, None)
    disk.fill(leave=8192)
    with pytest.raises(DiskFull, match=r"state.safetensors \(4.0 MB\)"):
        checkpoint.save(disk.place, {"a": torch.zeros(10**6)}, checkpoint.Progress(step=2), 1, None)
    assert names(disk.place) == {"step-00000001", "filler"}


@contextmanager
def before(owner: object, name: str, when: int, action: Callable[[Any], None]) -> Iterator[None]:
    """Let something happen just before the so many'th call of a method."""
    method, calls = getattr(owner, name), 0

    def wrapped(*words: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == when:
            action(words[0])
        return method(*words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, wrapped)
        yield


def longer(log: Callable[..., None]) -> Callable[..., None]:
    """Lines of a page each: a file that has room left in its last page can still grow."""
    return lambda run, step, kind, values: log(run, step, kind, {**values, "x" * 5000: 0.0})


def better(
    held_out: Callable[[Trainer], dict[str, float]],
) -> Callable[[Trainer], dict[str, float]]:
    """Every evaluation is the best one so far."""
    return lambda run: {**held_out(run), "accept_length": 1.0 + run.progress.step}


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "name", "when", "file"), [
    (Trainer, "save", 2, "state.safetensors"), (best_drafter, "publish", 1, "/.drafter.new/"),
    (MetricsLog, "log", 5, "metrics.jsonl"), (best_drafter, "save_if_best", 2, "/best/step-00000003/"),
])  # fmt: skip
def test_a_run_without_room_continues_bit_equal(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path, disk: Disk,
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    owner: object, name: str, when: int, file: str,
) -> None:  # fmt: skip
    """Whatever was being written: it is named, what was there is whole, the same run goes on."""
    monkeypatch.setattr(MetricsLog, "log", longer(MetricsLog.log))
    monkeypatch.setattr(Trainer, "evaluate", better(Trainer.evaluate))
    loop.fit(config(tmp_path / "whole"), loaded, made, QUIET)
    run = disk.place / "run"

    def full(where: Trainer | MetricsLog) -> None:
        if isinstance(where, Trainer):
            where.writer.wait()  # nothing else is being written
        disk.fill()

    with before(owner, name, when, full):
        assert file in refused(capfd, lambda: loop.fit(config(run), loaded, made, QUIET))
    assert checkpoint.list_checkpoints(run / "checkpoints")
    assert not [f for f in (run / "checkpoints").iterdir() if f.name.startswith(".")]
    disk.empty()
    loop.fit(config(run), loaded, made, QUIET)
    assert weights(run).keys() == weights(tmp_path / "whole").keys()
    for key, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(run)[key])
    assert losses(run) == losses(tmp_path / "whole")


def weights(run: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(run / "drafter" / "model.safetensors")
    return tensors


def losses(run: Path) -> list[tuple[int, str, float | None]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["kind"], line.get("loss@1")) for line in lines]


@pytest.mark.parametrize("name", ["add", "_write_manifest"])
def test_a_preparation_without_room_continues_byte_for_byte(
    disk: Disk, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, name: str,
) -> None:  # fmt: skip
    """While a shard is written, or the manifest that is to name it."""
    torch.set_num_threads(1)
    monkeypatch.setattr(generate, "SHARD", 8)
    words = [
        "prepare", "target=tiny", "data=self", "data.generate.samples=40", "data.holdout=0.2",
        "data.generate.max_new_tokens=8", "data.generate.record=false",
    ]  # fmt: skip
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    assert cli.main(words) == 0
    monkeypatch.setenv("OUTRIDER_CACHE", str(disk.place))
    with before(GeneratedStore, name, 3, lambda _: disk.fill()):
        said = refused(capfd, lambda: cli.main(words))
    assert ("manifest.json (" if name == "_write_manifest" else "shard-000000") in said
    (folder,) = (disk.place / "self").iterdir()
    assert len(json.loads((folder / "manifest.json").read_text())["shards"]) == 2
    assert not list(folder.glob(".*.tmp"))
    disk.empty()
    assert cli.main(words) == 0
    assert generated_text(disk.place) == generated_text(tmp_path)


@pytest.mark.slow
def test_a_report_without_room_is_made_by_the_same_command(
    disk: Disk, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command line to the exit code, with a service that has no room either."""
    torch.set_num_threads(1)
    run = disk.place / "run"
    words = [
        "train", *SMALL, f"run.dir={run}", "train.quick_eval=true", "eval.limit=2",
        "eval.max_new_tokens=16", "train.tensorboard=true",
    ]  # fmt: skip

    def full(*words: Any, **named: Any) -> None:
        disk.fill()
        show_and_save(*words, **named)

    monkeypatch.setattr("outrider.eval.run.show_and_save", full)
    assert "/eval/eval.outputs.jsonl" in refused(capfd, lambda: cli.main(words))
    monkeypatch.setattr("outrider.eval.run.show_and_save", show_and_save)
    trained = weights(run)
    disk.empty()
    assert cli.main(words) == 0
    assert json.loads((run / "eval" / "eval.json").read_text())["prompts"] == 2
    assert all(torch.equal(trained[name], value) for name, value in weights(run).items())


def test_a_file_that_may_grow_no_further_leaves_the_old_one(tmp_path: Path) -> None:
    """Where no file system can be mounted: the process's own limit."""
    write(tmp_path / "file", b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(DiskFull, match=r"file \(1.0 MB\) could not be written: File too large"):
            write(tmp_path / "file", b"x" * 10**6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "file").read_bytes() == b"old"
    assert names(tmp_path) == {"file"}


class Full(io.StringIO):
    """A stream into a file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("number", errors.DISK_FULL_ERRNOS)
def test_every_way_of_having_no_room_ends_alike(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the message itself cannot be written."""
    monkeypatch.setattr("sys.stderr", Full())
    with pytest.raises(SystemExit) as left, exit_on_error("train.py"):
        raise OSError(number, os.strerror(number))
    assert left.value.code == 1


def test_other_errors_of_files_are_bugs() -> None:
    with pytest.raises(PermissionError), exit_on_error("train.py"):
        raise PermissionError(errno.EACCES, "no")


def test_a_recording_on_a_full_disk_goes_on_when_there_is_room(
    disk: Disk, loaded: LoadedTarget, capfd: pytest.CaptureFixture[str]
) -> None:
    """What was written is whole and stays; the same command writes the rest."""
    folder = disk.place / "traces"
    asked = config(disk.place / "run", f"data.traces={folder}", "record.shard=500")
    size = 0

    def fill_behind_some(self: RecordingFolder, shard: int, *rest: Any) -> None:
        nonlocal size
        if shard == 3:
            disk.fill(leave=size // 2)
        write_shard(self, shard, *rest)
        size = self.shard_file(shard).stat().st_size

    write_shard = RecordingFolder.write_shard
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordingFolder, "write_shard", fill_behind_some)
        said = refused(capfd, lambda: record(asked))
    assert "shard-00003.safetensors" in said
    before = RecordingFolder(folder)
    assert before.missing_shards() == list(range(3, len(before.shard_documents)))
    for shard in range(3):
        before.verify_shard(shard)
    disk.empty()
    assert record(asked) == 0
    assert RecordingFolder(folder).missing_shards() == []


def test_a_recording_larger_than_the_disk_is_not_begun(disk: Disk, loaded: LoadedTarget) -> None:
    folder = disk.place / "traces"
    disk.fill(leave=2**20)
    asked = config(disk.place / "run", f"data.traces={folder}")
    with pytest.raises(RunError, match=r"needs \d+\.\d MB, and 1\.0 MB are free"):
        record(asked)
    assert not list(folder.glob("shard-*"))
