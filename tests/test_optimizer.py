"""`train.optimizer` and `train.schedule`: parameters, states, continued runs, refused settings."""

import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import nn

from outrider.conf.compose import compose, read_overrides
from outrider.conf.errors import ConfigError
from outrider.conf.schema import TrainConfig
from outrider.data.training_data import TrainingData
from outrider.launch.memory import training_state_bytes
from outrider.launch.train import train
from outrider.models.target.load import LoadedTarget
from outrider.train import loop
from outrider.train.optimizer import OPTIMIZERS, MuonAndAdamW, OptimizerKind, state_numbers
from outrider.train.resume import as_it_began
from outrider.train.schedule import SCHEDULES, learning_rate
from outrider.train.settings import parse
from outrider.train.trainer import Trainer
from tests.runs import QUIET, config


def assert_equal_tensors(a: Path, b: Path) -> None:
    """Compare two files bit for bit."""
    one, other = load_file(a), load_file(b)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_interrupted_run_ends_as_an_uninterrupted_one(
    name: str, loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    """The last checkpoint is lost, weights and states of the one before continue, bit-equal."""
    words = f"train.optimizer={name}", "train.weight_decay=0.1", "train.schedule=wsd"
    loop.fit(config(tmp_path / "whole", *words), loaded, made, QUIET)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-00000006")
    loop.fit(config(tmp_path / "parts", *words), loaded, made, QUIET)
    last = Path("checkpoints", "step-00000006", "state.safetensors")
    assert_equal_tensors(tmp_path / "whole" / last, tmp_path / "parts" / last)
    kinds = {key.partition(".")[0] for key in load_file(tmp_path / "whole" / last)}
    assert (
        kinds - {"buffer"}
        == {"parameter"}
        | {
            "adamw": {"exp_avg", "exp_avg_sq"},
            "sgd": {"momentum_buffer"},
            "adafactor": {"row_var", "col_var", "variance"},
            "muon": {"momentum_buffer", "exp_avg", "exp_avg_sq"},
        }[name]
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_states_of_an_optimizer_are_counted_from_shapes(
    name: str, loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    run = Trainer(config(tmp_path, f"train.optimizer={name}"), loaded, made)
    loop.optimizer_step(run, run.step_data.micro_batches(0), measure=False)
    states = run.optimizer.optimizer.state.values()
    kept = [x for one in states for kind, x in one.items() if kind != "step" and x is not None]
    assert sum(x.numel() for x in kept) == state_numbers(run.drafter, run.config.train)


def test_memory_of_the_states() -> None:
    """Weights, gradients and two moments of 4 bytes; with one state, 4 fewer."""
    launch = parse(compose()).launch
    assert training_state_bytes(launch, 1, 1000) == 16_000
    assert training_state_bytes(launch, 1, 1000, states=1000) == 12_000


def test_muon_updates_hidden_matrices_and_adamw_the_rest(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    """EAGLE-3 on the embedded target: its head over the draft vocabulary is AdamW's."""
    words = "train.optimizer=muon", "train.optimizer.rate=2", "train.weight_decay=0.1"
    run = Trainer(config(tmp_path, *words), loaded, made)
    names = {p: name for name, p in run.drafter.named_parameters()}
    groups = run.optimizer.param_groups
    matrices = {names[p] for group in groups if group["matrix"] for p in group["params"]}
    rest = {names[p] for group in groups if not group["matrix"] for p in group["params"]}
    shapes = {name: tuple(p.shape) for p, name in names.items() if p.requires_grad}
    assert matrices | rest == shapes.keys()
    assert rest == {"lm_head.weight", *(n for n, size in shapes.items() if len(size) == 1)}
    assert {group["lr_factor"] for group in groups if group["matrix"]} == {2.0}
    assert {group["lr_factor"] for group in groups if not group["matrix"]} == {1.0}
    assert all(g["weight_decay"] == 0.1 * (g["params"][0].ndim > 1) for g in groups)


def test_a_hidden_matrix_may_have_as_many_rows_as_the_draft_vocabulary(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    """As at 8192 tokens for a target of 8192 hidden states: only the head is AdamW's."""
    size = loaded.target.shape().hidden
    words = "train.optimizer=muon", f"drafter.draft_vocab_size={size}"
    run = Trainer(config(tmp_path, *words), loaded, made)
    names = {p: name for name, p in run.drafter.named_parameters()}
    rest = [p for g in run.optimizer.param_groups if not g["matrix"] for p in g["params"]]
    assert [names[p] for p in rest if p.ndim > 1] == ["lm_head.weight"]


def test_an_optimizer_of_ones_own_is_chosen_by_its_name(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs no file of conf/; a schedule is registered likewise."""
    kind = OptimizerKind(lambda groups, train, _: torch.optim.RMSprop(groups, lr=train.lr))
    monkeypatch.setitem(OPTIMIZERS, "rmsprop", kind)
    monkeypatch.setitem(SCHEDULES, "half", lambda left, train: 0.5)
    words = "train.optimizer=rmsprop", "train.schedule=half", "train.warmup=0", "train.max_steps=4"
    assert loop.fit(config(tmp_path, *words), loaded, made, QUIET)
    saved = load_file(tmp_path / "checkpoints" / "step-00000004" / "state.safetensors")
    assert {key.partition(".")[0] for key in saved} == {"buffer", "parameter", "square_avg"}
    assert learning_rate(config(tmp_path, *words).train, 0.3) == 0.5e-3


@pytest.mark.parametrize("shape", [(64, 64), (256, 64), (64, 256)])
def test_a_step_of_muon_is_as_large_as_one_of_adamw(shape: tuple[int, int]) -> None:
    """Root mean square 0.2 lr for every shape, as AdamW's; Newton-Schulz is exact to a third."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(shape))
    group = {"params": [parameter], "weight_decay": 0.0, "lr_factor": 1.0, "matrix": True}
    optimizer = MuonAndAdamW([group], parse(compose(["train.lr=1e-3"])).train, None)
    parameter.grad = torch.randn(shape)
    optimizer.step()
    assert float(parameter.detach().square().mean().sqrt()) == pytest.approx(0.2e-3, rel=0.35)


def wsd(left: float, decay: float) -> float:
    """Learning rate with `left` of the steps after no warm-up to go."""
    words = ["train.lr=1", "train.warmup=0.0", "train.schedule=wsd", f"train.decay={decay}"]
    return learning_rate(parse(compose(words)).train, 1 - left)


def test_wsd_is_constant_and_then_falls_to_zero() -> None:
    """At the middle of the decay it is 1 - sqrt(1/2)."""
    assert wsd(1, 0.25) == wsd(0.5, 0.25) == wsd(0.25, 0.25) == 1
    assert wsd(0.125, 0.25) == pytest.approx(1 - 0.5**0.5)
    assert wsd(0, 0.25) == 0


def test_a_run_from_before_optimizers_were_chosen_continues(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    """Its config.yaml has neither train.optimizer nor train.decay; its states have equal names."""
    loop.fit(config(tmp_path, "train.optimizer=adamw"), loaded, made, QUIET)
    saved = OmegaConf.load(tmp_path / "config.yaml")
    for name in ("optimizer", "decay"):
        saved.train.pop(name)
    OmegaConf.save(saved, tmp_path / "config.yaml")
    continued = as_it_began(config(tmp_path, "train.max_steps=8"))
    assert continued.train.optimizer.name == "adamw"
    assert loop.fit(continued, loaded, made, QUIET)
    with pytest.raises(ConfigError, match=r"train.optimizer.name = 'muon'\n.*'adamw'"):
        loop.fit(config(tmp_path, "train.optimizer=muon"), loaded, made, QUIET)


def test_a_config_file_chooses_an_optimizer(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"

    def read(text: str) -> TrainConfig:
        file.write_text(text)
        return parse(compose(read_overrides(str(file)))).train

    assert read("train: {optimizer: sgd}").optimizer.rate == 30
    train = read("train: {optimizer: {name: muon, momentum: 0.9}, lr: 0.01}")
    assert (train.optimizer.name, train.optimizer.momentum, train.lr) == ("muon", 0.9, 0.01)
    saved = OmegaConf.to_yaml(OmegaConf.create({"train": {"optimizer": {"name": "adamw"}}}))
    assert read(saved).optimizer == TrainConfig().optimizer


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train.optimizer=muom", "train.optimizer = 'muom'\n.*no optimizer.*\n.*adamw, sgd"),
        ("train.optimizer.rate=2", "no such key.\n.*train.optimizer=adafactor or"),
        ("train.optimizer.momentum=0.5", "no such key.\n.*train.optimizer=muon or"),
        ("train.optimizer=sgd train.optimizer.momentum=1", r"must be in \[0, 1\)"),
        ("train.optimizer=muon launch=zero2", "launch=zero2 divides .*muon needs whole matrices"),
        ("train.optimizer=adafactor launch=zero3", "launch=zero3 divides .*adafactor needs"),
        ("train.schedule=cosin", "no schedule.*\n.*cosine, linear, constant, wsd"),
        ("train.schedule=wsd train.decay=0", r"train.decay = 0.*\n.*in \(0, 1\]"),
    ],
)
def test_unusable_settings_are_refused_before_anything_is_loaded(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(compose(words.split()))


def test_an_optimizer_that_torch_lacks_names_the_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before anything is loaded; the configuration of a run from elsewhere can be read."""
    monkeypatch.delattr(torch.optim, "Muon")
    monkeypatch.delattr("outrider.models.target.load.load_target")
    settings = config(tmp_path, "train.optimizer=muon")
    with pytest.raises(ConfigError, match=r"torch.optim.Muon needs torch >= 2.9, and this is"):
        train(settings)
