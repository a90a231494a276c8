"""Columns of other names: known fields of a row, and of its turns, by the user's names.

`data.columns={messages: dialogue, role: speaker, content: text}` reads

    {"dialogue": [{"speaker": "user", "text": "2+2?"}, {"speaker": "assistant", "text": "4"}]}

as the `messages` of `conversations`. A row's own columns and those of its turns have one mapping,
because no known field occurs in both.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

from outrider.conf.errors import ConfigError
from outrider.conf.fields import unknown_key

LISTS = ("messages", "conversations", "conversation", "turns")
OPENERS = (*LISTS, "prompt", "question", "instruction")  # the first that a row has is its shape
ROW_FIELDS = (
    *OPENERS, "completion", "response", "answer", "input", "output", "system", "tools", "id",
    "question_id", "category",
)  # fmt: skip
TURN_FIELDS = ("role", "from", "content", "value", "tool_calls", "reasoning_content", "thinking")
KEY = "data.columns"
FIRST = 100  # rows in which every column must occur


def check_columns(columns: Mapping[str, str]) -> None:
    """Raise ConfigError for an unknown field, or two fields of one column."""
    seen = dict[tuple[bool, str], str]()
    for field, column in columns.items():
        if field not in (*ROW_FIELDS, *TURN_FIELDS):
            known = [f"{KEY}.{name}" for name in (*ROW_FIELDS, *TURN_FIELDS)]
            error = unknown_key(f"{KEY}.{field}", column, known)
            why = "No row or turn has such a field. Write {field: column}."
            raise ConfigError(error.key, column, why, error.fix)
        first = seen.setdefault((field in TURN_FIELDS, column), field)
        if first != field:
            why = f"{first} and {field} are two fields, and a column can be one of them."
            raise ConfigError(KEY, dict(columns), why, "Leave one of them out.")


def rename_columns(
    rows: Iterable[dict[str, Any]], columns: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield the rows with known fields.

    Raises:
        ConfigError: none of the first rows has a column of the mapping.
    """
    stream = iter(rows)
    first = list(islice(stream, FIRST))
    of_row = {field: column for field, column in columns.items() if field in ROW_FIELDS}
    of_turn = {field: column for field, column in columns.items() if field in TURN_FIELDS}
    _require_columns(first, of_row, "row")
    turns = (turn for row in first for turn in _turns(_rename_row(row, of_row)))
    _require_columns(list(turns), of_turn, "turn")
    for row in chain(first, stream):
        yield _rename_turns(_rename_row(row, of_row), of_turn)


def _require_columns(records: list[dict[str, Any]], columns: Mapping[str, str], what: str) -> None:
    existing = dict.fromkeys(str(name) for record in records for name in record)
    for field, column in columns.items():
        if records and column not in existing:
            why = f"No {what} has this column. Columns of a {what}: {', '.join(existing)}."
            raise ConfigError(f"{KEY}.{field}", column, why, "Name one of them.")


def _rename_row(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return a row with known fields; a shape that the mapping does not name gives way to it."""
    renamed = _rename(row, columns)
    shapes = [place for place, field in enumerate(OPENERS) if field in columns]
    for field in OPENERS[: min(shapes, default=0)]:
        renamed.pop(field, None)
    return renamed


def _rename_turns(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    if not columns:
        return row
    return {
        field: [_rename(x, columns) if isinstance(x, dict) else x for x in value]
        if field in ROW_FIELDS and isinstance(value, list)
        else value
        for field, value in row.items()
    }


def _turns(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for field, value in row.items():
        if field in ROW_FIELDS and isinstance(value, list):
            yield from (turn for turn in value if isinstance(turn, dict))


def _rename(record: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return a record with known fields; one that lacks a column lacks the field."""
    taken = {field: record[column] for field, column in columns.items() if column in record}
    used = {*columns.values(), *columns}
    return {name: value for name, value in record.items() if name not in used} | taken
