r"""Tools, tool calls and tool results of records, in OpenAI's form.

    {"role": "assistant", "content": "Let me check.", "tool_calls": [{"type": "function",
        "function": {"name": "weather", "arguments": "{\"city\": \"Rome\"}"}}]}
    {"role": "tool", "content": "21 degrees", "tool_call_id": "call_1"}
    {"from": "function_call", "value": "{\"name\": \"weather\", \"arguments\": {}}"}
    {"from": "observation", "value": "21 degrees"}

`arguments` may be JSON text or an object. `tools` of a row is a list of functions, or the JSON text
of one. A thought is `reasoning_content`, `reasoning` or `thinking` of a turn, or a content part.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

CALL_KEYS = ("tool_calls", "function_call")
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
THOUGHT_PARTS = ("thinking", "reasoning")
HALF_PAIR = re.compile("[\ud800-\udfff]")  # a cut-off emoji leaves half a surrogate pair in json


class UnreadableTools(ValueError):
    """A tool, a tool call or its result that is not in a known form."""


def read_tools(value: Any) -> list[dict[str, Any]]:
    """Return the tools of a row as `{"type": "function", "function": {...}}`; [] if it has none.

    Raises:
        UnreadableTools: a tool has no name, or the value is no list.
    """
    tools = _parsed(value) if isinstance(value, str) and value.strip() else value or []
    if isinstance(tools, Mapping):
        tools = [tools]
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise UnreadableTools("tools is no list")
    return [_function(_checked(tool)) for tool in tools]


def read_calls(turn: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tool calls of a turn in OpenAI's form; [] if it has none.

    Raises:
        UnreadableTools: a call has no name, or its arguments are neither text nor an object.
    """
    value = next((turn[key] for key in CALL_KEYS if turn.get(key)), None)
    return [] if value is None else calls_of(value)


def calls_of(value: Any) -> list[dict[str, Any]]:
    """Return calls given as a list, one call, or the JSON text of either."""
    value = _parsed(value) if isinstance(value, str) else value
    calls = value if isinstance(value, list) else [value]
    return [_call(_checked(call)) for call in calls]


def call_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call given as text; no text is no arguments.

    Raises:
        UnreadableTools: the text is no JSON object.
    """
    value = _checked(_parsed(text)) if text.strip() else {}
    if not isinstance(value, dict):
        raise UnreadableTools("the arguments of a call are no object")
    return value


def result_turns(turn: Mapping[str, Any], content: Any) -> list[dict[str, Any]]:
    """Return a turn per result: a list of results with their own content is several results.

    A result that is not text becomes its JSON text.
    """
    known = {key: turn[key] for key in ("name", "tool_call_id") if isinstance(turn.get(key), str)}
    if isinstance(content, list) and content:
        if all(isinstance(part, dict) and "content" in part for part in content):
            return [one for part in content for one in result_turns(part, part["content"])]
        if all(isinstance(part, str) or _is_text_part(part) for part in content):
            texts = [part if isinstance(part, str) else part["text"] for part in content]
            content = "".join(texts)
    _checked([content, known])
    if content is not None and not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False)
    return [{"content": content or "", **known}]


def split_thought(turn: Mapping[str, Any], content: Any) -> tuple[str, Any]:
    """Return the thought of an answer, "" if it has none, and the content without its thoughts.

    Raises:
        UnreadableTools: the thought is no text.
    """
    thoughts = [turn[key] for key in THOUGHT_KEYS if turn.get(key)][:1]
    if isinstance(content, list):
        parts = [part for part in content if _is_thought_part(part)]
        content = [part for part in content if not _is_thought_part(part)]
        thoughts = thoughts or [_part_text(part) for part in parts]
    if not all(isinstance(thought, str) for thought in thoughts):
        raise UnreadableTools("a thought is no text")
    return _checked("\n".join(thoughts)), content


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _is_thought_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in THOUGHT_PARTS


def _part_text(part: Mapping[str, Any]) -> Any:
    """Return the text of a thinking part; Mistral writes it as a list of text parts."""
    value = next((part[key] for key in (part["type"], "text", "content") if key in part), None)
    if isinstance(value, list) and all(_is_text_part(one) for one in value):
        return "".join(one["text"] for one in value)
    return value


def _function(value: Any) -> dict[str, Any]:
    """Return `{"type": "function", "function": {"name": ..., ...}}` of a tool or a call."""
    outer = value if isinstance(value, dict) else {}
    inner = outer["function"] if isinstance(outer.get("function"), dict) else outer
    if not isinstance(inner.get("name"), str) or not inner["name"].strip():
        raise UnreadableTools("a function has no name")
    about = {"id": outer["id"]} if isinstance(outer.get("id"), str) else {}
    described = {key: part for key, part in inner.items() if key not in ("id", "type")}
    return {**about, "type": "function", "function": described}


def _call(value: Any) -> dict[str, Any]:
    """Return a call in OpenAI's form."""
    call = _function(value)
    arguments = call["function"].get("arguments", call["function"].pop("parameters", None))
    arguments = {} if arguments is None else arguments
    if isinstance(arguments, str):
        call_arguments(arguments)
        arguments = arguments if arguments.strip() else {}
    elif not isinstance(arguments, dict):
        raise UnreadableTools("the arguments of a call are neither text nor an object")
    call["function"]["arguments"] = arguments
    return call


def _checked(value: Any) -> Any:
    """Return the value; UnreadableTools if it is too deep, no JSON, or has half an emoji."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise UnreadableTools("the value is no JSON") from error
    if HALF_PAIR.search(text):
        raise UnreadableTools("the text has half a surrogate pair")
    return value


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableTools("the text is no JSON") from error
