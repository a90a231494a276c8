"""A target in shares over the ranks, on other devices, or in fewer bits says the same."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError, RunError
from outrider.models import placement as place
from outrider.models.drafters.medusa import Config as MedusaConfig
from outrider.models.load import TINY, load
from outrider.models.target import Target
from outrider.models.vocab import DraftVocab
from outrider.train.settings import TargetConfig, parse
from tests import runs, tiny

RANKS = 2


def rows(rank: int = 0) -> tuple[torch.Tensor, ...]:
    """A packed batch; another one on every rank."""
    ids = torch.randint(9, 1500, (2, 24), generator=torch.Generator().manual_seed(rank))
    document = torch.tensor([[0] * 14 + [1] * 10, [0] * 20 + [-1] * 4])
    positions = torch.cat([torch.arange(14), torch.arange(10)]).expand(2, -1)
    return ids, document >= 0, document, positions


def held(target: Target) -> int:
    """Numbers of the decoder layers that lie here."""
    parts = (p.to_local() if hasattr(p, "to_local") else p for p in target.layers.parameters())
    return sum(part.numel() for part in parts)


def compare(rank: int, folder: str) -> None:
    """One rank's part: every place against the whole."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))  # transformers
    dist.init_process_group(
        "gloo", f"file://{folder}/meet", rank=rank, world_size=RANKS,
        timeout=timedelta(seconds=30),
    )  # fmt: skip
    torch.set_num_threads(1)
    alone = load(TargetConfig(dtype="float32")).target
    for name in ("sharded", "tensor"):
        target = load(TargetConfig(dtype="float32", place=name)).target
        assert target.elsewhere
        assert target.lean is None
        assert held(target) < 0.6 * held(alone), "the other share lies on the other rank"
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
def test_shares_over_two_ranks_say_what_the_whole_says(tmp_path: Path) -> None:
    mp.spawn(compare, args=(str(tmp_path),), nprocs=RANKS)  # type: ignore[attr-defined,no-untyped-call]


def test_a_family_without_a_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no plan"):
        place.check_shares(tiny.target().model)


def test_a_process_alone_holds_all_of_it() -> None:
    target = load(TargetConfig(dtype="float32", place="sharded")).target
    assert not target.elsewhere


def test_ends_are_copied_home_and_what_is_said_too() -> None:
    """`meta` stands for another device: ends cannot come from there, so only places are seen."""
    whole = load(TargetConfig(dtype="float32")).target
    apart = load(TargetConfig(dtype="float32", place="apart", devices=("cpu",))).target
    assert apart.elsewhere
    assert apart.device == torch.device("cpu") == apart.lies
    for target in (whole, apart):
        target.set_taps((1,))
    ours, theirs = apart.trace(*rows()), whole.trace(*rows())
    assert torch.equal(ours.last, theirs.last)
    assert torch.equal(ours.taps, theirs.taps)
    far = Target(tiny.target().model.to("meta"), home=torch.device("meta"))
    assert far.lies.type == far.device.type == "meta"


def test_an_end_in_shares_becomes_whole_without_its_hooks() -> None:
    class Share(torch.nn.Parameter):
        def full_tensor(self) -> torch.Tensor:
            return torch.cat([self.data, self.data])

    module: Any = torch.nn.Linear(3, 2, bias=False)
    module.weight = Share(torch.ones(2, 3))
    module.register_forward_hook(lambda *_: 1 / 0)
    from outrider.models.target import whole

    full = whole(module, torch.device("cpu"))
    assert full(torch.ones(1, 3)).shape == (1, 4)
    assert module.weight.shape == (2, 3)


@pytest.mark.parametrize("kind", list(place.QUANTISERS))
def test_quantised_targets_say_nearly_the_same(kind: str) -> None:
    pytest.importorskip(place.QUANTISERS[kind])
    whole = load(TargetConfig()).target
    target = load(TargetConfig(quantise=kind)).target  # type: ignore[arg-type]
    assert target.lean is None
    few, many = (sum(_bytes(p) for p in t.layers.parameters()) for t in (target, whole))
    assert few < 0.6 * many
    ours, theirs = target.trace(*rows()).last.float(), whole.trace(*rows()).last.float()
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=-1).mean() > 0.98


def _bytes(parameter: Any) -> int:
    inside = getattr(parameter, "qdata", None)
    count = parameter if inside is None else inside
    return int(count.numel() * count.element_size())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(place.QUANTISERS, "nf4", "no_such_package")
    with pytest.raises(ConfigError, match="pip install no_such_package"):
        place.quantised("nf4")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["target.place=apart"], "belong together"),
        (["target.devices=[cuda:1]"], "belong together"),
        (["target.place=sharded", "target.quantise=nf4"], "cannot be sharded"),
        (["target.place=everywhere"], "target.place"),
    ],
)
def test_settings_that_cannot_work_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(compose(words))


def test_shares_neither_write_text_alone_nor_carry_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    from outrider.data.prepare import material
    from outrider.models.drafters import build

    words = ["target.place=apart", "target.devices=[cpu]", "data=self"]
    config = runs.config(
        tmp_path / "run",
        *words,
        "data.overlap=keep",
        f"data.path={TINY.parent.parent}/data/tiny/prompts.jsonl",
    )
    loaded = load(config.target)
    with pytest.raises(RunError, match="place=apart no rank can write"):
        material(config, loaded, (1, 3, 4), runs.QUIET, rank=0)
    medusa = MedusaConfig(name="medusa", draft_vocab_size=None, adapter_rank=2, keep=0.1)
    with pytest.raises(ConfigError, match="where adapters cannot stand"):
        build(medusa, loaded.target, DraftVocab.whole(loaded.target.vocab))
