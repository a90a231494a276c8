"""The README tells the truth: its map of files, its commands, its keys."""

import re
import shlex
from pathlib import Path

import pytest

from outrider.conf.compose import compose
from outrider.launch.sweep import jobs
from outrider.train.settings import parse

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ROOMS = ("models", "data", "train", "eval", "launch", "conf", "tests")


def listed() -> set[str]:
    """Files named in the first column of the map."""
    rows = re.findall(r"^\| (`[^|]*) \|", README, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def there() -> set[str]:
    """Files a reader may open: no tests of a subject, no empty package files."""
    found = {str(f.relative_to(ROOT)) for room in ROOMS for f in (ROOT / room).rglob("*.py")}
    found |= {"train.py", "eval.py"}
    return {f for f in found if not re.search(r"__init__\.py$|(^|/)test_[^/]*\.py$", f)}


def test_the_map_lists_every_file_and_no_other() -> None:
    assert listed() == there()


def commands() -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if "train.py" in line]


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words)[:60])
def test_every_training_command_of_the_readme_is_valid(words: list[str]) -> None:
    overrides = words[words.index("train.py") + 1 :]
    for job in jobs([word for word in overrides if word != "-m"]):
        parse(compose(job))


def test_every_make_target_of_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
