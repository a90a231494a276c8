"""Validation of JSON files from outside: their fields, and the type of each.

A shape is one of

    float, int, str, bool, None     a number, a whole number from 0, text, ...; object is anything
    "text"                          this text
    number, token                   a number, nan and infinity included; a token id
    [shape], [shape, shape]         a list of any length, a list of two
    {"a, b": shape, "c?": shape}    an object with these fields, c if it exists; others are allowed
    {str: shape}                    an object whose values all have one shape
    (shape, shape)                  one of these
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from outrider.conf.errors import CorruptFile
from outrider.conf.files import read_json, read_lines

LARGEST = 2**63  # above all numbers but nan and infinity
RATE = (float, None)  # a number, null where it was not measured
MISSING = object()


def read_object(file: Path, fix: str, shape: dict[Any, Any]) -> dict[str, Any]:
    """Read a JSON object of a shape.

    Raises:
        CorruptFile: as `read_json`, or for a value of another shape, which the message names.
    """
    content = read_json(file, fix)
    require_shape(content, shape, str(file), fix)
    return content


def read_rows(
    file: Path, fix: str, shape: dict[Any, Any], torn: bool = False
) -> list[dict[str, Any]]:
    """Read the objects of a JSONL file as `read_lines`; each has the shape."""
    rows = read_lines(file, fix, torn)
    for line, row in enumerate(rows, start=1):
        require_shape(row, shape, f"{file}: line {line}", fix)
    return rows


def require_shape(value: Any, shape: Any, place: str, fix: str) -> None:
    """Raise a `CorruptFile` for a value of another shape; `place` is the file."""
    if mismatch := find_mismatch(value, shape):
        raise CorruptFile(f"{place}: {mismatch}.", fix)


def number(value: Any) -> bool:
    """Return whether a value is a number that fits into a float."""
    return type(value) is float or (type(value) is int and abs(value) < LARGEST)


def token(value: Any) -> bool:
    """Return whether a value is a whole number of 31 bits."""
    return type(value) is int and 0 <= value < 1 << 31


NAMES = {float: "a number", int: "a whole number from 0", str: "text", bool: "true or false",
         list: "a list of this length", dict: "an object", None: "null", number: "a number",
         token: "a token id"}  # fmt: skip


def find_mismatch(value: Any, shape: Any, name: str = "") -> str:
    """Return which part of a value has another shape; "" if none has."""
    if isinstance(shape, tuple):
        mismatches = [find_mismatch(value, one, name) for one in shape]
        return "" if "" in mismatches else mismatches[0]
    if isinstance(shape, list) and isinstance(value, list) and len(shape) in (1, len(value)):
        entries = _to_check(value) if len(shape) == 1 else enumerate(value)
        parts: Iterator[Any] = ((x, shape[i % len(shape)], f"{name}[{i}]") for i, x in entries)
    elif isinstance(shape, dict) and isinstance(value, dict):
        parts = _fields(value, shape, name)
    elif value is MISSING:
        return f"{name} is missing"
    else:
        kind: Any = type(shape) if isinstance(shape, list | dict) else shape
        expected = NAMES.get(kind, repr(shape))
        return "" if _fits(value, shape) else f"{name} is {repr(value)[:60]}, not {expected}"
    return next(filter(None, (find_mismatch(*part) for part in parts)), "")


def _to_check(values: list[Any]) -> Iterable[tuple[int, Any]]:
    """Return (index, entry) of a long list's different entries; of whole numbers only the ends.

    A shape that has the smallest and the largest number has all between.
    """
    if not {*map(type, values)} <= {int, str, type(None)}:
        return enumerate(values)
    index = {entry: i for i, entry in enumerate(values)}
    numbers = [entry for entry in index if type(entry) is int]
    ends = (min(numbers), max(numbers)) if numbers else ()
    return [(i, entry) for entry, i in index.items() if type(entry) is not int or entry in ends]


def _fields(
    value: dict[str, Any], shape: dict[Any, Any], name: str
) -> Iterator[tuple[Any, Any, str]]:
    """Yield the fields of an object, each with its shape and full name."""
    for names, inner in shape.items():
        if names is str:
            for key, item in value.items():
                yield key, str, f"a name in {name or 'it'}"
                yield item, inner, f"{name}.{key}".lstrip(".")
            continue
        for field in names.split(", "):
            key = field.removesuffix("?")
            if key in value or key == field:
                yield value.get(key, MISSING), inner, f"{name}.{key}".lstrip(".")


def _fits(value: Any, shape: Any) -> bool:
    """Return whether a value that is no list or object has the shape."""
    if shape in (float, int):
        least = 0 if shape is int else -LARGEST
        return type(value) in (int, shape) and least <= value < LARGEST
    if shape in (number, token):
        return bool(shape(value))
    return shape is object or value == shape or type(value) is shape
