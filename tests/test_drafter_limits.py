"""Settings and prompts beyond the limits of the target: one message, which names key and fix."""

import json
from pathlib import Path

import pytest

from outrider.conf.command_settings import PlanConfig
from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError, RunError
from outrider.eval.plan.command import plan
from outrider.launch.cli import main
from outrider.launch.memory import memory
from outrider.models.drafters import drafter_class, names, resolve_taps
from outrider.models.drafters.kangaroo import Config as KangarooConfig
from outrider.models.drafters.layerskip import Config as LayerSkipConfig
from outrider.train.settings import parse

ALL = "[0,1,2,3,4,5,6,7]"  # layers of the embedded target, which has 2048 positions


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The error of a command that ends with exit code 2."""
    with pytest.raises(SystemExit, match=r"^2$"):
        main(words)
    error = capsys.readouterr().err
    assert error.count("error") == 1, error
    assert "Traceback" not in error
    return error


@pytest.mark.parametrize(
    ("words", "key", "why", "fix"),
    [
        (["kangaroo", "exit_layer=0"], "exit_layer = 0", "in [1, 1024]", "--help"),
        (["kangaroo", "exit_layer=9"], "exit_layer = 9", "has 8 layers", "Use 1 to 8"),
        (["layerskip", "exit_layer=0"], "exit_layer = 0", "in [1, 1024]", "--help"),
        (["layerskip", "exit_layer=9"], "exit_layer = 9", "has 8 layers", "Use 1 to 8"),
    ],
)
def test_training_refuses_an_exit_before_it_reads_text(
    words: list[str], key: str, why: str, fix: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("outrider.launch.train.load_training_data", None)
    name, setting = words
    chosen = [f"drafter={name}", f"drafter.{setting}"]
    error = refusal(["train", *chosen, f"run.dir={tmp_path}"], capsys)
    assert f"drafter.{key}" in error
    assert why in error
    assert fix in error


@pytest.mark.parametrize(
    ("words", "key", "why", "fix"),
    [
        (["ngram", "n=0"], "n = 0", "in [1, 64]", "--help"),
        (["lookahead", "n=0"], "n = 0", "in [2, 64]", "--help"),
        (["sparse_kv", "budget=3", "sinks=5"], "budget = 3", "5 sinks", "more than drafter.sinks"),
        (
            ["sparse_kv", "method=snapkv", "budget=9000", "window=2049"],
            "window = 2049", "2048 tokens", "Use at most 2048",
        ),
        (
            ["draft_verify", f"skip_attention={ALL}", f"skip_mlp={ALL}"],
            "skip_attention = [0, 1, 2, 3, 4, 5, 6, 7]", "All 8 layers", "Leave a layer out",
        ),
        (["draft_verify", "skip_mlp=[8]"], "skip_mlp[0] = 8", "layers 0..7", "Leave it out"),
    ],
)  # fmt: skip
def test_eval_refuses_settings_beyond_the_target(
    words: list[str], key: str, why: str, fix: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    name, *settings = words
    chosen = [f"drafter={name}", *(f"drafter.{setting}" for setting in settings)]
    error = refusal(["eval", *chosen, "target=tiny", f"run.dir={tmp_path}"], capsys)
    assert f"drafter.{key}" in error
    assert why in error
    assert fix in error


@pytest.mark.parametrize("drafter", ["ngram", "sparse_kv", "lookahead"])
@pytest.mark.parametrize(
    ("prompt", "why"),
    [("", "no prompt or user turn with text"), ("word " * 3000, "the target's 2048 positions")],
    ids=["empty", "too long"],
)
def test_eval_refuses_prompts_that_cannot_be_read(
    drafter: str, prompt: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": prompt}))
    words = [f"drafter={drafter}", "target=tiny", f"run.dir={tmp_path}", f"eval.prompts={file}"]
    error = refusal(["eval", *words], capsys)
    assert why in error
    assert "[transformers]" not in error


def test_layers_are_checked_with_the_taps() -> None:
    """`tap_layers` runs before the text is read; the constructor runs after it."""
    assert resolve_taps(KangarooConfig(exit_layer=4), 4) == (3,)
    assert resolve_taps(LayerSkipConfig(exit_layer=4), 4) == ()
    for config in (KangarooConfig(exit_layer=5), LayerSkipConfig(exit_layer=5)):
        with pytest.raises(ConfigError, match="has 4 layers"):
            resolve_taps(config, 4)


@pytest.mark.parametrize("word", ["target.place=sharded", "target.quantise=int8"])
def test_a_target_whose_layers_cannot_be_copied_is_refused_at_once(word: str) -> None:
    words = ["target=smollm2", word]
    parse(compose([*words, "drafter=kangaroo"]))
    with pytest.raises(ConfigError, match="copies of the target") as caught:
        parse(compose([*words, "drafter=layerskip"]))
    assert caught.value.key == word.partition("=")[0]


def test_memory_has_no_placements_that_the_drafter_refuses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    heads = []
    for name in ("kangaroo", "layerskip"):
        assert memory([f"drafter={name}", "target=tiny"]) == 0
        lines = capsys.readouterr().out.splitlines()
        heads.append(next(line for line in lines if line.startswith("MB per GPU")).split()[3:])
    assert heads == [
        ["replicated", "tensor", "sharded", "apart", "int8", "nf4", "ends"], ["replicated"]
    ]  # fmt: skip


def test_plan_refuses_drafters_that_run_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan times drafts without the target's cache, which these read."""
    monkeypatch.setattr("outrider.eval.plan.command.load_run_models", None)
    for name in ("kangaroo", "layerskip"):
        config = parse(compose([f"drafter={name}", f"run.dir={tmp_path}"]))
        with pytest.raises(RunError, match=rf"{name} drafts in .*\n.*outrider eval"):
            plan(config, PlanConfig())
    running = [name for name in names() if drafter_class(name).runs_target()]
    assert running == ["draft_verify", "kangaroo", "layerskip", "lookahead", "sparse_kv"]
