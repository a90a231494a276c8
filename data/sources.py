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

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypedDict

from rich.table import Table

from outrider.train.errors import ConfigError, RunError

SUITE = Path(__file__).parent / "tiny" / "prompts.jsonl"
SHOWN = 300  # characters of a record in a message
SHAPES = "messages, conversations, prompt (+ completion), turns, question (+ answer), instruction"
ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
}
RULES = {
    "used": "conversations that go on",
    "unknown shape": "record left out: none of the known keys holds turns",
    "no turns": "record left out: nothing remains to render",
    "leading answer": "dropped: a conversation starts with a question",
    "turns joined": "neighbours of one role became one turn, joined by a blank line",
    "text parts joined": "content given as parts, all text: joined",
    "empty turn": "the conversation ends before it",
    "unknown role": "the conversation ends before it (tool calls, for instance)",
    "not text": "the conversation ends before it (an image, a number, ...)",
    "late system turn": "the conversation ends before it: templates refuse it",
    "unanswered question": "a last question without an answer: dropped",
    "no answer": "questions only: a prompt, but no training text",
    "cut": "longer than data.max_length: the head is kept",
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


def records(path: str | Path, *, key: str = "data.path") -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl file (one per line) or a .json file (one array), streamed.

    Args:
        path: the file. A .json file that does not start with `[` is read line by line too.
        key: the setting that named the file, for the message when it is not there.

    Raises:
        ConfigError: no such file, or another kind of file. Raised by the call itself.
        RunError: a line (or an array element) is not a JSON object; names file and line.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(key, str(path), "There is no such file.", "Give a .jsonl or .json file.")
    if file.suffix not in {".jsonl", ".json"}:
        why = f"A file that ends in {file.suffix or 'no suffix'} is not read."
        raise ConfigError(key, str(path), why, "Give a .jsonl or .json file.")
    if file.suffix == ".json":
        with file.open("rb") as stream:
            if stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
                return _elements(file)
    return _lines(file)


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip(b" \t\r\n\xef\xbb\xbf"):
                yield _object(_parsed(line, file, number), file, number)


def _parsed(line: bytes, file: Path, number: int) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError alike
        raise _unreadable(file, number, error) from None


def _elements(file: Path, chunk: int = 1 << 20) -> Iterator[dict[str, Any]]:
    """The elements of one array; no more than a chunk (or one element) is in memory."""
    decode, between = json.JSONDecoder().raw_decode, re.compile(r"[\s,\[]*")
    text, at, line = "", 0, 1
    with file.open(encoding="utf-8-sig") as stream:
        while True:
            gap = len(between.match(text, at)[0])  # type: ignore[index]  # matches anywhere
            line += text.count("\n", at, at + gap)
            at += gap
            try:
                value, end = decode(text, at)
            except ValueError as error:  # half an element, the end of the array, or nonsense
                more = _more(stream, max(chunk, len(text) - at), file, line)
                if not more and text[at:].strip() == "]":
                    return
                if not more:
                    raise _unreadable(file, line, error) from None
                text, at = text[at:] + more, 0
                continue
            yield _object(value, file, line)
            line += text.count("\n", at, end)
            at = end


def _more(stream: TextIO, size: int, file: Path, line: int) -> str:
    try:
        return stream.read(size)
    except UnicodeDecodeError as error:
        raise _unreadable(file, line, error) from None


def _object(value: Any, file: Path, line: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _unreadable(file, line, f"a JSON object is needed, not {type(value).__name__}")
    return value


def _unreadable(file: Path, line: int, reason: object) -> RunError:
    return RunError(f"{file}, line {line}: {reason}", "Repair or remove that record.")


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


def conversations(
    path: str | Path, limit: int | None = None
) -> tuple[list[list[Message]], Summary]:
    """The answered conversations of a file, at most `limit` of them, and what was done to them.

    Raises:
        ConfigError, RunError: as `records`; also when no record holds an answer.
    """
    summary, found, first = Summary(), list[list[Message]](), ""
    for number, record in enumerate(records(path)):
        if limit is not None and len(found) >= limit:
            break
        if number == 0:
            first = f"The first: {json.dumps(record, ensure_ascii=False)[:SHOWN]}"
        turns = conversation(record, summary)
        if any(turn["role"] == "assistant" for turn in turns):
            summary.add("used")
            found.append(turns)
    if not found:
        counts = ", ".join(f"{reason}: {count}" for reason, count in summary.counts.items())
        message = f"{path} holds no answered conversation ({counts or 'empty file'}). {first}"
        raise RunError(message.strip(), f"Known shapes: {SHAPES}. Prompts alone are for data=self.")
    return found, summary


def prompts(
    path: str | Path | None = None,
    limit: int | None = None,
    *,
    key: str = "eval.prompts",
    summary: Summary | None = None,
) -> list[Prompt]:
    """The first `limit` prompts of a file, for evaluation and for self-generation.

    Answers in the file are not used. A record without an id is named by its place (from 1);
    an id seen before gets `#2`, `#3`, ... so that ids are unique.

    Args:
        path: a file in any shape of the module docstring; None is the embedded suite.
        limit: None takes all.
        key: the setting that named the file.
        summary: counts what was mended, when the caller wants to print it.

    Raises:
        ConfigError, RunError: as `records`; also when the file holds no question.
    """
    file = SUITE if path is None else path
    summary, found, seen = summary or Summary(), list[Prompt](), Counter[str]()
    for place, record in enumerate(records(file, key=key), start=1):
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
        raise RunError(f"{file} holds no question", f"Known shapes: {SHAPES}.")
    return found


def fingerprint(path: str | Path) -> str:
    """sha256 of the file's bytes, in hex: which data a run has seen."""
    digest = hashlib.sha256()
    with Path(path).expanduser().open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


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
        return "".join(texts)
    return "" if value is None or value == [] else value if isinstance(value, str) else None


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
