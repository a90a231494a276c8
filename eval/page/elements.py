"""Elements of a report page, independent of its output format: sections of tables, figures, notes.

A console table is converted cell by cell, so that both show the same numbers in the same digits.
Every table and figure has a definition of what it shows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from rich import table as console
from rich.text import Text

from outrider.eval.metrics import METRICS


class Cell(NamedTuple):
    """A text, and whether it is the best of its row or column."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Table:
    """A table; its first column has the names of the rows."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    definition: str

    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Figure:
    """A drawing for light and for dark pages, as data URIs."""

    title: str
    definition: str
    light: str
    dark: str

    kind: ClassVar[str] = "figure"


@dataclass(frozen=True)
class Note:
    """A sentence, and the command that would produce what is missing."""

    text: str
    command: str = ""

    kind: ClassVar[str] = "note"


@dataclass(frozen=True)
class Listing:
    """The text of a file."""

    title: str
    text: str

    kind: ClassVar[str] = "listing"


@dataclass(frozen=True)
class AnnotatedAnswer:
    """A prompt and its answer as texts with origins."""

    name: str
    prompt: str
    spans: Sequence[tuple[str, str]]

    kind: ClassVar[str] = "answer"


@dataclass(frozen=True)
class Collapsible:
    """Parts that are hidden until opened."""

    title: str
    parts: "Sequence[Part]"

    kind: ClassVar[str] = "collapsible"


Part = Table | Figure | Note | Listing | AnnotatedAnswer | Collapsible


class Section(NamedTuple):
    """A heading and its parts."""

    name: str  # anchor of the section
    title: str
    parts: Sequence[Part]


class Page(NamedTuple):
    """A page.

    Attributes:
        lead: sentences at the top, the verdicts.
        source: the folders and the version it was written from.
    """

    title: str
    lead: Sequence[str]
    sections: Sequence[Section]
    source: str


def text_table(
    title: str, head: Sequence[str], rows: Iterable[Sequence[str]], definition: str
) -> Table:
    """Return a table of plain texts."""
    return Table(title, head, [[Cell(text) for text in row] for row in rows], definition)


def from_console_table(source: console.Table, title: str, definition: str) -> Table:
    """Convert a console table; styled cells and rows are marked as best."""
    columns = [[_cell(cell) for cell in column.cells] for column in source.columns]
    head = [_cell(column.header).text for column in source.columns]
    rows = list(zip(*columns, strict=True))
    cells = [
        [Cell(cell.text, cell.best or bool(style.style)) for cell in row]
        for row, style in zip(rows, source.rows, strict=True)
    ]
    return Table(title, head, cells, definition)


def _cell(value: object) -> Cell:
    return Cell(value.plain, bool(value.style)) if isinstance(value, Text) else Cell(str(value))


def metric_definitions(*names: str) -> str:
    """Return the definitions of metrics of a report, from `metrics.METRICS`."""
    metrics = {metric.name: metric for metric in METRICS}
    chosen = [metrics[name] for name in names]
    return " ".join(f"{m.name} [{m.unit}]: {m.definition}." for m in chosen)
