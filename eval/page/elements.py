"""Elements of a report page, independent of its output format: sections of tables, figures, notes.

Every table and figure has a definition of what it shows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich import table as console
from rich.text import Text

from outrider.eval.metrics import METRICS


class Cell(NamedTuple):
    """A text, and whether it is the best of its row or column."""

    text: str
    best: bool = False


class _Part:
    @property
    def kind(self) -> str:
        """The name of the class in templates."""
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Table(_Part):
    """A table; its first column has the names of the rows."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    definition: str


@dataclass(frozen=True)
class Figure(_Part):
    """A drawing for light and for dark pages, as data URIs."""

    title: str
    definition: str
    light: str
    dark: str


@dataclass(frozen=True)
class Note(_Part):
    """A sentence, and the command that would produce what is missing."""

    text: str
    command: str = ""


@dataclass(frozen=True)
class Listing(_Part):
    """The text of a file."""

    title: str
    text: str


@dataclass(frozen=True)
class AnnotatedAnswer(_Part):
    """A prompt and its answer as texts with origins."""

    name: str
    prompt: str
    spans: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Collapsible(_Part):
    """Parts that are hidden until opened."""

    title: str
    parts: "Sequence[Part]"


Part = Table | Figure | Note | Listing | AnnotatedAnswer | Collapsible


class Section(NamedTuple):
    """A heading and its parts."""

    name: str  # anchor of the section
    title: str
    parts: Sequence[Part]


class Page(NamedTuple):
    """A page, before it is written as html and Markdown."""

    title: str
    lead: Sequence[str]  # sentences at the top, the verdicts
    sections: Sequence[Section]
    source: str  # the folders and the version it was written from


def text_table(
    title: str, head: Sequence[str], rows: Iterable[Sequence[str]], definition: str
) -> Table:
    """Return a table of plain texts."""
    return Table(title, head, [[Cell(text) for text in row] for row in rows], definition)


def from_console_table(source: console.Table, title: str, definition: str) -> Table:
    """Convert a console table; styled cells are marked as best."""
    columns = [[_cell(cell) for cell in column.cells] for column in source.columns]
    head = [_cell(column.header).text for column in source.columns]
    return Table(title, head, list(zip(*columns, strict=True)), definition)


def _cell(value: object) -> Cell:
    return Cell(value.plain, bool(value.style)) if isinstance(value, Text) else Cell(str(value))


def metric_definitions(*names: str) -> str:
    """Return the definitions of metrics of a report, from `metrics.METRICS`."""
    metrics = {m.name: f"{m.name} [{m.unit}]: {m.definition}." for m in METRICS}
    return " ".join(metrics[name] for name in names)
