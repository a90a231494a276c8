"""Rows from Python as training text: a generator, a list, or a `datasets.Dataset`.

They are written to a file of the user's cache, whose name is a hash of its content. Every step that
reads the text again (checks, contamination, a resumed run) reads this file, so rows that can be
read only once are enough, and other rows are another `data.path`.
"""

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import as_run_error, remove_temporary, sync_folder
from outrider.conf.paths import cache_home
from outrider.conf.quantities import format_count
from outrider.conf.schema import Config

EXAMPLE = '{"messages": [{"role": "user", "content": "2+2?"}, ...]}'
DAY = 86400.0  # seconds, after which a temporary file is of a killed process
OTHER_TEXT = ("path", "traces", "subset", "split", "revision")  # keys of `data` that name text


def with_rows(
    config: Config, rows: Iterable[Mapping[str, Any]], note: Callable[[str], object]
) -> Config:
    """Return the configuration of a run on these rows.

    Args:
        rows: dicts in a shape of `conversations`, or with the columns of `data.columns`. Read once,
            to the end.
        note: called with the number of rows and their file.

    Raises:
        ConfigError: the configuration names another text, or rows is no iterable of rows.
        RunError: there is no row, one is not a dict or cannot be stored, or reading them fails;
            then the error's cause is the exception that it raised.
    """
    _check(config, rows)
    file, count = write_rows(rows)
    note(f"text: {format_count(count, 'row')} from Python, kept in {file}")
    return replace(config, data=replace(config.data, path=str(file)))


def write_rows(rows: Iterable[Mapping[str, Any]]) -> tuple[Path, int]:
    """Write rows to a file of the cache; return it and their number."""
    folder, digest, count, size = cache_home() / "rows", hashlib.sha256(), 0, 0
    unique = f"{os.getpid()}-{secrets.token_hex(4)}"  # ranks in containers have equal ids
    temporary = folder / f".rows.{unique}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_temporary(folder, "rows", time.time() - DAY)
        with temporary.open("wb") as stream:
            for line in _lines(rows):
                stream.write(line)
                digest.update(line)
                count, size = count + 1, size + len(line)
            stream.flush()
            os.fsync(stream.fileno())
        if not count:
            why = "rows has no rows."
            raise RunError(why, "A generator can be read once: make a new one for every call.")
        file = folder / f"{digest.hexdigest()[:32]}.jsonl"
        temporary.replace(file)
        sync_folder(folder)
    except OSError as error:
        raise as_run_error(temporary, error, size) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return file, count


def _check(config: Config, rows: object) -> None:
    data = config.data
    for name in OTHER_TEXT:
        if (value := getattr(data, name)) is not None:
            why = "rows is the training text already."
            raise ConfigError(f"data.{name}", value, why, f"Leave out rows, or data.{name}.")
    if data.name == "tiny":
        why, fix = "It is the embedded text.", "With rows, use data=jsonl, or data=self: prompts."
        raise ConfigError("data", data.name, why, fix)
    if data.generate is not None and data.generate.self_prompted:
        why = "Prompts are generated, not read."
        raise ConfigError("data.generate.self_prompted", True, why, "Leave out rows.")
    kind, why, fix = type(rows).__name__, "", f"Give dicts such as {EXAMPLE}."
    if isinstance(rows, str | bytes | os.PathLike):
        why, fix = "It names a text, and rows holds one.", "Use data.path, without rows."
    elif isinstance(rows, Mapping):
        why = f"It is a mapping of {', '.join(map(str, list(rows)[:8]))}."
        fix = "Give one of them, such as rows=data['train']."
    elif not isinstance(rows, Iterable):
        why = "It cannot be iterated."
    if why:
        raise ConfigError("rows", f"a {kind}", why, fix)


def _lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    """Yield each row as a line of JSON.

    What JSON cannot hold (an image, a date) becomes an object, which is not text.
    """
    for number, row in enumerate(_read(rows), start=1):
        if not isinstance(row, Mapping):
            why = f"Row {number} of rows is of type {type(row).__name__}."
            raise RunError(why, f"Rows are dicts such as {EXAMPLE}.")
        try:
            yield json.dumps(dict(row), default=_plain).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            fix = f"Rows are dicts such as {EXAMPLE}."
            raise RunError(f"Row {number} of rows cannot be stored: {error}.", fix) from error


def _read(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    count = 0
    try:
        for row in rows:
            yield row
            count += 1
    except Exception as error:
        message = f"rows failed after {format_count(count, 'row')}: {type(error).__name__}: {error}"
        fix = "Correct what is iterated; the cause of this error has its traceback."
        raise RunError(message, fix) from error


def _plain(value: Any) -> Any:
    """Return a list or number of numpy or torch as one of Python, anything else as an object."""
    return value.tolist() if hasattr(value, "tolist") else {"type": type(value).__name__}
