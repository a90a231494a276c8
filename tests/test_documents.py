"""README and documentation: length, commands, links, and the map of files."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from outrider.conf.compose import compose
from outrider.conf.sweeps import read_sweep
from outrider.launch.combinations import expand_overrides
from outrider.train.settings import parse

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "_build" not in page.parts]
MODULE = "-m outrider train"  # how a launcher starts the installed package
PLACEHOLDERS = ("...", "DRAFTER", "FILE", "FOLDER", "${")


def commands() -> list[list[str]]:
    """Every training command of README and documentation that has no placeholder."""
    blocks = [re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL) for page in PAGES]
    text = "\n".join(block for page in blocks for block in page).replace("\\\n", " ")
    lines = [line.replace(MODULE, "train.py") for line in text.splitlines()]
    lines = [line for line in lines if re.search(r"\btrain\.py\b", line)]
    whole = [line for line in lines if not any(word in line for word in PLACEHOLDERS)]
    return [shlex.split(line, comments=True) for line in dict.fromkeys(whole)]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 160


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words)[:60])
def test_every_training_command_is_valid(words: list[str]) -> None:
    overrides = words[words.index("train.py") + 1 :]
    if "-m" in overrides:
        overrides = read_sweep([word for word in overrides if word != "-m"])[1]
    for job in expand_overrides(overrides):
        parse(compose(job))


def test_builds_of_torch_are_those_of_the_containerfile() -> None:
    """README and quick start name a CUDA and a CPU build."""
    containerfile = (ROOT / "launch" / "Containerfile").read_text()
    for page in (ROOT / "README.md", ROOT / "docs" / "quickstart.md"):
        text = page.read_text()
        builds = set(re.findall(r"/whl/(\w+)", text))
        assert builds == {"cpu", "cu130"}, page.name
        assert all(re.search(rf"\b{build}\b", containerfile) for build in builds)
        assert "-m outrider train" in text


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_workflows_run_make_targets_that_exist() -> None:
    makefile, files = (
        (ROOT / "Makefile").read_text(),
        list((ROOT / ".github" / "workflows").glob("*.yml")),
    )
    assert files
    for file in files:
        jobs = yaml.safe_load(file.read_text())["jobs"].values()
        commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
        assert commands
        for command in commands:
            target = command.removeprefix("make ")
            assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), command


def test_the_nightly_tests_run_as_on_two_other_processors() -> None:
    """The names are those that `torch.backends.cpu.get_cpu_capability` gives, in lower case."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())["jobs"]
    (job,) = jobs.values()
    assert [case["aten"] for case in job["strategy"]["matrix"]["include"]] == ["avx2", "default"]
    assert job["env"]["ATEN_CPU_CAPABILITY"] == "${{ matrix.aten }}"
    assert job["steps"][-1]["run"] == "make test"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_linked_files_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http", "mailto")):
            assert (page.parent / target).exists(), target


def test_test_files_named_in_pages_exist() -> None:
    """Except the example of CONTRIBUTING.md."""
    for page in PAGES:
        if page.name != "log.md":
            for name in re.findall(r"tests/test_(?!cell)\w+\.py", page.read_text()):
                assert (ROOT / name).is_file(), f"{page.name}: {name}"


def test_tests_named_by_the_page_on_security_exist() -> None:
    named = re.findall(r"`(test_\w+)::(\w+)`", (ROOT / "docs" / "security.md").read_text())
    assert len(named) > 40
    for file, name in named:
        assert f"\ndef {name}(" in (ROOT / "tests" / f"{file}.py").read_text(), f"{file}::{name}"


def test_the_map_of_files_is_current() -> None:
    """`python docs/reference_pages.py` updates it."""
    done = subprocess.run([sys.executable, str(ROOT / "docs" / "reference_pages.py"), "--check"])
    assert done.returncode == 0
