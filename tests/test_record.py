"""Recorded traces: the same training as online, from files that cannot be wrong in silence."""

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
from outrider.conf.errors import ConfigError, CorruptFile, DiskFull, RunError
from outrider.conf.files import sha256_of
from outrider.conf.schema import Config
from outrider.data.batches import gather
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
from outrider.models import load as load_models
from outrider.models.interface import Batch, TopKTeacher, Trace
from outrider.models.load import LoadedTarget, load_target
from outrider.models.target import Target
from outrider.models.vocab import DraftVocab
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
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return load_target(parse(compose(["target=tiny"])).target)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def config(*words: str) -> Config:
    return parse(compose([*WORDS, *words]))


def prepared(loaded: LoadedTarget, asked: Config) -> TrainingData:
    taps = drafters.resolve_taps(asked.drafter, loaded.target.num_layers)
    return load_training_data(asked, loaded, taps, Reporter.silent())


def both(loaded: LoadedTarget, *words: str) -> tuple[TrainingData, TrainingData]:
    """The same text, online and recorded."""
    online = prepared(loaded, config("data.mode=online", *words))
    return online, prepared(loaded, config("data.mode=recorded", *words))


def first_batch(made: TrainingData, rows: int = 2) -> Batch:
    return gather(made.train, torch.arange(rows))


def loss_of(loaded: LoadedTarget, made: TrainingData, asked: Config, trace: Trace) -> torch.Tensor:
    """Of an untrained drafter, which only the seed decides."""
    cfg: Any = asked.drafter
    torch.manual_seed(0)
    loaded.target.set_taps(drafters.resolve_taps(cfg, loaded.target.num_layers))
    drafter = drafters.build(cfg, loaded.target, made.vocab(cfg.draft_vocab_size)).eval()
    weights = parse_depth_weights(cfg.depth_weights, cfg.depths)
    objective = Objective(drafter, loaded.target, weights=weights, loss=cfg.loss)
    loss: torch.Tensor = objective(trace, torch.full((cfg.depths,), 50.0))[0]
    return loss.detach()


@pytest.mark.parametrize("name", drafters.names())
def test_every_drafter_learns_from_a_recording_what_it_learns_online(
    loaded: LoadedTarget, name: str
) -> None:
    """Kept as computed, every row a drafter reads or is judged by is there: the loss is the same
    up to the rounding of other batches.
    """
    words = (f"drafter={name}", "record.states=same")
    online, recorded = both(loaded, *words)
    batch = first_batch(online)
    assert recorded.recorded is not None
    assert online.about["sha256_documents"] == recorded.about["sha256_documents"]
    told = recorded.recorded[0].trace(batch)
    real = loaded.target.trace(*batch)
    pair = [loss_of(loaded, m, config(*words), t) for m, t in ((online, real), (recorded, told))]
    torch.testing.assert_close(pair[1], pair[0], rtol=1e-5, atol=1e-6)
    judged = real.supervised_mask(1)
    rows = torch.roll(judged, 1, dims=1)  # row t + 1 judges the guess of row t
    assert told.top1_ids is not None
    favourites = loaded.target.logits(real.last[rows]).argmax(-1)
    assert torch.equal(told.top1_ids[rows], favourites)


@pytest.mark.parametrize("states", ["bf16", "int8", "coded"])
def test_the_error_of_each_encoding_is_bounded(loaded: LoadedTarget, states: str) -> None:
    online, recorded = both(loaded, f"record.states={states}")
    assert recorded.recorded is not None
    batch = first_batch(online)
    told, real = recorded.recorded[0].trace(batch), loaded.target.trace(*batch)
    inside = batch.document >= 0
    error = (told.taps - real.taps)[inside].norm() / real.taps[inside].norm()
    assert 0 < error < {
        "bf16": 0.004, "int8": 0.01, "coded": 0.25
    }[states]  # fmt: skip


def test_a_top_k_teacher_is_near_the_full_one(loaded: LoadedTarget) -> None:
    """Its likely tokens are exact (to 11 bits), the rest keeps its share; the loss is near."""
    words = ("record.top=64", "drafter.draft_vocab_size=1000", "record.states=same")
    online, recorded = both(loaded, *words)
    assert recorded.recorded is not None
    batch = first_batch(online)
    told, real = recorded.recorded[0].trace(batch), loaded.target.trace(*batch)
    assert told.topk_teacher is not None
    assert told.last.shape[-1] == 0
    rows = torch.roll(real.supervised_mask(1), 1, dims=1)
    vocab = recorded.vocab(1000)
    logits = loaded.target.logits(real.last[rows])
    few = TopKTeacher(*(part[rows] for part in told.topk_teacher))
    spread, inside = few.scatter(len(vocab)), logits[:, vocab.target_ids]
    share = logits.softmax(-1)[:, vocab.target_ids].sum(-1)
    torch.testing.assert_close(few.share, share, rtol=2e-3, atol=1e-6)
    torch.testing.assert_close(spread.sum(-1), torch.ones(len(inside)), rtol=2e-3, atol=0)
    kept = inside.softmax(-1).topk(64).values
    torch.testing.assert_close(spread.topk(64).values, kept, rtol=2e-3, atol=1e-6)
    asked = config(*words)
    pair = [loss_of(loaded, m, asked, t) for m, t in ((online, real), (recorded, told))]
    torch.testing.assert_close(pair[1], pair[0], rtol=0.02, atol=0)


def test_a_top_k_teacher_with_a_tiny_share_keeps_its_distribution(
    loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share is below the range of 16 bits; it is stored as a separate factor."""
    target, places = loaded.target, torch.tensor([1200, 3, 7])
    head = torch.full((target.vocab_size,), -60.0).scatter(0, places, torch.tensor([9.0, -20, -21]))
    monkeypatch.setattr(target, "logits", lambda rows: head.expand(len(rows), -1))
    vocab, hidden = DraftVocab(torch.arange(1000), target.vocab_size), target.shape().hidden
    layout = Layout("ids", "same", (), hidden, top=2, vocab=vocab.target_ids)
    kept = RowSelection(torch.zeros(1).bool(), torch.ones(1).bool())
    rows = torch.zeros(1, 0), torch.zeros(1, hidden)
    said = layout.decode(layout.encode(target, kept, *rows, with_last_states=False), kept)
    assert said.top is not None
    told = Teacher(target, vocab, renormalise=True).from_recording(said.top, said.argmax)
    torch.testing.assert_close(told.p[0], head[:1000].softmax(-1), rtol=1e-3, atol=1e-6)
    assert told.p_full.sum() < 1e-9
    assert said.argmax.tolist() == [1200]


def test_held_out_text_keeps_its_last_states_with_record_top(loaded: LoadedTarget) -> None:
    """Held-out metrics compare with the full teacher."""
    online, recorded = both(loaded, "record.top=8", "record.states=same")
    assert recorded.recorded is not None
    held = gather(online.held, torch.tensor([0]))
    told, real = recorded.recorded[1].trace(held), loaded.target.trace(*held)
    assert told.topk_teacher is None
    rows = torch.roll(real.supervised_mask(1), 1, dims=1)
    torch.testing.assert_close(told.last[rows], real.last[rows], rtol=1e-4, atol=1e-4)
    assert [source.has_last_states for source in recorded.recorded] == [False, True]
    with pytest.raises(ConfigError, match=r"data\.holdout=0\.2"):
        prepared(loaded, config(f"data.traces={recorded.recorded[0].path}", "data.holdout=0.4",
                                "record.top=8"))  # fmt: skip


def test_first_weights_are_fitted_online_without_recorded_last_states(
    loaded: LoadedTarget, tmp_path: Path
) -> None:
    """The target runs for them."""
    words = ("data.mode=recorded", "record.top=8", "train.max_steps=1")
    asked = runs.config(tmp_path, *words)
    made = prepared(loaded, asked)
    assert made.recorded is not None
    assert not made.recorded[0].has_last_states
    assert "linear fit" in Trainer(asked, loaded, made).initialisation


def taps_of_shorter_rows(loaded: LoadedTarget, *words: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a recording that is read in rows of another length, documents cut or whole; and real."""
    _, recorded = both(loaded, *words)
    assert recorded.recorded is not None
    where = recorded.recorded[0].path
    shorter = prepared(loaded, config(f"data.traces={where}", "data.max_length=64"))
    assert shorter.recorded is not None
    batch = first_batch(shorter)
    told, real = shorter.recorded[0].trace(batch), loaded.target.trace(*batch)
    inside = batch.document >= 0
    return told.taps[inside], real.taps[inside]


def test_a_recording_is_read_in_any_packing(loaded: LoadedTarget) -> None:
    told, real = taps_of_shorter_rows(loaded, "record.states=same")
    torch.testing.assert_close(told, real, rtol=1e-4, atol=1e-4)


def test_the_beginning_of_a_coded_document_is_read(loaded: LoadedTarget) -> None:
    """Its bytes are those of all its rows; the first of them are the same as in whole documents."""
    told, real = taps_of_shorter_rows(loaded, "record.states=coded", "record.top=8")
    error = (told - real).norm() / real.norm()
    assert 1e-6 < error < 0.25


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss@1"] for line in lines if line["kind"] in ("train", "held")]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_from_a_recording_equals_the_online_run(
    loaded: LoadedTarget, tmp_path: Path, workers: int
) -> None:
    """Six steps with evaluations: the loss curves are equal up to rounding, read ahead or not."""
    curves = []
    for mode in ("online", "recorded"):
        words = (f"data.mode={mode}", "record.states=same", f"data.workers={workers}")
        asked = runs.config(tmp_path / mode, *words)
        taps = drafters.resolve_taps(asked.drafter, loaded.target.num_layers)
        loop.fit(asked, loaded, load_training_data(asked, loaded, taps, Reporter.silent()), QUIET)
        curves.append(losses(tmp_path / mode))
    assert len(curves[0]) > 6
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "words"), [("eagle3", ()), ("mtp", ()), ("eagle3", ("record=small",))]
)
def test_the_ends_of_a_target_are_enough(
    loaded: LoadedTarget, tmp_path: Path, name: str, words: tuple[str, ...]
) -> None:
    """Trained from a recording with its embedding and head alone: the same weights."""
    init = "drafter.init=random" if words else "drafter.init=linear"
    words = (*words, f"drafter={name}", init, f"data.traces={tmp_path / 'traces'}")
    record(runs.config(tmp_path, *words))
    drafts = []
    for place in ("replicated", "ends"):
        asked = runs.config(tmp_path / place, *words, f"target.place={place}")
        own = load_target(asked.target)
        assert own.target.ends_only == (place == "ends")
        taps = drafters.resolve_taps(asked.drafter, own.target.num_layers)
        loop.fit(asked, own, load_training_data(asked, own, taps, Reporter.silent()), QUIET)
        drafts.append(load_file(tmp_path / place / "drafter" / "model.safetensors"))
    assert drafts[0].keys() == drafts[1].keys()
    assert all(torch.equal(drafts[0][key], drafts[1][key]) for key in drafts[0])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text"])
def test_the_ends_of_any_family_are_those_of_the_whole(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    shape = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    family = AutoConfig.for_model(kind, **sizes, **shape)
    AutoModelForCausalLM.from_config(family).save_pretrained(tmp_path)
    words = ("target=hf", f"target.path={tmp_path}", "data.traces=x", "train.quick_eval=false")
    place, told = str(tmp_path), config(*words).target
    whole = Target(load_models._load_model(place, told))
    ends = Target(load_models._load_ends(place, told, torch.device("cpu")))
    states, ids = torch.randn(3, 32), torch.arange(9)
    assert torch.equal(ends.logits(states), whole.logits(states))
    assert torch.equal(ends.embed(ids), whole.embed(ids))
    assert ends.shape() == whole.shape()
    assert ends.ends_only
    assert "UNEXPECTED" not in capfd.readouterr().err


def test_what_the_ends_are_not_enough_for_is_refused(loaded: LoadedTarget, tmp_path: Path) -> None:
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
def test_reading_holds_no_rows_in_memory(loaded: LoadedTarget, tmp_path: Path) -> None:
    """Resident memory is the same after the second epoch as after the first, a recording's size
    less than if its files stayed open.
    """
    words = ("data.max_samples=300", f"data.traces={tmp_path}", "record.shard=2000")
    record(config(*words))
    made, resident = prepared(loaded, config(*words)), list[int]()
    assert made.recorded is not None
    for _ in range(3):
        for index in torch.arange(len(made.train)).split(4):
            made.recorded[0].trace(gather(made.train, index))
        resident.append(psutil.Process().memory_info().rss)
    assert made.recorded[0].size() > 20e6
    assert max(resident) - resident[0] < 0.1 * made.recorded[0].size()


# ---- the folder ----


def folder_of(made: TrainingData) -> RecordingFolder:
    assert made.recorded is not None
    assert made.recorded.train.path is not None
    return RecordingFolder(made.recorded.train.path)


def test_a_damaged_file_is_named_and_skipped_or_recorded_again_on_request(
    loaded: LoadedTarget,
) -> None:
    _, recorded = both(loaded)
    folder = folder_of(recorded)
    whole = {
        shard: sha256_of(folder.shard_file(shard)) for shard in range(len(folder.shard_documents))
    }
    assert len(whole) > 2
    file = folder.shard_file(1)
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    from_it = f"data.traces={folder.path}"
    with pytest.raises(CorruptFile, match=r"shard-00001.* is damaged"):
        prepared(loaded, config(from_it))
    fewer = prepared(loaded, config(from_it, "record.damaged=skip"))
    assert len(fewer.documents) == len(recorded.documents) - folder.shard_documents[1]
    assert record(config(from_it, "record.damaged=again")) == 0
    assert {s: sha256_of(folder.shard_file(s)) for s in whole} == whole
    prepared(loaded, config(from_it))


def test_an_unfinished_recording_is_not_trained_from(loaded: LoadedTarget) -> None:
    _, recorded = both(loaded)
    folder = folder_of(recorded)
    folder.mark_missing(2)
    with pytest.raises(
        CorruptFile, match=r"shard-00002.*has not been written\.\n.*outrider record"
    ):
        prepared(loaded, config(f"data.traces={folder.path}"))


def test_machines_write_side_by_side_what_one_writes_alone(
    loaded: LoadedTarget, tmp_path: Path
) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    record(config(f"data.traces={alone}"))
    record(config(f"data.traces={shared}", "record.share=1/2"))
    assert RecordingFolder(shared).missing_shards()
    record(config(f"data.traces={shared}", "record.share=2/2"))
    assert not RecordingFolder(shared).missing_shards()
    assert bytes_in(alone) == bytes_in(shared)


def bytes_in(folder: Path) -> dict[str, str]:
    return {file.name: sha256_of(file) for file in folder.iterdir() if file.name[0] != "."}


def test_an_existing_folder_keeps_its_shard_sizes(loaded: LoadedTarget, tmp_path: Path) -> None:
    """record.shard of a continued recording has no effect."""
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    record(config(f"data.traces={alone}"))
    record(config(f"data.traces={shared}", "record.share=1/2"))
    record(config(f"data.traces={shared}", "record.share=2/2", "record.shard=300"))
    assert bytes_in(alone) == bytes_in(shared)


def test_drafters_that_read_the_same_share_a_recording(
    loaded: LoadedTarget,
) -> None:
    """Depth and held-out share do not matter."""
    words = ("data.mode=recorded", "drafter=eagle")
    first = folder_of(prepared(loaded, config(*words)))
    for more in ("drafter.depths=5", "data.holdout=0.3", "record.shard=900"):
        assert folder_of(prepared(loaded, config(*words, more))).path == first.path
    assert folder_of(prepared(loaded, config(*words, "record.top=4"))).path != first.path


def test_other_folders_are_not_read_as_recordings(loaded: LoadedTarget, tmp_path: Path) -> None:
    """Run folders, and those of a target's own text, have a manifest too."""
    (tmp_path / "manifest.json").write_text('{"shards": {}, "taps": []}')
    with pytest.raises(RunError, match="holds something else"):
        prepared(loaded, config(f"data.traces={tmp_path}"))


def test_a_run_does_not_go_on_from_another_recording(loaded: LoadedTarget, tmp_path: Path) -> None:
    full, small, run = (tmp_path / name for name in ("full", "small", "run"))
    record(config(f"data.traces={full}"))
    record(config(f"data.traces={small}", "record.states=int8"))
    asked = runs.config(run, f"data.traces={full}", "train.max_steps=1")
    loop.fit(asked, loaded, prepared(loaded, asked), QUIET)
    other = runs.config(run, f"data.traces={small}", "train.max_steps=2")
    with pytest.raises(RunError, match=r"was trained from .*full.*bf16.* continue from .*int8"):
        loop.fit(other, loaded, prepared(loaded, other), QUIET)
    moved = full.rename(tmp_path / "moved")
    again = runs.config(run, f"data.traces={moved}", "train.max_steps=2")
    assert loop.fit(again, loaded, prepared(loaded, again), QUIET) is not None


def test_text_limits_hold_for_recordings_too(loaded: LoadedTarget, tmp_path: Path) -> None:
    record(config(f"data.traces={tmp_path}"))
    words = ("data.max_samples=12", "data.max_length=40", "data.shortest=9")
    told = prepared(loaded, config(f"data.traces={tmp_path}", *words))
    assert 0 < len(told.documents) < 12
    assert all(document.answer.sum() >= 9 for document in told.documents)
    batch = first_batch(told)
    assert told.recorded is not None
    taps, real = told.recorded[0].trace(batch).taps, loaded.target.trace(*batch).taps
    inside = batch.document >= 0
    torch.testing.assert_close(taps[inside].float(), real[inside], rtol=0.02, atol=0.02)


def test_the_doctor_finds_a_recording_sound(loaded: LoadedTarget, tmp_path: Path) -> None:
    record(config(f"data.traces={tmp_path / 'traces'}"))
    asked = config(f"data.traces={tmp_path / 'traces'}", f"run.dir={tmp_path / 'run'}")
    (finding,) = probed.recording(Trainer(asked, loaded, prepared(loaded, asked), begin=False))
    assert finding.state == "ok", finding.message


def test_a_nan_names_its_document(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "compare_with_plain_forward", lambda *_: Difference(0.0, 0.0, 1.0))
    real = type(loaded.target).trace

    def overflown(self: Any, *fields: Any) -> Trace:
        trace = real(self, *fields)
        return replace(trace, taps=trace.taps.masked_fill(trace.taps > 0.5, float("inf")))

    monkeypatch.setattr(type(loaded.target), "trace", overflown)
    with pytest.raises(RunError, match=r"document .*NaN or infinity"):
        record(config(f"data.traces={tmp_path}"))


def test_another_target_taps_or_text_is_refused(loaded: LoadedTarget, tmp_path: Path) -> None:
    record(config(f"data.traces={tmp_path}"))
    with pytest.raises(RunError, match="was recorded with documents = "):
        record(config(f"data.traces={tmp_path}", "data.max_samples=20"))
    with pytest.raises(RunError, match="holds the outputs of layers"):
        prepared(loaded, config(f"data.traces={tmp_path}", "drafter.taps=[0,2,3]"))
    with pytest.raises(ConfigError, match=r"for drafters that read taps.* and eagle reads last"):
        prepared(loaded, config(f"data.traces={tmp_path}", "drafter=eagle"))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "target": "another"}))
    with pytest.raises(RunError, match="was recorded with target = 'another'"):
        prepared(loaded, config(f"data.traces={tmp_path}"))


def test_states_of_the_wrong_rows_are_found_before_anything_is_written(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a batching bug would give them: each row has its neighbour's states."""
    real = type(loaded.target).trace

    def shifted(self: Any, *fields: Any) -> Trace:
        trace = real(self, *fields)
        return Trace(**{**vars(trace), "taps": trace.taps.roll(1, 1)})

    monkeypatch.setattr(type(loaded.target), "trace", shifted)
    with pytest.raises(RunError, match="outputs other states of document"):
        record(config(f"data.traces={tmp_path}"))
    assert not list(tmp_path.glob("shard-*"))


def test_a_recording_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.max_gb = 0\.001\n.*takes \d\.\d MB"):
        record(config(f"data.traces={tmp_path}", "data.max_gb=0.001"))
    assert not list(tmp_path.iterdir()), "so that smaller settings may begin there"


@pytest.mark.parametrize("words", [(), ("record=small", "data.max_samples=60")])
def test_the_estimate_is_what_is_written(tmp_path: Path, words: tuple[str, ...]) -> None:
    asked = config(f"data.traces={tmp_path}", *words)
    record(asked)
    loaded = load_target(asked.target)
    loaded.target.set_taps(drafters.resolve_taps(asked.drafter, loaded.target.num_layers))
    folder = RecordingFolder(tmp_path)
    made = prepared(loaded, config("data.mode=online", *words))
    work = writer.Recorder(asked, loaded, made, Reporter.silent())
    assert work.size() == pytest.approx(folder.size(), rel=0.1)


KILLS = """
import os, random, signal, sys
from pathlib import Path
import outrider.data.record.writer, outrider.models.load
from outrider.launch.cli import main

alone, torn, ranks, *words = sys.argv[1:]
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

chance = random.Random(0)
killed = [run(torn, chance.randint(1, 5)) for _ in range(10)]
print(killed, run(torn, 0), run(alone, 0))

def rank(number):
    if (child := os.fork()) == 0:
        os.environ |= {"RANK": str(number), "WORLD_SIZE": "2"}
        os._exit(main(["record", f"data.traces={ranks}", *words]))
    return child

print([os.waitpid(child, 0)[1] for child in [rank(1), rank(0)]])
"""


@pytest.mark.slow
def test_killed_at_ten_random_moments_and_resumed_it_is_byte_identical(tmp_path: Path) -> None:
    """By SIGKILL, in front of a rename: a shard without its json, a json without its name, a
    manifest that is not there yet.
    """
    alone, torn, ranks = (tmp_path / name for name in ("alone", "torn", "ranks"))
    small = ("record.shard=100", "record=small", "data.max_samples=50")
    places = [str(place) for place in (alone, torn, ranks)]
    command = [sys.executable, "-c", KILLS, *places, *WORDS, *small]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{[9] * 10} 0 0" in done.stdout.splitlines()
    assert bytes_in(torn) == bytes_in(alone)
    assert done.stdout.splitlines()[-1] == "[0, 0]"
    assert bytes_in(ranks) == bytes_in(alone), "two ranks write side by side what one writes"
    assert not list(torn.glob(".*")), "nothing half written is left"


# ---- hybrid ----


def kept(loaded: LoadedTarget, folder: Path, budget: float) -> TraceCache:
    asked = config()
    loaded.target.set_taps(drafters.resolve_taps(asked.drafter, loaded.target.num_layers))
    begun = TraceCache.from_config(asked, loaded.target, {})
    return TraceCache(folder, begun.layout, loaded.target, budget)


def test_hybrid_runs_the_target_once_per_row(loaded: LoadedTarget, tmp_path: Path) -> None:
    made = prepared(loaded, config("data.mode=online"))
    source, batch = kept(loaded, tmp_path / "kept" / "a", 1e9), first_batch(made)
    once = source.trace(batch)
    again = kept(loaded, tmp_path / "kept" / "a", 1e9)
    twice = again.trace(batch)
    assert (source.misses, again.misses, again.hits) == (2, 0, 2)
    assert torch.equal(once.taps, twice.taps)
    assert torch.equal(once.last, twice.last)


def test_hybrid_stores_what_fits_and_evicts_rows_of_earlier_runs(
    loaded: LoadedTarget, tmp_path: Path
) -> None:
    made = prepared(loaded, config("data.mode=online"))
    batches = [gather(made.train, torch.tensor([i])) for i in range(4)]
    older, sizes = kept(loaded, tmp_path / "kept" / "older", 1e9), list[int]()
    for batch in batches:
        before = older.size()
        older.trace(batch)
        sizes.append(older.size() - before)
    room = sizes[0] + sizes[1] + 0.5 * min(sizes)
    newer = kept(loaded, tmp_path / "kept" / "newer", room)
    for batch in batches:
        newer.trace(batch)
    assert older.size() == 0, "used longest ago"
    assert newer.size() <= room
    for batch in batches:
        newer.trace(batch)
    assert newer.hits == 2, "rows of this run did not make room for each other"


def test_hybrid_keeps_the_rows_of_an_earlier_start(loaded: LoadedTarget, tmp_path: Path) -> None:
    """Room for two of four rows, and two of an earlier start: they do not give way to the others,
    though those are asked for first.
    """
    made, where = prepared(loaded, config("data.mode=online")), tmp_path / "kept" / "a"
    batches = [gather(made.train, torch.tensor([i])) for i in range(4)]
    killed = kept(loaded, where, 1e9)
    for batch in batches[:2]:
        killed.trace(batch)
    again = kept(loaded, where, float(killed.size()))
    again.touch_rows(made.train)
    for batch in reversed(batches):
        again.trace(batch)
    assert (again.hits, again.misses) == (2, 2)
    assert again.size() == killed.size()


def test_hybrid_stores_nothing_on_a_full_disk(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training continues: missing rows are computed again."""
    made = prepared(loaded, config("data.mode=online"))
    source, batch = kept(loaded, tmp_path / "kept" / "a", 1e9), first_batch(made)

    def full(*_: Any) -> str:
        raise DiskFull("full")

    monkeypatch.setattr(cache, "write_tensors", full)
    once, twice = source.trace(batch), source.trace(batch)
    assert torch.equal(once.taps, twice.taps)
    assert (source.hits, source.misses, source.size()) == (0, 4, 0)


def test_hybrid_computes_again_what_is_damaged(loaded: LoadedTarget, tmp_path: Path) -> None:
    made = prepared(loaded, config("data.mode=online"))
    source, batch = kept(loaded, tmp_path / "kept" / "a", 1e9), first_batch(made)
    once = source.trace(batch)
    for file in (tmp_path / "kept" / "a").iterdir():
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
    again = kept(loaded, tmp_path / "kept" / "a", 1e9)
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
def test_settings_that_contradict_each_other(words: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(*words)
    assert caught.value.key.startswith(key)


def test_coded_states_are_refused_where_they_are_the_teacher(loaded: LoadedTarget) -> None:
    with pytest.raises(ConfigError, match=r"record\.states = 'coded'\n.*eagle reads the states"):
        prepared(loaded, config("data.mode=recorded", "drafter=eagle", "record.states=coded"))
