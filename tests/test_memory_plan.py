"""The estimates of `outrider memory`, compared with what tiny models allocate."""

import gc
import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError
from outrider.conf.schema import LaunchConfig, TargetConfig
from outrider.launch import memory
from outrider.launch.cli import main
from outrider.launch.processes import clean_environment, train_command
from outrider.models import drafters
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import Trace
from outrider.models.target.load import meta_model
from outrider.models.target.target import Target
from outrider.train.settings import parse
from tests.families import small_model

ROOT = Path(__file__).parent.parent
PUBLISHED = {  # parameters, as the models' cards count them
    "8b": 8_030_261_248, "32b": 32_762_123_264, "70b": 70_553_706_496, "235b": 235_093_634_560,
}  # fmt: skip


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_parameter_counts_match_the_model_cards(name: str) -> None:
    model = meta_model(TargetConfig(), memory.MODELS[name])
    assert memory.ParameterCounts.of(model).whole == PUBLISHED[name]
    assert next(model.parameters()).is_meta


# ---- activations ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def frozen() -> Target:
    """A target with the proportions of a large one."""
    sizes = {"hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 8}
    return Target(small_model("llama", **sizes, num_key_value_heads=2, head_dim=8, vocab_size=96))


def drafter_and_trace(name: str, frozen: Target, depths: int) -> tuple[Drafter, Trace]:
    cfg = drafters.drafter_module(name).Config(name=name, depths=depths)
    drafter = drafters.build(cfg, frozen, DraftVocab.identity(frozen.vocab_size)).train()
    ids = torch.randint(frozen.vocab_size, (2, 48), generator=torch.Generator().manual_seed(0))
    zeros, places = torch.zeros_like(ids), torch.arange(48).expand(2, -1)
    return drafter, frozen.trace(ids, zeros == 0, zeros, places)


def saved_numbers(name: str, frozen: Target, depths: int) -> tuple[float, float]:
    """Numbers per row that autograd saves in the unroll, measured and predicted."""
    drafter, trace = drafter_and_trace(name, frozen, depths)
    owned = {p.untyped_storage().data_ptr() for p in drafter.parameters()}
    owned |= {p.untyped_storage().data_ptr() for p in frozen.model.parameters()}
    sizes, saved = dict[int, int](), list[Tensor]()

    def record(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in owned:
            sizes[storage.data_ptr()] = storage.nbytes()
            saved.append(x)  # or its address would be used again
        return x

    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        saved += [guess.hidden for guess in drafter.unroll(trace)]
    return sum(sizes.values()) / 4 / trace.ids.numel(), drafter.activation_count(depths)


@pytest.mark.parametrize("name", drafters.trained_names())
def test_activation_memory_of_an_unroll(name: str, frozen: Target) -> None:
    for depths in (1, 4):
        counted, predicted = saved_numbers(name, frozen, depths)
        assert predicted == pytest.approx(counted, rel=0.1), depths


def test_activation_memory_with_gradient_checkpointing(frozen: Target) -> None:
    """Python references its inputs, not autograd, so they are counted as objects."""
    drafter, trace = drafter_and_trace("eagle3", frozen, depths := 4)
    drafter.gradient_checkpointing = True
    before = tensor_storages()
    guesses = list(drafter.unroll(trace))
    new = sum(size for place, size in tensor_storages().items() if place not in before)
    counted = new / 4 / trace.ids.numel()
    assert len(guesses) == depths
    predicted = memory.activations_per_row(drafter, frozen.shape(), depths, recompute=True)
    one_depth = drafter.activation_count(depths) / depths  # only exists in the backward pass
    assert predicted - one_depth == pytest.approx(counted, rel=0.1)
    assert predicted < 0.6 * drafter.activation_count(depths)


def tensor_storages() -> dict[int, int]:
    gc.collect()
    storages = [x.untyped_storage() for x in gc.get_objects() if type(x) is Tensor]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


# ---- weights, gradients, moments -----------------------------------------------------------------


def test_each_zero_stage_shards_more() -> None:
    """For a drafter that is large enough; ZeRO-3 keeps up to a billion weights gathered."""
    order = [LaunchConfig(name, "bf16") for name in ("ddp", "zero1", "zero2", "zero3")]
    order += [LaunchConfig("zero3", "bf16", offload=what) for what in ("optimizer", "parameters")]
    sizes = [memory.training_state_bytes(launch, 8, 10**10) for launch in order]
    assert sizes == sorted(set(sizes), reverse=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("launch", "precision"), [("zero2", "no"), ("zero3", "bf16")])
def test_training_state_of_two_ranks(launch: str, precision: str, tmp_path: Path) -> None:
    """Without gradients, freed after a step, and the weights that ZeRO-3 gathers."""
    command = [
        *train_command(2)[:-1],
        str(ROOT / "tests" / "held_states.py"),
        str(tmp_path / "run"),
    ]
    env = {**clean_environment(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [f"launch={launch}", f"launch.precision={precision}", "drafter=eagle3"]
    done = subprocess.run(
        [*command, *words], env=env, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr
    measured = float(re.findall(r"held ([\d.]+)", done.stdout)[-1])
    gradients = {"zero2": 2.0, "zero3": 1.0}[launch]  # bytes of each in their precision / ranks
    config = LaunchConfig(launch, precision)  # type: ignore[arg-type]
    predicted = memory.training_state_bytes(config, 2, 10**6) / 10**6
    assert measured == pytest.approx(predicted - gradients, rel=0.1)


# ---- the verb ------------------------------------------------------------------------------------


def test_table_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "memory",
        "drafter=eagle3",
        "launch=zero2",
        "launch.precision=bf16",
        "memory.model=70b",
    ]
    assert main([*words, "data.max_length=2048", "train.batch_tokens=65536"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Fits with target.place=tensor; also sharded, apart, nf4, ends\n")
    assert "70.55 billion" in printed
    verdicts = next(line for line in printed.splitlines() if "fits" in line)
    assert verdicts.split()[3:] == ["no", "fits", "fits", "fits", "no", "fits", "fits"]
    assert "gradient_checkpointing" not in printed
    assert main([*words, "train.batch_tokens=65536", "--explain"]) == 0
    explained = " ".join(capsys.readouterr().out.split())
    assert all(part in explained for part in (*memory.DEFINITIONS, "gradient_checkpointing"))


def test_units_fit_the_embedded_target(capsys: pytest.CaptureFixture[str]) -> None:
    """No number of its table or its lines is rounded to zero but where nothing is held."""
    assert main(["memory", "target=tiny"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("tiny: 3.44 million parameters of 4 bytes; eagle3: 860,928")
    assert lines[3].startswith("Less than a minute: 300 steps of 57.6 GFLOP")
    assert lines[4] == "34.5 MB of checkpoints and drafters"
    assert lines[5].startswith("MB per GPU replicated")
    assert all(float(line.split()[1]) > 1 for line in lines[6:-1])
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(59, "Less than a minute"), (60, "About 1 minute"), (1080, "About 18 minutes"),
     (1800, "About 0.5 hours"), (86400, "About 24.0 hours")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert memory.format_duration(seconds) == text


def test_numbers_of_parameters_and_operations() -> None:
    counts = [memory.format_parameters(count) for count in (8 * 10**9, 135 * 10**6, 999)]
    assert counts == ["8.00 billion", "135.00 million", "999"]
    sums = [memory.format_operations(flops) for flops in (1.13e16, 5.1e13, 2e9, 1e6)]
    assert sums == ["11.3 PFLOP", "51 TFLOP", "2 GFLOP", "0.001 GFLOP"]


def test_no_placement_fits() -> None:
    assert memory.verdict({"replicated": {"target": 2.0}}, 1.0).startswith("No placement fits. To")


def test_memory_grows_with_every_size(frozen: Target) -> None:
    def total(*words: str, ranks: int = 4) -> float:
        config = parse(compose(["drafter=eagle3", *words]))
        target, drafter = memory.meta_models(small_model("llama").to("meta"), config)
        sizes = memory.ParameterCounts.of(target.model)
        parts = memory.memory_by_part(config, sizes, target.shape(), drafter, ranks, 2**20)
        assert set(parts) == set(memory.PARTS)
        return sum(parts.values())

    baseline = total()
    assert total("train.batch_tokens=8192") > baseline
    assert total("drafter.depths=7") > baseline
    assert total("train.gradient_checkpointing=true") < baseline
    assert total("target.place=sharded") < baseline
    assert total("launch.accumulation=2") < baseline


def test_unknown_gpus_raise(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["memory", "memory.gpu=v100"])
    assert stopped.value.code == 2
    assert "memory.gpu" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="gpus"):
        memory.memory(["memory.gpus=0"])
