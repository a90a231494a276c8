"""The drafter in CONTRIBUTING.md, built from the page, passes the tests of all drafters."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.models import drafters

ROOT = Path(__file__).parent.parent
FOLDERS = ("conf", "data", "docs", "eval", "launch", "models", "outrider", "tests", "train")
FILES = ("models/drafters/cell.py", "conf/drafter/cell.yaml", "tests/test_cell.py",
         "docs/drafters/cell.md")  # fmt: skip


def blocks() -> list[str]:
    """The fenced blocks of the section: model, settings, test, page."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page[page.index("## Adding a drafter") : page.index("## Rules")]
    return re.findall(r"^`{3,4}(?:python|yaml|markdown)\n(.*?)^`{3,4}$", section, re.M | re.S)


def test_example_has_at_most_forty_lines() -> None:
    """Forty lines of code: no blank lines, no docstring."""
    model = re.sub(r'"""(.*?)"""\n', "", blocks()[0], flags=re.DOTALL)
    assert len([line for line in model.splitlines() if line.strip()]) <= 40


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_example_passes_the_drafter_tests(tmp_path: Path) -> None:
    """Four files in a copy of the checkout are clean; their own test and the contract pass."""
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder,
            tmp_path / folder,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, text in zip(FILES, blocks(), strict=True):
        (tmp_path / file).write_text(text, encoding="utf-8")
    python = [file for file in FILES if file.endswith(".py")]
    for words in (["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]):
        lint = [sys.executable, "-m", *words, *python]
        done = subprocess.run(lint, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    tests = [
        "tests/test_cell.py",
        "tests/test_drafter_contract.py",
        "tests/test_acceptance_forecast.py",
        "tests/test_contributing.py",
        "tests/test_config.py",
    ]
    options = ["-q", "-m", "not slow", "-k", "cell or every_drafter", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", result.stdout)[0]) > 20


def test_every_drafter_has_a_page() -> None:
    """By one template: the same headings in the same order."""
    headings = {}
    for name in drafters.names():
        page = (ROOT / "docs" / "drafters" / f"{name}.md").read_text(encoding="utf-8")
        headings[name] = re.findall(r"^## (.*)", page, re.MULTILINE)
    assert all(found == headings["eagle3"] for found in headings.values()), headings
    assert len(headings["eagle3"]) == 6


@pytest.mark.parametrize("name", drafters.names())
def test_page_explains_every_setting(name: str) -> None:
    page = (ROOT / "docs" / "drafters" / f"{name}.md").read_text(encoding="utf-8")
    table = page[page.index("## Settings") : page.index("## Logged metrics")]
    fields = [field.name for field in dataclasses.fields(drafters.drafter_module(name).Config)]
    missing = [field for field in fields if field != "name" and f"`{field}`" not in table]
    assert not missing
