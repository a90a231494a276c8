"""Sources: names, copies, files, folders and addresses; other locations raise."""

import json
import re
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from outrider.conf.errors import ConfigError, RunError
from outrider.data import sources
from outrider.data.conversations import (
    Prompt,
    RuleCounts,
    parse_conversation,
    read_conversations,
    read_prompts,
)
from outrider.data.dataset_registry import DATASETS, GENERAL, SUITES
from outrider.data.sources import data_source, suite_source

DIALOGUE = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
FROM = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]

# A row of each data set, from its page.
ROWS: dict[str, dict[str, Any]] = {
    "sharegpt": {"id": "a_0", "conversations": FROM},
    "ultrachat": {"prompt": "2+2?", "prompt_id": "f00", "messages": DIALOGUE},
    "perfectblend": {"conversations": FROM, "source": "metamath"},
    "magpie": {
        "uuid": "1", "model": "m", "instruction": "2+2?", "response": "4", "conversations": FROM,
    },
    "gsm8k": {"question": "2+2?", "answer": "4"},
    "code": {"instruction": "2+2?", "response": "4"},
}  # fmt: skip
PROMPTS: dict[str, tuple[dict[str, Any], Prompt]] = {
    "mt_bench": (
        {"category": "math", "prompt": ["2+2?", "3+3?"], "reference": [], "prompt_id": 81},
        Prompt("81", "math", ["2+2?", "3+3?"]),
    ),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f(x={}):\n", "entry_point": "f", "test": ""},
        Prompt("HumanEval/0", "humaneval", [
            "Complete this Python function.\n\n```python\ndef f(x={}):\n```"]),
    ),
    "gsm8k": ({"question": "2+2?", "answer": "4"}, Prompt("1", "gsm8k", ["2+2?"])),
    "alpaca": (
        {"instruction": "Add {1}.", "output": "x", "generator": "g", "dataset": "d"},
        Prompt("1", "alpaca", ["Add {1}."]),
    ),
    "cnn_dm": (
        {"article": "It rained.", "highlights": "Rain.", "id": "f0"},
        Prompt("f0", "cnn_dm", ["Summarize: It rained."]),
    ),
    "nq": ({"question": "who sang it", "answer": ["x"]}, Prompt("1", "nq", ["who sang it?"])),
    "spec_bench": (
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        Prompt("81", "writing", ["a", "b"]),
    ),
    "math_500": (
        {"problem": "$1+1$?", "solution": "", "answer": "2", "subject": "Algebra", "level": 1,
         "unique_id": "test/a/1.json"},
        Prompt("test/a/1.json", "Algebra", ["$1+1$?"]),
    ),
}  # fmt: skip


def table(file: Path, *rows: dict[str, Any]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(list(rows)), file)
    return str(file)


@pytest.mark.parametrize("name", DATASETS)
def test_rows_of_every_named_data_set_become_the_same_dialogue(name: str, tmp_path: Path) -> None:
    copy = table(tmp_path / "rows.parquet", ROWS[name])
    source, summary = data_source(f"{name}@{copy}"), RuleCounts()
    assert list(read_conversations(source, summary)) == [DIALOGUE]
    assert summary.counts == {"used": 1}


@pytest.mark.parametrize("name", PROMPTS)
def test_rows_of_every_named_suite_become_its_prompts(name: str, tmp_path: Path) -> None:
    row, expected = PROMPTS[name]
    copy = tmp_path / "rows.jsonl"
    copy.write_text(json.dumps(row))
    source = suite_source(f"{name}@{copy}")
    assert read_prompts(source) == [expected]
    assert source.single_category == (expected.category == name)


def test_a_copy_in_the_shape_of_spec_bench_is_read_as_any_suite(tmp_path: Path) -> None:
    """HumanEval, Alpaca, ... are also distributed in Spec-Bench's shape."""
    copy = tmp_path / "question.jsonl"
    copy.write_text(json.dumps({"question_id": 7, "turns": ["Add."]}))
    for name in set(PROMPTS) - {"mt_bench", "spec_bench", "math_500"}:
        assert read_prompts(suite_source(f"{name}@{copy}")) == [Prompt("7", name, ["Add."])]


def test_the_embedded_suite_has_eight_categories() -> None:
    suite = read_prompts(suite_source("outrider"))
    assert len(suite) >= 80
    assert len({prompt.category for prompt in suite}) == 8
    assert suite == read_prompts(suite_source(str(GENERAL)))


def test_location_and_licence_of_every_name_are_documented() -> None:
    for names, source in ((DATASETS, data_source), (SUITES, suite_source)):
        for name, spec in names.items():
            assert spec.licence
            assert spec.licence in source(name).describe()
    page = (Path(__file__).parent.parent / "docs" / "your_model.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (.*?) \|", page, re.MULTILINE)
    listed = {(name, location, licence) for name, location, licence in rows}
    known = {
        (name, "shipped" if Path(spec.location).is_absolute() else spec.location, spec.licence)
        for names in (DATASETS, SUITES)
        for name, spec in names.items()
    }
    assert listed == known


def test_a_folder_is_read_by_datasets_with_splits(tmp_path: Path) -> None:
    """Parquet files as in a hub repository: splits by file name, several files each."""
    for i in range(3):
        table(tmp_path / "data" / f"train-0000{i}-of-00003.parquet", {"question": f"{i}?"})
    table(tmp_path / "data" / "test-00000-of-00001.parquet", {"question": "t?"})
    assert [p.turns for p in read_prompts(data_source(str(tmp_path)))] == [["0?"], ["1?"], ["2?"]]
    assert [p.turns for p in read_prompts(suite_source(f"gsm8k@{tmp_path}"))] == [["t?"]]
    assert [p.turns for p in read_prompts(data_source(str(tmp_path), split="test"))] == [["t?"]]
    with pytest.raises(ConfigError, match=r"no split dev; it has train, test"):
        next(data_source(str(tmp_path), split="dev").rows())
    before = data_source(str(tmp_path)).fingerprint()
    assert data_source(str(tmp_path), split="test").fingerprint() != before
    table(tmp_path / "data" / "train-00000-of-00003.parquet", {"question": "other?"})
    assert data_source(str(tmp_path)).fingerprint() != before


def test_saved_datasets_are_read_and_damaged_files_raise(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list([{"question": "a?"}, {"question": "b?"}]).save_to_disk(
        str(tmp_path / "saved")
    )
    assert [p.turns for p in read_prompts(suite_source(str(tmp_path / "saved")))] == [
        ["a?"],
        ["b?"],
    ]
    file = Path(table(tmp_path / "truncated" / "train.parquet", *[{"question": "a?"}] * 99))
    file.write_bytes(file.read_bytes()[:-60])
    with pytest.raises((ConfigError, RunError), match=r"truncated"):
        list(data_source(str(tmp_path / "truncated")).rows())
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match=r"data\.path = .*none"):
        data_source(str(tmp_path / "none")).rows()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Serve a folder over http."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()


def test_an_address_is_downloaded_once(
    served: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    address, folder = served
    (folder / "question.jsonl").write_text(json.dumps({"question_id": 1, "turns": ["a"]}))
    source = suite_source(f"spec_bench@{address}/question.jsonl")
    assert read_prompts(source)[0].turns == ["a"]
    (folder / "question.jsonl").unlink()
    assert read_prompts(source)[0].turns == ["a"]
    with pytest.raises(ConfigError, match=r"missing\.jsonl.*\n.*404"):
        suite_source(f"{address}/missing.jsonl").rows()


@pytest.mark.parametrize(
    "location", ["ultrachatt", "missing.jsonl", "a/b/c.parquet", "magpie@nowhere"]
)
def test_an_unknown_location_raises_before_any_download(location: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.path"):
        data_source(location)


@pytest.mark.parametrize("part", ["subset", "split", "revision"])
def test_a_single_file_has_no_subset_split_or_revision(part: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=rf"data\.{part} = 'x'.*\n.*single file"):
        data_source(str(tmp_path / "a.jsonl"), **{part: "x"})  # type: ignore[arg-type]


def test_the_error_suggests_a_similar_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean ultrachat"):
        data_source("ultrachatt")
    with pytest.raises(ConfigError, match="Did you mean mt_bench"):
        suite_source("mt-bench")


def test_an_unreachable_hub_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Single files of a repository are downloaded by the hub's client."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"data\.path = 'Aeala.*\n.*could not be read"):
        data_source("sharegpt").rows()


def test_bad_rows_are_counted_in_the_summary(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": DIALOGUE}) + "\n{\n[]\n")
    summary = RuleCounts()
    assert len(list(read_conversations(data_source(str(file), skip_bad=2), summary))) == 1
    assert summary.counts == {"used": 1, "bad row": 2}
    with pytest.raises(RunError, match="line 3"):
        list(read_conversations(data_source(str(file), skip_bad=1), RuleCounts()))


def test_rows_of_mixed_shapes_in_one_file(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ROWS.values()))
    assert list(read_conversations(data_source(str(file)), RuleCounts())) == [DIALOGUE] * len(ROWS)
    assert parse_conversation(ROWS["code"]) == DIALOGUE
    assert sources.HUB_ID.fullmatch("org/name")
