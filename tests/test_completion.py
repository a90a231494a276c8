"""`outrider completion`: candidates of a line, and the scripts of bash and zsh."""

import os
import shutil
import subprocess
import sys

import pytest

from outrider.conf.compose import choices, known_keys
from outrider.launch import cli
from outrider.launch.completion import SCRIPTS, candidates
from outrider.launch.verbs import BENCHES, VERBS
from outrider.train.settings import is_untrained
from tests.wheel import ROOT

OUTRIDER = f'outrider() {{ "{sys.executable}" -m outrider "$@"; }}\n'


def shell(*command: str) -> list[str]:
    """Return the lines that a shell prints, in which `outrider` is this checkout."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("outrider ev", ["eval"]),
        ("outrider train drafter=ea", ["drafter=eagle", "drafter=eagle3"]),
        ("outrider train -m drafter=hass,ea", ["drafter=hass,eagle", "drafter=hass,eagle3"]),
        ("outrider train -m sweep=", ["sweep=default", "sweep=search", "sweep=speedup"]),
        ("outrider train drafter=medusa drafter.res", ["drafter.res_layers="]),
        ("outrider train drafter=eagle drafter.res", []),
        ("outrider train drafter=unfinis train.cl", ["train.clip="]),
        ("outrider train launch.precision=", ["launch.precision=bf16", "launch.precision=no"]),
        ("outrider train train.tensorboard=t", ["train.tensorboard=true"]),
        ("outrider train tr", ["train."]),
        ("outrider train dec", ["decode.", "decode="]),
        ("outrider eval train.", []),
        ("outrider ranks decode", []),
        ("outrider chat eval.", ["eval.drafter=", "eval.max_new_tokens="]),
        ("outrider plan plan.machine=h", ["plan.machine=h100", "plan.machine=h200"]),
        ("outrider compare runs/", []),
        ("outrider no-such-verb ", []),
        ("outrider train 'unbalanced ", []),
    ],
)  # fmt: skip
def test_candidates_of_a_line(line: str, expected: list[str]) -> None:
    found = candidates(line)
    assert found[: len(expected)] == expected
    assert expected or not found or line.endswith("unbalanced ")


def test_first_words_are_the_verbs_and_benchmarks() -> None:
    assert candidates("outrider ") == sorted(VERBS)
    assert candidates("outrider bench ") == sorted(BENCHES)


def test_every_key_of_training_is_offered() -> None:
    """Those of the default drafter."""
    groups = ("run", "target", "data", "record", "train", "launch", "eval")
    offered, open_ends = set[str](), [f"{group}." for group in groups]
    for end in open_ends:
        found = candidates(f"outrider train {end}")
        offered.update(key.rstrip("=") for key in found)
        open_ends += [key for key in found if key.endswith(".")]
    known = {key for key in known_keys() if key.split(".")[0] in groups and "." in key}
    assert offered - set(open_ends) <= known
    assert {"run.dir", "train.lr", "train.wandb.mode"} <= offered


def test_drafters_of_an_evaluation_are_those_without_weights() -> None:
    names = [f"drafter={name}" for name in choices("drafter") if is_untrained(name)]
    assert candidates("outrider eval drafter=") == sorted(names)


def test_a_candidate_costs_no_import_of_torch() -> None:
    code = "from outrider.launch.cli import main; import sys\n"
    code += "main(['completion', 'line=outrider train drafter=medusa drafter.d'])\n"
    code += "print('torch' in sys.modules)"
    printed = shell(sys.executable, "-c", code)
    assert printed == [
        "drafter.depth_weights=", "drafter.depths=", "drafter.draft_vocab_size=", "False"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("outrider train drafter=ea", ["eagle", "eagle3"]),  # bash replaces what follows "="
        ("outrider train train.wandb.", ["train.wandb.mode=", "train.wandb.project="]),
        ("outrider compare runs/a ru", []),  # bash completes file names
    ],
)
def test_bash_replaces_the_last_part_of_a_word(line: str, expected: list[str]) -> None:
    call = f"COMP_LINE='{line}' COMP_POINT={len(line)}; _outrider; printf '%s\\n' ${{COMPREPLY[@]}}"
    assert shell("bash", "--norc", "-c", f"{OUTRIDER}{SCRIPTS['bash']}\n{call}") == expected


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_adds_the_candidates() -> None:
    stubs = 'compdef() { }\ncompadd() { print -l -- "${@:#-*}" }\n'
    call = "LBUFFER='outrider train drafter=ea'; _outrider"
    printed = shell("zsh", "-f", "-c", f"{OUTRIDER}{stubs}{SCRIPTS['zsh']}\n{call}")
    assert printed == ["drafter=eagle", "drafter=eagle3"]


@pytest.mark.parametrize("words", [[], ["tcsh"]])
def test_another_shell_is_one_message(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["completion", *words])
    assert "Use one of: bash, zsh." in capsys.readouterr().err
