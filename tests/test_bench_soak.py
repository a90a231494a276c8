"""`outrider bench soak`: the schedule of faults, and a run with faults equals one without."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from outrider.conf.errors import ConfigError
from outrider.launch.bench.soak import (
    FAULTS,
    MARKER,
    FaultyRun,
    Options,
    _count_left,
    _schedule,
    soak,
)

SMALL_DISK = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=256m soak "$0" && exec "$@"']


def test_schedule_has_all_faults_equally_often() -> None:
    names = _schedule(Options(), small_disk=True)
    assert len(names) == 20
    assert {names.count(name) for name in FAULTS} <= {1, 2}
    assert names == _schedule(Options(), small_disk=True)
    assert names != _schedule(Options(seed=1), small_disk=True)


def test_a_large_disk_is_never_filled() -> None:
    assert "full disk" not in _schedule(Options(), small_disk=False)
    with pytest.raises(ConfigError, match="at most 1,000,000,000 bytes"):
        _schedule(Options(kinds=("full disk",)), small_disk=False)


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "hurt" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(ConfigError, match="not empty and no soak made it"):
        soak([f"dir={tmp_path}"])
    assert [mine] == [file for file in tmp_path.rglob("*") if file.is_file()]
    assert mine.read_text() == "mine"


def test_only_the_runs_of_an_earlier_soak_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.launch.bench.soak._compare_runs", lambda *_: 0)
    words = [f"dir={tmp_path / 'new'}"]
    assert soak(words) == 0
    for name in ("hurt/metrics.jsonl", "whole.txt", "mine.txt", "mine/hurt"):
        file = tmp_path / "new" / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
    assert soak(words) == 0
    left = {file.name for file in (tmp_path / "new").iterdir()} - {".lock"}
    assert left == {MARKER, "mine.txt", "mine"}


def test_ranks_that_outlive_their_launcher_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A zombie, whose exit code was not read, has ended."""
    monkeypatch.setattr("outrider.launch.bench.soak.GRACE", 0.5)
    with subprocess.Popen(["true"]), subprocess.Popen(["sleep", "60"]) as living:
        children = psutil.Process().children()
        assert _count_left(children) == 1
        living.kill()
        assert _count_left(children) == 0


@pytest.mark.parametrize("name", ["truncate", "flip a bit"])
def test_damage_changes_the_newest_checkpoint_alone(name: str, tmp_path: Path) -> None:
    """By one bit, or by up to a thousand bytes at the end."""
    content, changed = bytes(range(256)) * 8, set()
    ended = subprocess.Popen(["true"])
    assert ended.wait() == 0
    for seed in range(8):
        run = FaultyRun(Options(seed=seed), tmp_path / str(seed), steps=8)
        files = [
            run.folder / "checkpoints" / step / file
            for step in ("step-00000002", "step-00000004")
            for file in ("state.json", "state.safetensors")
        ]
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        FAULTS[name](run, ended)  # type: ignore[index]
        (file,) = (file for file in files if file.read_bytes() != content)
        data = file.read_bytes()
        changed.add(f"{file.parent.name}/{file.name}")
        if name == "truncate":
            assert content.startswith(data)
            assert 1 <= len(content) - len(data) <= 1000
        else:
            pairs = zip(data, content, strict=True)
            assert sum((a ^ b).bit_count() for a, b in pairs) == 1
    assert changed == {"step-00000004/state.json", "step-00000004/state.safetensors"}


@pytest.mark.parametrize("word", ["fault=3", "faults=0", "faults=many", "kinds=fault"])
def test_invalid_options_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="fault"):
        soak([word])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("launch", "kinds"),
    [
        ("ddp", "kill in a save,interrupt twice,flip a bit,no room"),
        ("zero2", "terminate a rank,interrupt,stall"),
    ],
)
def test_run_with_faults_is_bit_equal(launch: str, kinds: str, tmp_path: Path) -> None:
    out, faults = tmp_path / "soak.json", f"faults={len(kinds.split(','))}"
    words = [f"launch={launch}", f"kinds={kinds}", faults]
    assert soak([*words, f"dir={tmp_path / 'runs'}", f"out={out}"]) == 0
    result = json.loads(out.read_text())
    assert result["weights_equal"]
    assert result["log_equal"]
    assert {fault["fault"] for fault in result["faults"]} == set(kinds.split(","))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_on_a_disk_that_fills_is_bit_equal(tmp_path: Path) -> None:
    """The disk is a tmpfs in a mount namespace of its own, which needs no privileges."""
    if subprocess.run([*SMALL_DISK, tmp_path, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no small file system can be mounted here")
    out, folder = tmp_path / "soak.json", tmp_path / "disk"
    folder.mkdir()
    words = ["kinds=full disk", "faults=2", f"dir={folder}", f"out={out}"]
    command = [sys.executable, "-m", "outrider.launch.cli", "bench", "soak", *words]
    assert subprocess.run([*SMALL_DISK, folder, *command], check=False).returncode == 0
    result = json.loads(out.read_text())
    assert [fault["code"] for fault in result["faults"]] == [1, 1]
    assert result["weights_equal"]
    assert result["log_equal"]
