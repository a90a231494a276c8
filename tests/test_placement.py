"""Sharded, remote and quantised targets against the replicated one."""

import os
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.schema import TargetConfig
from outrider.data.reporter import Reporter
from outrider.models.decode.engine import Engine
from outrider.models.decode.request import Request
from outrider.models.drafters.medusa import Config as MedusaConfig
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.target import placement
from outrider.models.target.load import TINY, load_target
from outrider.models.target.target import Target
from outrider.train.settings import parse
from tests import runs, tiny
from tests.families import small_model

RANKS = 2


def rows(rank: int = 0) -> tuple[torch.Tensor, ...]:
    """A packed batch; another one on every rank."""
    ids = torch.randint(9, 1500, (2, 24), generator=torch.Generator().manual_seed(rank))
    document = torch.tensor([[0] * 14 + [1] * 10, [0] * 20 + [-1] * 4])
    positions = torch.cat([torch.arange(14), torch.arange(10)]).expand(2, -1)
    return ids, document >= 0, document, positions


def local_size(target: Target) -> int:
    """Count the parameters of the decoder layers on this rank."""
    parts = (p.to_local() if hasattr(p, "to_local") else p for p in target.layers.parameters())
    return sum(part.numel() for part in parts)


def compare(rank: int, folder: str) -> None:
    """Compare every placement with the replicated target, on one rank."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))  # transformers
    dist.init_process_group(
        "gloo", f"file://{folder}/meet", rank=rank, world_size=RANKS,
        timeout=timedelta(seconds=30),
    )  # fmt: skip
    torch.set_num_threads(1)
    alone = load_target(TargetConfig(dtype="float32")).target
    for name in ("sharded", "tensor"):
        target = load_target(TargetConfig(dtype="float32", place=name)).target
        assert target.is_remote
        assert target.fast_forward is None
        assert local_size(target) < 0.6 * local_size(alone), "the other shard is on the other rank"
        target.set_taps((0, 3))
        alone.set_taps((0, 3))
        ours, whole = target.trace(*rows(rank)), alone.trace(*rows(rank))
        torch.testing.assert_close(ours.last, whole.last, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.taps, whole.taps, atol=1e-4, rtol=1e-4)
        for part in ("embedding", "head"):
            assert torch.equal(getattr(target, part).weight, getattr(alone, part).weight)
        few = torch.arange(5)
        torch.testing.assert_close(
            target.logits_of(ours.last, few), alone.logits_of(ours.last, few)
        )
    dist.destroy_process_group()


@pytest.mark.slow
def test_sharded_and_tensor_parallel_targets_equal_the_replicated_one(tmp_path: Path) -> None:
    mp.spawn(compare, args=(str(tmp_path),), nprocs=RANKS)  # type: ignore[attr-defined,no-untyped-call]


def compare_hybrid(rank: int, folder: str) -> None:
    """Compare a sharded hybrid with the replicated one; ranks have other numbers of documents."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group(
        "gloo", f"file://{folder}/meet", rank=rank, world_size=RANKS,
        timeout=timedelta(seconds=30),
    )  # fmt: skip
    torch.set_num_threads(1)
    whole_settings = TargetConfig("hf", path=f"{folder}/hybrid", dtype="float32")
    alone = load_target(whole_settings).target
    target = load_target(replace(whole_settings, place="sharded")).target
    target.set_taps((0, 3))
    alone.set_taps((0, 3))
    ids = torch.arange(9, 33)[None] + rank
    document = torch.tensor([[0] * 24] if rank else [[0] * 9 + [1] * 8 + [2] * 7])
    positions = torch.cat([*map(torch.arange, [24] if rank else [9, 8, 7])])[None]
    batch = (ids, document >= 0, document, positions)
    ours, whole = target.trace(*batch), alone.trace(*batch)
    torch.testing.assert_close(ours.last, whole.last, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.taps, whole.taps, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_sharded_hybrid_runs_equally_often_on_all_ranks(tmp_path: Path) -> None:
    vocab = load_target(TargetConfig()).target.vocab_size
    small_model("bamba", vocab_size=vocab).save_pretrained(tmp_path / "hybrid")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (TINY / name).exists():
            shutil.copy(TINY / name, tmp_path / "hybrid")
    mp.spawn(compare_hybrid, args=(str(tmp_path),), nprocs=RANKS)  # type: ignore[attr-defined,no-untyped-call]


def test_a_family_without_a_tensor_parallel_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no tensor-parallel plan"):
        placement.require_sharded_layers(tiny.target().model)


def test_a_single_process_does_not_shard() -> None:
    target = load_target(TargetConfig(dtype="float32", place="sharded")).target
    assert not target.is_remote


def test_ends_and_states_are_on_the_output_device() -> None:
    """`meta` stands for another device; its ends have no values, so only devices are compared."""
    whole = load_target(TargetConfig(dtype="float32")).target
    apart = load_target(TargetConfig(dtype="float32", place="apart", devices=("cpu",))).target
    assert apart.is_remote
    assert apart.device == torch.device("cpu") == apart.layer_device
    for target in (whole, apart):
        target.set_taps((1,))
    ours, theirs = apart.trace(*rows()), whole.trace(*rows())
    assert torch.equal(ours.last, theirs.last)
    assert torch.equal(ours.taps, theirs.taps)
    assert apart.fast_forward is not None
    requests = [Request([5, 40, 17], 6), Request([7] * 9, 6)]
    texts = [Engine(t, None, None).generate_all(requests, 2) for t in (apart, whole)]
    assert [out.ids for out in texts[0]] == [out.ids for out in texts[1]]
    far = Target(tiny.target().model.to("meta"), output_device=torch.device("meta"))
    assert far.layer_device.type == far.device.type == "meta"


def test_a_sharded_end_is_gathered_without_its_hooks() -> None:
    class Share(torch.nn.Parameter):
        def full_tensor(self) -> torch.Tensor:
            return torch.cat([self.data, self.data])

    module: Any = torch.nn.Linear(3, 2, bias=False)
    module.weight = Share(torch.ones(2, 3))
    module.register_forward_hook(lambda *_: 1 / 0)
    from outrider.models.target.target import gather_module

    full = gather_module(module, torch.device("cpu"))
    assert full(torch.ones(1, 3)).shape == (1, 4)
    assert module.weight.shape == (2, 3)


@pytest.mark.parametrize("kind", list(placement.QUANTISERS))
def test_quantised_targets_are_close(kind: str) -> None:
    pytest.importorskip(placement.QUANTISERS[kind])
    whole = load_target(TargetConfig()).target
    target = load_target(TargetConfig(quantise=kind)).target  # type: ignore[arg-type]
    assert target.fast_forward is None
    few, many = (sum(_bytes(p) for p in t.layers.parameters()) for t in (target, whole))
    assert few < 0.6 * many
    ours, theirs = target.trace(*rows()).last.float(), whole.trace(*rows()).last.float()
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=-1).mean() > 0.98


def _bytes(parameter: Any) -> int:
    inside = getattr(parameter, "qdata", None)
    count = parameter if inside is None else inside
    return int(count.numel() * count.element_size())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(placement.QUANTISERS, "nf4", "no_such_package")
    with pytest.raises(ConfigError, match="pip install no_such_package"):
        placement.quantization_config("nf4")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["target.place=apart"], "needs target.devices"),
        (["target.devices=[cuda:1]"], "needs target.devices"),
        (["target.place=sharded", "target.quantise=nf4"], "cannot be placed as sharded"),
        (["target.place=everywhere"], "target.place"),
    ],
)
def test_contradictory_settings_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(compose(overrides))


def test_sharded_targets_refuse_self_generation_and_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    from outrider.data.corpus import load_training_data
    from outrider.models.drafters import build

    overrides = ["target.place=apart", "target.devices=[cpu]", "data=self"]
    config = runs.config(
        tmp_path / "run",
        *overrides,
        "data.overlap=keep",
        f"data.path={TINY.parent.parent}/data/tiny/prompts.jsonl",
    )
    loaded = load_target(config.target)
    with pytest.raises(RunError, match="place=apart no single rank can generate"):
        load_training_data(config, loaded, (1, 3, 4), Reporter.silent())
    medusa = MedusaConfig(name="medusa", draft_vocab_size=None, adapter_rank=2, keep=0.1)
    with pytest.raises(ConfigError, match="which adapters do not support"):
        build(medusa, loaded.target, DraftVocab.identity(loaded.target.vocab_size))
