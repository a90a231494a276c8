"""Training text of targets with recurrent layers: recorded, self-generated, and on several ranks.

tests/test_recurrent.py compares the states of packed rows with those of their documents alone.
"""

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.compose import compose
from outrider.data.batches import select_rows
from outrider.data.corpus import load_training_data
from outrider.data.reporter import Reporter
from outrider.data.training_data import TrainingData
from outrider.launch.processes import ROOT, clean_environment
from outrider.models import drafters
from outrider.models.interface import Batch, Trace
from outrider.models.target.load import TINY, LoadedTarget, load_target
from outrider.train.settings import parse
from tests import runs
from tests.families import HYBRIDS, small_model
from tests.test_processes import losses

SIZES: dict[str, Any] = {"vocab_size": 1536, "bos_token_id": None, "eos_token_id": 1}
TEXT = [
    "target=hf", "data=tiny", "data.max_length=96", "data.max_samples=16", "data.holdout=0.2",
    "data.workers=0", "drafter=eagle3", "record.states=same",
]  # fmt: skip
GENERATED = [
    "target=hf", "data=self", "data.max_length=96", "data.generate.samples=6",
    "data.generate.max_new_tokens=12", "data.generate.batch=3", "data.holdout=0.3",
    "data.path=data/tiny/prompts.jsonl", "data.overlap=keep", "data.generate.temperature=0",
    "drafter=eagle3", "record.states=same",
]  # fmt: skip
# linear attention, row by row, convolutions, recurrent layers alone with and without chunks
KINDS = ("qwen3_next", "jamba", "lfm2", "mamba2", "falcon_mamba")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Write a target of a family, with the embedded target's tokenizer."""

    @cache
    def write(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        small_model(family, **SIZES).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TINY / name, folder)
        return folder

    return write


def prepared(folder: Path, *words: str) -> tuple[LoadedTarget, TrainingData]:
    settings = parse(compose([*words, f"target.path={folder}"]))
    loaded = load_target(settings.target)
    taps = drafters.resolve_taps(settings.drafter, loaded.target.num_layers)
    loaded.target.set_taps(taps)
    return loaded, load_training_data(settings, loaded, taps, Reporter.silent())


def whole_batch(rows: Any) -> Batch:
    return select_rows(rows, torch.arange(len(rows)))


def assert_documents_alone(loaded: LoadedTarget, batch: Batch, trace: Trace) -> None:
    """Compare the supervised rows of a trace with the model's own states of every document."""
    target = loaded.target
    first = int(target._attends)  # the hidden states of Mamba do not begin with the embedding
    supervised = trace.supervised_mask(1)
    teacher, seen = supervised.roll(1, dims=1), 0
    for row, number in {(r, int(n)) for r, line in enumerate(batch.document) for n in line}:
        if number < 0:
            continue
        inside = batch.document[row] == number
        ids = batch.ids[row, inside][None]
        with torch.no_grad():
            out = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        states = out.hidden_states
        tapped = torch.cat([states[tap + first][0] for tap in target.taps], -1)
        own = supervised[row, inside]
        torch.testing.assert_close(
            trace.taps[row, inside][own].float(), tapped[own], atol=1e-4, rtol=1e-4
        )
        last = trace.last[row, inside][teacher[row, inside]].float()
        whole = states[-1][0][teacher[row, inside]]
        torch.testing.assert_close(last, whole, atol=1e-4, rtol=1e-4)
        seen += int(own.sum())
    assert seen > 20


@pytest.mark.parametrize("family", KINDS)
def test_recorded_states_are_those_of_documents_alone(family: str, folders: Any) -> None:
    """And of packed rows that hold several documents."""
    loaded, data = prepared(folders(family), *TEXT, "data.mode=recorded")
    assert data.recorded is not None
    batch = whole_batch(data.train)
    assert any(len({*row.tolist()} - {-1}) > 1 for row in batch.document)
    assert_documents_alone(loaded, batch, data.recorded[0].trace(batch))


def test_a_record_that_mixes_documents_is_detected(folders: Any) -> None:
    """Negative control of the comparison: rows read with a mask alone."""
    loaded, data = prepared(folders("qwen3_next"), *TEXT, "data.mode=online")
    target, batch = loaded.target, whole_batch(data.train)
    mixed = target._read_rows(batch.ids, batch.positions, batch.document, False)
    with pytest.raises(AssertionError, match="not close"):
        assert_documents_alone(loaded, batch, Trace.from_batch(batch, *mixed))


@pytest.mark.parametrize("family", KINDS)
def test_generated_text_and_its_states_are_those_of_the_model(family: str, folders: Any) -> None:
    """Greedy answers to prompts of several lengths in a batch, and the states kept beside them."""
    loaded, data = prepared(folders(family), *GENERATED)
    target = loaded.target
    assert data.recorded is not None
    batch, answered = whole_batch(data.train), 0
    assert_documents_alone(loaded, batch, data.recorded[0].trace(batch))
    for row, number in {(r, int(n)) for r, line in enumerate(batch.document) for n in line}:
        inside = batch.document[row] == number
        ids, answer = batch.ids[row, inside], batch.answer[row, inside]
        if number < 0 or not answer.any():
            continue
        start = int(answer.int().argmax())
        with torch.no_grad():
            logits = target.model(input_ids=ids[None], use_cache=False).logits[0]
        assert torch.equal(logits[start - 1 : -1].argmax(-1), ids[start:])
        answered += 1
    assert answered >= 3


@pytest.mark.slow
def test_two_ranks_train_as_one(folders: Any, tmp_path: Path) -> None:
    """The losses of every step, and those of the held-out text."""
    words = [
        *runs.SMALL[1:], f"target={folders('qwen3_next')}", "data=tiny", "drafter=eagle3",
        "train.optimizer=adamw", "train.max_steps=3",
    ]  # fmt: skip
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for name, launcher, more in (
        ("two", torchrun, ["launch=ddp"]),
        ("one", [], ["launch.accumulation=2"]),
    ):
        command = [sys.executable, *launcher, str(ROOT / "train.py"), *words, *more]
        command.append(f"run.dir={tmp_path / name}")
        env = {**clean_environment(), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=env, check=True, capture_output=True)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
    assert json.loads((tmp_path / "two" / "training.json").read_text())["budget"]["ranks"] == 2


def test_every_kind_is_a_family() -> None:
    assert {*KINDS} <= {*HYBRIDS}
