"""Console tables of numbers that fit 80 columns."""

from rich import box
from rich.table import Table


def narrow_table(title: str) -> Table:
    """Return a table without padding, with one line below the header."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)


def add_number_columns(table: Table, *names: str) -> None:
    """Add right-aligned columns that are never truncated."""
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
