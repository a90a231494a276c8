"""Parsing of records: each shape, and each rule of RULES with its count."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outrider.conf.errors import RunError
from outrider.data.conversations import (
    RULES,
    Message,
    Prompt,
    RuleCounts,
    parse_conversation,
    read_conversations,
    read_prompts,
)
from outrider.data.sources import data_source, suite_source


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
    assert parse_conversation(record) == expected


TOOL = {"role": "tool", "content": "{}"}
REPAIRED: list[tuple[str, list[Any], list[Message]]] = [
    ("no turns", [], []),
    ("no turns", [system("Be brief.")], []),
    ("leading answer", [assistant("Hello."), *DIALOGUE], DIALOGUE),
    ("leading answer", [system("S"), assistant("Hi"), *DIALOGUE], [system("S"), *DIALOGUE]),
    ("turns joined", [user("2+"), user("2?"), assistant("4")], [user("2+\n\n2?"), assistant("4")]),
    ("turns joined", [user("a"), assistant("b"), assistant("c")], [user("a"), assistant("b\n\nc")]),
    ("empty turn", [*DIALOGUE, user("3+3?"), assistant(" \n")], DIALOGUE),
    ("empty turn", [*DIALOGUE, {"role": "user", "content": None}, assistant("?")], DIALOGUE),
    ("unknown role", [*DIALOGUE, {"role": "critic", "content": "?"}, assistant("6")], DIALOGUE),
    ("unreadable call", [*DIALOGUE, TOOL, assistant("6")], DIALOGUE),
    ("not text", [*DIALOGUE, {"role": "user", "content": 6}, assistant("6")], DIALOGUE),
    ("late system turn", [*DIALOGUE, system("Now rhyme."), user("x"), assistant("y")], DIALOGUE),
    ("unanswered question", [*DIALOGUE, user("3+3?")], DIALOGUE),
    ("no answer", [user("2+2?")], [user("2+2?")]),
]


@pytest.mark.parametrize(("reason", "turns", "expected"), REPAIRED)
def test_an_irregular_conversation_is_repaired_by_its_rule_and_counted(
    reason: str, turns: list[Any], expected: list[Message]
) -> None:
    summary = RuleCounts()
    assert parse_conversation({"messages": turns}, summary) == expected
    assert summary.counts[reason] == 1


def test_a_regular_conversation_uses_no_rule() -> None:
    summary = RuleCounts()
    parse_conversation({"messages": [system("S"), *DIALOGUE, *DIALOGUE]}, summary)
    assert not summary.counts


def test_content_in_parts_is_joined_and_an_image_ends_the_conversation() -> None:
    summary = RuleCounts()
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    image = [{"type": "image", "url": "cat.png"}]
    turns = [{"role": "user", "content": parts}, DIALOGUE[1], {"role": "user", "content": image}]
    assert parse_conversation({"messages": turns}, summary) == DIALOGUE
    assert summary.counts == {"text parts joined": 1, "not text": 1}


def test_a_record_without_known_keys_is_counted() -> None:
    summary = RuleCounts()
    assert parse_conversation({"text": "once upon a time"}, summary) == []
    assert summary.counts == {"unknown shape": 1}


def test_the_summary_prints_each_used_rule_with_its_count() -> None:
    summary, console = RuleCounts(), Console(width=120, record=True, file=StringIO())
    summary.add("cut", 1234)
    console.print(summary)
    printed = console.export_text()
    assert "1,234" in printed
    assert RULES["cut"] in printed
    assert RULES["not text"] not in printed
    with pytest.raises(ValueError, match="no rule"):
        summary.add("made up")


def test_conversations_without_answers_are_counted(tmp_path: Path) -> None:
    rows = [{"messages": DIALOGUE}, {"prompt": "2+2?"}, {"text": "x"}, {"messages": DIALOGUE}]
    source, summary = data_source(str(write(tmp_path / "a.jsonl", *rows))), RuleCounts()
    assert list(read_conversations(source, summary)) == [DIALOGUE, DIALOGUE]
    assert summary.counts == {"used": 2, "no answer": 1, "unknown shape": 1}
    assert next(read_conversations(source, RuleCounts())) == DIALOGUE


ROW = {"text": "x", "source": "y"}


def test_a_file_without_answers_raises_and_shows_its_first_record(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r'The first: \{"text": "x", "source": "y"\}'):
        list(read_conversations(data_source(str(write(tmp_path / "a.jsonl", ROW))), RuleCounts()))


def test_prompts_contain_only_the_questions(tmp_path: Path) -> None:
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
    summary = RuleCounts()
    assert read_prompts(suite_source(str(path)), summary=summary) == expected
    assert summary.counts == {"unknown shape": 1}
    assert read_prompts(suite_source(str(path)), limit=2) == expected[:2]
    assert expected[2].first_messages() == [system("S"), user("2+2?")]


def test_a_file_without_questions_raises(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no question"):
        read_prompts(suite_source(str(write(tmp_path / "a.jsonl", {"text": "x"}))))
