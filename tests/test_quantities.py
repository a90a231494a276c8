"""Sizes and counts as printed."""

import pytest

from outrider.conf.quantities import format_bytes, format_count


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (73_495_867_392, "73.5 GB"), (39.4e6, "39.4 MB"), (12_100.0, "12.1 kB"),
        (0.4, "0 bytes"), (1, "1 byte"), (2**30, "1.1 GB"),
    ],
)  # fmt: skip
def test_a_size_has_the_largest_decimal_unit_that_fits(size: float, text: str) -> None:
    assert format_bytes(size) == text


def test_a_noun_agrees_with_its_number() -> None:
    assert [format_count(n, "row") for n in (0, 1, 2048)] == ["0 rows", "1 row", "2,048 rows"]
    assert format_count(2, "copy", "copies") == "2 copies"
