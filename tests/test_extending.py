"""docs/extending.md: the files of the page are written, and its commands run, word for word."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.launch import cli
from tests.plugin_registries import restored_registries

PAGE = (Path(__file__).parent.parent / "docs" / "extending.md").read_text(encoding="utf-8")
FILE = re.compile(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = [text for text in PAGE.split("\n## ") if SHELL.search(text)]
TITLES = [text.partition("\n")[0] for text in SECTIONS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with the files of the page, outside of the checkout."""
    folder = tmp_path_factory.mktemp("page")
    for name, text in FILE.findall(PAGE):
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    with restored_registries():
        yield


def commands(section: str) -> list[str]:
    return [line for block in SHELL.findall(section) for line in block.splitlines()]


def run(command: str) -> None:
    """Run a line of the page: outrider and python in this process, which takes less time."""
    words = shlex.split(command)
    if words[0] == "outrider":
        with restored_registries():
            cli.main(words[1:])
    elif words[0] == "python":
        names = {"__name__": "__main__"}
        exec(compile(Path(words[1]).read_text(encoding="utf-8"), words[1], "exec"), names)
    else:
        subprocess.run(["bash", "-ec", command], check=True, timeout=60)


def test_every_extension_point_has_an_example() -> None:
    assert TITLES == [
        "A loss", "An optimizer", "A schedule", "A row reader and a data set", "A draft policy",
        "A drafter", "Rows", "A callback", "A training loop",
    ]  # fmt: skip
    python = [text for name, text in FILE.findall(PAGE) if name.endswith(".py")]
    assert len(python) == len(TITLES)
    for text in python:
        own = re.findall(r"^(?:from|import) outrider\S*", text, re.MULTILINE)
        assert own == ["from outrider.api"], "one import line"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("section", SECTIONS, ids=TITLES)
def test_examples_run_word_for_word(
    section: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of the page: later sections use runs of earlier ones."""
    monkeypatch.chdir(folder)
    for command in commands(section):
        run(command)
    shown = capsys.readouterr().out
    if "outrider eval" in section:
        assert re.search(r"answers\s+equal\s+plain\s+decoding", shown)
    if "python callback.py" in section:
        assert re.search(r"ended after [1-9]", shown), "the initial weights do not end the run"
    if "python own_loop.py" in section:
        assert (folder / "runs/own/published/vllm/README.md").is_file()
