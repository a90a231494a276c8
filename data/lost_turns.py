"""Turns that a chat template does not render whole: tool calls, their results, and thoughts.

The pieces of an answer (content, thought, names and arguments of calls) and the results of tools
before it are replaced by marks, and the conversation is rendered up to that answer. If a mark is
missing, or the template refuses, the answer or its context would be trained in part. If text of an
answer is moved behind the results of its calls, the target would see another order.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from outrider.conf.errors import RunError
from outrider.data.conversations import Conversation, Message
from outrider.data.template_forms import ARGUMENT, CONTENT, NAME, THOUGHT
from outrider.data.tool_calls import call_arguments

OWN_TEXT = "Train on the target's own answers, data=self"
LOSSES = {  # rules of RULES by which a template loses something, and what to do
    "calls not rendered": f"{OWN_TEXT}, or on text without tools.",
    "thoughts not taken": f"{OWN_TEXT}, or remove the thoughts (reasoning_content, ...) from it.",
    "thoughts removed": f"The target decodes after its thoughts. {OWN_TEXT}.",
    "tools ignored": "Describe the tools in a system turn if the target is served so.",
}
Renderer: TypeAlias = Callable[[Conversation], str]  # raises RunError for a refusal
MARKS = re.compile(rf"(?:{CONTENT}|{THOUGHT}|{NAME}|{ARGUMENT})[0-9y]+z")


def lost_turn(text_of: Renderer, messages: Conversation) -> tuple[int, str] | None:
    """Return the first answer that the template renders in part, and the rule for it; None: all."""
    previous = None
    for index, turn in enumerate(messages):
        if turn["role"] != "assistant":
            continue
        begin = 0 if previous is None else previous
        with_results = messages[index - 1]["role"] == "tool"
        if len(turn) > 2 or with_results:
            marked = [_marked(one, n) for n, one in enumerate(messages[begin : index + 1])]
            context = Conversation([*messages[:begin], *marked], messages.tools)
            own = begin + (previous is not None)  # the first turn after the answer before
            if rule := _lost(text_of, context, own):
                return index, rule
            if previous is not None and _moved(text_of(context), context, previous):
                return previous, "calls not rendered"
        previous = index
    return None


def _lost(text_of: Renderer, marked: Conversation, begin: int) -> str | None:
    """Return the rule for what is missing from the text of marked turns, or None."""
    with_calls = "tool_calls" in marked[-1] or marked[-2]["role"] == "tool"
    rule = "calls not rendered" if with_calls else "thoughts not taken"
    try:
        text = text_of(marked)
    except RunError:
        return rule if _opening_renders(text_of, marked) else None
    missing = [mark for turn in marked[begin:] for mark in _marks(turn) if mark not in text]
    only_thought = all(mark.startswith(THOUGHT) for mark in missing)
    return ("thoughts not taken" if only_thought else rule) if missing else None


def _moved(text: str, marked: Conversation, answer: int) -> bool:
    """Return whether text of this answer stands behind results of its calls or the next answer.

    Its thought may be absent: templates remove the thoughts of earlier answers.
    """
    own = max((text.find(mark) for mark in _marks(marked[answer])), default=-1)
    later = [text.find(mark) for turn in marked[answer + 1 :] for mark in _marks(turn)]
    return bool(later) and min(later) < own


def _marks(turn: Message) -> list[str]:
    return MARKS.findall(json.dumps(turn))


def _opening_renders(text_of: Callable[[Conversation], str], turns: Conversation) -> bool:
    """Return whether the turns before the first answer render with a plain one."""
    roles = [turn["role"] for turn in turns]
    opening = turns[: roles.index("assistant")]
    answer = Message(role="assistant", content=CONTENT)
    try:
        return bool(text_of(Conversation([*opening, answer], turns.tools)))
    except RunError:
        return False


def _marked(turn: Message, number: int) -> Message:
    """Return an answer or the result of a tool with marks in place of its pieces."""
    if turn["role"] not in ("assistant", "tool"):
        return turn
    marked: Message = {**turn}
    if turn["content"].strip():
        marked["content"] = f"{CONTENT}{number}z"
    if "reasoning_content" in turn:
        marked["reasoning_content"] = f"{THOUGHT}{number}z"
    if "tool_calls" in turn:
        marked["tool_calls"] = [
            _marked_call(call, f"{number}y{n}") for n, call in enumerate(turn["tool_calls"])
        ]
    return marked


def _marked_call(call: Mapping[str, Any], number: str) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function["arguments"]
    arguments = call_arguments(arguments) if isinstance(arguments, str) else arguments
    marks = {key: f"{ARGUMENT}{number}y{n}z" for n, key in enumerate(arguments or {})}
    function.update(name=f"{NAME}{number}z", arguments=marks)
    return {**call, "function": function}
