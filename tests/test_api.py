"""outrider.api: the public names, their page, their types, and a loop of one's own."""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from safetensors.torch import load_file

import outrider.api as api
from outrider.conf.errors import ConfigError
from outrider.data.training_data import TrainingData
from outrider.eval.requests import GenerationOptions, GenerationSettings
from outrider.models.formats import native
from outrider.models.target.load import LoadedTarget
from outrider.train import loop
from outrider.train.own_loop import TrainingRun
from outrider.train.schedule import learning_rate
from tests.runs import QUIET, SMALL, config
from tests.wheel import ROOT


def test_every_public_name_is_on_the_page() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    table = page[page.index("## Names") :]
    assert set(re.findall(r"`(\w+)`", table)) - {"publish"} == {*api.__all__} - {"publish"}
    assert all(hasattr(api, name) for name in api.__all__)


def test_keywords_are_those_of_the_settings_and_on_the_page() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    names = [field.name for field in fields(GenerationSettings)]
    assert sorted(GenerationOptions.__annotations__) == sorted(names)
    assert all(f"`{name}`" in page for name in names)
    hints = get_type_hints(GenerationSettings)
    assert get_type_hints(GenerationOptions) == {name: hints[name] for name in names}


FUNCTIONS: list[Callable[..., Any]] = [
    api.configure, api.train, api.evaluate, api.publish, api.load_plugins, api.bind_rule,
    api.Decoder.from_run, api.Decoder.from_pretrained, api.Decoder.generate,
    api.Decoder.generate_batch, api.Decoder.stream, api.Decoder.chat, api.Chat.say,
    api.Chat.stream, api.TrainingRun.open, api.TrainingRun.traces, api.TrainingRun.finish,
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: one.__qualname__)
def test_arguments_of_public_functions_are_typed(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        if parameter.name not in ("self", "cls"):
            assert parameter.annotation not in (Any, inspect.Parameter.empty), parameter


@pytest.mark.slow
def test_a_type_checker_finds_a_wrong_keyword(tmp_path: Path) -> None:
    """One with another name, and one of another type."""
    good = 'decoder.generate("a", 8, temperature=0.5, stop=["x"], policy=Chain(2))\n'
    head = "from outrider.api import Chain, Decoder\n\ndecoder = Decoder.from_run('r')\n"
    bad = 'decoder.generate("a", 8, temperatur=0.5)\ndecoder.chat(seed="x")\n'
    (tmp_path / "script.py").write_text(head + good + bad)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", str(tmp_path / "script.py")], cwd=ROOT,
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    found = re.findall(r"script.py:(\d+): error: (.*)  \[", done.stdout)
    assert [line for line, _ in found] == ["5", "6"], done.stdout + done.stderr
    assert "temperatur" in found[0][1]


def test_configure_takes_the_words_of_a_command_line(tmp_path: Path) -> None:
    words = [*SMALL, f"run.dir={tmp_path}"]
    assert api.configure(words) == config(tmp_path)
    with pytest.raises(ConfigError, match=r"Did you mean train\.lr"):
        api.configure(["train.lrr=1"])
    with pytest.raises(ConfigError, match="eval does not use this key"):
        api.configure(["drafter=suffix", "target=tiny", "publish.format=vllm"], "eval")
    published = api.configure(["drafter=suffix", "target=tiny", "run.dir=out"], "eval")
    assert published.drafter.name == "suffix"


def test_a_loop_that_steps_like_train_ends_with_its_weights(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    """The same rows, noise, loss, clipping and learning rates: equal to the last bit."""
    trained = config(tmp_path / "a", "train.eval_every=6", "train.max_steps=6")
    loop.fit(trained, loaded, made, QUIET)
    run = TrainingRun(config(tmp_path / "b"), loaded, made)
    for step in range(6):
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate(run.config.train, step / 6) * group["lr_factor"]
        for trace, counts in run.traces(step):
            loss, _ = run.objective(trace, counts)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(run.objective.parameters(), 1.0)
        run.optimizer.step()
        run.optimizer.zero_grad()
    result = run.finish(steps=6)
    (file,) = (tmp_path / "a" / "checkpoints" / "step-00000006").glob("*.safetensors")
    saved = load_file(file)
    for name, value in run.objective.named_parameters():
        torch.testing.assert_close(value, saved[f"parameter.{name}"], rtol=0, atol=0)
    drafter, _ = native.load(result, loaded.target)
    assert drafter.state_dict().keys() == run.drafter.state_dict().keys()


def test_a_loop_of_ones_own_does_not_write_over_a_run_of_train(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds checkpoints of train"):
        TrainingRun.open(config(tmp_path))
    search = api.configure(["drafter=draft_verify", "target=tiny", f"run.dir={tmp_path}/x"])
    with pytest.raises(ConfigError, match="It is searched, not trained"):
        TrainingRun.open(search)
