"""The console of every verb: what it prints is text, never markup or an escape sequence.

Differs from rich's console: square brackets and colons of file names, settings and prompts are not
markup or emoji, numbers and paths are not highlighted, credentials are masked, and control
characters are escaped (`shown_text`). Styles are given as `Text` or `style=`. A table's title is a
line of its own, as wide as the terminal. No cell of a table is cut: a table that is too wide is
printed in parts of as many columns as fit, each with the first column.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from outrider.conf.shown_text import for_terminal

NARROWEST = 20  # columns that a column of text may be narrowed to


class Console(RichConsole):
    """A rich console without markup, whose text is escaped; arguments are those of rich."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **arguments})

    def render_str(self, text: str, **arguments: Any) -> Text:
        """Escape before a table or a line is laid out."""
        return super().render_str(for_terminal(text), **arguments)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Split a table; escape text that reaches the terminal by any other way, such as `Text`."""
        parts: Iterable[RenderableType] = [renderable]
        if isinstance(renderable, Table) and not _is_grid(renderable):
            parts = self._parts(renderable, (options or self.options).max_width)
        for part in parts:
            for segment in super().render(part, options):
                text = segment.text if segment.control else for_terminal(segment.text)
                yield segment if text == segment.text else Segment(text, segment.style)

    def _parts(self, table: Table, width: int) -> Iterable[RenderableType]:
        """Yield the title, then a table in parts that fit the width, each with the first column."""
        if isinstance(table.title, str):
            yield Text(table.title, table.title_style or "table.title")
        elif table.title is not None:
            yield table.title
        first, *others = [(column, self._needed_width(column)) for column in table.columns]
        parts = [[first]]
        for one in others:
            if len(parts[-1]) > 1 and _width(table, [*parts[-1], one]) > width:
                parts.append([first])
            parts[-1].append(one)
        for columns in parts:
            part = _select(
                table, [column for column, _ in columns], _width(table, columns) <= width
            )
            part.title = None
            yield part

    def _needed_width(self, column: Column) -> int:
        """Return the width that shows every cell: numbers whole, long text wrapped."""
        cells = (column.header, *column.cells)
        whole = max(self.measure(cell).maximum for cell in cells)
        if not _is_whole(column):
            whole = min(whole, NARROWEST)
        return max(whole, column.min_width or 0)


def _is_grid(table: Table) -> bool:
    """Return whether a table only lays text out, such as a progress bar."""
    return not table.columns or (table.box is None and not table.show_header)


def _is_whole(column: Column) -> bool:
    return column.no_wrap or column.justify == "right"


def _width(table: Table, columns: Sequence[tuple[Column, int]]) -> int:
    """Return the width of a table of columns of these widths, with padding and borders."""
    _, right, _, left = table.padding
    edges = 0 if table.pad_edge else left + right
    lines = 0 if table.box is None else len(columns) - 1 + 2 * table.show_edge
    return sum(width + left + right for _, width in columns) - edges + lines


def _select(table: Table, columns: Sequence[Column], fits: bool) -> Table:
    """Return a table of some of the columns, whose cells are wrapped instead of cut."""
    part = copy(table)
    part.columns, part.rows = [], []
    for index, column in enumerate(columns):
        whole = fits and _is_whole(column)
        new = replace(column, overflow="fold", no_wrap=whole, _index=index, _cells=[])
        part.columns.append(new)
    for row, cells in zip(table.rows, zip(*(c.cells for c in columns), strict=True), strict=True):
        part.add_row(*cells, style=row.style, end_section=row.end_section)
    return part
