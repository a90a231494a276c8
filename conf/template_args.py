"""Arguments of the chat template: `target.thinking` and `target.template_args`."""

import json
from collections.abc import Sequence
from typing import Any

THINKING_ARG = "enable_thinking"  # as Qwen3 and later models name it


def parse_template_args(thinking: bool | None, words: Sequence[str]) -> dict[str, Any]:
    """Return chat template arguments by name; a value is JSON if possible, else text."""
    args: dict[str, Any] = {} if thinking is None else {THINKING_ARG: thinking}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"template_args = {word}: write name=value")
        if name in args:
            raise ValueError(f"template_args = {word}: {name} is set twice")
        try:
            args[name] = json.loads(value)
            json.dumps(args[name], allow_nan=False)
        except (ValueError, RecursionError):
            args[name] = value
    return args
