"""Records to turns: each shape, each rule of RULES with its count, and files that are broken."""

import hashlib
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outrider.data import sources
from outrider.data.sources import (
    RULES,
    Message,
    Prompt,
    Summary,
    conversation,
    conversations,
    fingerprint,
    prompts,
    records,
)
from outrider.train.errors import ConfigError, RunError


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


def system(text: str) -> Message:
    return Message(role="system", content=text)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


DIALOGUE = [user("2+2?"), assistant("4")]
SHAPED: list[tuple[dict[str, Any], list[Message]]] = [
    ({"messages": DIALOGUE}, DIALOGUE),
    (
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        DIALOGUE,
    ),
    ({"conversations": DIALOGUE}, DIALOGUE),
    ({"prompt": "2+2?", "completion": "4"}, DIALOGUE),
    ({"prompt": "2+2?", "response": "4"}, DIALOGUE),
    ({"prompt": DIALOGUE[:1], "completion": DIALOGUE[1:]}, DIALOGUE),
    ({"question": "2+2?", "answer": "4"}, DIALOGUE),
    ({"instruction": "2+2?", "output": "4"}, DIALOGUE),
    ({"instruction": "2+2?", "input": "", "output": "4"}, DIALOGUE),
    (
        {"instruction": "Add.", "input": "2 2", "output": "4"},
        [user("Add.\n\n2 2"), assistant("4")],
    ),
    ({"prompt": "2+2?"}, DIALOGUE[:1]),
    ({"question": "2+2?"}, DIALOGUE[:1]),
    ({"turns": ["2+2?", "3+3?"]}, [user("2+2?"), user("3+3?")]),
    ({"system": "Be brief.", "messages": DIALOGUE}, [system("Be brief."), *DIALOGUE]),
    (
        {"messages": [{"role": "developer", "content": "Be brief."}, *DIALOGUE]},
        [system("Be brief."), *DIALOGUE],
    ),
]


@pytest.mark.parametrize(("record", "expected"), SHAPED)
def test_every_common_shape_becomes_the_same_turns(
    record: dict[str, Any], expected: list[Message]
) -> None:
    assert conversation(record) == expected


TOOL = {"role": "tool", "content": "{}"}
ODD: list[tuple[str, list[Any], list[Message]]] = [
    ("no turns", [], []),
    ("no turns", [system("Be brief.")], []),
    ("leading answer", [assistant("Hello."), *DIALOGUE], DIALOGUE),
    ("leading answer", [system("S"), assistant("Hi"), *DIALOGUE], [system("S"), *DIALOGUE]),
    ("turns joined", [user("2+"), user("2?"), assistant("4")], [user("2+\n\n2?"), assistant("4")]),
    ("turns joined", [user("a"), assistant("b"), assistant("c")], [user("a"), assistant("b\n\nc")]),
    ("empty turn", [*DIALOGUE, user("3+3?"), assistant(" \n")], DIALOGUE),
    ("empty turn", [*DIALOGUE, {"role": "user", "content": None}, assistant("?")], DIALOGUE),
    ("unknown role", [*DIALOGUE, TOOL, assistant("6")], DIALOGUE),
    ("not text", [*DIALOGUE, {"role": "user", "content": 6}, assistant("6")], DIALOGUE),
    ("late system turn", [*DIALOGUE, system("Now rhyme."), user("x"), assistant("y")], DIALOGUE),
    ("unanswered question", [*DIALOGUE, user("3+3?")], DIALOGUE),
    ("no answer", [user("2+2?")], [user("2+2?")]),
]


@pytest.mark.parametrize(("reason", "turns", "expected"), ODD)
def test_an_odd_conversation_is_mended_by_its_rule_and_counted(
    reason: str, turns: list[Any], expected: list[Message]
) -> None:
    summary = Summary()
    assert conversation({"messages": turns}, summary) == expected
    assert summary.counts[reason] == 1


def test_a_regular_conversation_uses_no_rule() -> None:
    summary = Summary()
    conversation({"messages": [system("S"), *DIALOGUE, *DIALOGUE]}, summary)
    assert not summary.counts


def test_content_in_parts_is_joined_and_an_image_ends_the_conversation() -> None:
    summary = Summary()
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    image = [{"type": "image", "url": "cat.png"}]
    turns = [{"role": "user", "content": parts}, DIALOGUE[1], {"role": "user", "content": image}]
    assert conversation({"messages": turns}, summary) == DIALOGUE
    assert summary.counts == {"text parts joined": 1, "not text": 1}


def test_a_record_without_known_keys_is_counted() -> None:
    summary = Summary()
    assert conversation({"text": "once upon a time"}, summary) == []
    assert summary.counts == {"unknown shape": 1}


def test_the_summary_prints_each_used_rule_with_its_count() -> None:
    summary, console = Summary(), Console(width=120, record=True, file=StringIO())
    summary.add("cut", 1234)
    console.print(summary)
    shown = console.export_text()
    assert "1,234" in shown
    assert RULES["cut"] in shown
    assert RULES["not text"] not in shown
    with pytest.raises(ValueError, match="no rule"):
        summary.add("made up")


def test_a_file_gives_its_answered_conversations_and_counts_the_rest(tmp_path: Path) -> None:
    rows = [{"messages": DIALOGUE}, {"prompt": "2+2?"}, {"text": "x"}, {"messages": DIALOGUE}]
    found, summary = conversations(write(tmp_path / "a.jsonl", *rows))
    assert found == [DIALOGUE, DIALOGUE]
    assert summary.counts == {"used": 2, "no answer": 1, "unknown shape": 1}
    assert conversations(tmp_path / "a.jsonl", limit=1)[0] == [DIALOGUE]


def test_a_file_without_any_answer_is_refused_and_its_first_record_shown(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r'The first: \{"text": "x", "source": "y"\}'):
        conversations(write(tmp_path / "a.jsonl", {"text": "x", "source": "y"}))


def test_lines_and_arrays_give_the_same_records(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} [a, b] ] \u00e9", "deep": [[{"n": n}], "]"]} for n in range(50)]
    write(tmp_path / "a.jsonl", *rows)
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    write(tmp_path / "lines.json", *rows)
    (tmp_path / "bom.json").write_text("\ufeff" + json.dumps(rows))
    for name in ("a.jsonl", "b.json", "lines.json", "bom.json"):
        assert list(records(tmp_path / name)) == rows
    for chunk in (1, 7, 64):  # an element may be cut anywhere
        assert list(sources._elements(tmp_path / "b.json", chunk)) == rows


def test_blank_lines_and_an_empty_array_hold_no_record(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"prompt": "x"}\n\n')
    (tmp_path / "b.json").write_text("[ ]\n")
    assert list(records(tmp_path / "a.jsonl")) == [{"prompt": "x"}]
    assert list(records(tmp_path / "b.json")) == []


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.jsonl", b'{"a": 1}\n\n{"a": \n', 3),
        ("a.jsonl", b'{"a": 1}\n[1]\n', 2),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', 2),
        ("a.json", b'[{"a": 1},\n {"b": 2},\n {"c": }]', 3),
        ("a.json", b'[{"a": 1},\n 7]', 2),
        ("a.json", b'[\n{"a":\n 1},\n\n {"b": 2}', 5),
        ("a.json", b'[{"a": "\xff"}]', 1),
    ],
)
def test_a_bad_record_names_file_and_line(
    tmp_path: Path, name: str, content: bytes, line: int
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RunError, match=rf"{name}, line {line}:"):
        list(records(tmp_path / name))


def test_a_missing_file_or_another_kind_is_an_error_of_its_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval\.prompts = .*nowhere"):
        prompts(tmp_path / "nowhere.jsonl")
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ConfigError, match=r"data\.path = .*\n.*\.parquet is not read"):
        records(tmp_path / "a.parquet")


def test_prompts_are_the_questions_alone(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        {"question": "2+2?", "answer": "4"},
        {"id": "m", "messages": [system("S"), *DIALOGUE, user("3+3?")]},
        {"text": "no question here"},
        {"id": "m", "prompt": "the same name twice"},
    )
    expected = [
        Prompt("81", "writing", ["Write.", "Again."]),
        Prompt("2", "all", ["2+2?"]),
        Prompt("m", "all", ["2+2?", "3+3?"], "S"),
        Prompt("m#2", "all", ["the same name twice"]),
    ]
    summary = Summary()
    assert prompts(path, summary=summary) == expected
    assert summary.counts == {"unknown shape": 1}
    assert prompts(path, limit=2) == expected[:2]
    assert expected[2].opening() == [system("S"), user("2+2?")]


def test_a_file_without_a_question_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no question"):
        prompts(write(tmp_path / "a.jsonl", {"text": "x"}))


def test_the_embedded_suite_is_read_when_no_path_is_given() -> None:
    suite = prompts(None, limit=3)
    assert len(suite) == 3
    first = json.loads(sources.SUITE.read_text().splitlines()[0])
    assert (suite[0].id, suite[0].turns) == (str(first["id"]), first["turns"])


def test_the_fingerprint_is_the_sha256_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc" * 500_000)
    assert fingerprint(tmp_path / "a") == hashlib.sha256(b"abc" * 500_000).hexdigest()
