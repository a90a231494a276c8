"""Package layout: one import name over the root folders, in a checkout and in a wheel."""

import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import outrider
from outrider.launch.verbs import BENCHES, VERBS
from tests.wheel import ROOT, build_wheel, run_outrider

FOLDERS = ("conf", "data", "eval", "launch", "models", "train")


def python(*arguments: str, cwd: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter with `path` first; -P leaves the current folder out."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={"PYTHONPATH": str(path), "PATH": "/usr/bin:/bin", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("name", FOLDERS)
def test_each_link_is_the_folder_it_names(name: str) -> None:
    assert (ROOT / "outrider" / name).samefile(ROOT / name)
    module = importlib.import_module(f"outrider.{name}")
    assert module.__file__ is not None
    assert Path(module.__file__).samefile(ROOT / name / "__init__.py")


def test_links_are_relative() -> None:
    """An absolute link would point outside of another clone."""
    for name in FOLDERS:
        link = ROOT / "outrider" / name
        assert not link.is_symlink() or str(link.readlink()) == f"../{name}"


def test_importing_outrider_loads_no_library(tmp_path: Path) -> None:
    """Importing the command line loads none either, so that help and errors are fast."""
    heavy = "{'torch', 'transformers', 'accelerate', 'deepspeed', 'datasets', 'wandb'}"
    code = f"import sys, outrider, outrider.launch.cli; print(sorted({heavy} & set(sys.modules)))"
    done = python("-c", code, cwd=tmp_path, path=ROOT)
    assert done.stdout == "[]\n", done.stderr


def test_the_version_is_written_once() -> None:
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    assert f'version = "{outrider.__version__}"' in lines


def test_a_checkout_without_links_still_imports(tmp_path: Path) -> None:
    """As unpacked on Windows: the links have become small text files."""
    (tmp_path / "outrider").mkdir()
    (tmp_path / "outrider" / "__init__.py").write_text((ROOT / "outrider/__init__.py").read_text())
    (tmp_path / "outrider" / "models").write_text("../models")
    (tmp_path / "pyproject.toml").write_text('version = "9.9.9"\n')
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("here = True\n")
    code = "import outrider.models; print(outrider.models.here)"
    assert python("-c", code, cwd=tmp_path, path=tmp_path).stdout == "True\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_a_wheel_installs_one_top_level_name(wheel: Path) -> None:
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"outrider"}


@pytest.mark.slow
def test_a_wheel_holds_the_data_that_code_reads(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    yaml = ("conf/**/*.yaml", "launch/**/*.yaml")
    text = ("eval/**/*.jinja", "eval/**/*.txt")
    for pattern in (*yaml, *text, "data/**/*.jsonl", "models/tiny/*.json"):
        for path in ROOT.glob(pattern):
            assert f"outrider/{path.relative_to(ROOT).as_posix()}" in names
    assert "outrider/py.typed" in names


@pytest.mark.slow
def test_a_wheel_holds_no_generator_of_committed_files(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.startswith("outrider/data/make")]


@pytest.mark.slow
def test_a_wheel_runs_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    done = python("-m", "outrider.launch.cli", "train", "--help", "all", cwd=empty, path=site)
    assert done.returncode == 0, done.stderr
    assert "drafter.draft_vocab_size" in done.stdout
    imported = python("-c", "import outrider.conf as c; print(c.__file__)", cwd=empty, path=site)
    assert Path(imported.stdout.strip()).is_relative_to(site)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_wheel_starts_runs_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """A sweep starts processes, and launch prints commands; neither needs train.py."""
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    small = ["data.max_samples=60", "train.batch_tokens=512", "train.max_steps=2"]
    sweep = ["drafter=eagle3", "train.lr=1e-3", "train.quick_eval=false", "train.own_prompts=0"]
    run_outrider(site, empty, "train", "-m", *sweep, *small, "run.dir=runs/one")
    assert (empty / "runs" / "one" / "drafter" / "model.safetensors").is_file()
    printed = run_outrider(site, empty, "launch", "cluster.gpus=2", "launch=ddp")
    assert "torchrun --standalone --nproc_per_node=2 -m outrider train launch=ddp" in printed


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_verb_of_a_wheel_is_importable(wheel: Path, tmp_path: Path) -> None:
    """Verbs and benchmarks are imported where nothing of the checkout can be."""
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "from outrider.launch.verbs import BENCHES, VERBS\n"
        "print(*[v.load().__name__ for v in [*VERBS.values(), *BENCHES.values()] if v.target])"
    )
    done = python("-c", code, cwd=empty, path=site)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == len(VERBS) + len(BENCHES) - 1  # bench has no function
