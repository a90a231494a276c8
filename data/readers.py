"""Rows of .jsonl, .json, .csv and .parquet files, streamed.

A file may be larger than memory. A row that cannot be read (damaged json, wrong encoding, too long
a line) raises an error with its line, or is skipped and counted as long as `skip_bad` allows.
Damage behind which no row can be found (inside an array, in a cut-off parquet file) always raises.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import check_depth, open_regular
from outrider.conf.plugins import OWN_PART, Registry

TEXT = (".jsonl", ".json", ".csv")
SUFFIXES = (*TEXT, ".parquet")
BOM = b"\xef\xbb\xbf"
BYTE_ORDER_MARKS = {
    b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}  # fmt: skip
# zero bytes among the first four, which no UTF-8 text has
ZERO_BYTES = {"x0x0": "UTF-16LE", "0x0x": "UTF-16BE", "x000": "UTF-32LE", "000x": "UTF-32BE"}
MAX_ROW = 1 << 24  # bytes; a conversation of 4 million tokens
PARQUET_ROWS = 256  # per batch


@dataclass
class BadRowPolicy:
    """Limit on skipped bad rows, and their count."""

    skip_bad: int = 0  # rows that may be skipped
    on_skip: Callable[[], None] = lambda: None
    option: str = ""  # configuration key of the limit, for the message; "" if there is none
    count: int = 0

    def skip_or_raise(self, file: Path, line: int, reason: object) -> None:
        """Count a bad row; raise RunError if there are more than `skip_bad`."""
        self.count += 1
        if self.count > self.skip_bad:
            earlier = f" (bad row number {self.count})" if self.skip_bad else ""
            skip = f", or leave it out: {self.option}={self.count}" if self.option else ""
            raise _unreadable(file, line, f"{reason}{earlier}", skip)
        self.on_skip()


Reader = Callable[[Path, BadRowPolicy], Iterator[dict[str, Any]]]


def read_records(
    path: str | Path, *, key: str = "data.path", policy: BadRowPolicy | None = None
) -> Iterator[dict[str, Any]]:
    """Return the rows of a file as dicts, streamed.

    Args:
        path: one object per line (.jsonl), one array or one object per line (.json), a table
            whose first line names the columns (.csv), or a .parquet file.
        key: configuration key that names the file, for messages.

    Raises:
        ConfigError: no such file, an empty one, or another kind. Raised by the call itself.
        RunError: a row cannot be read; names file and line.
    """
    file, policy = Path(path).expanduser(), policy or BadRowPolicy()
    _check_file(file, path, key)
    rows = READERS[file.suffix](file, policy)
    return rows if file.suffix in SUFFIXES else _checked_rows(rows, file)


def _json_rows(file: Path, policy: BadRowPolicy) -> Iterator[dict[str, Any]]:
    if _head(file).removeprefix(BOM).lstrip()[:1] == b"[":
        return _array_elements(file, policy)
    return _json_lines(file, policy)


def _checked_rows(rows: Iterator[dict[str, Any]], file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a registered reader; its exceptions become a RunError."""
    try:
        for row in rows:
            yield _require_object(row)
    except RunError:
        raise
    except Exception as error:  # of any kind: it is the user's code
        why = f"The reader of {file.suffix} failed on {file}: {type(error).__name__}: {error}"
        raise RunError(why, "Correct the reader, or the file.") from error


def _check_file(file: Path, path: str | Path, key: str) -> None:
    """Raise ConfigError for a file that cannot hold rows."""
    why, fix = "", f"Give a file that ends in {', '.join(READERS)}. {OWN_PART}"
    if not file.exists():
        why = "There is no such file."
    elif not file.is_file():
        why = "It is not a regular file."
    elif file.suffix not in READERS:
        why = f"A file that ends in {file.suffix or 'no suffix'} is not read."
    elif file.stat().st_size == 0:
        why, fix = "The file is empty.", "Check that it was written completely."
    elif file.suffix in TEXT and (wide := _wide_encoding(_head(file))):
        why = f"This file is {wide}, and UTF-8 is read."
        fix = f"iconv -f {wide} -t UTF-8 {file.name} > new{file.suffix}"
    if why:
        raise ConfigError(key, str(path), why, fix)


def _head(file: Path) -> bytes:
    with open_regular(file) as stream:
        return stream.read(4096)


def _wide_encoding(head: bytes) -> str:
    """Return UTF-16 or UTF-32 (with its byte order) if a file begins like it, else ""."""
    marked = next((name for mark, name in BYTE_ORDER_MARKS.items() if head.startswith(mark)), "")
    return marked or ZERO_BYTES.get("".join("x" if byte else "0" for byte in head[:4]), "")


def _json_lines(file: Path, policy: BadRowPolicy) -> Iterator[dict[str, Any]]:
    number = 0
    with open_regular(file) as stream:
        while line := stream.readline(MAX_ROW):
            number += 1
            if len(line) == MAX_ROW and not line.endswith(b"\n"):
                policy.skip_or_raise(file, number, f"the line is longer than {MAX_ROW} bytes")
                while (rest := stream.readline(MAX_ROW)) and not rest.endswith(b"\n"):
                    pass
            elif line.strip(b" \t\r\n" + BOM):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                    yield _require_object(json.loads(text.rstrip("\r\n")))
                except json.JSONDecodeError as error:
                    place = f"{error.msg} at column {error.colno}"
                    why = f"this is not one complete JSON object ({place})"
                    policy.skip_or_raise(file, number, why)
                except (ValueError, RecursionError) as error:
                    policy.skip_or_raise(file, number, error)


def _array_elements(
    file: Path, policy: BadRowPolicy, chunk: int = 1 << 20
) -> Iterator[dict[str, Any]]:
    """Yield the elements of one array, with a chunk (or one element) in memory.

    ijson would refuse NaN, turn half a surrogate pair into "?" and need memory that grows with the
    square of the nesting depth.
    """
    decode, between = json.JSONDecoder().raw_decode, re.compile(r"[\s,]*")
    with file.open(encoding="utf-8-sig") as stream:
        text = ""
        while "[" not in text:
            text += _read_text(stream, chunk, file, 1)
        at = text.index("[") + 1
        line = 1 + text.count("\n", 0, at)
        while True:
            gap = len(between.match(text, at)[0])  # type: ignore[index]  # matches anywhere
            line += text.count("\n", at, at + gap)
            at += gap
            try:
                value, end = decode(text, at)
            except RecursionError as error:
                raise _unreadable(file, line, error) from None
            except ValueError as error:  # half an element, the end of the array, or damage
                more = _read_text(stream, max(chunk, len(text) - at), file, line)
                if not more and text[at:].strip() == "]":
                    return
                if not more:
                    raise _unreadable(file, line, error) from None
                if len(text) - at > MAX_ROW:
                    why = f"an element is longer than {MAX_ROW} characters, or damaged: {error}"
                    raise _unreadable(file, line, why) from None
                text, at = text[at:] + more, 0
                continue
            try:
                yield _require_object(value)
            except ValueError as error:
                policy.skip_or_raise(file, line, error)
            line += text.count("\n", at, end)
            at = end


def _read_text(stream: TextIO, size: int, file: Path, line: int) -> str:
    try:
        return stream.read(size)
    except UnicodeDecodeError as error:
        raise _unreadable(file, line, error) from None


def _csv_rows(file: Path, policy: BadRowPolicy) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table. A cell that holds a json list (of turns) is parsed."""
    csv.field_size_limit(MAX_ROW)
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        lines = iter(lambda: _bounded_line(stream, file, rows.line_num + 1), "")
        rows: csv.DictReader[str] = csv.DictReader(lines, strict=True)
        while True:
            try:
                yield _parse_cells(next(rows))
            except StopIteration:
                return
            except csv.Error as error:
                policy.skip_or_raise(file, rows.line_num + 1, error)  # line_num is not updated yet
            except ValueError as error:
                policy.skip_or_raise(file, rows.line_num, error)


def _bounded_line(stream: TextIO, file: Path, number: int) -> str:
    if len(line := stream.readline(MAX_ROW)) == MAX_ROW:
        raise _unreadable(file, number, f"the line is longer than {MAX_ROW} characters")
    return line


def _parse_cells(row: dict[Any, Any]) -> dict[str, Any]:
    """Parse the cells that are json lists; ValueError for too many, too few or undecodable ones."""
    if None in row or None in row.values():
        raise ValueError("the row and the first line have different numbers of cells")
    try:
        for value in row.values():
            value.encode()  # bytes that are not UTF-8 were read as surrogates
    except UnicodeEncodeError:
        raise ValueError("the row is not UTF-8") from None
    for name, value in row.items():
        if value.startswith("[") and value.endswith("]"):
            with suppress(ValueError, RecursionError):  # text in brackets
                row[name] = check_depth(json.loads(value))
    return row


def _parquet_rows(file: Path, policy: BadRowPolicy) -> Iterator[dict[str, Any]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as table:
            for number, batch in enumerate(table.iter_batches(batch_size=PARQUET_ROWS)):
                try:
                    rows = [] if batch.nbytes > MAX_ROW else batch.to_pylist()
                except UnicodeDecodeError:  # arrow checks text only when it is converted
                    rows = []
                yield from rows or _valid_rows(batch, number * PARQUET_ROWS, file, policy)
    except (ArrowException, ArithmeticError, OSError, ValueError) as error:  # names, dates
        raise RunError(f"{file} is damaged: {error}", "Fetch or write it again.") from None


def _valid_rows(
    batch: Any, before: int, file: Path, policy: BadRowPolicy
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch one by one; skip or refuse the bad ones."""
    for row in range(len(batch)):
        try:
            (one,) = batch.slice(row, 1).to_pylist()
            if len(json.dumps(one, default=lambda _: None, ensure_ascii=False)) > MAX_ROW:
                why = f"the row is longer than {MAX_ROW} characters"
                policy.skip_or_raise(file, before + row + 1, why)
            else:
                yield one
        except UnicodeDecodeError as error:
            policy.skip_or_raise(file, before + row + 1, error)


def _require_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object is needed, not {type(value).__name__}")
    check_depth(value)
    return value


def _unreadable(file: Path, line: int, reason: object, skip: str = "") -> RunError:
    return RunError(f"{file}, line {line}: {reason}", f"Repair or remove that record{skip}.")


OWN_READERS: dict[str, Reader] = {
    ".jsonl": _json_lines, ".json": _json_rows, ".csv": _csv_rows, ".parquet": _parquet_rows,
}  # fmt: skip
# by the end of a file's name
READERS: Registry[Reader] = Registry("row reader", Callable, OWN_READERS, pattern=r"\.[a-z0-9]+")
