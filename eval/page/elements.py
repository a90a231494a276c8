"""What a page is made of, whatever it is written as: sections of tables, figures, answers, notes.

A table of a console becomes a table of a page as it stands, so that both show the same numbers in
the same digits. Every table and figure says what it shows in words of its own.
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
    """The first column names what the others say of it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    definition: str

    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Figure:
    """A drawing twice, for light pages and for dark ones, as data URIs."""

    title: str
    definition: str
    light: str
    dark: str

    kind: ClassVar[str] = "figure"


@dataclass(frozen=True)
class Note:
    """A sentence, and perhaps a command that would change it."""

    text: str
    command: str = ""

    kind: ClassVar[str] = "note"


@dataclass(frozen=True)
class Listing:
    """A file as it is."""

    title: str
    text: str

    kind: ClassVar[str] = "listing"


@dataclass(frozen=True)
class Answer:
    """A prompt and what was said to it: texts, and who proposed each."""

    name: str
    prompt: str
    pieces: Sequence[tuple[str, str]]

    kind: ClassVar[str] = "answer"


@dataclass(frozen=True)
class Fold:
    """Parts that a reader may open."""

    title: str
    parts: "Sequence[Part]"

    kind: ClassVar[str] = "fold"


Part = Table | Figure | Note | Listing | Answer | Fold


class Section(NamedTuple):
    """A heading and what stands below it."""

    name: str  # of the link to it
    title: str
    parts: Sequence[Part]


class Page(NamedTuple):
    """All of it.

    Attributes:
        lead: sentences on top: what was found.
        source: what it was written from, and by what.
    """

    title: str
    lead: Sequence[str]
    sections: Sequence[Section]
    source: str


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], definition: str) -> Table:
    """Of plain texts."""
    return Table(title, head, [[Cell(text) for text in row] for row in rows], definition)


def of_console(shown: console.Table, title: str, definition: str) -> Table:
    """A table for terminals, cell by cell; what stands out there does so here."""
    columns = [[_cell(cell) for cell in column.cells] for column in shown.columns]
    head = [_cell(column.header).text for column in shown.columns]
    rows = list(zip(*columns, strict=True))
    stands_out = [bool(row.style) for row in shown.rows]
    return Table(
        title,
        head,
        [
            [Cell(cell.text, cell.best or bold) for cell in row]
            for row, bold in zip(rows, stands_out, strict=True)
        ],
        definition,
    )


def _cell(value: object) -> Cell:
    return Cell(value.plain, bool(value.style)) if isinstance(value, Text) else Cell(str(value))


def meanings(*names: str) -> str:
    """What the metrics of a report of these names are, in the words of `metrics.METRICS`."""
    known = {metric.name: metric for metric in METRICS}
    found = [known[name] for name in names]
    return " ".join(f"{m.name} [{m.unit}]: {m.definition}." for m in found)
