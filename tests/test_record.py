"""Recorded traces: training equals online training, and damaged or foreign files raise."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.conf.compose import compose
from outrider.conf.console import Console as ReportConsole
from outrider.conf.errors import ConfigError, CorruptFile, DiskFull, RunError
from outrider.conf.files import sha256_of
from outrider.conf.schema import Config
from outrider.data.batches import select_rows
from outrider.data.corpus import load_training_data
from outrider.data.prepare import record
from outrider.data.record import cache, writer
from outrider.data.record.cache import TraceCache
from outrider.data.record.folder import RecordingFolder
from outrider.data.record.layout import Layout, RowSelection
from outrider.data.record.verify import Difference
from outrider.data.reporter import Reporter
from outrider.data.training_data import TrainingData
from outrider.launch.doctor import target as probed
from outrider.models import drafters
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import Batch, TopKTeacher, Trace
from outrider.models.target import load as load_models
from outrider.models.target.load import LoadedTarget, load_target
from outrider.models.target.target import Target
from outrider.train import loop
from outrider.train.losses import parse_depth_weights
from outrider.train.objective import Objective
from outrider.train.settings import parse
from outrider.train.teacher import Teacher
from outrider.train.trainer import Trainer
from tests import runs

WORDS = [
    "target=tiny", "data=tiny", "data.max_length=96", "data.max_samples=24", "data.holdout=0.2",
    "train.batch_tokens=192", "drafter.depths=3", "record.shard=600", "data.workers=0",
]  # fmt: skip
QUIET, RUN = Console(quiet=True), f"{0:016x}"  # a name of a cached run


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return load_target(parse(compose(["target=tiny"])).target)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def config(*words: str) -> Config:
    return parse(compose([*WORDS, *words]))


def training_data(loaded: LoadedTarget, settings: Config) -> TrainingData:
    taps = drafters.resolve_taps(settings.drafter, loaded.target.num_layers)
    return load_training_data(settings, loaded, taps, Reporter.silent())


def both(loaded: LoadedTarget, *words: str) -> tuple[TrainingData, TrainingData]:
    """Return the data of the same text, online and recorded."""
    online = training_data(loaded, config("data.mode=online", *words))
    return online, training_data(loaded, config("data.mode=recorded", *words))


def first_batch(data: TrainingData, rows: int = 2) -> Batch:
    return select_rows(data.train, torch.arange(rows))


def loss_of(
    loaded: LoadedTarget, data: TrainingData, settings: Config, trace: Trace
) -> torch.Tensor:
    """Return the loss of an untrained drafter, which depends only on the seed."""
    cfg: Any = settings.drafter
    torch.manual_seed(0)
    loaded.target.set_taps(drafters.resolve_taps(cfg, loaded.target.num_layers))
    drafter = drafters.build(cfg, loaded.target, data.vocab(cfg.draft_vocab_size)).eval()
    weights = parse_depth_weights(cfg.depth_weights, cfg.depths)
    objective = Objective(drafter, loaded.target, weights=weights, loss=cfg.loss)
    loss: torch.Tensor = objective(trace, torch.full((cfg.depths,), 50.0))[0]
    return loss.detach()


@pytest.mark.parametrize("name", drafters.trained_names())
def test_loss_from_a_recording_equals_the_online_loss(loaded: LoadedTarget, name: str) -> None:
    """With states="same" every row that a drafter or its teacher reads is stored: the loss is
    equal up to rounding in other batches.
    """
    words = (f"drafter={name}", "record.states=same")
    online, recorded = both(loaded, *words)
    batch = first_batch(online)
    assert recorded.recorded is not None
    assert online.about["sha256_documents"] == recorded.about["sha256_documents"]
    stored = recorded.recorded[0].trace(batch)
    computed = loaded.target.trace(*batch)
    sides = ((online, computed), (recorded, stored))
    pair = [loss_of(loaded, data, config(*words), trace) for data, trace in sides]
    torch.testing.assert_close(pair[1], pair[0], rtol=1e-5, atol=1e-6)
    supervised = computed.supervised_mask(1)
    rows = torch.roll(supervised, 1, dims=1)  # row t + 1 is the teacher of the guess of row t
    assert stored.top1_ids is not None
    argmax = loaded.target.logits(computed.last[rows]).argmax(-1)
    assert torch.equal(stored.top1_ids[rows], argmax)


@pytest.mark.parametrize("states", ["bf16", "int8", "coded"])
def test_the_error_of_each_encoding_is_bounded(loaded: LoadedTarget, states: str) -> None:
    online, recorded = both(loaded, f"record.states={states}")
    assert recorded.recorded is not None
    batch = first_batch(online)
    stored, computed = recorded.recorded[0].trace(batch), loaded.target.trace(*batch)
    inside = batch.document >= 0
    error = (stored.taps - computed.taps)[inside].norm() / computed.taps[inside].norm()
    assert 0 < error < {
        "bf16": 0.004, "int8": 0.01, "coded": 0.25
    }[states]  # fmt: skip


def test_a_top_k_teacher_approximates_the_full_one(loaded: LoadedTarget) -> None:
    """Its likely tokens are exact (to 11 bits), the rest has its total probability."""
    words = ("record.top=64", "drafter.draft_vocab_size=1000", "record.states=same")
    online, recorded = both(loaded, *words)
    assert recorded.recorded is not None
    batch = first_batch(online)
    stored, computed = recorded.recorded[0].trace(batch), loaded.target.trace(*batch)
    assert stored.topk_teacher is not None
    assert stored.last.shape[-1] == 0
    rows = torch.roll(computed.supervised_mask(1), 1, dims=1)
    vocab = recorded.vocab(1000)
    logits = loaded.target.logits(computed.last[rows])
    top_k = TopKTeacher(*(part[rows] for part in stored.topk_teacher))
    spread, inside = top_k.scatter(len(vocab)), logits[:, vocab.target_ids]
    share = logits.softmax(-1)[:, vocab.target_ids].sum(-1)
    torch.testing.assert_close(top_k.share, share, rtol=2e-3, atol=1e-6)
    torch.testing.assert_close(spread.sum(-1), torch.ones(len(inside)), rtol=2e-3, atol=0)
    largest = inside.softmax(-1).topk(64).values
    torch.testing.assert_close(spread.topk(64).values, largest, rtol=2e-3, atol=1e-6)
    settings = config(*words)
    sides = ((online, computed), (recorded, stored))
    pair = [loss_of(loaded, data, settings, trace) for data, trace in sides]
    torch.testing.assert_close(pair[1], pair[0], rtol=0.02, atol=0)


def test_a_top_k_teacher_with_a_tiny_share_keeps_its_distribution(
    loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share is below the range of 16 bits; it is stored as a separate factor."""
    target, indices = loaded.target, torch.tensor([1200, 3, 7])
    head = torch.full((target.vocab_size,), -60.0).scatter(
        0, indices, torch.tensor([9.0, -20, -21])
    )
    monkeypatch.setattr(target, "logits", lambda rows: head.expand(len(rows), -1))
    vocab, hidden = DraftVocab(torch.arange(1000), target.vocab_size), target.shape().hidden
    layout = Layout("ids", "same", (), hidden, top=2, vocab=vocab.target_ids)
    selection = RowSelection(torch.zeros(1).bool(), torch.ones(1).bool())
    rows = torch.zeros(1, 0), torch.zeros(1, hidden)
    parts = layout.encode(target, selection, *rows, with_last_states=False)
    decoded = layout.decode(parts, selection)
    assert decoded.top is not None
    teacher = Teacher(target, vocab, renormalise=True).from_recording(decoded.top, decoded.argmax)
    torch.testing.assert_close(teacher.p[0], head[:1000].softmax(-1), rtol=1e-3, atol=1e-6)
    assert teacher.p_full.sum() < 1e-9
    assert decoded.argmax.tolist() == [1200]


def test_last_states_of_held_out_text_are_stored_with_record_top(loaded: LoadedTarget) -> None:
    """Held-out metrics compare with the full teacher."""
    online, recorded = both(loaded, "record.top=8", "record.states=same")
    assert recorded.recorded is not None
    held = select_rows(online.held, torch.tensor([0]))
    stored, computed = recorded.recorded[1].trace(held), loaded.target.trace(*held)
    assert stored.topk_teacher is None
    rows = torch.roll(computed.supervised_mask(1), 1, dims=1)
    torch.testing.assert_close(stored.last[rows], computed.last[rows], rtol=1e-4, atol=1e-4)
    assert [source.has_last_states for source in recorded.recorded] == [False, True]
    with pytest.raises(ConfigError, match=r"data\.holdout=0\.2"):
        training_data(loaded, config(f"data.traces={recorded.recorded[0].path}", "data.holdout=0.4",
                                "record.top=8"))  # fmt: skip


def test_first_weights_are_fitted_online_without_recorded_last_states(
    loaded: LoadedTarget, tmp_path: Path
) -> None:
    """The target computes them."""
    words = ("data.mode=recorded", "record.top=8", "train.max_steps=1")
    settings = runs.config(tmp_path, *words)
    data = training_data(loaded, settings)
    assert data.recorded is not None
    assert not data.recorded[0].has_last_states
    assert "linear fit" in Trainer(settings, loaded, data).initialisation


def taps_of_shorter_rows(loaded: LoadedTarget, *words: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return taps of a recording read in rows of another length, and the computed ones."""
    _, recorded = both(loaded, *words)
    assert recorded.recorded is not None
    folder = recorded.recorded[0].path
    shorter = training_data(loaded, config(f"data.traces={folder}", "data.max_length=64"))
    assert shorter.recorded is not None
    batch = first_batch(shorter)
    stored, computed = shorter.recorded[0].trace(batch), loaded.target.trace(*batch)
    inside = batch.document >= 0
    return stored.taps[inside], computed.taps[inside]


def test_a_recording_is_read_in_any_packing(loaded: LoadedTarget) -> None:
    stored, computed = taps_of_shorter_rows(loaded, "record.states=same")
    torch.testing.assert_close(stored, computed, rtol=1e-4, atol=1e-4)


def test_the_beginning_of_a_coded_document_is_read(loaded: LoadedTarget) -> None:
    """A coded document is decompressed whole; its first rows equal those of the whole document."""
    stored, computed = taps_of_shorter_rows(loaded, "record.states=coded", "record.top=8")
    error = (stored - computed).norm() / computed.norm()
    assert 1e-6 < error < 0.25


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss@1"] for line in lines if line["kind"] in ("train", "held")]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_from_a_recording_equals_the_online_run(
    loaded: LoadedTarget, tmp_path: Path, workers: int
) -> None:
    """Six steps with evaluations: equal losses up to rounding, with and without prefetching."""
    curves = []
    for mode in ("online", "recorded"):
        words = (f"data.mode={mode}", "record.states=same", f"data.workers={workers}")
        settings = runs.config(tmp_path / mode, *words)
        taps = drafters.resolve_taps(settings.drafter, loaded.target.num_layers)
        loop.fit(
            settings, loaded, load_training_data(settings, loaded, taps, Reporter.silent()), QUIET
        )
        curves.append(losses(tmp_path / mode))
    assert len(curves[0]) > 6
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "words"), [("eagle3", ()), ("mtp", ()), ("eagle3", ("record=small",))]
)
def test_training_from_a_recording_needs_only_embedding_and_head(
    loaded: LoadedTarget, tmp_path: Path, name: str, words: tuple[str, ...]
) -> None:
    """With target.place=ends the trained weights are the same."""
    init = "drafter.init=random" if words else "drafter.init=linear"
    words = (*words, f"drafter={name}", init, f"data.traces={tmp_path / 'traces'}")
    record(runs.config(tmp_path, *words))
    drafts = []
    for place in ("replicated", "ends"):
        settings = runs.config(tmp_path / place, *words, f"target.place={place}")
        own = load_target(settings.target)
        assert own.target.ends_only == (place == "ends")
        taps = drafters.resolve_taps(settings.drafter, own.target.num_layers)
        loop.fit(settings, own, load_training_data(settings, own, taps, Reporter.silent()), QUIET)
        drafts.append(load_file(tmp_path / place / "drafter" / "model.safetensors"))
    assert drafts[0].keys() == drafts[1].keys()
    assert all(torch.equal(drafts[0][key], drafts[1][key]) for key in drafts[0])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text"])
def test_embedding_and_head_alone_equal_those_of_the_whole_model(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    shape = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    family = AutoConfig.for_model(kind, **sizes, **shape)
    AutoModelForCausalLM.from_config(family).save_pretrained(tmp_path)
    words = ("target=hf", f"target.path={tmp_path}", "data.traces=x", "train.quick_eval=false")
    path, settings = str(tmp_path), config(*words).target
    whole = Target(load_models._load_model(path, settings))
    ends = Target(load_models._load_ends(path, settings, torch.device("cpu")))
    states, ids = torch.randn(3, 32), torch.arange(9)
    assert torch.equal(ends.logits(states), whole.logits(states))
    assert torch.equal(ends.embed(ids), whole.embed(ids))
    assert ends.shape() == whole.shape()
    assert ends.ends_only
    assert "UNEXPECTED" not in capfd.readouterr().err


def test_place_ends_raises_where_the_whole_model_is_needed(
    loaded: LoadedTarget, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"Add recorded features: data.traces"):
        config("target.place=ends", "train.quick_eval=false")
    with pytest.raises(ConfigError, match=r"train.quick_eval=false"):
        config("target.place=ends", f"data.traces={tmp_path}", "train.quick_eval=true")
    ends = load_target(
        config("target.place=ends", f"data.traces={tmp_path}", "train.quick_eval=false").target
    )
    ids = torch.arange(4)[None]
    with pytest.raises(ConfigError, match="Only its embedding and its head were loaded"):
        ends.target.forward(ids, ids, torch.ones(1, 4, 4).tril().bool())


@pytest.mark.slow
def test_reading_leaves_no_rows_in_memory(loaded: LoadedTarget, tmp_path: Path) -> None:
    """Resident memory does not grow by the size of the recording from epoch to epoch."""
    words = ("data.max_samples=300", f"data.traces={tmp_path}", "record.shard=2000")
    record(config(*words))
    data, resident = training_data(loaded, config(*words)), list[int]()
    assert data.recorded is not None
    for _ in range(3):
        for index in torch.arange(len(data.train)).split(4):
            data.recorded[0].trace(select_rows(data.train, index))
        resident.append(psutil.Process().memory_info().rss)
    assert data.recorded[0].size() > 20e6
    assert max(resident) - resident[0] < 0.1 * data.recorded[0].size()


# ---- the folder ----


def folder_of(data: TrainingData) -> RecordingFolder:
    assert data.recorded is not None
    assert data.recorded.train.path is not None
    return RecordingFolder(data.recorded.train.path)


def test_a_damaged_shard_raises_or_is_skipped_or_recorded_again(
    loaded: LoadedTarget,
) -> None:
    _, recorded = both(loaded)
    folder = folder_of(recorded)
    hashes = {
        shard: sha256_of(folder.shard_file(shard)) for shard in range(len(folder.shard_documents))
    }
    assert len(hashes) > 2
    file = folder.shard_file(1)
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    traces = f"data.traces={folder.path}"
    with pytest.raises(CorruptFile, match=r"shard-00001.* is damaged"):
        training_data(loaded, config(traces))
    fewer = training_data(loaded, config(traces, "record.damaged=skip"))
    assert len(fewer.documents) == len(recorded.documents) - folder.shard_documents[1]
    assert record(config(traces, "record.damaged=again")) == 0
    assert {s: sha256_of(folder.shard_file(s)) for s in hashes} == hashes
    training_data(loaded, config(traces))


def test_progress_counts_conversations_not_files(loaded: LoadedTarget) -> None:
    """Also of a recording of one file."""
    console = ReportConsole(file=io.StringIO(), force_terminal=True, color_system=None, width=160)
    settings = config("data.mode=recorded", "record.shard=1000000")
    data = load_training_data(settings, loaded, (1, 3, 4), Reporter(console))
    text, count = console.file.getvalue(), len(data.documents)  # type: ignore[attr-defined]
    assert f"{count}/{count} conversations" in text
    assert "1/1" not in text


def test_training_from_an_unfinished_recording_raises(loaded: LoadedTarget) -> None:
    _, recorded = both(loaded)
    folder = folder_of(recorded)
    folder.mark_missing(2)
    with pytest.raises(
        CorruptFile, match=r"shard-00002.*has not been written\.\n.*outrider record"
    ):
        training_data(loaded, config(f"data.traces={folder.path}"))


def test_shares_of_two_machines_equal_the_recording_of_one(
    loaded: LoadedTarget, tmp_path: Path
) -> None:
    single, shared = tmp_path / "single", tmp_path / "shared"
    record(config(f"data.traces={single}"))
    record(config(f"data.traces={shared}", "record.share=1/2"))
    assert RecordingFolder(shared).missing_shards()
    record(config(f"data.traces={shared}", "record.share=2/2"))
    assert not RecordingFolder(shared).missing_shards()
    assert bytes_in(single) == bytes_in(shared)


def bytes_in(folder: Path) -> dict[str, str]:
    return {file.name: sha256_of(file) for file in folder.iterdir() if file.name[0] != "."}


def test_an_existing_folder_keeps_its_shard_sizes(loaded: LoadedTarget, tmp_path: Path) -> None:
    """record.shard of a continued recording has no effect."""
    single, shared = tmp_path / "single", tmp_path / "shared"
    record(config(f"data.traces={single}"))
    record(config(f"data.traces={shared}", "record.share=1/2"))
    record(config(f"data.traces={shared}", "record.share=2/2", "record.shard=300"))
    assert bytes_in(single) == bytes_in(shared)


def test_drafters_that_read_the_same_share_a_recording(
    loaded: LoadedTarget,
) -> None:
    """Depth and held-out share do not matter."""
    words = ("data.mode=recorded", "drafter=eagle")
    first = folder_of(training_data(loaded, config(*words)))
    for more in ("drafter.depths=5", "data.holdout=0.3", "record.shard=900"):
        assert folder_of(training_data(loaded, config(*words, more))).path == first.path
    assert folder_of(training_data(loaded, config(*words, "record.top=4"))).path != first.path


def test_other_folders_raise(loaded: LoadedTarget, tmp_path: Path) -> None:
    """Run folders and stores of self-generated text also have a manifest."""
    (tmp_path / "manifest.json").write_text('{"shards": {}, "taps": []}')
    with pytest.raises(RunError, match="holds something else"):
        training_data(loaded, config(f"data.traces={tmp_path}"))


def test_continuing_a_run_from_another_recording_raises(
    loaded: LoadedTarget, tmp_path: Path
) -> None:
    full, small, run = (tmp_path / name for name in ("full", "small", "run"))
    record(config(f"data.traces={full}"))
    record(config(f"data.traces={small}", "record.states=int8"))
    settings = runs.config(run, f"data.traces={full}", "train.max_steps=1")
    loop.fit(settings, loaded, training_data(loaded, settings), QUIET)
    other = runs.config(run, f"data.traces={small}", "train.max_steps=2")
    with pytest.raises(RunError, match=r"was trained from .*full.*bf16.* continue from .*int8"):
        loop.fit(other, loaded, training_data(loaded, other), QUIET)
    moved = full.rename(tmp_path / "moved")
    again = runs.config(run, f"data.traces={moved}", "train.max_steps=2")
    assert loop.fit(again, loaded, training_data(loaded, again), QUIET) is not None


def test_text_limits_apply_to_recordings(loaded: LoadedTarget, tmp_path: Path) -> None:
    record(config(f"data.traces={tmp_path}"))
    words = ("data.max_samples=12", "data.max_length=40", "data.shortest=9")
    limited = training_data(loaded, config(f"data.traces={tmp_path}", *words))
    used, whole = len(limited.documents), RecordingFolder(tmp_path).manifest["source"]["cases"]
    assert 0 < used < 12
    cases = {**whole, "used": used, "not selected": whole["used"] - used}
    assert limited.about["cases"] == cases
    assert limited.about["documents"] == used
    assert all(document.answer.sum() >= 9 for document in limited.documents)
    batch = first_batch(limited)
    assert limited.recorded is not None
    stored, computed = limited.recorded[0].trace(batch).taps, loaded.target.trace(*batch).taps
    inside = batch.document >= 0
    torch.testing.assert_close(stored[inside].float(), computed[inside], rtol=0.02, atol=0.02)


def test_the_doctor_accepts_a_recording(loaded: LoadedTarget, tmp_path: Path) -> None:
    record(config(f"data.traces={tmp_path / 'traces'}"))
    settings = config(f"data.traces={tmp_path / 'traces'}", f"run.dir={tmp_path / 'run'}")
    (finding,) = probed.check_recording(
        Trainer(settings, loaded, training_data(loaded, settings), begin=False)
    )
    assert finding.state == "ok", finding.message


def test_nan_error_names_the_document(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "compare_with_plain_forward", lambda *_: Difference(0.0, 0.0, 1.0))
    original = type(loaded.target).trace

    def overflown(self: Any, *fields: Any) -> Trace:
        trace = original(self, *fields)
        return replace(trace, taps=trace.taps.masked_fill(trace.taps > 0.5, float("inf")))

    monkeypatch.setattr(type(loaded.target), "trace", overflown)
    with pytest.raises(RunError, match=r"document .*NaN or infinity"):
        record(config(f"data.traces={tmp_path}"))


def test_another_target_taps_or_text_raises(loaded: LoadedTarget, tmp_path: Path) -> None:
    record(config(f"data.traces={tmp_path}"))
    with pytest.raises(RunError, match="was recorded with documents = "):
        record(config(f"data.traces={tmp_path}", "data.max_samples=20"))
    with pytest.raises(RunError, match="holds the outputs of layers"):
        training_data(loaded, config(f"data.traces={tmp_path}", "drafter.taps=[0,2,3]"))
    with pytest.raises(ConfigError, match=r"for drafters that read taps.* and eagle reads last"):
        training_data(loaded, config(f"data.traces={tmp_path}", "drafter=eagle"))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "target": "another"}))
    with pytest.raises(RunError, match="was recorded with target = 'another'"):
        training_data(loaded, config(f"data.traces={tmp_path}"))


def test_states_of_wrong_rows_raise_before_anything_is_written(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulated batching bug: each row has its neighbour's states."""
    original = type(loaded.target).trace

    def shifted(self: Any, *fields: Any) -> Trace:
        trace = original(self, *fields)
        return Trace(**{**vars(trace), "taps": trace.taps.roll(1, 1)})

    monkeypatch.setattr(type(loaded.target), "trace", shifted)
    with pytest.raises(RunError, match="outputs other states of document"):
        record(config(f"data.traces={tmp_path}"))
    assert not list(tmp_path.glob("shard-*"))


def test_a_recording_larger_than_the_limit_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.max_gb = 0\.001\n.*takes \d\.\d MB"):
        record(config(f"data.traces={tmp_path}", "data.max_gb=0.001"))
    assert not list(tmp_path.iterdir()), "the folder stays empty for smaller settings"


@pytest.mark.parametrize("words", [(), ("record=small", "data.max_samples=60")])
def test_size_estimate_is_close_to_the_written_size(tmp_path: Path, words: tuple[str, ...]) -> None:
    settings = config(f"data.traces={tmp_path}", *words)
    record(settings)
    loaded = load_target(settings.target)
    loaded.target.set_taps(drafters.resolve_taps(settings.drafter, loaded.target.num_layers))
    folder = RecordingFolder(tmp_path)
    data = training_data(loaded, config("data.mode=online", *words))
    recorder = writer.Recorder(settings, loaded, data, Reporter.silent())
    assert recorder.size() == pytest.approx(folder.size(), rel=0.1)


KILLS = """
import os, random, signal, sys
from pathlib import Path
import outrider.data.record.writer, outrider.models.target.load
from outrider.launch.cli import main

single, killed, ranks, *words = sys.argv[1:]
rename = Path.replace

def dying(moment):
    count = 0
    def replace(self, target):
        nonlocal count
        count += 1
        if count == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)
    return replace

def run(folder, moment):
    if (child := os.fork()) == 0:
        Path.replace = dying(moment)
        os._exit(main(["record", f"data.traces={folder}", *words]))
    return os.waitpid(child, 0)[1]

generator = random.Random(0)
codes = [run(killed, generator.randint(1, 5)) for _ in range(10)]
print(codes, run(killed, 0), run(single, 0))

def rank(number):
    if (child := os.fork()) == 0:
        os.environ |= {"RANK": str(number), "WORLD_SIZE": "2"}
        os._exit(main(["record", f"data.traces={ranks}", *words]))
    return child

print([os.waitpid(child, 0)[1] for child in [rank(1), rank(0)]])
"""


@pytest.mark.slow
def test_recording_killed_ten_times_and_resumed_is_byte_identical(tmp_path: Path) -> None:
    """SIGKILL before a rename leaves a shard without its json, or no manifest."""
    single, killed, ranks = (tmp_path / name for name in ("single", "killed", "ranks"))
    small = ("record.shard=100", "record=small", "data.max_samples=50")
    folders = [str(folder) for folder in (single, killed, ranks)]
    command = [sys.executable, "-c", KILLS, *folders, *WORDS, *small]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{[9] * 10} 0 0" in done.stdout.splitlines()
    assert bytes_in(killed) == bytes_in(single)
    assert done.stdout.splitlines()[-1] == "[0, 0]"
    assert bytes_in(ranks) == bytes_in(single), "two ranks write the same bytes as one"
    assert not list(killed.glob(".*")), "no temporary files are left"


# ---- hybrid ----


def trace_cache(loaded: LoadedTarget, folder: Path, budget: float) -> TraceCache:
    settings = config()
    loaded.target.set_taps(drafters.resolve_taps(settings.drafter, loaded.target.num_layers))
    default = TraceCache.from_config(settings, loaded.target, {})
    return TraceCache(folder, default.layout, loaded.target, budget)


def test_hybrid_runs_the_target_once_per_row(loaded: LoadedTarget, tmp_path: Path) -> None:
    data = training_data(loaded, config("data.mode=online"))
    source, batch = trace_cache(loaded, tmp_path / "kept" / RUN, 1e9), first_batch(data)
    once = source.trace(batch)
    again = trace_cache(loaded, tmp_path / "kept" / RUN, 1e9)
    twice = again.trace(batch)
    assert (source.misses, again.misses, again.hits) == (2, 0, 2)
    assert torch.equal(once.taps, twice.taps)
    assert torch.equal(once.last, twice.last)


def test_hybrid_stores_what_fits_and_evicts_rows_of_earlier_runs(
    loaded: LoadedTarget, tmp_path: Path
) -> None:
    data = training_data(loaded, config("data.mode=online"))
    batches = [select_rows(data.train, torch.tensor([i])) for i in range(4)]
    older, sizes = trace_cache(loaded, tmp_path / "kept" / RUN, 1e9), list[int]()
    for batch in batches:
        before = older.size()
        older.trace(batch)
        sizes.append(older.size() - before)
    budget = sizes[0] + sizes[1] + 0.5 * min(sizes)
    newer = trace_cache(loaded, tmp_path / "kept" / f"{1:016x}", budget)
    for batch in batches:
        newer.trace(batch)
    assert older.size() == 0, "least recently used"
    assert newer.size() <= budget
    for batch in batches:
        newer.trace(batch)
    assert newer.hits == 2, "rows of this run do not evict each other"


def test_hybrid_does_not_evict_rows_of_an_earlier_start_of_this_run(
    loaded: LoadedTarget, tmp_path: Path
) -> None:
    """The budget holds two of four rows; two are stored by an earlier start and the others are
    requested first.
    """
    data, folder = training_data(loaded, config("data.mode=online")), tmp_path / "kept" / RUN
    batches = [select_rows(data.train, torch.tensor([i])) for i in range(4)]
    killed = trace_cache(loaded, folder, 1e9)
    for batch in batches[:2]:
        killed.trace(batch)
    again = trace_cache(loaded, folder, float(killed.size()))
    again.touch_rows(data.train)
    for batch in reversed(batches):
        again.trace(batch)
    assert (again.hits, again.misses) == (2, 2)
    assert again.size() == killed.size()


def test_hybrid_stores_nothing_on_a_full_disk(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training continues: missing rows are computed again."""
    data = training_data(loaded, config("data.mode=online"))
    source, batch = trace_cache(loaded, tmp_path / "kept" / RUN, 1e9), first_batch(data)

    def full(*_: Any) -> str:
        raise DiskFull("full")

    monkeypatch.setattr(cache, "write_tensors", full)
    once, twice = source.trace(batch), source.trace(batch)
    assert torch.equal(once.taps, twice.taps)
    assert (source.hits, source.misses, source.size()) == (0, 4, 0)


def test_hybrid_recomputes_damaged_rows(loaded: LoadedTarget, tmp_path: Path) -> None:
    data = training_data(loaded, config("data.mode=online"))
    source, batch = trace_cache(loaded, tmp_path / "kept" / RUN, 1e9), first_batch(data)
    once = source.trace(batch)
    for file in (tmp_path / "kept" / RUN).iterdir():
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
    again = trace_cache(loaded, tmp_path / "kept" / RUN, 1e9)
    assert torch.equal(again.trace(batch).taps, once.taps)
    assert (again.hits, again.misses) == (0, 2)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("data.mode=hybrid", "record.top=8"), "data.mode"),
        (("data.mode=hybrid", "record.states=coded"), "data.mode"),
        (("data.mode=online", "data.traces=x"), "data.mode"),
        (("record.share=3/2",), "record"),
        (("record.share=0/2",), "record"),
    ],
)
def test_contradicting_settings_raise(words: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(*words)
    assert caught.value.key.startswith(key)


def test_coded_states_raise_where_they_are_the_teacher(loaded: LoadedTarget) -> None:
    with pytest.raises(ConfigError, match=r"record\.states = 'coded'\n.*eagle reads the states"):
        training_data(loaded, config("data.mode=recorded", "drafter=eagle", "record.states=coded"))
