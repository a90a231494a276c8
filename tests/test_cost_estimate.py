"""Estimated costs are close to measured ones; contradicting launchers are refused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError
from outrider.conf.schema import Config, LaunchConfig
from outrider.data.corpus import load_training_data
from outrider.data.reporter import Reporter
from outrider.launch import cost_estimate
from outrider.models.decode.round_times import Stopwatch
from outrider.models.target import load
from outrider.train import distributed
from outrider.train.settings import parse
from outrider.train.trainer import Trainer


def config(folder: Path, *words: str) -> Config:
    small = ["target=tiny", "data.max_samples=40", "data.max_length=128", "train.batch_tokens=512"]
    return parse(compose([*small, f"run.dir={folder}", *words]))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    cfg = config(tmp_path_factory.mktemp("plan"))
    loaded = load.load_target(cfg.target)
    return Trainer(cfg, loaded, load_training_data(cfg, loaded, (1, 3, 4), Reporter.silent()))


@pytest.mark.parametrize("bytes_of", [2, 4])
def test_the_rate_is_that_of_matrix_products(
    bytes_of: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that moves by a second with every product; the first product does not count."""
    now, real = [0.0], torch.mm

    def product(a: Tensor, b: Tensor) -> Tensor:
        now[0] += 1.0
        return real(a, b)

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(Stopwatch, "clock", staticmethod(lambda: now[0]))
    size = cost_estimate.MATRIX_SIZE["cpu"]
    assert cost_estimate.matmul_rate(bytes_of) == 2.0 * size**3


def test_the_disk_estimate_covers_what_a_run_writes(run: Trainer) -> None:
    """Two checkpoints of 12 bytes per parameter are most of it."""
    run.progress.step = 1
    run.save()
    run.writer.wait()
    file = next((run.folder / "checkpoints").rglob("state.safetensors"))
    size = sum(p.numel() for p in run.drafter.parameters())
    assert 4 * size <= file.stat().st_size <= 13 * size  # no moments before the first step
    assert cost_estimate.estimate(run).disk >= 2 * file.stat().st_size


@pytest.mark.parametrize(
    ("environment", "launch", "message"),
    [
        ({"WORLD_SIZE": "2"}, LaunchConfig("single"), "started 2 processes"),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
            LaunchConfig("zero2"),
            "ZeRO stage 3",
        ),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, LaunchConfig("ddp"), "--mixed_precision fp16"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, LaunchConfig("zero2"), "steps 4"),
        ({"ACCELERATE_GRADIENT_CLIPPING": "1.0"}, LaunchConfig("zero2"), "train.clip"),
        ({"ACCELERATE_USE_FSDP": "true"}, LaunchConfig("ddp"), "use FSDP"),
        (
            {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "/a/ds.json"},
            LaunchConfig("zero2"),
            "settings from a file",
        ),
        (
            {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"},
            LaunchConfig("zero3"),
            "offload parameters",
        ),
    ],
)
def test_a_launcher_that_contradicts_the_configuration_is_refused(
    environment: dict[str, str],
    launch: LaunchConfig,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        distributed.require_matching_launcher(launch)
