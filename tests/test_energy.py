"""Counters of the kernel, played by files."""

from pathlib import Path

import pytest

from outrider.train.energy import Meter


def package(place: Path, number: int, energy: int, most: int = 1000 * 10**6) -> Path:
    zone = place / f"intel-rapl:{number}"
    zone.mkdir(exist_ok=True)
    (zone / "max_energy_range_uj").write_text(f"{most}\n")
    (zone / "energy_uj").write_text(f"{energy}\n")
    return zone / "energy_uj"


def test_packages_are_added_up_and_wrap_around(tmp_path: Path) -> None:
    one, two = package(tmp_path, 0, 990 * 10**6), package(tmp_path, 1, 5 * 10**6)
    part = tmp_path / "intel-rapl:0:0"  # a part of the first one
    part.mkdir()
    (part / "energy_uj").write_text("7")
    meter = Meter(tmp_path)
    one.write_text(str(30 * 10**6))  # through its end at 1000 J: 40 J
    two.write_text(str(7 * 10**6))
    assert meter.joules() == pytest.approx(42)
    two.write_text(str(8 * 10**6))
    assert meter.joules() == pytest.approx(43)


def test_where_nothing_can_be_read_there_is_no_number(tmp_path: Path) -> None:
    assert Meter(tmp_path / "nothing").joules() is None
    package(tmp_path, 0, 1).write_text("secret")
    assert Meter(tmp_path).joules() is None
