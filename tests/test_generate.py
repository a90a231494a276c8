"""Self-generation: the engine's tokens, independent of the batch, and resumable."""

import io
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open

from outrider.conf.compose import compose
from outrider.conf.console import Console
from outrider.conf.errors import RunError
from outrider.conf.files import read_json, sha256_of, write_json
from outrider.conf.schema import GenerateConfig
from outrider.conf.tensor_files import write_tensors
from outrider.data.batches import select_rows
from outrider.data.corpus import load_training_data
from outrider.data.generate import PromptTokens, SelfGenerator, generate_missing
from outrider.data.generated_store import GeneratedAnswer, GeneratedStore
from outrider.data.reporter import Reporter
from outrider.models.decode.engine import Engine
from outrider.models.decode.request import Stops
from outrider.models.target import load
from outrider.models.target.load import LoadedTarget
from outrider.models.target.target import Target
from outrider.train.settings import parse
from tests.families import small_model

STOP = [2]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(small_model("llama"))


@pytest.fixture(scope="module")
def prompts() -> list[PromptTokens]:
    lengths = [5, 9, 3, 12, 7, 4, 8]
    generator = torch.Generator().manual_seed(3)
    return [
        PromptTokens(i, f"q{i}", torch.randint(3, 61, (n,), generator=generator).tolist())
        for i, n in enumerate(lengths)
    ]


def backend(target: Target, seed: int = 0, **options: Any) -> SelfGenerator:
    usual = {"max_new_tokens": 11, "batch": 3, "temperature": 1.0}
    return SelfGenerator(target, STOP, GenerateConfig(**{**usual, **options}), seed)


def answers(
    target: Target, prompts: list[PromptTokens], seed: int = 0, **options: Any
) -> dict[int, GeneratedAnswer]:
    out: dict[int, GeneratedAnswer] = {}

    def on_answer(prompt: PromptTokens, answer: GeneratedAnswer | None) -> bool:
        assert answer is not None
        out[prompt.index] = answer
        return True

    backend(target, seed, **options).run(prompts, on_answer)
    return out


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2"])
def test_greedy_answers_are_those_of_plain_decoding(
    family: str, prompts: list[PromptTokens]
) -> None:
    """Prompts of unequal length in a batch give the same answers as each alone."""
    target = Target(small_model(family))
    generated = answers(target, prompts, temperature=0.0)
    decoder = Engine(target, None, None, stops=Stops(STOP))
    for prompt in prompts:
        alone = decoder.generate(prompt.ids, 11).ids
        assert generated[prompt.index].ids == prompt.ids + alone
        assert generated[prompt.index].prompt_length == len(prompt.ids)


def test_sampled_answers_do_not_depend_on_the_batch(
    target: Target, prompts: list[PromptTokens]
) -> None:
    one, many = (answers(target, prompts, batch=b) for b in (1, 5))
    assert {p: a.ids for p, a in one.items()} == {p: a.ids for p, a in many.items()}
    other = answers(target, prompts, seed=1)
    assert {p: a.ids for p, a in other.items()} != {p: a.ids for p, a in one.items()}


def test_an_answer_ends_at_the_last_position_of_the_target(target: Target) -> None:
    positions = target.shape().max_positions
    prompt = PromptTokens(0, "long", [5] * (positions - 4))
    (answer,) = answers(target, [prompt], temperature=0.0).values()
    assert len(answer.ids) <= positions


def test_generation_stops_when_the_callback_returns_false(
    target: Target, prompts: list[PromptTokens]
) -> None:
    ended: list[int] = []

    def on_answer(prompt: PromptTokens, answer: GeneratedAnswer | None) -> bool:
        ended.append(prompt.index)
        return len(ended) < 2

    backend(target).run(prompts, on_answer)
    assert len(ended) == 2


def test_an_interrupted_generation_continues_where_it_stopped(
    target: Target, prompts: list[PromptTokens], tmp_path: Path
) -> None:
    about = {"a": 1}
    store = GeneratedStore(tmp_path, about)
    generate_missing(backend(target, max_new_tokens=6), prompts[:3], store)
    again, second = GeneratedStore(tmp_path, about), backend(target, max_new_tokens=6)
    generate_missing(second, prompts, again)
    assert second.prompt_tokens == sum(len(p.ids) for p in prompts[3:])  # no prompt is read twice
    assert sorted(a.index for a in again.answers()) == list(range(7))
    assert not GeneratedStore(tmp_path, about).complete
    again.mark_complete("all")
    again.add([replace(again.answers()[0], index=7)])  # another request needs more
    store = GeneratedStore(tmp_path, about)
    assert len(store.answers()) == 8
    assert len(store.select("all").answers()) == 7


def test_the_content_of_a_shard_depends_only_on_the_prompts(target: Target, tmp_path: Path) -> None:
    """Neither batch size nor existing shards change it; more prompts keep the first shards."""
    many = [PromptTokens(i, f"q{i}", [3 + i % 50] * (1 + i % 7)) for i in range(200)]

    def store(name: str, prompts: list[PromptTokens], batch: int = 7) -> GeneratedStore:
        store = GeneratedStore(tmp_path / name, {})
        generate_missing(backend(target, max_new_tokens=3, batch=batch), prompts, store)
        store.mark_complete(str(len(prompts)))
        return store

    reference = store("reference", many)
    assert len(reference.shards) == 4
    assert reference.shards == store("other batch", many, 50).shards
    interrupted = GeneratedStore(tmp_path / "interrupted", {})
    for name in list(reference.shards)[1:3]:
        interrupted.add(shard_answers(reference, name))
    assert reference.shards == store("interrupted", many).shards
    fewer = store("grown", many[:70]).shards
    assert fewer == store("grown", many).select("70").shards
    assert {a.index for a in GeneratedStore(tmp_path / "grown", {}).answers()} == set(range(200))


def shard_answers(store: GeneratedStore, name: str) -> list[GeneratedAnswer]:
    part = store.reload()
    part.shards = {name: store.shards[name]}
    return part.answers()


def test_the_time_limit_includes_earlier_calls(
    target: Target, prompts: list[PromptTokens], tmp_path: Path
) -> None:
    """The limit applies to the text, not to the process: killed calls count."""
    store, generator = GeneratedStore(tmp_path, {"a": 1}), backend(target, max_new_tokens=6)
    generate_missing(generator, prompts[:3], store, minutes=5.0)
    assert 0 < store.seconds < 300
    again = GeneratedStore(tmp_path, {"a": 1})
    assert again.seconds == pytest.approx(store.seconds)
    again.seconds = 301.0
    generate_missing(generator, prompts, again, minutes=5.0)
    assert len(again.answers()) == 3
    generate_missing(generator, prompts, again, minutes=6.0)
    assert len(again.answers()) == 7


def test_another_or_a_damaged_store_raises(
    target: Target, prompts: list[PromptTokens], tmp_path: Path
) -> None:
    store = GeneratedStore(tmp_path, {"a": 1})
    generate_missing(backend(target, max_new_tokens=3), prompts, store)
    with pytest.raises(RunError, match="something else"):
        GeneratedStore(tmp_path, {"a": 2})
    (shard,) = tmp_path.glob("shard-*")
    shard.write_bytes(shard.read_bytes()[:-50])
    with pytest.raises(RunError, match="damaged"):
        GeneratedStore(tmp_path, {"a": 1}).answers()


def test_shards_of_earlier_versions_are_read_without_their_features(
    target: Target, prompts: list[PromptTokens], tmp_path: Path
) -> None:
    store = GeneratedStore(tmp_path, {"a": 1})
    generate_missing(backend(target, max_new_tokens=3), prompts, store)
    answers, manifest = store.answers(), read_json(tmp_path / "manifest.json", "")
    (shard,) = tmp_path.glob("shard-*")
    with safe_open(shard, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
        metadata = file.metadata()
    rows = len(tensors["ids"])
    features = {"taps": torch.zeros(rows, 8), "last": torch.zeros(rows, 4)}
    write_tensors(shard, {**tensors, **features, "favourite": torch.zeros(rows)}, metadata)
    shards = {shard.name: sha256_of(shard)}
    write_json(tmp_path / "manifest.json", {**manifest, "taps": [0, 2], "shards": shards})
    assert GeneratedStore(tmp_path, {"a": 1}).answers() == answers


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return load.load_target(parse(compose(["target=tiny"])).target)


def test_sizes_have_one_unit_and_samples_are_shown_once(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When text is generated and recorded, which reads the recording again."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Mock(free=73_495_867_392))
    words = [
        "target=tiny", "data=self", "data.max_length=200", "data.generate.samples=6",
        "data.generate.max_new_tokens=24", "data.holdout=0.3", "data.overlap=keep",
        "data.path=data/tiny/prompts.jsonl",
    ]  # fmt: skip
    console = Console(file=io.StringIO(), width=80)
    load_training_data(parse(compose(words)), loaded, (1, 3, 4), Reporter(console))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert printed.count("tokens are supervised, from") == 2
    assert re.search(r"up to 6 answers, at most [\d.]+ (bytes|kB) of 73\.5 GB free\n", printed)
    assert re.search(r"in 1 file: [\d.]+ [kM]B \(\d+ bytes per token\) of 73\.5 GB free", printed)
    assert "GB free, about 1 minute\n" in printed
    assert re.search(r" training rows? of 200 tokens .* 1 held-out row, recorded traces", printed)


def test_recorded_traces_equal_online_traces(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorded traces of self-generated text are those of a fresh forward."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    words = [
        "target=tiny", "data=self", "data.max_length=200", "data.generate.samples=12",
        "data.generate.max_new_tokens=24", "data.generate.batch=4", "data.holdout=0.3",
        "data.path=data/tiny/prompts.jsonl", "data.overlap=keep",
    ]  # fmt: skip
    config = parse(compose(words))
    data = load_training_data(config, loaded, (1, 3, 4), Reporter.silent())
    assert data.recorded is not None
    for rows, recorded in zip((data.train, data.held), data.recorded, strict=True):
        batch = select_rows(rows, torch.arange(len(rows)))
        stored, fresh = recorded.trace(batch), loaded.target.trace(*batch)
        for depth in (1, 2):
            counted = stored.supervised_mask(depth)
            assert torch.equal(counted, fresh.supervised_mask(depth))
            assert counted.any()
            torch.testing.assert_close(
                stored.taps[counted], fresh.taps[counted], atol=1e-3, rtol=1e-3
            )
            teacher_rows = counted.roll(depth, 1)  # the rows whose distribution is the teacher
            torch.testing.assert_close(
                stored.last[teacher_rows], fresh.last[teacher_rows], atol=1e-3, rtol=1e-3
            )
            argmax = loaded.target.logits(fresh.last[teacher_rows]).argmax(-1)
            assert stored.top1_ids is not None
            assert torch.equal(stored.top1_ids[teacher_rows], argmax)
