"""Sizes and counts as printed: one decimal unit for bytes, and nouns that agree with a number."""

from rich.filesize import decimal


def format_bytes(size: float) -> str:
    """Return a size in units of 1,000: 39.4 MB."""
    return decimal(round(size))


def format_count(count: int, noun: str, plural: str = "") -> str:
    """Return a number and its noun: 1 row, 1,024 rows.

    Args:
        plural: of a noun that does not end in a plain s.
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
