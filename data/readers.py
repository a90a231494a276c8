"""Rows of files: .jsonl, .json, .csv and .parquet, streamed, with the bad ones counted.

A file may be larger than memory: no more than a chunk, a batch or one row of it is held. A row
that cannot be read (damaged json, wrong encoding, a line without end) is named and refused, or
left out and counted as long as `skip_bad` allows. What cannot be read on from (an array that is
damaged inside, a parquet file that was cut off) is always refused.
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

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
BOM = b"\xef\xbb\xbf"
MARKS = {  # how a file begins, which is what it is
    b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}  # fmt: skip
# where the zero bytes of a first letter or two are, which no text in UTF-8 has
ZEROS = {"x0x0": "UTF-16LE", "0x0x": "UTF-16BE", "x000": "UTF-32LE", "000x": "UTF-32BE"}
LONGEST = 1 << 24  # bytes of a row; a conversation of 4 million tokens
BATCH = 256  # rows of a parquet file at a time


@dataclass
class Patience:
    """How many bad rows are left out before a file is refused, and how many have been.

    Attributes:
        noted: called for each that is left out.
    """

    skip_bad: int = 0
    noted: Callable[[], None] = lambda: None
    option: str = ""  # the setting that allows more
    bad: int = 0

    def refuse(self, file: Path, line: int, reason: object) -> None:
        """Count a bad row.

        Raises:
            RunError: one more than allowed.
        """
        self.bad += 1
        if self.bad > self.skip_bad:
            earlier = f" (bad row number {self.bad})" if self.skip_bad else ""
            leave = f", or leave it out: {self.option}={self.bad}" if self.option else ""
            raise RunError(
                f"{file}, line {line}: {reason}{earlier}", f"Repair or remove that record{leave}."
            )
        self.noted()


def records(
    path: str | Path, *, key: str = "data.path", patience: Patience | None = None
) -> Iterator[dict[str, Any]]:
    """The rows of a file as dicts, streamed.

    Args:
        path: one object per line (.jsonl), one array or one object per line (.json), a table
            whose first line names the columns (.csv), or a .parquet file.
        key: the setting that named the file, for the message when it is not there.
        patience: counts bad rows; None refuses the first.

    Raises:
        ConfigError: no such file, an empty one, or another kind. Raised by the call itself.
        RunError: a row that cannot be read; names file and line.
    """
    file, patience = Path(path).expanduser(), patience or Patience()
    _look(file, path, key)
    if file.suffix == ".parquet":
        return _table(file, patience)
    if file.suffix == ".csv":
        return _columns(file, patience)
    if file.suffix == ".json" and _begins(file).removeprefix(BOM).lstrip()[:1] == b"[":
        return _elements(file, patience)
    return _lines(file, patience)


def _look(file: Path, path: str | Path, key: str) -> None:
    """Refuse what needs no reading to be refused."""
    fix = f"Give a file that ends in {', '.join(SUFFIXES)}."
    if not file.is_file():
        raise ConfigError(key, str(path), "There is no such file.", fix)
    if file.suffix not in SUFFIXES:
        why = f"A file that ends in {file.suffix or 'no suffix'} is not read."
        raise ConfigError(key, str(path), why, fix)
    if file.stat().st_size == 0:
        raise ConfigError(key, str(path), "The file is empty.", "Was it written to its end?")
    wide = "" if file.suffix == ".parquet" else _wide(_begins(file))
    if wide:
        fix = f"iconv -f {wide} -t UTF-8 {file.name} > new{file.suffix}"
        raise ConfigError(key, str(path), f"This file is {wide}, and UTF-8 is read.", fix)


def _begins(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(4096)


def _wide(begin: bytes) -> str:
    """The encoding of text whose letters are wider than a byte; "" if they are not."""
    marked = next((name for mark, name in MARKS.items() if begin.startswith(mark)), "")
    return marked or ZEROS.get("".join("x" if byte else "0" for byte in begin[:4]), "")


def _lines(file: Path, patience: Patience) -> Iterator[dict[str, Any]]:
    number = 0
    with file.open("rb") as stream:
        while line := stream.readline(LONGEST):
            number += 1
            if len(line) == LONGEST and not line.endswith(b"\n"):
                while (rest := stream.readline(LONGEST)) and not rest.endswith(b"\n"):
                    pass
                patience.refuse(file, number, f"the line is longer than {LONGEST} bytes")
            elif line.strip(b" \t\r\n" + BOM):
                try:
                    yield _object(_parsed(line, number))
                except json.JSONDecodeError as error:
                    why = f"no JSON object on one line ({error.msg} at column {error.colno})"
                    patience.refuse(file, number, why)
                except (ValueError, RecursionError) as error:
                    patience.refuse(file, number, error)


def _parsed(line: bytes, number: int) -> Any:
    """
    Raises:
        ValueError: not json, or not UTF-8.
    """
    return json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))


def _elements(file: Path, patience: Patience, chunk: int = 1 << 20) -> Iterator[dict[str, Any]]:
    """The elements of one array; no more than a chunk (or one element) is in memory."""
    decode, between = json.JSONDecoder().raw_decode, re.compile(r"[\s,]*")
    with file.open(encoding="utf-8-sig") as stream:
        text = ""
        while "[" not in text:
            text += _more(stream, chunk, file, 1)
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
            except ValueError as error:  # half an element, the end of the array, or nonsense
                more = _more(stream, max(chunk, len(text) - at), file, line)
                if not more and text[at:].strip() == "]":
                    return
                if not more:
                    raise _unreadable(file, line, error) from None
                if len(text) - at > LONGEST:
                    why = f"an element is longer than {LONGEST} characters, or damaged: {error}"
                    raise _unreadable(file, line, why) from None
                text, at = text[at:] + more, 0
                continue
            try:
                yield _object(value)
            except ValueError as error:
                patience.refuse(file, line, error)
            line += text.count("\n", at, end)
            at = end


def _more(stream: TextIO, size: int, file: Path, line: int) -> str:
    try:
        return stream.read(size)
    except UnicodeDecodeError as error:
        raise _unreadable(file, line, error) from None


def _columns(file: Path, patience: Patience) -> Iterator[dict[str, Any]]:
    """A table of text. A cell that holds a json list (of turns) is read as one."""
    csv.field_size_limit(LONGEST)
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        rows = csv.DictReader(stream, strict=True)
        while True:
            try:
                row = next(rows)
                yield _cells(row)
            except StopIteration:
                return
            except csv.Error as error:
                patience.refuse(file, rows.line_num + 1, error)  # the line is not counted yet
            except ValueError as error:
                patience.refuse(file, rows.line_num, error)


def _cells(row: dict[Any, Any]) -> dict[str, Any]:
    """
    Raises:
        ValueError: too many cells, too few, or text that is not UTF-8.
    """
    if None in row or None in row.values():
        raise ValueError("the row has not as many cells as the first line has names")
    try:
        for value in row.values():
            value.encode()  # a byte that was no UTF-8 cannot be written again
    except UnicodeEncodeError:
        raise ValueError("the row is not UTF-8") from None
    listed = {k: v for k, v in row.items() if v.startswith("[") and v.endswith("]")}
    for name, value in listed.items():
        with suppress(ValueError):  # it may be text in brackets
            row[name] = json.loads(value)
    return row


def _table(file: Path, patience: Patience) -> Iterator[dict[str, Any]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as table:
            for number, batch in enumerate(table.iter_batches(batch_size=BATCH)):
                try:
                    yield from batch.to_pylist()
                except UnicodeDecodeError:  # arrow does not look at text before it is asked for
                    yield from _one_by_one(batch, number * BATCH, file, patience)
    except (ArrowException, OSError) as error:
        raise RunError(f"{file} is damaged: {error}", "Fetch or write it again.") from None


def _one_by_one(
    batch: Any, before: int, file: Path, patience: Patience
) -> Iterator[dict[str, Any]]:
    """The rows of a batch that holds bad ones."""
    for place in range(len(batch)):
        try:
            yield from batch.slice(place, 1).to_pylist()
        except UnicodeDecodeError as error:
            patience.refuse(file, before + place + 1, error)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object is needed, not {type(value).__name__}")
    return value


def _unreadable(file: Path, line: int, reason: object) -> RunError:
    return RunError(f"{file}, line {line}: {reason}", "Repair or remove that record.")
