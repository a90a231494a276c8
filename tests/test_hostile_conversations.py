"""Conversations of very many turns: the spans of the slow way, in linear time."""

import time
from typing import Any

import pytest

from outrider.conf.console import Console
from outrider.conf.errors import RunError
from outrider.data import answer_spans
from outrider.data import reporter as reporters
from outrider.data.conversations import Message, RuleCounts
from outrider.data.reporter import Reporter
from outrider.data.tokenise import render, render_all
from tests.test_tokenise import (
    MARKED,
    PLAIN,
    THINKING,
    byte_tokenizer,
    character_tokenizer,
    dialogue,
    merging_tokenizer,
    trimmed_byte_tokenizer,
)

TURNS = 3_000
COUNTING = PLAIN.replace("{{ m.content }}", "{{ messages | length }} {{ m.content }}")
TEMPLATES = {"plain": PLAIN, "marked": MARKED, "thinking": THINKING}
TEXTS = ["a", "b b", "1\n", "\n1", "<t>a</t>b", "\U0001f600", "a/b", "?"]


def long_dialogue(turns: int, *, system: bool = False) -> list[Message]:
    contents = [TEXTS[(i * i + i // 7) % len(TEXTS)] for i in range(turns)]
    return dialogue(*contents, system="b" if system else None)


@pytest.mark.parametrize("make", [
    character_tokenizer, byte_tokenizer, trimmed_byte_tokenizer, merging_tokenizer,
])  # fmt: skip
@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_windows_give_the_spans_of_prefixes(
    make: Any, system: bool, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make(template)
    for turns in (4, 18, 20, 22, 36, 61):
        messages = long_dialogue(turns, system=system)[: turns // 2 * 2 + system]
        monkeypatch.setattr(answer_spans, "MANY", 10**9)
        slow = render(tokenizer, messages, max_length=100_000)
        monkeypatch.setattr(answer_spans, "MANY", 1)
        fast = render(tokenizer, messages, max_length=100_000)
        assert fast == slow
        assert fast.rewritten == slow.rewritten


@pytest.mark.parametrize(
    "template", [PLAIN, MARKED, THINKING, None], ids=["plain", "marked", "thinking", "none"]
)
def test_thousands_of_turns_are_rendered_in_seconds(template: str | None) -> None:
    start = time.process_time()
    document = render(byte_tokenizer(template), long_dialogue(TURNS), max_length=1024)
    assert document.answer.any()
    assert time.process_time() - start < 10


def test_a_template_of_far_turns_falls_back_to_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, messages = byte_tokenizer(COUNTING), long_dialogue(40)
    slow = render(tokenizer, messages, max_length=100_000)
    monkeypatch.setattr(answer_spans, "MANY", 1)
    assert render(tokenizer, messages, max_length=100_000) == slow


def test_a_template_of_far_turns_is_refused_with_a_short_message() -> None:
    with pytest.raises(RunError, match="Split it") as caught:
        render(byte_tokenizer(COUNTING), long_dialogue(2_000), max_length=64)
    assert len(str(caught.value)) < 10_000


@pytest.mark.parametrize("template", [PLAIN, THINKING, None], ids=["plain", "thinking", "none"])
def test_each_takes_the_first_answers_of_thousands_of_turns_in_seconds(
    template: str | None,
) -> None:
    start, summary = time.process_time(), RuleCounts()
    rows = render_all(
        byte_tokenizer(template), [long_dialogue(TURNS)], max_length=256, supervise="each",
        summary=summary,
    )  # fmt: skip
    assert time.process_time() - start < 30
    assert len(rows) > 10
    assert summary.counts["rows of one answer"] == answer_spans.MOST
    assert summary.counts["far answers"] == TURNS // 2 - answer_spans.MOST


@pytest.mark.parametrize("template", [*TEMPLATES.values(), None], ids=[*TEMPLATES, "none"])
def test_each_gives_the_rows_of_prefixes(template: str | None) -> None:
    """Rows that are not rendered, because an earlier answer was cut off, have no answer."""
    tokenizer, messages = byte_tokenizer(template), long_dialogue(60)
    rows = render_all(tokenizer, [messages], max_length=200, supervise="each")
    slow = [
        render(tokenizer, messages[: turn + 1], max_length=200, last_only=True)
        for turn in range(1, 60, 2)
    ]
    kept = [row for row in slow if row.answer.any()]
    assert [(r.ids.tolist(), r.answer.tolist()) for r in rows] == [
        (r.ids.tolist(), r.answer.tolist()) for r in kept
    ]
    assert 0 < len(kept) < len(slow)


def test_one_long_conversation_shows_its_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporters, "LINE", 0.0)
    render_all(
        byte_tokenizer(PLAIN), [long_dialogue(200)], max_length=64, reporter=Reporter(Console())
    )
    shown = [line for line in capsys.readouterr().out.splitlines() if "tokenising:" in line]
    assert len(shown) > 10
    assert "200 turns" in shown[-1]
