"""Rendering of chat templates within limits of time and memory, and their arguments.

The values are assigned at the start of the template itself, so everything that renders with this
tokenizer uses them, and the hash of the template, which every run and report stores, covers them.

    target.thinking=false target.template_args=['date_string=26 Jul 2024']
    {% set enable_thinking = false %}{% set date_string = "26 Jul 2024" %}{{ bos_token }}...
"""

import hashlib
import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.conf.errors import ConfigError
from outrider.conf.template_args import THINKING_ARG, parse_template_args

SECONDS = 5.0  # of processor time for one text
MEMORY = 4 * 2**30  # bytes that a template may allocate
MEMORY_FILE = Path("/proc/self/statm")  # of Linux; elsewhere memory is not limited


def render(tokenizer: Any, messages: Sequence[Any], **arguments: Any) -> str:
    """Return the text of the template, in jinja2's sandbox, with limits of time, memory and length.

    Raises:
        jinja2.TemplateError: the template refuses the conversation.
        Exception: of any kind, for a template that fails otherwise.
    """
    with _limits():
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, **arguments))
    given = [value for turn in messages for value in turn.values()]
    given.append(arguments.get("tools") or "")
    longest = 2**20 + 2**12 * len(messages) + 16 * sum(len(str(value)) for value in given)
    if len(text) > longest:
        raise ValueError(f"its text has {len(text):,} characters, and at most {longest:,} can be")
    return text


@contextmanager
def _limits() -> Iterator[None]:
    """Stop the main thread, the only one that handles signals, at a limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    start = time.thread_time()

    def check(*_: object) -> None:
        if time.thread_time() - start > SECONDS:  # the timer counts all threads
            raise TimeoutError(f"it runs for more than {SECONDS:.0f} seconds")

    before = signal.signal(signal.SIGVTALRM, check)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS, 0.5)
    try:
        with _memory_limit():
            yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _memory_limit() -> Iterator[None]:
    """Limit the memory that this process adds while a template runs.

    Only the system can stop one operation of C (`x ~ x`, `center`, `join`). RLIMIT_DATA counts
    memory that is private and writable; the address space that CUDA and threads reserve is not.
    """
    if not MEMORY_FILE.exists():
        yield
        return
    import resource  # absent on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(MEMORY_FILE.read_bytes().split()[5]) * resource.getpagesize()
    bounds = [limit for limit in (soft, hard, used + MEMORY) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(bounds), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def set_template_args(tokenizer: Any, args: dict[str, Any]) -> None:
    """Set arguments of the chat template; ConfigError if it does not use one of them."""
    if not args:
        return
    original = getattr(tokenizer, "chat_template", None)
    template = str(tokenizer.get_chat_template()) if original else ""
    for name, value in args.items():
        if name not in template:
            key = "target.thinking" if name == THINKING_ARG else "target.template_args"
            why = f"The chat template does not use {name}." if template else "It has none."
            raise ConfigError(key, value, why, "Remove it, or use another target.")
    # Jinja writes literals as JSON does, but none for null
    literals = {n: "none" if value is None else json.dumps(value) for n, value in args.items()}
    # +%} keeps a newline that the template begins with
    assignments = [f"{{% set {name} = {literal} +%}}" for name, literal in literals.items()]
    tokenizer.chat_template = "".join(assignments) + template


def thinking_is_off(tokenizer: Any) -> bool:
    """Return whether `set_template_args` has set target.thinking=false."""
    off = f"{{% set {THINKING_ARG} = false +%}}"
    return off in str(getattr(tokenizer, "chat_template", None))


def template_hash(tokenizer: Any) -> str:
    """Return the hash of the chat template with its arguments."""
    text = str(getattr(tokenizer, "chat_template", None))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def template_change(manifest: Mapping[str, Any], target: Any, tokenizer: Any) -> str:
    """Return a warning if the run of a manifest was trained with another template, else "".

    `target` holds the present settings of its target.

    Raises:
        ValueError: the manifest has template arguments that are none.
    """
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
