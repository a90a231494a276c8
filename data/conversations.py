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

A record may also have `system` (text), `tools`, `id` or `question_id`, and `category`. A turn may
have tool calls and a thought (`tool_calls.py` has their forms); results of tools are turns.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsIndex, TypeAlias, TypedDict, cast, overload

from rich.table import Table

from outrider.conf.errors import RunError
from outrider.conf.shown_text import mask_credentials
from outrider.data.sources import Source
from outrider.data.tool_calls import (
    HALF_PAIR,
    UnreadableTools,
    calls_of,
    read_calls,
    read_tools,
    result_turns,
    split_thought,
)

RawTurn: TypeAlias = tuple[Any, Any, Mapping[str, Any]]  # role, content, the turn itself
SHOWN = 300  # characters of a record in a message
PLAIN = 2  # keys of a turn without calls and thoughts
SHAPES = "messages, conversations, prompt (+ completion), turns, question (+ answer), instruction"
ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "observation", "ipython", "function"), "tool"),
    **dict.fromkeys(("tool_response", "function_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),  # an answer that is a call
}
RULES = {
    "used": "kept",
    "not selected": "left out: beyond data.max_samples, or in a damaged file of a recording",
    "bad row": "left out: cannot be read (data.skip_bad)",
    "in the suite": "left out: has a question of eval.prompts, or nearly",
    "refused": "left out: the chat template refuses it (data.skip_bad)",
    "unknown shape": "left out: none of the known keys holds turns",
    "unreadable tools": "left out: tools is no list of functions with names",
    "no turns": "left out: nothing remains to render",
    "leading answer": "dropped: a conversation starts with a question",
    "turns joined": "neighbours of one role are joined by a blank line",
    "answers in a row": "the conversation ends before one that follows a call or has a thought",
    "text parts joined": "content in parts, all text: joined",
    "empty turn": "the conversation ends before it",
    "unknown role": "the conversation ends before it",
    "unreadable call": "the conversation ends before it: a call without a name, a result without a "
    "call, a thought that is no text",
    "calls not rendered": "the conversation ends before it: the chat template loses or refuses the "
    "turn's calls, their results, or the text beside them",
    "thoughts not taken": "the conversation ends before it: the chat template loses the thought",
    "thoughts removed": "the chat template removes the thoughts of every answer: trained without",
    "tools ignored": "the chat template does not render tools: trained without",
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


class Turn(TypedDict):
    """What every turn has."""

    role: str
    content: str


class Message(Turn, total=False):
    """One turn. `role` is system, user, assistant or tool."""

    reasoning_content: str  # thought of an answer
    tool_calls: list[dict[str, Any]]  # in OpenAI's form; arguments are text or an object
    name: str  # of the tool that gave this result
    tool_call_id: str


class Conversation(list[Message]):
    """Turns with the tools that are described to the target; slices keep the tools."""

    def __init__(
        self, turns: Iterable[Message] = (), tools: list[dict[str, Any]] | None = None,
        origin: str = "",
    ) -> None:  # fmt: skip
        super().__init__(turns)
        self.tools = tools or None
        self.origin = origin  # row and file, for messages

    @overload
    def __getitem__(self, index: SupportsIndex) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> "Conversation": ...
    def __getitem__(self, index: SupportsIndex | slice) -> "Message | Conversation":
        if isinstance(index, slice):
            return Conversation(super().__getitem__(index), self.tools, self.origin)
        return super().__getitem__(index)


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
    tools: list[dict[str, Any]] | None = None

    def first_messages(self) -> Conversation:
        """Return the turns before the first answer: the system turn, if any, and a question."""
        system = [] if self.system is None else [Message(role="system", content=self.system)]
        return Conversation([*system, Message(role="user", content=self.turns[0])], self.tools)


def parse_conversation(record: dict[str, Any], summary: RuleCounts | None = None) -> Conversation:
    """Return the turns of a record, repaired by `RULES`; empty when nothing is usable.

    The questions of a `turns` record stay separate turns, to be answered one by one.
    """
    summary = RuleCounts() if summary is None else summary
    turns = _normalise(record, summary)
    answered = up_to_last_answer(turns)
    if answered and len(answered) < len(turns):
        summary.add("unanswered question")
        return answered
    if turns and not answered:
        summary.add("no answer")
    return turns


def up_to_last_answer(turns: Conversation) -> Conversation:
    """Return the turns up to the last answer; empty if there is none."""
    answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    return turns[: answers[-1] + 1] if answers else turns[:0]


def read_conversations(source: Source, summary: RuleCounts) -> Iterator[Conversation]:
    """Yield the conversations of a source that have answers; RunError if there are none."""
    first, place = "", mask_credentials(source.location)
    for number, record in enumerate(source.rows(lambda: summary.add("bad row"))):
        if number == 0:
            first = f"The first: {json.dumps(record, ensure_ascii=False, default=str)[:SHOWN]}"
        turns = parse_conversation(record, summary)
        if any(turn["role"] == "assistant" for turn in turns):
            summary.add("used")
            turns.origin = f"row {number + 1 + summary.counts['bad row']} of {place}"
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
            category = str(record.get("category") or "all")
            prompts.append(Prompt(name, category, questions, system, turns.tools))
    if not prompts and limit != 0:
        message = f"{source.location} has no question: no prompt or user turn with text."
        raise RunError(message, f"Known shapes: {SHAPES}.")
    return prompts


def _normalise(record: dict[str, Any], summary: RuleCounts) -> Conversation:
    """Apply the rules of conversations and prompts; the last question may lack its answer."""
    raw = _role_content_pairs(record)
    if raw is None:
        summary.add("unknown shape")
        return Conversation()
    try:
        tools = read_tools(record.get("tools"))
    except UnreadableTools:
        summary.add("unreadable tools")
        return Conversation()
    if isinstance(record.get("system"), str) and record["system"].strip():
        has_system = bool(raw) and ROLES.get(str(raw[0][0])) == "system"
        raw = raw if has_system else [("system", record["system"], {}), *raw]
    turns = _alternate(_valid_turns(raw, summary), summary, join_questions="turns" not in record)
    if all(turn["role"] == "system" for turn in turns):
        summary.add("no turns")
        return Conversation()
    return Conversation(turns, tools)


def _role_content_pairs(record: dict[str, Any]) -> list[RawTurn] | None:
    """Return (role, content, turn), unchecked; None when the record has no known shape."""
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


def _pair(turn: Any) -> RawTurn:
    if isinstance(turn, dict):
        return turn.get("role", turn.get("from")), turn.get("content", turn.get("value")), turn
    return "user", turn, {}


def _as_pairs(role: str, value: Any) -> list[RawTurn]:
    return [_pair(turn) for turn in value] if isinstance(value, list) else [(role, value, {})]


def _instruction(record: dict[str, Any]) -> Any:
    instruction, context = record.get("instruction"), record.get("input")
    if isinstance(instruction, str) and isinstance(context, str) and context.strip():
        return f"{instruction}\n\n{context}"
    return instruction


def _valid_turns(raw: list[RawTurn], summary: RuleCounts) -> list[Message]:
    """Return the turns before the first unusable one; an empty system turn is skipped."""
    turns: list[Message] = []
    for name, value, fields in raw:
        role = ROLES.get(str(name).lower())
        try:
            new = _read_turn(role, value, fields, turns, summary)
        except UnreadableTools:
            reason = "unreadable call"
        else:
            reason = _unusable(role, new, turns)
        if reason == "empty turn" and role == "system" and not turns:
            continue
        if reason:
            summary.add(reason)
            break
        turns += new
    return turns


def _read_turn(
    role: str | None, value: Any, fields: Mapping[str, Any], before: list[Message],
    summary: RuleCounts,
) -> list[Message]:  # fmt: skip
    """Return the turn, as several ones for several results; [] for content that is not text."""
    if role == "tool":
        if not (before and (before[-1]["role"] == "tool" or "tool_calls" in before[-1])):
            raise UnreadableTools("a result without a call")
        return [
            cast("Message", {"role": "tool", **result}) for result in result_turns(fields, value)
        ]
    if role == "call":
        return [Message(role="assistant", content="", tool_calls=calls_of(value))]
    if role != "assistant" or (isinstance(value, str) and len(fields) <= PLAIN):
        content = _text(value, summary)
        return [] if content is None or role is None else [Message(role=role, content=content)]
    thought, value = split_thought(fields, value)
    content, calls = _text(value, summary), read_calls(fields)
    if content is None:
        return []
    turn = Message(role=role, content=content)
    if thought.strip():
        turn["reasoning_content"] = thought
    if calls:
        turn["tool_calls"] = calls
    return [turn]


def _unusable(role: str | None, new: list[Message], before: list[Message]) -> str:
    """Return the rule that ends the conversation before these turns, or ""."""
    if role is None:
        return "unknown role"
    if not new:
        return "not text"
    if role != "tool" and not new[0]["content"].strip() and "tool_calls" not in new[0]:
        return "empty turn"
    return "late system turn" if role == "system" and before else ""


def _text(value: Any, summary: RuleCounts) -> str | None:
    if isinstance(value, list) and value:
        parts = [part.get("text") if isinstance(part, dict) else part for part in value]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            return None
        summary.add("text parts joined")
        value = "".join(texts)
    if isinstance(value, str):
        return None if HALF_PAIR.search(value) else value
    return "" if value is None or value == [] else None


def _alternate(turns: list[Message], summary: RuleCounts, join_questions: bool) -> list[Message]:
    result: list[Message] = []
    for turn in turns:
        last = result[-1]["role"] if result else "system"
        if turn["role"] in ("assistant", "tool") and last == "system":
            summary.add("leading answer")
        elif turn["role"] == last == "assistant" or (
            turn["role"] == last == "user" and join_questions
        ):
            if (joined := _joined(result[-1], turn)) is None:
                summary.add("answers in a row")
                break
            summary.add("turns joined")
            result[-1] = joined
        else:
            result.append(turn)
    return result


def _joined(first: Message, second: Message) -> Message | None:
    """Return two neighbours of one role as one turn; None if text or a thought follows a call."""
    if "reasoning_content" in second or ("tool_calls" in first and second["content"].strip()):
        return None
    texts = [turn["content"] for turn in (first, second) if turn["content"].strip()]
    joined: Message = {**first, "content": "\n\n".join(texts)}
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return joined
