"""Bad steps: detection, skipping without effect on the state, resume."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError, RunError
from outrider.data.training_data import TrainingData
from outrider.models.target.load import LoadedTarget
from outrider.train import loop
from outrider.train.bad_steps import ENOUGH, RECENT, BadStepGuard
from outrider.train.checkpoint import Progress
from outrider.train.objective import Objective
from outrider.train.settings import parse
from outrider.train.trainer import Trainer
from tests.runs import QUIET, config

STEADY = ("train.schedule=constant", "train.warmup=0", "train.eval_every=100", "train.save_every=4")


def problems(losses: list[float], skip_bad: int = 9, spike: float | None = 3.0) -> list[bool]:
    guard = BadStepGuard(Progress(), skip_bad, spike)
    return [bool(guard.problem(loss)) for loss in losses]


def test_spike_exceeds_multiple_of_recent_median() -> None:
    calm = [2.0] * ENOUGH
    assert problems([*calm, 6.0, 6.1]) == [False] * (ENOUGH + 1) + [True]
    assert problems([*calm, 6.1], spike=None)[-1] is False
    assert problems([*calm[1:], 60.0])[-1] is False, "too few recent losses"
    assert problems([*calm, math.nan, math.inf, -math.inf, 2.0])[-4:] == [True, True, True, False]


def test_bad_losses_do_not_enter_the_median() -> None:
    assert all(problems([*[1.0] * ENOUGH, *[10.0] * RECENT])[ENOUGH:])
    falling = [100.0] * RECENT + [1.0] * RECENT + [5.0]
    assert problems(falling)[-1], "only recent losses count"


def test_skip_raises_after_skip_bad_steps() -> None:
    guard = BadStepGuard(Progress(), 2, None)
    for count in (1, 2):
        assert f"({count} of 2)" in guard.skip("its loss is nan", Path("rows"))
    with pytest.raises(RunError, match="Step 0 is bad"):
        guard.skip("its loss is nan", Path("rows"))
    assert guard.progress.skipped == 2


@contextmanager
def scaled_losses(factors: dict[int, float]) -> Iterator[None]:
    """Multiply the loss at these steps."""
    forward, now = Objective.forward, [0]

    def scaled(self: Objective, *args: Any) -> Any:
        loss, sums = forward(self, *args)
        return (loss * factors.get(now[0], 1.0) if self.training else loss), sums

    seed_step = Trainer.seed_step

    def record_step(run: Trainer, step: int) -> None:
        now[0] = step
        seed_step(run, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Objective, "forward", scaled)
        patch.setattr(Trainer, "seed_step", record_step)
        yield


def state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(
        folder / "checkpoints" / f"step-{step:08d}" / "state.safetensors"
    )
    return tensors


def test_skipped_step_leaves_weights_and_moments(
    loaded: LoadedTarget,
    made: TrainingData,
    tmp_path: Path,
) -> None:
    """The next step continues from the same state."""
    words = (*STEADY, "train.skip_bad=2", "train.max_steps=4", "train.save_every=1",
             "train.keep_last=9")  # fmt: skip
    with scaled_losses({1: math.nan, 2: math.inf}):
        loop.fit(config(tmp_path, *words), loaded, made, QUIET)
    one, two, three, four = (state(tmp_path, step) for step in (1, 2, 3, 4))
    for name in one:
        assert torch.equal(one[name], two[name]), name
        assert torch.equal(two[name], three[name]), name
    assert any(not torch.equal(three[name], four[name]) for name in three)
    files = sorted(file.name for file in tmp_path.glob("bad-batch-*"))
    assert [name[:23] for name in files] == ["bad-batch-step-00000001", "bad-batch-step-00000002"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(x["step"], x["skipped"]) for x in lines if x["kind"] == "skipped"] == [(1, 1), (2, 2)]


def test_run_stops_after_skip_bad_steps(
    loaded: LoadedTarget,
    made: TrainingData,
    tmp_path: Path,
) -> None:
    with (
        scaled_losses({1: math.nan, 3: math.nan}),
        pytest.raises(RunError, match=r"Step 3 is bad: its loss is nan; .*\n.*train.skip_bad"),
    ):
        loop.fit(config(tmp_path, *STEADY, "train.skip_bad=1"), loaded, made, QUIET)


def test_nan_gradient_is_a_bad_step(
    loaded: LoadedTarget,
    made: TrainingData,
    tmp_path: Path,
) -> None:
    """The loss is finite and its gradient is not."""

    def scaled(self: Objective, *args: Any) -> Any:
        loss, sums = forward(self, *args)
        parameter = next(p for p in self.parameters() if p.requires_grad)
        return loss + 0 * (parameter.flatten()[0] - parameter.detach().flatten()[0]).sqrt(), sums

    forward = Objective.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Objective, "forward", scaled)
        with pytest.raises(RunError, match="Step 2 is bad: the norm of its gradient is"):
            loop.fit(config(tmp_path, *STEADY, "train.skip_bad=2"), loaded, made, QUIET)


def test_resumed_run_finds_the_same_spikes(
    loaded: LoadedTarget,
    made: TrainingData,
    tmp_path: Path,
) -> None:
    """The recent losses are in the checkpoint."""
    words = (*STEADY, "train.spike=2", "train.skip_bad=3")
    with scaled_losses({10: 50.0, 13: 50.0}):
        loop.fit(config(tmp_path / "whole", *words, "train.max_steps=16"), loaded, made, QUIET)
        loop.fit(config(tmp_path / "parts", *words, "train.max_steps=12"), loaded, made, QUIET)
        loop.fit(config(tmp_path / "parts", *words, "train.max_steps=16"), loaded, made, QUIET)
    whole, parts = state(tmp_path / "whole", 16), state(tmp_path / "parts", 16)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    about = json.loads(
        (tmp_path / "parts" / "checkpoints" / "step-00000016" / "state.json").read_text()
    )
    assert about["progress"]["skipped"] == 2


def test_update_ratio_is_logged(loaded: LoadedTarget, made: TrainingData, tmp_path: Path) -> None:
    loop.fit(config(tmp_path, *STEADY), loaded, made, QUIET)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    ratios = [line["update_ratio"] for line in lines if line["kind"] == "train"]
    assert len(ratios) == 6
    assert all(1e-5 < ratio < 1 for ratio in ratios)


def test_deepspeed_with_accumulation_cannot_skip_steps() -> None:
    words = ["launch=zero2", "launch.accumulation=2", "train.skip_bad=1"]
    with pytest.raises(ConfigError, match=r"train.skip_bad = 1"):
        parse(compose(words))
