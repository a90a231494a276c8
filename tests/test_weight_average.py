"""`train.ema`: the average of the weights, its measurement, checkpoints and publication."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError
from outrider.data.training_data import TrainingData
from outrider.launch.step_cost import checkpoint_bytes
from outrider.models.target.load import LoadedTarget
from outrider.train import loop
from outrider.train.metrics_log import read_log
from outrider.train.settings import parse
from outrider.train.trainer import Trainer
from outrider.train.weight_average import WeightAverage
from tests.runs import QUIET, config

LAST = Path("checkpoints", "step-00000006", "state.safetensors")


def test_the_average_after_two_steps() -> None:
    """Weights 8, 4, 0 with a decay of 3/4: 8, 3/4 8 + 1/4 4 = 7, 3/4 7 = 5.25."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 8.0)
    average = WeightAverage(model, 0.75)
    for weight, expected in ((4.0, 7.0), (0.0, 5.25)):
        nn.init.constant_(model.weight, weight)
        average.update()
        assert average.tensors["weight"].item() == expected
    with average.applied():
        assert model.weight.item() == 5.25
    assert model.weight.item() == 0.0


def test_an_average_continues_bit_equal_and_is_measured(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    """The weights themselves are those of a run without an average."""
    words = ("train.ema=0.9",)
    loop.fit(config(tmp_path / "without"), loaded, made, QUIET)
    loop.fit(config(tmp_path / "whole", *words), loaded, made, QUIET)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-00000006")
    loop.fit(config(tmp_path / "parts", *words), loaded, made, QUIET)
    whole, parts = (load_file(tmp_path / name / LAST) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    without = load_file(tmp_path / "without" / LAST)
    assert all(torch.equal(without[name], whole[name]) for name in without)
    averages = {name for name in whole if name.startswith("average.")}
    assert whole.keys() - without.keys() == averages
    assert len(averages) == sum(name.startswith("parameter.") for name in without)
    kinds = [(line["step"], line["kind"]) for line in read_log(tmp_path / "whole")]
    assert {one for one in kinds if one[1] == "held_ema"} == {(3, "held_ema"), (6, "held_ema")}
    with pytest.raises(ConfigError, match=r"train.ema = 0.5\n.*began with train.ema = 0.9"):
        loop.fit(config(tmp_path / "whole", "train.ema=0.5"), loaded, made, QUIET)


@pytest.mark.parametrize("averaged_is_better", [True, False])
def test_the_better_of_both_is_the_drafter(
    averaged_is_better: bool, loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    """Measured in turn: the weights at steps 0, 3 and 6, the averages at 3 and 6."""
    lengths = iter([1.1, 1.2, 1.2, 1.5, 1.9 if averaged_is_better else 1.4])
    evaluate = Trainer.evaluate

    def scripted(run: Trainer, *where: Any) -> dict[str, float]:
        return {**evaluate(run, *where), "accept_length": next(lengths)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "evaluate", scripted)
        final = loop.fit(config(tmp_path, "train.ema=0.9"), loaded, made, QUIET)
    assert final is not None
    published, saved = load_file(final / "model.safetensors"), load_file(tmp_path / LAST)
    kind = "average" if averaged_is_better else "parameter"
    own = {n for n in published if f"{kind}.drafter.{n}" in saved}
    assert own
    assert all(torch.equal(published[n], saved[f"{kind}.drafter.{n}"]) for n in own)
    about = json.loads((final / "config.json").read_text())["about"]
    assert about.get("averaged") == (0.9 if averaged_is_better else None)


@pytest.mark.parametrize("words", ["train.ema=1", "train.ema=0", "train.ema=0.9 launch=zero3"])
def test_a_decay_out_of_range_and_sliced_weights_are_refused(words: str) -> None:
    with pytest.raises(ConfigError, match=r"train.ema = .*\n.*(in \(0, 1\)|launch=zero3)"):
        parse(compose(words.split()))


def test_the_disk_of_an_average_is_counted() -> None:
    """keep_last + 1 checkpoints of 4 bytes more per parameter."""
    without, with_average = (parse(compose(w)).train for w in ([], ["train.ema=0.9"]))
    more = checkpoint_bytes(with_average, 100, 200) - checkpoint_bytes(without, 100, 200)
    assert more == (without.keep_last + 1) * 400
