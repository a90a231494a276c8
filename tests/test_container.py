"""launch/Containerfile, as far as it can be checked without building it."""

import re
import shlex

from outrider.launch.processes import ROOT

FILE = ROOT / "launch" / "Containerfile"
KNOWN = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "USER", "WORKDIR"}


def instructions() -> list[tuple[str, str]]:
    """("RUN", "pip install ..") of every instruction, its lines joined."""
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in whole.splitlines() if line]


def of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def test_instructions_are_known_and_the_first_is_the_base() -> None:
    names = [name for name, _ in instructions()]
    assert set(names) <= KNOWN
    assert [name for name in names if name != "ARG"][0] == "FROM"  # noqa: RUF015


def test_every_argument_that_is_used_is_declared() -> None:
    declared = {rest.partition("=")[0] for rest in of("ARG")}
    assert set(re.findall(r"\$\{(\w+)\}", FILE.read_text())) == declared


def test_copied_files_exist_and_suffice_for_an_installation() -> None:
    copied = set[str]()
    for rest in of("COPY"):
        *sources, place = shlex.split(rest)
        assert place in ("./", *sources)
        copied.update(sources)
    assert all((ROOT / name).exists() for name in copied)
    linked = {path.resolve().name for path in (ROOT / "outrider").iterdir() if path.is_symlink()}
    assert copied >= linked | {"outrider", "pyproject.toml", "constraints.txt", "train.py"}


def test_versions_are_those_of_the_tested_set() -> None:
    run = " ".join(of("RUN"))
    (torch,) = re.findall(r"torch==\S+", run)
    pins = (ROOT / "constraints.txt").read_text()
    assert f"\n{torch}\n" in pins
    assert "--constraint constraints.txt" in run
    (python,) = [rest.partition("=")[2] for rest in of("ARG") if rest.startswith("PYTHON=")]
    assert f"Python {python}," in pins.splitlines()[0]


def test_an_ordinary_user_runs_the_command() -> None:
    names = [name for name, _ in instructions()]
    (user,) = of("USER")
    assert f"useradd --create-home --uid 1000 {user}" in " ".join(of("RUN"))
    assert "RUN" not in names[names.index("USER") :]
    assert of("ENTRYPOINT") == ['["outrider"]']
