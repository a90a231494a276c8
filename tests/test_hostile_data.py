"""Data files that are endless or not regular, and files of the user where Outrider cleans."""

import shutil
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import read_json, sha256_of, write_json
from outrider.data.batches import select_rows
from outrider.data.conversations import RuleCounts, read_conversations
from outrider.data.generated_store import GeneratedAnswer, GeneratedStore
from outrider.data.prepare import record
from outrider.data.readers import MAX_ROW, SUFFIXES, BadRowPolicy, read_records
from outrider.data.record.entropy_coding import compress, decompress
from outrider.data.record.folder import RecordingFolder
from outrider.data.reporter import Reporter
from outrider.data.self_generated import _exclusive
from outrider.data.sources import data_source
from outrider.launch.cli import main
from outrider.models.target.load import LoadedTarget
from outrider.train import loop
from tests import runs, test_record
from tests.test_hostile_files import hostile
from tests.test_record import config, trace_cache, training_data

loaded, own_cache = test_record.loaded, test_record.own_cache  # fixtures


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", ["fifo", "zero", "null", "folder", "huge", "deep", "nested"])
def test_hostile_data_is_one_error_at_once(kind: str, suffix: str, tmp_path: Path) -> None:
    file, start = tmp_path / f"text{suffix}", time.process_time()
    hostile(kind, file)
    with pytest.raises((ConfigError, RunError), match="text"):
        list(read_conversations(data_source(str(file)), RuleCounts()))
    assert time.process_time() - start < 10


def test_rows_of_parquet_are_bounded(tmp_path: Path) -> None:
    """A dictionary holds a long text once, for any number of rows."""
    texts = pa.array(["a", "b" * (MAX_ROW + 1), "c"] * 5).dictionary_encode()
    file = tmp_path / "text.parquet"
    pq.write_table(pa.table({"prompt": texts}), file)
    with pytest.raises(RunError, match="line 2: the row is longer than"):
        list(read_records(file))
    rows = list(read_records(file, policy=BadRowPolicy(5)))
    assert [row["prompt"] for row in rows] == ["a", "c"] * 5


def test_a_fifo_is_named_as_such(tmp_path: Path) -> None:
    hostile("fifo", tmp_path / "text.jsonl")
    with pytest.raises(ConfigError, match=r"data\.path = .*\n.*not a regular file"):
        data_source(str(tmp_path / "text.jsonl")).rows()


@pytest.mark.parametrize("kind", ["fifo", "zero", "null"])
@pytest.mark.parametrize("saved", [False, True])
def test_hostile_files_of_a_folder_are_one_error_at_once(
    kind: str, saved: bool, tmp_path: Path
) -> None:
    """Of parquet files, and of `save_to_disk`."""
    (tmp_path / "rows").mkdir()
    if saved:
        (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "rows/one.arrow"}]}')
        (tmp_path / "dataset_info.json").write_text("{}")
    hostile(kind, tmp_path / "rows" / ("one.arrow" if saved else "one.parquet"))
    with pytest.raises(ConfigError, match=r"one\.\w+ is not a regular file"):
        list(data_source(str(tmp_path)).rows())


@pytest.mark.parametrize("kind", ["fifo", "zero", "folder", "huge", "deep", "binary"])
@pytest.mark.parametrize("name", ["manifest.json", "shard-00000000.safetensors"])
def test_hostile_files_of_generated_text_are_one_error(
    kind: str, name: str, tmp_path: Path
) -> None:
    GeneratedStore(tmp_path, {}).add([GeneratedAnswer(0, "a", [1, 2, 3], 2)])
    (tmp_path / name).unlink()
    hostile(kind, tmp_path / name)
    start = time.process_time()
    if kind in ("fifo", "zero", "folder") and name == "manifest.json":
        assert not GeneratedStore(tmp_path, {}).shards  # there is no manifest
        return
    if kind == "huge" and name != "manifest.json":
        return  # hashed once, as long as that takes
    with pytest.raises(RunError):
        GeneratedStore(tmp_path, {}).answers()
    assert time.process_time() - start < 10


@pytest.mark.parametrize("kind", ["fifo", "zero", "folder", "deep", "binary"])
@pytest.mark.parametrize("name", ["manifest.json", "shard-00000.json", "shard-00000.safetensors"])
def test_hostile_files_of_a_recording_are_one_error(
    kind: str, name: str, tmp_path: Path, loaded: LoadedTarget
) -> None:
    folder = recording(loaded, tmp_path / "traces")
    (folder.path / name).unlink()
    hostile(kind, folder.path / name)
    start = time.process_time()
    with pytest.raises(RunError, match=r"traces"):
        training_data(loaded, config(f"data.traces={folder.path}"))
    assert time.process_time() - start < 10


def recording(loaded: LoadedTarget, path: Path) -> RecordingFolder:
    settings = config("data.mode=recorded", "data.max_samples=4", f"data.traces={path}")
    record(settings)
    return RecordingFolder(path)


def test_entropy_coded_states_cannot_grow_without_bound() -> None:
    packed = compress(torch.zeros(2**16, 2**4), 0.5)
    assert decompress(packed, 2**4, 0.5, 2**16).shape == (2**16, 2**4)
    with pytest.raises(ValueError, match="more than 3 rows"):
        decompress(packed, 2**4, 0.5, 3)


# ---- files of the user ----


def foreign(folder: Path) -> list[Path]:
    """Put a user's files and folders there, with names that resemble Outrider's."""
    files = [
        folder / "notes.txt", folder / ".notes.tmp", folder / ".draft.safetensors.tmp",
        folder / "model.safetensors", folder / f"{'a' * 32}-copy.safetensors",
        folder / "shard-00000.bak.safetensors", folder / "sub.bak" / "model.safetensors",
    ]  # fmt: skip
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"the user's")
    (folder / f"{'b' * 32}-{'c' * 16}.safetensors").mkdir(exist_ok=True)
    return files


def test_the_trace_cache_removes_only_its_own_files(loaded: LoadedTarget, tmp_path: Path) -> None:
    home = tmp_path / "kept"
    data = training_data(loaded, config("data.mode=online"))
    batches = [select_rows(data.train, torch.tensor([i])) for i in range(4)]
    older = trace_cache(loaded, home / f"{0:016x}", 1e9)
    for batch in batches:
        older.trace(batch)
    size = older.size()
    shutil.copytree(older.path, home / f"{0:016x}.bak")
    first = next(older.path.glob("*.safetensors"))
    copy = first.with_name(f"{first.stem}.bak.safetensors")
    shutil.copy(first, copy)
    users = [*foreign(home), *foreign(older.path), copy, *(home / f"{0:016x}.bak").iterdir()]
    newer = trace_cache(loaded, home / f"{1:016x}", 0.6 * size)
    for batch in batches:
        newer.trace(batch)
    assert older.size() < size
    assert newer.size() > 0
    assert all(file.is_file() for file in users)


def test_recording_again_removes_only_its_own_files(loaded: LoadedTarget, tmp_path: Path) -> None:
    path = tmp_path / "traces"
    folder = recording(loaded, path)
    users = foreign(path)
    left = path / ".shard-00000.safetensors.123.tmp"
    left.write_bytes(b"of a killed process")
    content = bytearray(folder.shard_file(0).read_bytes())
    content[-9] ^= 1
    folder.shard_file(0).write_bytes(content)
    words = ("data.mode=recorded", "data.max_samples=4", f"data.traces={path}")
    record(config(*words, "record.damaged=again"))
    assert all(file.read_bytes() == b"the user's" for file in users)
    assert not left.exists()


def test_shards_without_a_manifest_are_not_overwritten(
    loaded: LoadedTarget, tmp_path: Path
) -> None:
    folder = recording(loaded, tmp_path / "traces")
    (folder.path / "manifest.json").unlink()
    before = sha256_of(folder.shard_file(0))
    with pytest.raises(RunError, match="shards without a manifest"):
        recording(loaded, folder.path)
    assert sha256_of(folder.shard_file(0)) == before


def test_generation_removes_only_its_own_temporary_files(tmp_path: Path) -> None:
    store = GeneratedStore(tmp_path, {})
    store.add([GeneratedAnswer(0, "a", [1, 2, 3], 2)])
    users, left = foreign(tmp_path), tmp_path / ".shard-00000000.safetensors.123.tmp"
    left.write_bytes(b"of a killed process")
    with _exclusive(store, Reporter.silent()) as again:
        assert len(again.answers()) == 1
    assert all(file.read_bytes() == b"the user's" for file in users)
    assert not left.exists()


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    GeneratedStore(tmp_path / "text", {}).add([GeneratedAnswer(0, "a", [1, 2, 3], 2)])
    manifest = read_json(tmp_path / "text" / "manifest.json", "")
    (tmp_path / "x.safetensors").write_bytes(b"")
    write_json(tmp_path / "text" / "manifest.json", {
        **manifest, "shards": {"../x.safetensors": sha256_of(tmp_path / "x.safetensors")},
    })  # fmt: skip
    with pytest.raises(RunError, match="no name of a shard"):
        GeneratedStore(tmp_path / "text", {})


# ---- memory of a step ----


def test_a_step_that_no_machine_can_hold_is_refused_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "target=tiny", "data.max_samples=24", "data.max_length=128"]
    start = time.process_time()
    with pytest.raises(SystemExit) as stopped:
        main([*words, f"run.dir={tmp_path / 'run'}", "train.batch_tokens=268435456"])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert "train.batch_tokens" in message
    assert "Traceback" not in message
    assert time.process_time() - start < 60


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(), torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)  # fmt: skip
def test_a_failed_allocation_of_a_step_names_batch_tokens(
    error: Exception, loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    settings = runs.config(tmp_path / "run", "train.max_steps=1")
    monkeypatch.setattr(loop, "_advance", fail)
    with pytest.raises(RunError, match=r"train\.batch_tokens=512.*more memory"):
        loop.fit(settings, loaded, training_data(loaded, settings), test_record.QUIET)
