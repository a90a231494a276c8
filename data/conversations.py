"""Named data sets and prompt suites: from files in the shapes of the field to turns of text.

A record becomes a conversation, a list of turns that starts with a question (after an optional
system turn), alternates, and holds no empty turn: what every chat template can render. Records
that are not like that are mended or left out by the rules in `RULES`, and each use of a rule is
counted in a `Summary`; nothing disappears unseen.

    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
    {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}
    {"prompt": "2+2?", "completion": "4"}          both may also be lists of messages
    {"turns": ["2+2?", "And times 3?"]}            questions only, as in Spec-Bench
    {"question": "2+2?", "answer": "4"}            the answer is optional, as in GSM8K
    {"instruction": "Add.", "input": "2 2", "output": "4"}

A record may also carry `system` (text), `id` or `question_id`, and `category`.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypedDict

from rich.table import Table

from outrider.conf.errors import RunError
from outrider.data.sources import Source

SHOWN = 300  # characters of a record in a message
SHAPES = "messages, conversations, prompt (+ completion), turns, question (+ answer), instruction"
ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
}
RULES = {
    "used": "conversations that go on",
    "bad row": "left out: it cannot be read (data.skip_bad)",
    "in the suite": "left out: a question of eval.prompts, word for word or nearly",
    "unknown shape": "record left out: none of the known keys holds turns",
    "no turns": "record left out: nothing remains to render",
    "leading answer": "dropped: a conversation starts with a question",
    "turns joined": "neighbours of one role became one turn, joined by a blank line",
    "text parts joined": "content given as parts, all text: joined",
    "empty turn": "the conversation ends before it",
    "unknown role": "the conversation ends before it (tool calls, for instance)",
    "not text": "the conversation ends before it (an image, a number, half an emoji, ...)",
    "late system turn": "the conversation ends before it: templates refuse it",
    "unanswered question": "a last question without an answer: dropped",
    "no answer": "questions only: a prompt, but no training text",
    "rows of one answer": "each answer became a row, with what came before it",
    "rewritten": "the template shows an earlier turn otherwise later: answers found in the text",
    "cut": "longer than data.max_length: the head is kept",
    "too long": "longer than data.max_length: left out",
    "answers cut off": "every answer lies behind data.max_length: left out",
}


class Message(TypedDict):
    """One turn. `role` is system, user or assistant."""

    role: str
    content: str


@dataclass
class Summary:
    """How often each rule of `RULES` was used. Prints as a table: `console.print(summary)`."""

    counts: Counter[str] = field(default_factory=Counter)

    def add(self, reason: str, count: int = 1) -> None:
        if reason not in RULES:
            raise ValueError(f"{reason!r} has no rule; there are {', '.join(RULES)}")
        self.counts[reason] += count

    def __rich__(self) -> Table:
        table = Table("case", "count", "what is done", title="conversations")
        for reason, rule in RULES.items():
            if self.counts[reason]:
                table.add_row(reason, f"{self.counts[reason]:,}", rule)
        return table


@dataclass(frozen=True)
class Prompt:
    """The questions of one dialogue, asked one by one; the answers are the target's own."""

    id: str
    category: str
    turns: list[str]
    system: str | None = None

    def opening(self) -> list[Message]:
        """What stands before the first answer: the system turn, if any, and the first question."""
        system = [] if self.system is None else [Message(role="system", content=self.system)]
        return [*system, Message(role="user", content=self.turns[0])]


def conversation(record: dict[str, Any], summary: Summary | None = None) -> list[Message]:
    """The turns of a record, mended by `RULES`; empty when nothing usable is in it.

    A result without an assistant turn is a prompt: the record asks and nobody answers.
    The questions of a `turns` record stay separate turns, to be answered one by one.
    """
    summary = Summary() if summary is None else summary
    turns = _mended(record, summary)
    answered = any(turn["role"] == "assistant" for turn in turns)
    if answered and turns[-1]["role"] == "user":
        summary.add("unanswered question")
        return turns[:-1]
    if turns and not answered:
        summary.add("no answer")
    return turns


def conversations(source: Source, summary: Summary) -> Iterator[list[Message]]:
    """The answered conversations of a source, streamed; what was done to them is counted.

    Raises:
        ConfigError, RunError: as the source; also when no record holds an answer.
    """
    first = ""
    for number, record in enumerate(source.rows(lambda: summary.add("bad row"))):
        if number == 0:
            first = f"The first: {json.dumps(record, ensure_ascii=False, default=str)[:SHOWN]}"
        turns = conversation(record, summary)
        if any(turn["role"] == "assistant" for turn in turns):
            summary.add("used")
            yield turns
    if not summary.counts["used"]:
        counts = ", ".join(f"{reason}: {count}" for reason, count in summary.counts.items())
        message = f"{source.place} holds no answered conversation ({counts or 'empty'}). {first}"
        raise RunError(message.strip(), f"Known shapes: {SHAPES}. Prompts alone are for data=self.")


def prompts(
    source: Source, limit: int | None = None, summary: Summary | None = None
) -> list[Prompt]:
    """The first `limit` prompts of a source, for evaluation and for self-generation.

    Answers in it are not used. A record without an id is named by its place (from 1); an id seen
    before gets `#2`, `#3`, ... so that ids are unique.

    Args:
        limit: None takes all.
        summary: counts what was mended, when the caller wants to print it.

    Raises:
        ConfigError, RunError: as the source; also when it holds no question.
    """
    summary = Summary() if summary is None else summary
    found, seen = list[Prompt](), Counter[str]()
    for place, record in enumerate(source.rows(lambda: summary.add("bad row")), start=1):
        if limit is not None and len(found) >= limit:
            break
        turns = _mended(record, summary)
        asked = [turn["content"] for turn in turns if turn["role"] == "user"]
        if asked:
            name = str(record.get("id", record.get("question_id", place)))
            seen[name] += 1
            name = name if seen[name] == 1 else f"{name}#{seen[name]}"
            system = turns[0]["content"] if turns[0]["role"] == "system" else None
            found.append(Prompt(name, str(record.get("category") or "all"), asked, system))
    if not found and limit != 0:
        raise RunError(f"{source.place} holds no question", f"Known shapes: {SHAPES}.")
    return found


def _mended(record: dict[str, Any], summary: Summary) -> list[Message]:
    """The rules that conversations and prompts share; the last question may lack its answer."""
    raw = _shape(record)
    if raw is None:
        summary.add("unknown shape")
        return []
    if isinstance(record.get("system"), str) and record["system"].strip():
        has_system = bool(raw) and ROLES.get(str(raw[0][0])) == "system"
        raw = raw if has_system else [("system", record["system"]), *raw]
    turns = _alternating(_sound(raw, summary), summary, join_questions="turns" not in record)
    if all(turn["role"] == "system" for turn in turns):
        summary.add("no turns")
        return []
    return turns


def _shape(record: dict[str, Any]) -> list[tuple[Any, Any]] | None:
    """(role, content) pairs, unchecked; None when the record is in no known shape."""
    for name in ("messages", "conversations", "conversation", "turns"):
        if isinstance(record.get(name), list):
            return [_pair(turn) for turn in record[name]]
    written = record.get("completion", record.get("response"))
    for asked, answer in (
        (record.get("prompt"), written),
        (record.get("question"), record.get("answer")),
        (_instruction(record), record.get("output", written)),
    ):
        if asked is not None:
            return [*_side("user", asked), *([] if answer is None else _side("assistant", answer))]
    return None


def _pair(turn: Any) -> tuple[Any, Any]:
    if isinstance(turn, dict):
        return turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    return "user", turn


def _side(role: str, value: Any) -> list[tuple[Any, Any]]:
    return [_pair(turn) for turn in value] if isinstance(value, list) else [(role, value)]


def _instruction(record: dict[str, Any]) -> Any:
    instruction, given = record.get("instruction"), record.get("input")
    if isinstance(instruction, str) and isinstance(given, str) and given.strip():
        return f"{instruction}\n\n{given}"
    return instruction


def _sound(raw: list[tuple[Any, Any]], summary: Summary) -> list[Message]:
    """The turns up to the first that cannot be used; an empty system turn is simply no turn."""
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


def _text(value: Any, summary: Summary) -> str | None:
    if isinstance(value, list) and value:
        parts = [part.get("text") if isinstance(part, dict) else part for part in value]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            return None
        summary.add("text parts joined")
        value = "".join(texts)
    if isinstance(value, str):
        return value if _encodes(value) else None
    return "" if value is None or value == [] else None


def _encodes(text: str) -> bool:
    """Half of a pair of surrogates, as a cut-off emoji leaves in json, is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _alternating(turns: list[Message], summary: Summary, join_questions: bool) -> list[Message]:
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
