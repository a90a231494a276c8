"""Text for people: credentials and home folders are masked, control characters escaped."""

import logging
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MASK = "***"
USERINFO = re.compile(r"(?<=://)[^\s/?#'\"\\]+@")
SECRET_FIELD = re.compile(
    r"(?i)([?&;#][\w.%-]*(?:token|key|secret|passw|pwd|sig|auth|credential|session)[\w.%-]*=)"
    r"[^&;\s#'\"\\]+"
)
TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY")
SHORTEST_TOKEN = 8  # characters; a shorter value may be part of a word
# controls but newline and tab, bidirectional embeddings, overrides and isolates, line and
# paragraph separators, lone surrogates
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def mask_credentials(text: str) -> str:
    """Replace user:password@ and secret query fields of addresses, and access tokens, by ***."""
    text = TOKEN.sub(MASK, SECRET_FIELD.sub(rf"\g<1>{MASK}", USERINFO.sub(f"{MASK}@", text)))
    for value in map(os.environ.get, TOKEN_VARIABLES):
        if value and len(value) >= SHORTEST_TOKEN:
            text = text.replace(value, MASK)
    return text


def mask_address(address: str, message: str) -> str:
    """Return a message about an address without any part of the address's credentials."""
    secrets = [match[0] for match in USERINFO.finditer(address)]
    secrets += [match[0].partition("=")[2] for match in SECRET_FIELD.finditer(address)]
    parts = {part for secret in secrets for part in (secret, *re.split("[:@]", secret)) if part}
    for part in sorted(parts, key=len, reverse=True):
        message = message.replace(part, MASK)
    return mask_credentials(message)


def mask_home(text: str) -> str:
    """Replace the user's home folder by ~, and mask credentials: text that is published."""
    home = str(Path("~").expanduser()).rstrip("/")
    text = re.sub(rf"(?<![\w.~-]){re.escape(home)}(?![\w.-])", "~", text) if home else text
    return mask_credentials(re.sub(r"(?<![\w.])/(?:home|Users)/[^/\s'\"]+", "~", text))


def mask_values(value: Any, mask: Any = mask_credentials) -> Any:
    """Return nested mappings and lists with `mask` applied to every text in them."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, Mapping):
        return {
            mask(k) if isinstance(k, str) else k: mask_values(v, mask) for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        masked = [mask_values(one, mask) for one in value]
        return tuple(masked) if isinstance(value, tuple) else masked
    return value


def escape_controls(text: str) -> str:
    r"""Return text whose characters cannot act on a terminal: an escape is shown as \x1b."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def for_terminal(text: object) -> str:
    """Return text as the terminal may show it: masked, and controls escaped."""
    return escape_controls(mask_credentials(str(text)))


class EscapedLogRecord(logging.LogRecord):
    """A log record of any library, as the terminal may show it."""

    def getMessage(self) -> str:
        return for_terminal(super().getMessage())

    def __setattr__(self, name: str, value: Any) -> None:
        text = isinstance(value, str) and name in ("exc_text", "stack_info")
        super().__setattr__(name, for_terminal(value) if text else value)


def escape_library_output() -> None:
    """Escape warnings, log records and tracebacks of this process, which print themselves."""

    def show(*error: Any) -> None:
        if error[0] is not SystemExit:  # which ends a thread
            sys.stderr.write(for_terminal("".join(traceback.format_exception(*error[:3]))))

    plain = warnings.formatwarning
    warnings.formatwarning = lambda *about, **line: for_terminal(plain(*about, **line))
    logging.setLogRecordFactory(EscapedLogRecord)
    sys.excepthook = show
    threading.excepthook = lambda error: show(*error)
    sys.unraisablehook = lambda error: show(error.exc_type, error.exc_value, error.exc_traceback)
