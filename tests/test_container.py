"""launch/Containerfile, as far as it can be checked without building it."""

import re
import shlex

from outrider.launch.processes import ROOT

FILE = ROOT / "launch" / "Containerfile"
INSTRUCTIONS = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "USER", "WORKDIR"}


def instructions() -> list[tuple[str, str]]:
    """("RUN", "pip install ..") of every instruction, its lines joined."""
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line]


def arguments(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def test_instructions_begin_with_the_base_image() -> None:
    names = [name for name, _ in instructions()]
    assert set(names) <= INSTRUCTIONS
    assert [name for name in names if name != "ARG"][0] == "FROM"  # noqa: RUF015


def test_used_arguments_are_declared() -> None:
    declared = {rest.partition("=")[0] for rest in arguments("ARG")}
    assert set(re.findall(r"\$\{(\w+)\}", FILE.read_text())) == declared


def test_copied_files_are_complete() -> None:
    copied = set[str]()
    for rest in arguments("COPY"):
        *sources, destination = shlex.split(rest)
        assert destination in ("./", *sources)
        copied.update(sources)
    assert all((ROOT / name).exists() for name in copied)
    linked = {path.resolve().name for path in (ROOT / "outrider").iterdir() if path.is_symlink()}
    assert copied >= linked | {"outrider", "pyproject.toml", "constraints.txt", "train.py"}


def test_versions_match_constraints() -> None:
    run = " ".join(arguments("RUN"))
    (torch,) = re.findall(r"torch==\S+", run)
    pins = (ROOT / "constraints.txt").read_text()
    assert f"\n{torch}\n" in pins
    assert "--constraint constraints.txt" in run
    (python,) = [rest.partition("=")[2] for rest in arguments("ARG") if rest.startswith("PYTHON=")]
    assert f"Python {python}," in pins.splitlines()[0]


def test_command_runs_as_an_unprivileged_user() -> None:
    names = [name for name, _ in instructions()]
    (user,) = arguments("USER")
    assert f"useradd --create-home --uid 1000 {user}" in " ".join(arguments("RUN"))
    assert "RUN" not in names[names.index("USER") :]
    assert arguments("ENTRYPOINT") == ['["outrider"]']
