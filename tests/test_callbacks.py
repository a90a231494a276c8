"""Callbacks of `train`, and what it raises."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError, RunError, RunStopped, exit_on_error
from outrider.data.training_data import TrainingData
from outrider.launch.train import train
from outrider.models.target.load import LoadedTarget
from outrider.train import checkpoint, loop
from outrider.train.callbacks import Callback
from outrider.train.metrics_log import read_log
from outrider.train.settings import parse
from outrider.train.trainer import Trainer
from tests.runs import QUIET, config


class Recorder(Callback):
    """Notes what is called, and does `action` in `where` after a number of steps."""

    def __init__(self, where: str = "", step: int = 0, action: Any = None) -> None:
        self.calls: list[Any] = []
        self.lines: list[dict[str, Any]] = []
        self.where, self.step, self.action = where, step, action

    def act(self, where: str, run: Trainer) -> Any:
        self.calls.append((where, run.progress.step))
        return self.action() if (where, run.progress.step) == (self.where, self.step) else None

    def on_start(self, run: Trainer) -> None:
        self.act("start", run)

    def on_step(self, run: Trainer) -> None:
        self.act("step", run)

    def on_log(self, step: int, kind: str, values: dict[str, float]) -> None:
        self.lines.append({"step": step, "kind": kind, **values})

    def on_evaluate(
        self, run: Trainer, held: dict[str, float], own: dict[str, float]
    ) -> bool | None:
        assert held["accept_length"] >= 1
        assert own == {}
        return bool(self.act("evaluate", run))

    def on_end(self, run: Trainer, drafter: Path | None) -> None:
        self.calls.append(drafter)


def test_callbacks_follow_a_run(loaded: LoadedTarget, made: TrainingData, tmp_path: Path) -> None:
    """Six steps, evaluated at 0, 3 and 6; own trackers get every line of the log."""
    one = Recorder()
    final = loop.fit(config(tmp_path), loaded, made, QUIET, callbacks=[one, Callback()])
    steps = [("step", n) for n in range(1, 7)]
    assert one.calls == [
        ("start", 0), ("evaluate", 0), *steps[:3], ("evaluate", 3), *steps[3:], ("evaluate", 6),
        final,
    ]  # fmt: skip
    assert one.lines == read_log(tmp_path)


def test_a_callback_ends_a_run_as_finished(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = Recorder("evaluate", 3, lambda: True)
    final = loop.fit(config(tmp_path), loaded, made, QUIET, callbacks=[one])
    assert final is not None
    assert one.calls[-1] == final
    assert json.loads((tmp_path / "training.json").read_text())["steps"] == 3
    loop.fit(config(tmp_path), loaded, made, Console(width=400))  # without the callback
    shown = " ".join(capsys.readouterr().out.split())
    assert "is finished: 3 steps" in shown
    assert "a callback ended it; to start over" in shown


def fail() -> None:
    raise KeyError("mine")


@pytest.mark.parametrize("where", ["start", "step", "evaluate"])
def test_the_exception_of_a_callback_is_named_and_the_run_saved(
    where: str, loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    """The same call without the error continues, and ends as an uninterrupted run."""
    step = {"start": 0, "step": 2, "evaluate": 3}[where]
    one = Recorder(where, step, fail)
    message = f"The callback Recorder.on_{where} raised KeyError: 'mine'"
    with pytest.raises(RunError, match=message) as caught:
        loop.fit(config(tmp_path / "a"), loaded, made, QUIET, callbacks=[one])
    assert isinstance(caught.value.__cause__, KeyError)
    assert one.calls[-1] == (where, step), "nothing is called afterwards"
    newest = checkpoint.list_checkpoints(tmp_path / "a" / "checkpoints")[-1]
    assert checkpoint.step_of(newest) == step
    loop.fit(config(tmp_path / "a"), loaded, made, QUIET, callbacks=[Callback()])
    assert [x["step"] for x in read_log(tmp_path / "a") if x["kind"] == "train"] == [*range(6)]


def test_train_raises_when_it_was_stopped(tmp_path: Path) -> None:
    """The command line exits with 130, without another message."""
    words = "data.max_samples=40", "train.max_steps=2", "train.eval_every=9"

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    one = Recorder("step", 1, interrupt)
    with pytest.raises(RunStopped, match=r"was stopped, and is saved.\n.*same call continues"):
        train(config(tmp_path, *words), callbacks=[one])
    assert one.calls[-1] is None
    assert train(config(tmp_path, *words)) == 0
    with pytest.raises(SystemExit) as caught, exit_on_error("outrider train"):
        raise RunStopped("stopped", "continue")
    assert caught.value.code == 130
    shutil.rmtree(tmp_path)


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Callback(), "This is not a list"),
        ([print], r"callbacks\[0\] .*\n.*not a Callback, but of type builtin_function"),
        ([Callback(), Recorder], r"callbacks\[1\] .*\n.*a class, not an instance.\n.*Recorder\(\)"),
    ],
)
def test_callbacks_of_a_wrong_type_are_refused(given: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        train(config(tmp_path), callbacks=given)
    search = parse(compose(["drafter=draft_verify", f"run.dir={tmp_path}"]), searched=True)
    with pytest.raises(ConfigError, match="draft_verify is searched, not trained"):
        train(search, callbacks=[Callback()])
