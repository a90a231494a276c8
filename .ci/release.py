"""Build a release in dist/: wheel, source archive, notes, checksums. It needs no account.

    make release

The version is that of pyproject.toml, the notes are its section of CHANGELOG.md. The wheel is built
from the source archive, so both hold the same files. It is installed with its dependencies into an
empty environment, where `outrider` trains and measures from an empty folder. Only then are the
files moved to dist/. Uploading them needs an account:

    twine upload dist/outrider-VERSION*
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHORT = (
    "data.max_samples=60", "train.batch_tokens=512", "train.max_steps=2", "train.own_prompts=0",
    "eval.limit=1", "eval.max_new_tokens=32",
)  # fmt: skip
UNRELEASED = "Unreleased"


def main() -> int:
    """Build, check and move the files of a release. Returns the exit code."""
    torch = sys.argv[1]
    number = version((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    title, notes = section((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), number)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        say(f"1/3 source archive and wheel of version {number}")
        files = build(copy_of_commit(folder / "source"), folder / "dist")
        say(f"2/3 an empty environment with the wheel and its dependencies, {torch}: minutes")
        check(files[0], folder / "environment", torch)
        say("3/3 checksums")
        (folder / "dist" / "NOTES.md").write_text(f"# Outrider {number}\n\n{notes}\n", "utf-8")
        files.append(folder / "dist" / "NOTES.md")
        (folder / "dist" / "SHA256SUMS").write_text(sums(files), "utf-8")
        for file in (folder / "dist").iterdir():
            (ROOT / "dist").mkdir(exist_ok=True)
            shutil.copy2(file, ROOT / "dist" / file.name)
            say(f"dist/{file.name}")
    if title == UNRELEASED:
        say(f"CHANGELOG.md has no section {number}: the notes are those of {UNRELEASED}.")
    return 0


def say(text: str) -> None:
    print(text, flush=True)


def version(pyproject: str) -> str:
    """Return the version, which is written in pyproject.toml alone."""
    (number,) = re.findall(r'^version = "([^"]+)"$', pyproject, re.MULTILINE)
    return str(number)


def section(changelog: str, number: str) -> tuple[str, str]:
    """Return title and text of the section of a version; of `Unreleased` if it has none.

    A title may have a date: "## 0.1.0 (2026-12-01)".
    """
    parts = re.split(r"^## (.+)\n", changelog, flags=re.MULTILINE)[1:]
    sections = {
        title.split()[0]: text.strip() for title, text in zip(parts[::2], parts[1::2], strict=True)
    }
    title = number if number in sections else UNRELEASED
    if not sections.get(title):
        raise SystemExit(f"CHANGELOG.md has no section {number}, and none of {UNRELEASED}.")
    return title, sections[title]


def copy_of_commit(folder: Path) -> Path:
    """Copy the files that git tracks, so that nothing else of the checkout is released."""
    if run(["git", "status", "--porcelain", "--untracked-files=no"], ROOT):
        say("Uncommitted changes of tracked files are part of this release.")
    for name in run(["git", "ls-files", "-z"], ROOT).split("\0")[:-1]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def build(source: Path, folder: Path) -> list[Path]:
    """Build the source archive, and the wheel from it; return the wheel and the archive."""
    folder.mkdir()
    date = run(["git", "log", "-1", "--format=%ct"], ROOT).strip()
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    run([sys.executable, "-c", code], source, SOURCE_DATE_EPOCH=date)
    (archive,) = folder.glob("outrider-*.tar.gz")
    wheel = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    run([sys.executable, "-m", "pip", *wheel, str(archive)], source, SOURCE_DATE_EPOCH=date)
    return [*folder.glob("outrider-*.whl"), archive]


def check(wheel: Path, folder: Path, torch: str) -> None:
    """Install the wheel into a new environment; help, a short training and a report must work."""
    empty = folder / "empty"
    run([sys.executable, "-m", "venv", str(folder)], ROOT)
    empty.mkdir()
    python, outrider = folder / "bin" / "python", folder / "bin" / "outrider"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*install, torch], empty)
    run([*install, "-c", str(ROOT / "constraints.txt"), str(wheel)], empty)
    run([str(python), "-m", "pip", "check"], empty)
    for words in (
        ["--help"], ["train", "--help", "all"], ["train", "run.dir=run", *SHORT],
        ["report", "run.dir=run"],
    ):  # fmt: skip
        say(f"    outrider {' '.join(words)}")
        run([str(outrider), *words], empty)
    for name in ("drafter/model.safetensors", "eval/eval.json", "report.html"):
        if not (empty / "run" / name).is_file():
            raise SystemExit(f"The run of the installed wheel has no {name}.")


def run(command: list[str], folder: Path, **more: str) -> str:
    """Run a command, which must succeed, without the environment of another Python."""
    outer = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_REQUIRE_VIRTUALENV")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    done = subprocess.run(
        command, cwd=folder, env={**environment, **more}, capture_output=True, text=True
    )
    if done.returncode:
        output = f"{done.stdout}{done.stderr}"[-4000:]
        raise SystemExit(f"{output}\n{' '.join(command)}: exit code {done.returncode}")
    return done.stdout


def sums(files: list[Path]) -> str:
    """Return a line per file, as `sha256sum --check` reads it."""
    hashes = ((hashlib.sha256(file.read_bytes()).hexdigest(), file.name) for file in files)
    return "".join(f"{digest}  {name}\n" for digest, name in hashes)


if __name__ == "__main__":
    sys.exit(main())
