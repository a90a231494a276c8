"""Random mutations of data files, recordings, generated text and caches: read, or refused."""

import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import strategies as st
from pyarrow import parquet

from outrider.conf.console import Console
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import sha256_of
from outrider.conf.schema import Config
from outrider.data import corpus
from outrider.data.batches import select_rows
from outrider.data.conversations import Prompt, RuleCounts, read_conversations, read_prompts
from outrider.data.generated_store import GeneratedAnswer, GeneratedStore
from outrider.data.pack import split_holdout
from outrider.data.prepare import record
from outrider.data.record.cache import TraceCache
from outrider.data.reporter import Reporter
from outrider.data.sources import data_source, suite_source
from outrider.data.tokenise import conversation_key
from outrider.data.training_data import TrainingData
from outrider.launch.doctor import text
from outrider.models.formats.fingerprints import fingerprints
from outrider.models.target.load import LoadedTarget
from tests import test_record
from tests.mutations import fuzz, mutated_bytes, mutated_json, mutated_value, replace_file
from tests.test_record import config, trace_cache, training_data

pytestmark = pytest.mark.untyped  # files hold values of any type
loaded = test_record.loaded  # a fixture
RECORDS: list[dict[str, Any]] = [
    {"messages": [{"role": "system", "content": "b"}, {"role": "user", "content": "a\u00e9"},
                  {"role": "assistant", "content": [{"type": "text", "text": "c"}]}],
     "id": 7, "category": "one"},
    {"conversations": [{"from": "human", "value": "x, y"}, {"from": "gpt", "value": "z\n"}]},
    {"prompt": [{"role": "user", "content": "p"}], "completion": "q", "system": "s"},
    {"turns": ["one", "two"], "question_id": "a"},
    {"instruction": "i", "input": "j", "output": "k"},
]  # fmt: skip
TABLE = [{"prompt": f"p{i}", "completion": "c\u00e9", "id": str(i)} for i in range(4)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(folder / "cache"))
        yield folder


def parquet_bytes() -> bytes:
    stream = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(TABLE), stream)
    return stream.getvalue()


JSONL = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)
PRINTED = set[frozenset[tuple[str, int]]]()  # counts, which most examples have in common
CSV = b'id,prompt,completion\n1,"a ""b""",c\n2,d,"[1]"\n'


def accepted(read: Callable[[], Any]) -> Any:
    """Return what is read; None for one of the project's errors, whose text can be shown."""
    try:
        return read()
    except (ConfigError, RunError) as error:
        str(error).encode(errors="backslashreplace")
        return None


def read_text(file: Path) -> None:
    """Read a file as training text and as prompts, and use both as preparation does."""

    def conversations() -> None:
        summary = RuleCounts()
        for turns in read_conversations(data_source(str(file), skip_bad=2), summary):
            assert turns[-1]["role"] == "assistant"
            conversation_key(turns)
            " ".join(turn["content"] for turn in turns).encode()
        if (counts := frozenset(summary.counts.items())) not in PRINTED:
            Reporter(Console(file=io.StringIO())).print(summary)
            PRINTED.add(counts)

    def prompts() -> list[Prompt]:
        return read_prompts(suite_source(str(file)))

    accepted(conversations)
    for prompt in accepted(prompts) or []:
        " ".join([*prompt.turns, prompt.system or ""]).encode()
        assert prompt.first_messages()
        json.dumps([prompt.id, prompt.category]).encode()
        Console(file=io.StringIO()).print(prompt.id, prompt.category)
    accepted(lambda: data_source(str(file)).fingerprint())


@fuzz(data=mutated_bytes(JSONL) | mutated_value(RECORDS).map(
    lambda rows: b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    if isinstance(rows, list) else json.dumps(rows).encode()
))  # fmt: skip
def test_json_lines(place: Path, data: bytes) -> None:
    replace_file(place / "a.jsonl", data)
    read_text(place / "a.jsonl")


@fuzz(data=mutated_json(RECORDS))
def test_json_arrays(place: Path, data: bytes) -> None:
    replace_file(place / "a.json", data)
    read_text(place / "a.json")


@fuzz(data=mutated_bytes(CSV))
def test_csv(place: Path, data: bytes) -> None:
    replace_file(place / "a.csv", data)
    read_text(place / "a.csv")


@fuzz(data=mutated_bytes(parquet_bytes()))
def test_parquet(place: Path, data: bytes) -> None:
    replace_file(place / "a.parquet", data)
    read_text(place / "a.parquet")


@fuzz(rows=mutated_value(RECORDS))
def test_parquet_columns_of_other_types(place: Path, rows: Any) -> None:
    try:
        table = pa.Table.from_pylist(rows)
        parquet.write_table(table, place / "b.parquet")
    except (pa.ArrowException, AttributeError, LookupError, TypeError, ValueError, OverflowError):
        return  # no table has these values
    read_text(place / "b.parquet")


# ---- recordings, generated text, caches ----


@pytest.fixture(scope="module")
def recordings(loaded: LoadedTarget, place: Path) -> dict[str, Path]:
    """A recording of each encoding, and with `record.top`; `used` is written per example."""
    made = {}
    for name, word in (("int8", "record.states=int8"), ("coded", "record.states=coded"),
                       ("top", "record.top=4")):  # fmt: skip
        made[name] = place / name
        words = ("data.mode=recorded", "data.max_samples=4", f"data.traces={made[name]}", word)
        record(config(*words))
    return made


@pytest.fixture(scope="module")
def used(loaded: LoadedTarget, place: Path) -> Iterator[Config]:
    """The configuration of the recording `used`; the target's fingerprints are computed once."""
    known = fingerprints(loaded)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "fingerprints", lambda _: known)
        yield config(f"data.traces={place / 'used'}", "data.holdout=0.4")


def use_recording(loaded: LoadedTarget, settings: Config) -> None:
    def read() -> TrainingData:
        data = training_data(loaded, settings)
        text.check_conversations(data)
        assert data.recorded is not None
        for rows, source in ((data.train, data.recorded.train), (data.held, data.recorded.held)):
            trace = source.trace(select_rows(rows, torch.arange(len(rows))))
            if trace.top1_ids is not None:
                data.vocab(None).to_draft(trace.top1_ids.clamp(min=0))
        return data

    accepted(read)


def with_file(source: Path, folder: Path, name: str, data: bytes) -> None:
    """Copy a folder with one file replaced, whose hash is that of its bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    replace_file(folder / name, data)
    if name.startswith("shard-") and name.endswith(".safetensors"):
        change_json(folder / name.replace(".safetensors", ".json"), sha256=sha256_of(folder / name))
    elif name.startswith("about"):
        change_json(folder / "manifest.json", about=sha256_of(folder / name))


def change_json(file: Path, **fields: Any) -> None:
    replace_file(file, json.dumps({**json.loads(file.read_text()), **fields}).encode())


@fuzz(data=st.data())
def test_recording(
    loaded: LoadedTarget, recordings: dict[str, Path], used: Config, place: Path, data: Any
) -> None:
    file = data.draw(st.sampled_from([
        file for folder in recordings.values() for file in sorted(folder.iterdir())
        if file.name.startswith(("manifest", "about", "shard-00000"))
    ]))  # fmt: skip
    name = file.name
    content = file.read_bytes()
    if name.endswith(".json"):
        mutated = data.draw(mutated_json(json.loads(content)))
    else:  # the header, more often than the numbers
        size = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:size])
        new = json.dumps(data.draw(mutated_value(header))).encode()
        whole = len(new).to_bytes(8, "little") + new + content[size:]
        mutated = data.draw(st.just(whole) | mutated_bytes(content))
    with_file(file.parent, place / "used", name, mutated)
    use_recording(loaded, used)


ANSWERS = [GeneratedAnswer(i, f"key{i}", [5, 6, 7 + i, 8], 2) for i in range(3)]


@pytest.mark.parametrize("name", ["manifest.json", "shard-00000000.safetensors"])
@fuzz(data=st.data())
def test_generated_text(place: Path, name: str, data: Any) -> None:
    source, folder = place / "text", place / "text-used"
    if not source.exists():
        store = GeneratedStore(source, {"a": 1})
        store.add(ANSWERS, 1.5)
        store.mark_complete("[null, 3]")
    content = (source / name).read_bytes()
    is_manifest = name == "manifest.json"
    mutated = data.draw(mutated_json(json.loads(content)) if is_manifest else
                        mutated_bytes(content))  # fmt: skip
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    replace_file(folder / name, mutated)
    if not is_manifest:
        change_json(folder / "manifest.json", shards={name: sha256_of(folder / name)})

    def read() -> list[GeneratedAnswer]:
        store = GeneratedStore(folder, {"a": 1})
        chosen = store.select("[null, 3]") if "[null, 3]" in store.complete else store
        store.seconds += 1.0
        return chosen.answers()

    documents = [answer.to_document() for answer in accepted(read) or []]
    split_holdout(documents, 0.5)
    assert all(document.answer.any() and document.ids.min() >= 0 for document in documents)


@pytest.fixture(scope="module")
def cached(loaded: LoadedTarget, place: Path) -> tuple[TraceCache, Any, Any, bytes]:
    data = training_data(loaded, config("data.mode=online", "data.max_samples=4"))
    batch = select_rows(data.train, torch.arange(1))
    cache = trace_cache(loaded, place / "kept" / f"{0:016x}", 1e9)
    trace = cache.trace(batch)
    return cache, batch, trace, next(iter(cache.files.values())).read_bytes()


@fuzz(data=st.data())
def test_cached_rows_are_read_as_written_or_computed_again(
    loaded: LoadedTarget, cached: tuple[TraceCache, Any, Any, bytes], data: Any
) -> None:
    cache, batch, trace, content = cached
    (file,) = cache.files.values()
    replace_file(file, data.draw(mutated_bytes(content)))
    other = TraceCache(cache.path, cache.layout, loaded.target, 1e9).trace(batch)
    assert torch.equal(other.taps, trace.taps)
    assert torch.equal(other.last, trace.last)
