"""Files for contributors: workflows, forms, commit hooks, the project's address."""

import re
import subprocess
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.conf import packages
from tests.wheel import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = [ROOT / ".github" / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "drafter.yml")]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
ADDRESS = re.compile(
    r"https?://(?:www\.)?(?:[\w.-]*(?:github|gitlab|codeberg)[\w.-]*/[\w.-]+/|pypi\.org/project/|"
    r"outrider\.)[\w./-]*outrider", re.IGNORECASE,
)  # fmt: skip


def load(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def jobs(workflow: Path) -> list[dict[str, Any]]:
    return list(load(workflow)["jobs"].values())


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(workflow) for step in job["steps"]]


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.splitlines()]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_have_triggers_limits_and_steps(workflow: Path) -> None:
    content = load(workflow)
    assert content[True]  # YAML reads the key `on` as true
    assert content["permissions"] == {"contents": "read"}
    for job in jobs(workflow):
        assert 0 < job["timeout-minutes"] <= 360
        assert job["runs-on"]
    for step in steps(workflow):
        assert ("uses" in step) != ("run" in step)
        assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|[0-9a-f]{40})", step.get("uses", "a/b@v1"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.stem)
def test_targets_and_files_of_workflows_exist(workflow: Path) -> None:
    text = "\n".join(step.get("run", "") for step in steps(workflow))
    targets = re.findall(r"\bmake ([a-z.][\w./-]*)", text)
    for target in targets:
        assert re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE), target
    for name in re.findall(r"(?:^|[\s=\"'])((?:tests|docs|\.ci|launch)/[\w./-]+)", text):
        assert (ROOT / name).exists(), name
    for step in steps(workflow):
        if cached := step.get("with", {}).get("cache-dependency-path"):
            assert (ROOT / cached).is_file()
    assert targets


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.stem)
def test_python_versions_of_workflows_are_supported(workflow: Path) -> None:
    supported = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)
    versions = [
        str(version) for job in jobs(workflow)
        for version in job.get("strategy", {}).get("matrix", {}).get("python", [])
    ]  # fmt: skip
    versions += [str(step.get("with", {}).get("python-version", "")) for step in steps(workflow)]
    versions = [version for version in versions if version and "${{" not in version]
    assert set(versions) <= set(supported)
    assert versions


def test_continuous_integration_uses_the_oldest_and_the_newest_python() -> None:
    supported = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)
    assert f'requires-python = ">={supported[0]}"' in PYPROJECT
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    (matrix,) = (job["strategy"]["matrix"] for job in jobs(workflow) if "strategy" in job)
    assert matrix["python"] == [supported[0], supported[-1]]
    made = [step["run"] for step in steps(workflow) if "run" in step]
    assert made == ["make lint", "make docs", "make test"]


@pytest.mark.parametrize("form", FORMS, ids=lambda file: file.stem)
def test_issue_forms_have_labelled_fields(form: Path) -> None:
    """Fields as GitHub's syntax for issue forms has them."""
    content = load(form)
    assert {"name", "description", "body"} <= content.keys()
    fields = content["body"]
    assert len({field["id"] for field in fields}) == len(fields)
    for field in fields:
        assert field["type"] in ("input", "textarea", "dropdown", "checkboxes")
        assert field["attributes"]["label"]
        assert ("options" in field["attributes"]) == (field["type"] in ("dropdown", "checkboxes"))


def test_a_bug_needs_the_output_of_doctor() -> None:
    (field,) = (field for field in load(FORMS[0])["body"] if field["id"] == "doctor")
    assert field["validations"] == {"required": True}
    assert "outrider doctor" in field["attributes"]["description"]


def test_files_named_in_forms_exist() -> None:
    files = [*FORMS, ROOT / ".github" / "pull_request_template.md", ROOT / "SECURITY.md"]
    for file in files:
        for name in re.findall(r"\b(?:docs/)?\w+\.(?:md|cff)\b", file.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{file.name}: {name}"


def test_commit_hooks_are_the_commands_of_lint() -> None:
    """With the tools of .venv, whose versions constraints.txt pins."""
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    (repository,) = load(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    assert [hook["entry"] for hook in repository["hooks"]] == commands
    for hook in repository["hooks"]:
        assert (hook["language"], hook["pass_filenames"]) == ("system", False)
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert all(f"\n{tool}==" in pins for tool in ("ruff", "mypy", "import-linter"))


def test_the_citation_is_complete() -> None:
    citation = load(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert f'license = "{citation["license"]}"' in PYPROJECT
    assert "version" not in citation  # pyproject.toml has it


def test_no_file_but_pyproject_has_an_address_of_the_project() -> None:
    """[project.urls] is the one place; who publishes the project fills in its line."""
    (table,) = re.findall(r"^\[project\.urls\]\n(.*?)^\[", PYPROJECT, re.DOTALL | re.MULTILINE)
    assert len(table.strip().splitlines()) == 1
    own = re.findall(r'^\w+ = "(\S+)"', table, re.MULTILINE)
    for file in tracked_files():
        if file.name == "pyproject.toml" or not file.is_file():
            continue
        text = file.read_bytes().decode("utf-8", errors="replace")
        assert not ADDRESS.search(text), file
        assert not any(address in text for address in own), file


@pytest.mark.parametrize(
    "place", ["github.com/someone/outrider", "pypi.org/project/outrider", "outrider.host/outrider"]
)
def test_addresses_of_the_project_are_recognised(place: str) -> None:
    assert ADDRESS.search(f"https://{place}")


def test_the_address_is_that_of_the_installed_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    message = Message()
    monkeypatch.setattr(packages, "metadata", lambda name: message)
    assert packages.project_url() is None
    message["Project-URL"] = "Repository, https://host.example/someone/project"
    assert packages.project_url() == "https://host.example/someone/project"
