"""A full disk: one message with the file and the free space, exit code 1, and a resumable run.

The tests mount a small file system (tmpfs); they are skipped without the right to do so.
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
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file

from outrider.conf import errors
from outrider.conf.errors import DiskFull, RunError, exit_on_error
from outrider.conf.files import append, copy_files, write
from outrider.data import generate
from outrider.data.generated_store import GeneratedStore
from outrider.data.pack import Rows
from outrider.data.prepare import record
from outrider.data.record.folder import RecordingFolder
from outrider.data.trace_source import TraceSource
from outrider.data.training_data import TrainingData
from outrider.eval.report_tables import show_and_save
from outrider.launch import cli
from outrider.models.target import load
from outrider.models.target.load import LoadedTarget
from outrider.train import best_drafter, checkpoint, loop
from outrider.train.metrics_log import MetricsLog
from outrider.train.trainer import Trainer
from tests.runs import QUIET, SMALL, config, generated_text


class Disk:
    """A file system of 64 MB, and a file that takes its free space."""

    def __init__(self, path: Path) -> None:
        self.path, self.filler = path, path / "filler"

    def fill(self, leave: int = 0) -> None:
        state = os.statvfs(self.path)
        with self.filler.open("wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, state.f_bavail * state.f_frsize - leave)

    def empty(self) -> None:
        self.filler.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64M", "tmpfs", str(path)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no small file system can be mounted here: {error}")
    yield Disk(path)
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def run_and_get_error(capfd: pytest.CaptureFixture[str], action: Callable[[], Any]) -> str:
    """Run an action that must end with exit code 1 for a full disk; return its message."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped, exit_on_error("train.py"):
        action()
    captured = capfd.readouterr()
    assert stopped.value.code == 1
    assert "Traceback" not in captured.out + captured.err
    assert "No space left on device" in captured.err
    assert "free there" in captured.err
    assert errors.FREE_SPACE in captured.err
    return captured.err


def test_a_file_that_does_not_fit_leaves_the_old_one(disk: Disk) -> None:
    write(disk.path / "file", b"old")
    disk.fill(leave=8192)
    why = r"file \(1.0 MB\) could not be written: No space left.*; [\d.]+ (kB|bytes) are free there"
    with pytest.raises(DiskFull, match=why):
        write(disk.path / "file", b"x" * 10**6)
    assert (disk.path / "file").read_bytes() == b"old"
    assert names(disk.path) == {"file", "filler"}


def test_a_line_that_does_not_fit(disk: Disk) -> None:
    append(disk.path / "log", "first\n")
    disk.fill()
    with pytest.raises(DiskFull, match=r"log \(1.0 MB\) could not be written: No space left"):
        append(disk.path / "log", "x" * 10**6)
    assert (disk.path / "log").read_text().startswith("first\n")


def test_a_folder_that_does_not_fit_leaves_the_old_one(disk: Disk) -> None:
    write(disk.path / "final" / "a", b"old")
    write(disk.path / "new" / "a", b"small")
    write(disk.path / "new" / "b", b"x" * 10**6)
    disk.fill(leave=10**5)
    with pytest.raises(DiskFull, match=r"/b \(1.0 MB\)"):
        copy_files(disk.path / "new", disk.path / "final", ("a", "b"))
    assert names(disk.path) == {"final", "new", "filler"}
    assert names(disk.path / "final") == {"a"}
    assert (disk.path / "final" / "a").read_bytes() == b"old"


def test_a_checkpoint_that_does_not_fit_is_removed(disk: Disk) -> None:
    checkpoint.save(disk.path, {"a": torch.zeros(1000)}, checkpoint.Progress(step=1), 1, None)
    disk.fill(leave=8192)
    with pytest.raises(DiskFull, match=r"state.safetensors \(4.0 MB\)"):
        checkpoint.save(disk.path, {"a": torch.zeros(10**6)}, checkpoint.Progress(step=2), 1, None)
    assert names(disk.path) == {"step-00000001", "filler"}


def test_a_run_folder_on_a_full_disk_ends_training_before_anything_is_loaded(
    disk: Disk, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "load_target", lambda *_: pytest.fail("loads the target"))
    disk.fill()
    words = ["train", f"run.dir={disk.path / 'run'}"]
    assert "/run/" in run_and_get_error(capfd, lambda: cli.main(words))
    assert not list((disk.path / "run").glob("*"))


@contextmanager
def before(owner: object, name: str, when: int, action: Callable[[Any], None]) -> Iterator[None]:
    """Call `action` just before the `when`-th call of a method."""
    method, calls = getattr(owner, name), 0

    def wrapped(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == when:
            action(arguments[0])
        return method(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, wrapped)
        yield


def longer(log: Callable[..., None]) -> Callable[..., None]:
    """Make each line a page long: a file with space in its last page can still grow."""
    return lambda run, step, kind, values: log(run, step, kind, {**values, "x" * 5000: 0.0})


Evaluate: TypeAlias = Callable[[Trainer, Rows, TraceSource], dict[str, float]]


def better(held_out: Evaluate) -> Evaluate:
    """Make every evaluation the best one so far."""
    return lambda run, *where: {
        **held_out(run, *where),
        "accept_length": 1.0 + run.progress.step,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "name", "when", "file"), [
    (Trainer, "save", 2, "state.safetensors"), (best_drafter, "write_result", 1, "/.drafter.new/"),
    (MetricsLog, "log", 5, "metrics.jsonl"),
    (best_drafter, "save_if_best", 2, "/best/step-00000003/"),
])  # fmt: skip
def test_a_run_on_a_full_disk_resumes_bit_exactly(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path, disk: Disk,
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    owner: object, name: str, when: int, file: str,
) -> None:  # fmt: skip
    """The error names the file, existing files are intact, and the run can be resumed."""
    monkeypatch.setattr(MetricsLog, "log", longer(MetricsLog.log))
    monkeypatch.setattr(Trainer, "evaluate", better(Trainer.evaluate))
    loop.fit(config(tmp_path / "reference"), loaded, made, QUIET)
    run = disk.path / "run"

    def full(owner: Trainer | MetricsLog) -> None:
        if isinstance(owner, Trainer):
            owner.writer.wait()  # nothing else is being written
        disk.fill()

    with before(owner, name, when, full):
        assert file in run_and_get_error(capfd, lambda: loop.fit(config(run), loaded, made, QUIET))
    assert checkpoint.list_checkpoints(run / "checkpoints")
    assert not [f for f in (run / "checkpoints").iterdir() if f.name.startswith(".")]
    disk.empty()
    loop.fit(config(run), loaded, made, QUIET)
    assert weights(run).keys() == weights(tmp_path / "reference").keys()
    for key, value in weights(tmp_path / "reference").items():
        assert torch.equal(value, weights(run)[key])
    assert losses(run) == losses(tmp_path / "reference")


def weights(run: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(run / "drafter" / "model.safetensors")
    return tensors


def losses(run: Path) -> list[tuple[int, str, float | None]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["kind"], line.get("loss@1")) for line in lines]


@pytest.mark.parametrize("name", ["add", "_write_manifest"])
def test_a_preparation_on_a_full_disk_resumes_byte_for_byte(
    disk: Disk, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, name: str,
) -> None:  # fmt: skip
    """The disk is full while a shard or the manifest is written."""
    monkeypatch.setattr(generate, "SHARD", 8)
    words = [
        "prepare", "target=tiny", "data=self", "data.generate.samples=40", "data.holdout=0.2",
        "data.generate.max_new_tokens=8", "data.generate.record=false",
    ]  # fmt: skip
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    assert cli.main(words) == 0
    monkeypatch.setenv("OUTRIDER_CACHE", str(disk.path))
    with before(GeneratedStore, name, 3, lambda _: disk.fill()):
        message = run_and_get_error(capfd, lambda: cli.main(words))
    assert ("manifest.json (" if name == "_write_manifest" else "shard-000000") in message
    (folder,) = (disk.path / "self").iterdir()
    assert len(json.loads((folder / "manifest.json").read_text())["shards"]) == 2
    assert not list(folder.glob(".*.tmp"))
    disk.empty()
    assert cli.main(words) == 0
    assert generated_text(disk.path) == generated_text(tmp_path)


@pytest.mark.slow
def test_a_report_on_a_full_disk_is_written_by_repeating_the_command(
    disk: Disk, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command line to the exit code; a tracker fails to write as well."""
    run = disk.path / "run"
    words = [
        "train", *SMALL, f"run.dir={run}", "train.quick_eval=true", "eval.limit=2",
        "eval.max_new_tokens=16", "train.tensorboard=true",
    ]  # fmt: skip

    def full(*arguments: Any, **named: Any) -> None:
        disk.fill()
        show_and_save(*arguments, **named)

    monkeypatch.setattr("outrider.eval.run.show_and_save", full)
    assert "/eval/eval.outputs.jsonl" in run_and_get_error(capfd, lambda: cli.main(words))
    monkeypatch.setattr("outrider.eval.run.show_and_save", show_and_save)
    trained = weights(run)
    disk.empty()
    assert cli.main(words) == 0
    assert json.loads((run / "eval" / "eval.json").read_text())["prompts"] == 2
    assert all(torch.equal(trained[name], value) for name, value in weights(run).items())


def test_a_file_size_limit_leaves_the_old_file(tmp_path: Path) -> None:
    """The limit of the process, where no file system can be mounted."""
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
def test_every_errno_of_a_full_disk_has_the_same_exit_code(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the message itself cannot be written."""
    monkeypatch.setattr("sys.stderr", Full())
    with pytest.raises(SystemExit) as stopped, exit_on_error("train.py"):
        raise OSError(number, os.strerror(number))
    assert stopped.value.code == 1


@pytest.mark.parametrize("error", [ConnectionResetError(errno.ECONNRESET, "no"), OSError("no")])
def test_errors_of_libraries_and_the_network_are_not_caught(error: OSError) -> None:
    with pytest.raises(OSError, match="no"), exit_on_error("train.py"):
        raise error


def test_a_recording_on_a_full_disk_can_be_resumed(
    disk: Disk, loaded: LoadedTarget, capfd: pytest.CaptureFixture[str]
) -> None:
    """Written shards are intact and stay; the same command writes the others."""
    folder = disk.path / "traces"
    settings = config(disk.path / "run", f"data.traces={folder}", "record.shard=500")
    size = 0

    def fill_at_third_shard(self: RecordingFolder, shard: int, *rest: Any) -> None:
        nonlocal size
        if shard == 3:
            disk.fill(leave=size // 2)
        write_shard(self, shard, *rest)
        size = self.shard_file(shard).stat().st_size

    write_shard = RecordingFolder.write_shard
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordingFolder, "write_shard", fill_at_third_shard)
        message = run_and_get_error(capfd, lambda: record(settings))
    assert "shard-00003.safetensors" in message
    before = RecordingFolder(folder)
    assert before.missing_shards() == list(range(3, len(before.shard_documents)))
    for shard in range(3):
        before.verify_shard(shard)
    disk.empty()
    assert record(settings) == 0
    assert RecordingFolder(folder).missing_shards() == []


def test_a_recording_larger_than_the_disk_is_not_started(disk: Disk, loaded: LoadedTarget) -> None:
    folder = disk.path / "traces"
    disk.fill(leave=2**20)
    settings = config(disk.path / "run", f"data.traces={folder}")
    with pytest.raises(RunError, match=r"needs \d+\.\d MB, and 1\.0 MB are free"):
        record(settings)
    assert not list(folder.glob("shard-*"))
