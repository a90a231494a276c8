"""Optional packages: a plain installation works without them, and messages name their extras."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.conf.errors import ConfigError
from outrider.conf.packages import EXTRAS, install_command
from outrider.eval.search_results import load_study
from outrider.launch import cli
from tests.wheel import ROOT

SMALL = [
    "data.max_samples=60", "train.batch_tokens=512", "train.max_steps=2", "train.own_prompts=0",
    "train.quick_eval=false",
]  # fmt: skip
BLOCKED = f"""
import sys, warnings
warnings.simplefilter("ignore")
for name in {sorted(EXTRAS)}:
    sys.modules[name] = None  # an import raises ModuleNotFoundError
"""


def requirements(extra: str) -> list[str]:
    """Return the requirements of an extra; of a plain installation for "dependencies"."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (found,) = re.findall(rf"^{extra} = \[(.*?)\n?\]$", text, re.DOTALL | re.MULTILINE)
    return re.findall(r'"([^"]+)"', found)


@pytest.mark.parametrize("package", EXTRAS)
def test_the_extra_of_a_message_installs_the_package(package: str) -> None:
    names = [re.split(r"[>=\[]", text)[0] for text in requirements(EXTRAS[package])]
    assert package in names
    assert not any(text.startswith(package) for text in requirements("dependencies"))


def test_all_and_the_set_up_of_a_clone_have_every_extra() -> None:
    (every,) = requirements("all")
    extras = re.findall(r"\[(.*)\]", every)[0].split(",")
    assert extras == sorted({*EXTRAS.values()})
    assert "outrider[all]" in requirements("dev")
    assert '-e ".[dev,docs]"' in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(
    ("package", "words", "key"),
    [
        ("deepspeed", ["launch=zero2"], "launch = 'zero2'"),
        ("wandb", ["train.wandb.mode=offline"], "train.wandb.mode = 'offline'"),
        ("tensorboard", ["train.tensorboard=true"], "train.tensorboard = True"),
        ("optuna", ["drafter=draft_verify"], "drafter = 'draft_verify'"),
        ("optuna", ["-m", "sweep=search"], "sweep.trials = "),
    ],
    ids=["deepspeed", "wandb", "tensorboard", "search of sublayers", "search"],
)
def test_a_missing_package_is_named_with_its_extra(
    package: str, words: list[str], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, package, None)
    folder = "sweep.dir" if "-m" in words else "run.dir"
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", *words, f"{folder}={tmp_path / 'run'}"])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert key in error
    assert f"It needs the package {package}, which is not installed." in error
    assert f"pip install 'outrider[{EXTRAS[package]}]'" in error
    assert not (tmp_path / "run").exists()


def test_a_search_folder_without_optuna_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("optuna"))):
        load_study(tmp_path)


@pytest.mark.slow
def test_a_plain_installation_trains(tmp_path: Path) -> None:
    """Every module is imported, too, except for the search (Optuna) and the server (Starlette)."""
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for folder in ("conf", "models", "data", "train", "eval", "launch")
        for file in (ROOT / folder).rglob("*.py")
        if file.parent.name not in ("make", "engines", "serve") and file.name != "search.py"
    ]
    code = f"""{BLOCKED}
import importlib
from outrider.launch import cli
for module in {modules}:
    importlib.import_module("outrider." + module)
assert cli.main(["train", "run.dir=run", *{SMALL}]) == 0
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run" / "drafter" / "model.safetensors").is_file()
