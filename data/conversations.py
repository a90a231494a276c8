"""Conversations and prompts from the record shapes that public data sets use.

A conversation is a list of turns: an optional system turn, a question, then answers and questions
in turn, none of them empty. Every chat template can render that. Records that differ are repaired
or left out by `RULES`, and each use of a rule is counted in a `RuleCounts`.

    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
    {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}
    {"prompt": "2+2?", "completion": "4"}          both may also be lists of messages
    {"turns": ["2+2?", "And times 3?"]}            questions only, as in Spec-Bench
    {"question": "2+2?", "answer": "4"}            the answer is optional, as in GSM8K
    {"instruction": "Add.", "input": "2 2", "output": "4"}

A record may also have `system` (text), `id` or `question_id`, and `category`.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypedDict

from rich.table import Table

from outrider.conf.errors import RunError
from outrider.data.sources import Source

SHOWN = 300  # characters of a record in a message
HALF_PAIR = re.compile("[\ud800-\udfff]")
SHAPES = "messages, conversations, prompt (+ completion), turns, question (+ answer), instruction"
ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
}
RULES = {
    "used": "kept",
    "not selected": "left out: beyond data.max_samples, or in a damaged file of a recording",
    "bad row": "left out: cannot be read (data.skip_bad)",
    "in the suite": "left out: has a question of eval.prompts, or nearly",
    "unknown shape": "left out: none of the known keys holds turns",
    "no turns": "left out: nothing remains to render",
    "leading answer": "dropped: a conversation starts with a question",
    "turns joined": "neighbours of one role are joined by a blank line",
    "text parts joined": "content in parts, all text: joined",
    "empty turn": "the conversation ends before it",
    "unknown role": "the conversation ends before it (tool calls, for instance)",
    "not text": "the conversation ends before it (an image, a number, half an emoji, ...)",
    "late system turn": "the conversation ends before it: templates refuse it",
    "unanswered question": "a last question without an answer: dropped",
    "no answer": "left out: a prompt without an answer",
    "short": "left out: fewer answer tokens than data.shortest",
    "rows of one answer": "each answer is a row, with the turns before it",
    "far answers": "left out by data.supervise=each: after the first 500 of a conversation",
    "rewritten": "the template changes earlier turns: answers found by text",
    "cut": "longer than data.max_length: the head is kept",
    "too long": "left out: longer than data.max_length",
    "answers cut off": "left out: every answer starts after data.max_length",
}


class Message(TypedDict):
    """One turn. `role` is system, user or assistant."""

    role: str
    content: str


@dataclass
class RuleCounts:
    """Counts of the rules in `RULES`. Prints as a table: `console.print(summary)`.

    Every conversation is counted once as used or left out; it may be repaired by several rules.
    """

    counts: Counter[str] = field(default_factory=Counter)

    def add(self, reason: str, count: int = 1) -> None:
        if reason not in RULES:
            raise ValueError(f"{reason!r} has no rule; there are {', '.join(RULES)}")
        self.counts[reason] += count

    def __rich__(self) -> Table:
        left_out = sum(n for case, n in self.counts.items() if RULES[case].startswith("left out:"))
        used = self.counts["used"]
        unit = "rows of one answer" if self.counts["rows of one answer"] else "conversations"
        title = f"{unit}: {used + left_out:,} read = {used:,} used + {left_out:,} left out"
        table = Table("case", "count", "rule", title=title)
        for reason, rule in RULES.items():
            if self.counts[reason]:
                table.add_row(reason, f"{self.counts[reason]:,}", rule)
        return table


@dataclass(frozen=True)
class Prompt:
    """The questions of a dialogue; the target generates the answers one by one."""

    id: str
    category: str
    turns: list[str]
    system: str | None = None

    def first_messages(self) -> list[Message]:
        """Return the turns before the first answer: the system turn, if any, and a question."""
        system = [] if self.system is None else [Message(role="system", content=self.system)]
        return [*system, Message(role="user", content=self.turns[0])]


def parse_conversation(record: dict[str, Any], summary: RuleCounts | None = None) -> list[Message]:
    """Return the turns of a record, repaired by `RULES`; empty when nothing is usable.

    The questions of a `turns` record stay separate turns, to be answered one by one.
    """
    summary = RuleCounts() if summary is None else summary
    turns = _normalise(record, summary)
    answered = any(turn["role"] == "assistant" for turn in turns)
    if answered and turns[-1]["role"] == "user":
        summary.add("unanswered question")
        return turns[:-1]
    if turns and not answered:
        summary.add("no answer")
    return turns


def read_conversations(source: Source, summary: RuleCounts) -> Iterator[list[Message]]:
    """Yield the conversations of a source that have answers; RunError if there are none."""
    first = ""
    for number, record in enumerate(source.rows(lambda: summary.add("bad row"))):
        if number == 0:
            first = f"The first: {json.dumps(record, ensure_ascii=False, default=str)[:SHOWN]}"
        turns = parse_conversation(record, summary)
        if any(turn["role"] == "assistant" for turn in turns):
            summary.add("used")
            yield turns
    if not summary.counts["used"]:
        counts = ", ".join(f"{reason}: {count}" for reason, count in summary.counts.items())
        message = f"{source.location} has no conversation with an answer ({counts or 'empty'})."
        fix = f"Known shapes: {SHAPES}. Other names of columns: data.columns={{messages: NAME}}. "
        fix += "Prompts without answers need data=self."
        raise RunError(f"{message} {first}".strip(), fix)


def read_prompts(
    source: Source, limit: int | None = None, summary: RuleCounts | None = None
) -> list[Prompt]:
    """Return the first `limit` prompts of a source, for evaluation and for self-generation.

    Answers are not used. A record without an id is named by its number (from 1). An id that occurs
    again gets `#2`, `#3`, ... so that ids are unique. Raises RunError if there is no question.
    """
    summary = RuleCounts() if summary is None else summary
    prompts, ids = list[Prompt](), Counter[str]()
    for number, record in enumerate(source.rows(lambda: summary.add("bad row")), start=1):
        if limit is not None and len(prompts) >= limit:
            break
        turns = _normalise(record, summary)
        questions = [turn["content"] for turn in turns if turn["role"] == "user"]
        if questions:
            name = str(record.get("id", record.get("question_id", number)))
            ids[name] += 1
            name = name if ids[name] == 1 else f"{name}#{ids[name]}"
            system = turns[0]["content"] if turns[0]["role"] == "system" else None
            prompts.append(Prompt(name, str(record.get("category") or "all"), questions, system))
    if not prompts and limit != 0:
        message = f"{source.location} has no question: no prompt or user turn with text."
        raise RunError(message, f"Known shapes: {SHAPES}.")
    return prompts


def _normalise(record: dict[str, Any], summary: RuleCounts) -> list[Message]:
    """Apply the rules of conversations and prompts; the last question may lack its answer."""
    raw = _role_content_pairs(record)
    if raw is None:
        summary.add("unknown shape")
        return []
    if isinstance(record.get("system"), str) and record["system"].strip():
        has_system = bool(raw) and ROLES.get(str(raw[0][0])) == "system"
        raw = raw if has_system else [("system", record["system"]), *raw]
    turns = _alternate(_valid_turns(raw, summary), summary, join_questions="turns" not in record)
    if all(turn["role"] == "system" for turn in turns):
        summary.add("no turns")
        return []
    return turns


def _role_content_pairs(record: dict[str, Any]) -> list[tuple[Any, Any]] | None:
    """Return (role, content) pairs, unchecked; None when the record has no known shape."""
    for name in ("messages", "conversations", "conversation", "turns"):
        if isinstance(record.get(name), list):
            return [_pair(turn) for turn in record[name]]
    completion = record.get("completion", record.get("response"))
    for question, answer in (
        (record.get("prompt"), completion),
        (record.get("question"), record.get("answer")),
        (_instruction(record), record.get("output", completion)),
    ):
        if question is not None:
            answers = [] if answer is None else _as_pairs("assistant", answer)
            return _as_pairs("user", question) + answers
    return None


def _pair(turn: Any) -> tuple[Any, Any]:
    if isinstance(turn, dict):
        return turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    return "user", turn


def _as_pairs(role: str, value: Any) -> list[tuple[Any, Any]]:
    return [_pair(turn) for turn in value] if isinstance(value, list) else [(role, value)]


def _instruction(record: dict[str, Any]) -> Any:
    instruction, context = record.get("instruction"), record.get("input")
    if isinstance(instruction, str) and isinstance(context, str) and context.strip():
        return f"{instruction}\n\n{context}"
    return instruction


def _valid_turns(raw: list[tuple[Any, Any]], summary: RuleCounts) -> list[Message]:
    """Return the turns before the first unusable one; an empty system turn is skipped."""
    turns: list[Message] = []
    for name, value in raw:
        role, content = ROLES.get(str(name).lower()), _text(value, summary)
        if role is None:
            summary.add("unknown role")
        elif content is None:
            summary.add("not text")
        elif not content.strip():
            if role == "system" and not turns:
                continue
            summary.add("empty turn")
        elif role == "system" and turns:
            summary.add("late system turn")
        else:
            turns.append(Message(role=role, content=content))
            continue
        break
    return turns


def _text(value: Any, summary: RuleCounts) -> str | None:
    if isinstance(value, list) and value:
        parts = [part.get("text") if isinstance(part, dict) else part for part in value]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            return None
        summary.add("text parts joined")
        value = "".join(texts)
    if isinstance(value, str):  # a cut-off emoji leaves half a surrogate pair in json
        return None if HALF_PAIR.search(value) else value
    return "" if value is None or value == [] else None


def _alternate(turns: list[Message], summary: RuleCounts, join_questions: bool) -> list[Message]:
    result: list[Message] = []
    for turn in turns:
        last = result[-1]["role"] if result else "system"
        if turn["role"] == "assistant" and last == "system":
            summary.add("leading answer")
        elif turn["role"] == last != "system" and (join_questions or last == "assistant"):
            summary.add("turns joined")
            joined = f"{result[-1]['content']}\n\n{turn['content']}"
            result[-1] = Message(role=last, content=joined)
        else:
            result.append(turn)
    return result
