"""Forms in which a chat template takes tool calls, thoughts and tools, found by rendering.

Templates differ: some take the arguments of a call as an object and encode text twice, some take
text and fail with an object; some read a thought as `reasoning_content`, some as `thinking`, as a
part of the content or within `<think>` tags, and some remove every thought. Small conversations
whose pieces are marks are rendered once per template, and the first form is chosen whose text has
every mark, with arguments that are neither encoded twice nor written as Python does.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, cast

from outrider.data.conversations import Message
from outrider.data.tool_calls import THOUGHT_KEYS, call_arguments
from outrider.models.target import chat_template

CONTENT, THOUGHT, NAME, ARGUMENT = "xqcontentjz", "xqthoughtjz", "xqnamejz", "xqargumentjz"
CITY = "xqkeyjz"
TAG, END_TAG = "<think>", "</think>"
TAGGED_ANSWER = re.compile(rf"\s*{TAG}(.*?){END_TAG}\s*(.*)", re.DOTALL)
PARTS, TAGGED = "parts", "tagged"  # places of a thought that are no key
TOOL = {
    "type": "function",
    "function": {"name": NAME, "description": NAME, "parameters": {
        "type": "object", "properties": {CITY: {"type": "string", "description": "city"}},
    }},
}  # fmt: skip


@dataclass(frozen=True)
class TemplateForms:
    """What a template takes, and in which form; `turn` and `turns` convert to it.

    Attributes:
        thought: key of a thought beside the content, PARTS or TAGGED; None: it takes none.
        tags_are_text: thoughts are read elsewhere; `<think>` in the content is rendered as text.
        removes_thoughts: thoughts in the content are removed, also from the last answer.
        no_content: content of a call without text.
        text_arguments: arguments are JSON text, not an object.
        short_ids: ids of calls have 9 letters and digits (Mistral).
        tools: tools are rendered.
        text: content that is text is rendered; templates of image models may take parts alone.
    """

    thought: str | None = None
    tags_are_text: bool = False
    removes_thoughts: bool = False
    no_content: str | None = ""
    text_arguments: bool = False
    short_ids: bool = False
    tools: bool = False
    text: bool = True

    def turn(self, message: Message) -> dict[str, Any]:
        """Return a turn as the template takes it."""
        turn: dict[str, Any] = dict(message)
        if calls := message.get("tool_calls"):
            turn["tool_calls"] = [self._call(call) for call in calls]
            turn["content"] = turn["content"] or self.no_content
        if self.short_ids and "tool_call_id" in turn:
            turn["tool_call_id"] = _short(turn["tool_call_id"])
        thought = turn.pop("reasoning_content", None)
        return turn if thought is None else self._with_thought(turn, thought)

    def without_tags(self, message: Message) -> Message:
        """Return an answer whose thought in tags is moved out of the content, if tags are text."""
        tagged = self.tags_are_text and message["role"] == "assistant"
        found = TAGGED_ANSWER.fullmatch(message["content"]) if tagged else None
        if not found or "reasoning_content" in message:
            return message
        moved = {"content": found[2], "reasoning_content": found[1].strip()}
        return cast(Message, {**message, **moved})

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        arguments = function["arguments"]
        if self.text_arguments and isinstance(arguments, dict):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        elif not self.text_arguments and isinstance(arguments, str):
            function["arguments"] = call_arguments(arguments)
        new = {**call, "function": function}
        if self.short_ids:
            new["id"] = _short(call.get("id", json.dumps(call, sort_keys=True)))
        return new

    def _with_thought(self, turn: dict[str, Any], thought: str) -> dict[str, Any]:
        if self.thought == TAGGED:
            return {**turn, "content": _tagged(thought, turn["content"] or "")}
        if self.thought == PARTS:
            parts = [{"type": "thinking", "thinking": thought}]
            parts += [{"type": "text", "text": turn["content"]}] if turn["content"] else []
            return {**turn, "content": parts}
        return {**turn, self.thought or THOUGHT_KEYS[0]: thought}


def template_forms(tokenizer: Any) -> TemplateForms:
    """Return the forms of a tokenizer's chat template; the result is kept."""
    return _template_forms(tokenizer, str(tokenizer.chat_template))


@lru_cache(maxsize=8)
def _template_forms(tokenizer: Any, template: str) -> TemplateForms:
    def render(*turns: Mapping[str, Any], **more: Any) -> str:
        try:
            return chat_template.render(
                tokenizer, [{"role": "user", "content": "?"}, *turns], **more
            )
        except Exception:  # a template is a program
            return ""

    answer = {"role": "assistant", "content": CONTENT}
    if CONTENT not in (text := render(answer)):
        return TemplateForms(text=not text)  # if it fails, 20 more would each take the time limit
    tagged = render({**answer, "content": _tagged(THOUGHT, CONTENT)})
    calls = next(_call_forms(render), TemplateForms())
    thought = TemplateForms(thought=_thought_place(render, tagged))
    apart = Message(role="assistant", content=CONTENT, reasoning_content=THOUGHT)
    return TemplateForms(
        thought=thought.thought,
        tags_are_text=thought.thought is not None and render(thought.turn(apart)) != tagged,
        removes_thoughts=CONTENT in tagged and THOUGHT not in tagged,
        no_content=calls.no_content, text_arguments=calls.text_arguments,
        short_ids=calls.short_ids, tools=NAME in render(answer, tools=[TOOL]),
    )  # fmt: skip


def _thought_place(render: Callable[..., str], tagged: str) -> str | None:
    """Return where the template reads a thought; in tags only if the prompt opens such a tag."""
    answer = {"role": "assistant", "content": CONTENT}
    for key in THOUGHT_KEYS:
        if _in_order(render({**answer, key: THOUGHT})):
            return key
    parts = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": CONTENT}]
    text = render({**answer, "content": parts})
    if _in_order(text) and "'type'" not in text and '"type"' not in text:
        return PARTS
    opens = render(add_generation_prompt=True).rstrip().endswith(TAG)
    return TAGGED if opens and _in_order(tagged) else None


def _in_order(text: str) -> bool:
    return -1 < text.find(THOUGHT) < text.find(CONTENT)


def _call_forms(render: Callable[..., str]) -> Iterator[TemplateForms]:
    """Yield the forms in which a call is rendered, those with arguments as JSON or marks first."""
    call = {"id": "call_1", "type": "function",
            "function": {"name": NAME, "arguments": {CITY: ARGUMENT}}}  # fmt: skip
    possible = list[TemplateForms]()
    for short_ids, text, content in product((False, True), (False, True), ("", None)):
        forms = TemplateForms(no_content=content, text_arguments=text, short_ids=short_ids)
        turn = forms.turn(Message(role="assistant", content="", tool_calls=[call]))
        rendered = render(turn, tools=[TOOL]) or render(turn)
        if NAME in rendered and ARGUMENT in rendered:
            twice, literal = f'{CITY}\\"' in rendered, f"'{CITY}'" in rendered
            if not (twice or literal):
                yield forms
            possible.append(forms)
    yield from possible


def _tagged(thought: str, content: str) -> str:
    return f"{TAG}\n{thought}\n{END_TAG}\n\n{content}"


def _short(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:9]
