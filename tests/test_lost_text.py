"""Rows that a chat template refuses, and what a run tells of text that it loses."""

import copy
import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest

from outrider.conf.compose import compose
from outrider.conf.console import Console
from outrider.conf.errors import RunError
from outrider.data import self_generated
from outrider.data.conversations import Message, Prompt, RuleCounts, read_conversations
from outrider.data.corpus import report_losses
from outrider.data.rendered_text import ConversationError
from outrider.data.reporter import Reporter
from outrider.data.sources import data_source
from outrider.data.tokenise import render_all
from outrider.models.target.load import load_target
from outrider.train.settings import parse
from tests.template_families import coder

QUESTION = {"role": "user", "content": "Rome?"}
FINAL = {"role": "assistant", "content": "21 degrees."}


# ---- rows that a template refuses ----


@pytest.fixture
def refused(tmp_path: Path) -> Path:
    file = tmp_path / "chats.jsonl"
    rows = [[QUESTION, FINAL], [{"role": "system", "content": "Brief."}, QUESTION, FINAL]]
    file.write_text("".join(f"{json.dumps({'messages': row})}\n" for row in [*rows, rows[0]]))
    return file


def test_a_refused_row_is_named_with_the_option_that_skips_it(refused: Path) -> None:
    rows = read_conversations(data_source(str(refused)), RuleCounts())
    with pytest.raises(ConversationError, match=r"row 2 of .*chats\.jsonl: .*refused") as error:
        render_all(coder("gemma2"), rows, max_length=999)
    assert "data.skip_bad=1" in error.value.fix


def test_refused_rows_are_skipped_and_counted_within_the_limit(refused: Path) -> None:
    summary = RuleCounts()
    rows = read_conversations(data_source(str(refused)), summary)
    documents = render_all(coder("gemma2"), rows, max_length=999, summary=summary, skip_bad=1)
    assert len(documents) == 2
    assert summary.counts["refused"] == 1
    summary.counts["bad row"] = 1
    rows = read_conversations(data_source(str(refused)), RuleCounts())
    with pytest.raises(RunError, match="row 2 of"):
        render_all(coder("gemma2"), rows, max_length=999, summary=summary, skip_bad=1)


def test_a_refused_prompt_is_skipped_within_the_limit() -> None:
    """data=self: the second of two prompts has a system turn."""
    config = parse(compose(["target=tiny", "data=self"]))
    loaded = load_target(config.target)
    tokenizer = copy.deepcopy(loaded.tokenizer)
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer.chat_template = refuses + str(tokenizer.chat_template)
    loaded = loaded._replace(tokenizer=tokenizer)
    prompts = [Prompt("a", "all", ["Hello"]), Prompt("b", "all", ["Hello"], "Brief.")]
    with pytest.raises(ConversationError, match=r"prompt b: .*no system") as error:
        self_generated._tokenise(prompts, loaded, config, Reporter.silent())
    assert "data.skip_bad=1" in error.value.fix
    config = replace(config, data=replace(config.data, skip_bad=1))
    kept = self_generated._tokenise(prompts, loaded, config, Reporter.silent())
    assert [prompt.index for prompt in kept] == [0]


# ---- what a run tells ----


def report(name: str, *rows: list[Any], tmp_path: Path) -> str:
    """Return what a run prints about the text of these rows."""
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(f"{json.dumps({'messages': row})}\n" for row in rows))
    source, summary = data_source(str(file)), RuleCounts()
    found = render_all(
        coder(name), read_conversations(source, summary), max_length=999, summary=summary
    )
    console = Console(width=400, record=True, file=StringIO())
    report_losses(source, found, summary, Reporter(console))
    return console.export_text()


def test_thoughts_removed_from_every_answer_are_a_note_with_possible_advice(tmp_path: Path) -> None:
    row = [QUESTION, {**FINAL, "content": "<think>\nHm.\n</think>\n\n21 degrees."}]
    printed = report("r1_distill", row, row, tmp_path=tmp_path)
    assert "2 conversations, thoughts removed" in printed
    assert "data=self" in printed


def test_text_of_which_nothing_is_rendered_is_an_error_with_its_reason(tmp_path: Path) -> None:
    row = [QUESTION, {**FINAL, "reasoning_content": "Hm."}]
    with pytest.raises(RunError, match=r"no answer .* \(1 conversation, thoughts not taken\)") as e:
        report("qwen2_5", row, tmp_path=tmp_path)
    assert "data=self" in e.value.fix


def test_plain_text_has_no_note(tmp_path: Path) -> None:
    assert report("qwen2_5", [QUESTION, FINAL], tmp_path=tmp_path) == ""


def test_a_template_that_takes_content_as_parts_alone_is_refused() -> None:
    """As of SmolVLM: text is iterated by letters, and an answer would be its end token alone."""
    tokenizer = copy.deepcopy(coder("qwen2_5"))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{% for part in m.content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    with pytest.raises(ConversationError, match="loses the text of its answers"):
        render_all(tokenizer, [cast(list[Message], [QUESTION, FINAL])], max_length=999)
