"""Tables of many numbers, for terminals of 80 columns and for pipes."""

from rich import box
from rich.table import Table


def narrow(title: str) -> Table:
    """No lines but one below the head, and no room beside a word."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)


def add_numbers(table: Table, *names: str) -> None:
    """Columns of numbers, which are never cut."""
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
