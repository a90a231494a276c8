"""`train.patience`: the end of a run without a better acceptance."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError
from outrider.data.training_data import TrainingData
from outrider.models.target.load import LoadedTarget
from outrider.train import checkpoint, loop
from outrider.train.settings import parse
from outrider.train.trainer import Trainer
from tests.runs import QUIET, config

WORDS = "train.eval_every=1", "train.save_every=1", "train.schedule=constant", "train.patience=2"
LENGTHS = {0: 1.1, 1: 1.5, 2: 1.2, 3: 1.5, 4: 1.9, 5: 1.9, 6: 1.9}  # by step: 3 equals, 4 is better


@contextmanager
def scripted() -> Iterator[None]:
    """Replace the measured acceptance lengths by those of LENGTHS."""
    evaluate = Trainer.evaluate

    def measure(run: Trainer, *where: Any) -> dict[str, float]:
        return {**evaluate(run, *where), "accept_length": LENGTHS[run.progress.step]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "evaluate", measure)
        yield


def last_state(folder: Path) -> tuple[int, bool, int, int]:
    newest = checkpoint.list_checkpoints(folder / "checkpoints")[-1]
    progress, _ = checkpoint.read_state(newest)
    return progress.step, progress.finished, progress.stale, progress.best_step


def test_a_run_ends_after_evaluations_without_a_better_one(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Best at step 1, and not at 2 and 3: the end, with the drafter of step 1; a copy that lost
    the last checkpoint counts on from step 2 and ends at the same step.
    """
    with scripted():
        final = loop.fit(config(tmp_path / "a", *WORDS), loaded, made, QUIET)
        assert final == tmp_path / "a" / "drafter"
        assert last_state(tmp_path / "a") == (3, True, 2, 1)
        assert json.loads((final / "config.json").read_text())["about"]["step"] == 1
        assert json.loads((tmp_path / "a" / "training.json").read_text())["steps"] == 3
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-00000003")
        assert last_state(tmp_path / "b") == (2, False, 1, 1)
        loop.fit(config(tmp_path / "b", *WORDS), loaded, made, QUIET)
        assert last_state(tmp_path / "b") == (3, True, 2, 1)
        loop.fit(config(tmp_path / "a", *WORDS), loaded, made, Console(width=400))
        assert "is finished: 3 steps" in (shown := " ".join(capsys.readouterr().out.split()))
        assert "to go on, raise train.patience;" in shown
        loop.fit(config(tmp_path / "a", *WORDS[:-1], "train.patience=3"), loaded, made, QUIET)
        assert last_state(tmp_path / "a") == (6, True, 2, 4), "4 is better, and 6 the last step"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train.eval_every=1000", r"there are 0 evaluations .*\n.*eval_every=299 or less"),
        ("train.max_steps=100 train.eval_every=50", r"1 evaluation .*\n.*eval_every=49 or less"),
        ("train.max_steps=2 train.eval_every=1", r"1 evaluation .*\n.*Train for more steps"),
        ("train.patience=0", "must be >= 1"),
    ],
)
def test_patience_that_cannot_end_a_run_is_refused(words: str, message: str) -> None:
    """An evaluation at the last step ends nothing."""
    patience = "train.patience=2" if "max_steps" in words else "train.patience=1"
    with pytest.raises(ConfigError, match=rf"train.patience = \d\n.*{message}"):
        parse(compose([patience, *words.split()]))
    parse(compose(["train.patience=2", "train.max_steps=101", "train.eval_every=50"]))
    parse(compose(["train.patience=9", "train.max_steps=null", "train.max_minutes=1"]))
