"""Arguments of the chat template besides the messages: thinking, the date, ...

The values are assigned at the start of the template itself, so everything that renders with this
tokenizer uses them, and the hash of the template, which every run and report stores, covers them.

    target.thinking=false target.template_args=['date_string=26 Jul 2024']
    {% set enable_thinking = false %}{% set date_string = "26 Jul 2024" %}{{ bos_token }}...
"""

import hashlib
import json
from typing import Any

from outrider.conf.errors import ConfigError
from outrider.conf.schema import THINKING_ARG, parse_template_args


def set_template_args(tokenizer: Any, args: dict[str, Any]) -> None:
    """Set arguments of the chat template; ConfigError if it does not use one of them."""
    if not args:
        return
    original = getattr(tokenizer, "chat_template", None)
    template = str(tokenizer.get_chat_template()) if original else ""
    for name, value in args.items():
        if name not in template:
            key = "target.thinking" if name == THINKING_ARG else "target.template_args"
            why = f"The chat template does not use {name}." if template else "There is none."
            raise ConfigError(key, value, why, "Drop it, or take another target.")
    # Jinja writes literals as JSON does, but none for null
    literals = {n: "none" if value is None else json.dumps(value) for n, value in args.items()}
    # +%} keeps a newline that the template begins with
    assignments = [f"{{% set {name} = {literal} +%}}" for name, literal in literals.items()]
    tokenizer.chat_template = "".join(assignments) + template


def template_hash(tokenizer: Any) -> str:
    """Return the hash of the chat template with its arguments."""
    text = str(getattr(tokenizer, "chat_template", None))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def template_change(folder: Any, target: Any, tokenizer: Any) -> str:
    """Return a warning if the run in `folder` was trained with another template, else "".

    `target` holds the present settings of its target.
    """
    from outrider.conf.files import read_json

    if not (folder / "manifest.json").is_file():
        return ""
    manifest = read_json(folder / "manifest.json", f"Train {folder} again.")
    was = manifest.get("fingerprints", {}).get("template")
    if was is None or was == template_hash(tokenizer):
        return ""
    settings = manifest.get("config", {}).get("target", {})
    before = parse_template_args(settings.get("thinking"), settings.get("template_args") or ())
    now = parse_template_args(target.thinking, target.template_args)
    return (
        "the chat template is not the one of training, so these prompts are new to the drafter\n"
        f"  trained with {_shown(before)}, template {was[:8]}\n"
        f"  measured with {_shown(now)}, template {template_hash(tokenizer)[:8]}"
    )


def _shown(args: dict[str, Any]) -> str:
    return ", ".join(f"{n}={json.dumps(value)}" for n, value in args.items()) or "no arguments"
