"""What the chat template is told besides the turns: whether to think, which date it is, ...

The values are written at the head of the template itself, so that everybody who renders with this
tokenizer (training, the target's own text, the decoder, the prompts of a server) renders alike,
and the hash of the template, which every run and report keeps, knows of them.

    target.thinking=false target.template_args=['date_string=26 Jul 2024']
    {% set enable_thinking = false %}{% set date_string = "26 Jul 2024" %}{{ bos_token }}...
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from outrider.conf.errors import ConfigError

THINKING = "enable_thinking"  # as Qwen3 and those after it call it


def read_args(thinking: bool | None, words: Sequence[str]) -> dict[str, Any]:
    """The arguments by name; a value is json if it can be, else text.

    Raises:
        ValueError: a word is not of the form name=value, or two say the same name.
    """
    args: dict[str, Any] = {} if thinking is None else {THINKING: thinking}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"template_args = {word}: write name=value")
        if name in args:
            raise ValueError(f"template_args = {word}: {name} is set twice")
        try:
            args[name] = json.loads(value)
        except ValueError:
            args[name] = value
    return args


def tell(tokenizer: Any, args: dict[str, Any]) -> None:
    """Give the tokenizer's template these arguments.

    Raises:
        ConfigError: there is no template, or it does not ask for one of them.
    """
    if not args:
        return
    has_one = getattr(tokenizer, "chat_template", None)
    known = str(tokenizer.get_chat_template()) if has_one else ""
    for name, value in args.items():
        if name not in known:
            key = "target.thinking" if name == THINKING else "target.template_args"
            why = f"The chat template does not ask for {name}." if known else "There is none."
            raise ConfigError(key, value, why, "Drop it, or take another target.")
    # +%} keeps a newline that the template begins with
    told = "".join(f"{{% set {name} = {_literal(value)} +%}}" for name, value in args.items())
    tokenizer.chat_template = told + known


def _literal(value: Any) -> str:
    """As Jinja writes it: like json, except that null is none."""
    return "none" if value is None else json.dumps(value)


def template_hash(tokenizer: Any) -> str:
    """Of the chat template with its arguments."""
    text = str(getattr(tokenizer, "chat_template", None))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def change(folder: Any, target: Any, tokenizer: Any) -> str:
    """What is to be said where a run was trained with another template; "" where it was not.

    Args:
        folder: of the run.
        target: its settings now.
    """
    from outrider.conf.files import read_json

    if not (folder / "manifest.json").is_file():
        return ""
    then = read_json(folder / "manifest.json", f"Train {folder} again.")
    was = then.get("fingerprints", {}).get("template")
    if was is None or was == template_hash(tokenizer):
        return ""
    told = then.get("config", {}).get("target", {})
    before = read_args(told.get("thinking"), told.get("template_args") or ())
    now = read_args(target.thinking, target.template_args)
    return (
        "the chat template is not the one of training: the drafter has never seen such prompts\n"
        f"  trained with {_shown(before)}, template {was[:8]}\n"
        f"  measured with {_shown(now)}, template {template_hash(tokenizer)[:8]}"
    )


def _shown(args: dict[str, Any]) -> str:
    return (
        ", ".join(f"{name}={json.dumps(value)}" for name, value in args.items()) or "no arguments"
    )
