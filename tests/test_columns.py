"""Columns of other names: `data.columns` maps them to the fields of conversations."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError
from outrider.conf.short_forms import config_words
from outrider.data import columns
from outrider.data.columns import check_columns, rename_columns
from outrider.data.conversations import RuleCounts, parse_conversation, read_conversations
from outrider.data.self_generated import conversation_source
from outrider.train.settings import check_files, parse

DIALOGUE = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
SPOKEN = [{"speaker": "user", "text": "2+2?"}, {"speaker": "assistant", "text": "4"}]
TURNS = {"messages": "dialogue", "role": "speaker", "content": "text"}


def renamed(row: dict[str, Any], mapping: dict[str, str]) -> dict[str, Any]:
    return next(rename_columns([row], mapping))


@pytest.mark.parametrize(
    ("row", "mapping"),
    [
        ({"dialogue": DIALOGUE}, {"messages": "dialogue"}),
        ({"dialogue": SPOKEN, "n": 1}, TURNS),
        ({"messages": SPOKEN}, {"role": "speaker", "content": "text"}),
        ({"q": "2+2?", "a": "4"}, {"prompt": "q", "completion": "a"}),
        ({"q": "2+2?", "answer": "4"}, {"question": "q"}),
        ({"completion": "2+2?", "prompt": "4"}, {"prompt": "completion", "completion": "prompt"}),
        ({"input": "2+2?", "result": "4"}, {"instruction": "input", "output": "result"}),
        ({"prompt": SPOKEN[:1], "completion": SPOKEN[1:]}, {"role": "speaker", "content": "text"}),
    ],
)
def test_columns_are_read_as_the_fields_that_the_mapping_names(
    row: dict[str, Any], mapping: dict[str, str]
) -> None:
    before = json.dumps(row)
    assert parse_conversation(renamed(row, mapping)) == DIALOGUE
    assert json.dumps(row) == before, "a row is not changed"


def test_a_mapped_field_decides_the_shape_of_a_row() -> None:
    """Without the mapping, `messages` comes before `prompt`."""
    row = {"messages": [{"role": "user", "content": "other"}], "q": "2+2?", "completion": "4"}
    assert parse_conversation(renamed(row, {"prompt": "q"})) == DIALOGUE


def test_the_known_fields_are_all_that_conversations_read() -> None:
    """Each one changes what is parsed."""
    rows: dict[str, dict[str, Any]] = {
        **{field: {field: DIALOGUE} for field in columns.LISTS},
        **{field: {field: "a"} for field in ("prompt", "question", "instruction")},
        "completion": {"prompt": "a", "completion": "b"}, "system": {"prompt": "a", "system": "s"},
        "response": {"prompt": "a", "response": "b"}, "answer": {"question": "a", "answer": "b"},
        "input": {"instruction": "a", "input": "b"}, "output": {"instruction": "a", "output": "b"},
    }  # fmt: skip
    for field, row in rows.items():
        other = {("x" if name == field else name): value for name, value in row.items()}
        assert parse_conversation(other) != parse_conversation(row), field
        assert parse_conversation(renamed(other, {field: "x"})) == parse_conversation(row), field
    assert {*rows, "tools", "id", "question_id", "category"} == {*columns.ROW_FIELDS}


def test_a_column_may_be_absent_from_some_rows() -> None:
    rows = [{"q": "a", "completion": "b"}, {"q": "a", "completion": "b", "sys": "s"}]
    first, second = rename_columns(rows, {"prompt": "q", "system": "sys"})
    assert "system" not in first
    assert second["system"] == "s"


def test_a_missing_column_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="dialogue, id") as error:
        renamed({"dialogue": DIALOGUE, "id": 1}, {"messages": "dialog"})
    assert (error.value.key, error.value.value) == ("data.columns.messages", "dialog")
    with pytest.raises(ConfigError, match="Columns of a turn: speaker, text"):
        renamed({"dialogue": SPOKEN}, {"messages": "dialogue", "role": "who"})
    assert list(rename_columns([], {"messages": "x"})) == []


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ("{mesages: x}", "Did you mean data.columns.messages"),
        ("{contents: x}", "Did you mean data.columns.content"),
        ("{messages: x, turns: x}", "messages and turns are two fields"),
        ("{messages: [x]}", "expects text"),
        ("x", "a mapping like"),
    ],
)
def test_a_mapping_that_cannot_be_meant_is_refused(mapping: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(compose(["data=jsonl", "data.path=a.jsonl", f"data.columns={mapping}"]))


def test_a_row_and_its_turns_may_have_columns_of_one_name() -> None:
    check_columns({"messages": "x", "content": "x"})


def test_columns_without_a_path_are_refused() -> None:
    config = parse(compose(["data=self", "data.columns={prompt: q}"]))
    with pytest.raises(ConfigError, match=r"data\.path, which is not set"):
        check_files(config, "data.path")
    with pytest.raises(ConfigError, match=r"data\.path, which is not set"):
        conversation_source(config.data)


def test_a_source_reads_columns_and_another_mapping_is_another_text(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f"{json.dumps({'dialogue': SPOKEN})}\n")
    words = ["data.columns={messages: dialogue, role: speaker, content: text}"]
    config = parse(compose(["data=jsonl", f"data.path={file}", *words]))
    source = conversation_source(config.data)
    assert list(read_conversations(source, RuleCounts())) == [DIALOGUE]
    plain = replace(source, columns={})
    assert plain.fingerprint() != source.fingerprint()


def test_a_configuration_file_holds_the_mapping() -> None:
    """Both forms of `--config`, and a saved run's."""
    mapping = {"messages": "the dialogue", "role": "who"}
    names = {"data": ["jsonl", "self"]}
    for data in (
        {"name": "jsonl", "path": "a.jsonl", "columns": mapping},
        {"path": "a.jsonl", "columns": mapping},
    ):
        words = ["data=jsonl", *config_words({"data": data}, names)]
        assert parse(compose(words)).data.columns == mapping
