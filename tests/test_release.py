"""`make release` (.ci/release.py): version, notes, files, checksums.

The check of the wheel in an empty environment is part of the command itself.
"""

import importlib.util
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import outrider
from tests.wheel import ROOT, build_wheel

CHANGELOG = (
    "# Changelog\n\n## Unreleased\n\n- c\n\n## 1.1 (2026-12-01)\n\n### Added\n\n- b\n\n## 1.0\n"
)


@pytest.fixture(scope="module")
def release() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_version_is_that_of_the_package(release: Any) -> None:
    assert release.version((ROOT / "pyproject.toml").read_text()) == outrider.__version__


@pytest.mark.parametrize(
    ("number", "expected"),
    [("1.1", ("1.1", "### Added\n\n- b")), ("2.0", ("Unreleased", "- c"))],
    ids=["its own section, whose title has a date", "the section of what is not released"],
)
def test_notes_are_a_section_of_the_changelog(
    release: Any, number: str, expected: tuple[str, str]
) -> None:
    assert release.section(CHANGELOG, number) == expected


@pytest.mark.parametrize(
    "text", ["# Changelog\n", "# Changelog\n\n## Unreleased\n\n## 1.0\n\n- a\n"]
)
def test_a_release_without_notes_is_refused(release: Any, text: str) -> None:
    with pytest.raises(SystemExit, match=r"no section 1\.1"):
        release.section(text, "1.1")


def test_this_version_has_notes(release: Any) -> None:
    _, notes = release.section((ROOT / "CHANGELOG.md").read_text(), outrider.__version__)
    assert len(notes) > 100


def test_sums_are_accepted_by_sha256sum(release: Any, tmp_path: Path) -> None:
    files = [tmp_path / "a.whl", tmp_path / "b.tar.gz"]
    for file in files:
        file.write_bytes(file.name.encode())
    (tmp_path / "SHA256SUMS").write_text(release.sums(files))
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True).returncode == 0
    files[1].write_bytes(b"changed")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True).returncode == 1


def test_a_failed_command_ends_the_release_with_its_output(release: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"why(.|\n)*exit code 3"):
        release.run(["bash", "-c", "echo why >&2; exit 3"], tmp_path)


def test_another_python_of_the_caller_has_no_effect(
    release: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert release.run(["bash", "-c", "echo ${PYTHONPATH:-none}"], tmp_path) == "none\n"


@pytest.mark.slow
def test_the_source_archive_builds_the_wheel_of_the_checkout(release: Any, tmp_path: Path) -> None:
    """It holds folders in place of the links, and nothing that git does not track."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    wheel, archive = release.build(release.copy_of_commit(tmp_path / "source"), tmp_path / "dist")
    assert sorted(zipfile.ZipFile(wheel).namelist()) == sorted(
        zipfile.ZipFile(build_wheel(tmp_path / "checkout")).namelist()
    )
    with tarfile.open(archive) as opened:
        members = opened.getmembers()
    assert not [member.name for member in members if not (member.isfile() or member.isdir())]
    assert {member.name.split("/")[1] for member in members if "/" in member.name} == {
        "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "outrider", "outrider.egg-info",
        "pyproject.toml", "setup.cfg",
    }  # fmt: skip
