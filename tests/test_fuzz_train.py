"""Random mutations of a run's files: training reads them, falls back, or refuses with a message."""

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import strategies as st
from torch import nn

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.shown_text import for_terminal
from outrider.data.training_data import TrainingData
from outrider.launch import train
from outrider.models.target.load import LoadedTarget
from outrider.train import best_drafter, checkpoint, loop, resume
from outrider.train.bad_steps import BadStepGuard
from outrider.train.checkpoint import Progress
from outrider.train.metrics_log import MetricsLog
from outrider.train.schedule import fraction_done
from outrider.train.settings import parse, read_saved_config
from outrider.train.trainer import Trainer
from tests.mutations import fuzz, mutated_bytes, mutated_json, mutated_value, replace_file
from tests.runs import QUIET, config

pytestmark = pytest.mark.untyped  # files hold values of any type

SAVED = Progress(step=2, seconds=3.5, best=1.25, best_step=1, skipped=1, recent=[1.5, 2.0],
                 phases={"steps": 3.0, "held out": 0.5})  # fmt: skip
WEIGHTS = {
    "parameter.weight": torch.tensor([[1.0, 2.0]]), "exp_avg.weight": torch.zeros(1, 2),
    "exp_avg_sq.weight": torch.ones(1, 2),
}  # fmt: skip
METRICS = (
    b'{"step": 0, "kind": "held", "loss@1": 2.0}\n{"step": 0, "kind": "train", "lr": 0.001}\n'
    b'{"step": 3, "kind": "skipped", "skipped": 1.0}\n{"step": 4, "kind": "train", "lr": NaN}\n'
    b'{"step": 4, "ki'
)


def save(folder: Path, progress: Progress) -> Path:
    checkpoint.save(folder, WEIGHTS, progress, last=9, every=None)
    return folder / f"step-{progress.step:08d}"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints; those of step 2 are mutated."""
    folder = tmp_path_factory.mktemp("pair")
    save(folder, Progress(step=1))
    save(folder, SAVED)
    return folder


def pristine(kind: str) -> bytes:
    """Return a file of a checkpoint of step 2."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return (save(Path(folder), SAVED) / kind).read_bytes()


STATE, TENSORS = json.loads(pristine("state.json")), pristine("state.safetensors")
VERSION_1 = {
    "progress": {k: x for k, x in STATE["progress"].items() if k != "version"} | {"joules": None},
    "sha256": STATE["sha256"],
}
HEADER_BYTES = struct.unpack("<Q", TENSORS[:8])[0]
HEADER = json.loads(TENSORS[8 : 8 + HEADER_BYTES])


@st.composite
def mutated_header(draw: st.DrawFn) -> bytes:
    """Return the tensors with another header, whose length is right, or nearly."""
    header = draw(mutated_json(HEADER))
    length = len(header) + draw(st.sampled_from([0, 0, 0, 0, -1, 1, 2**40, 2**63]))
    return struct.pack("<Q", max(0, length)) + header + TENSORS[8 + HEADER_BYTES :]


def load(folder: Path) -> Progress:
    """Load the newest checkpoint that is not damaged, and use it as the loop does."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = SimpleNamespace(state=dict[Any, Any]())
    places = checkpoint.list_checkpoints(folder)
    progress, errors = checkpoint.load_newest(places, model, optimizer)
    assert progress.step == 2 - len(errors)
    BadStepGuard(progress, 9, 2.0).problem(1.0)
    with progress.phase("steps"):
        pass
    limits: Any = SimpleNamespace(max_steps=10, max_minutes=3.0)
    assert 0 <= fraction_done(limits, progress) < math.inf
    assert progress.best < 1e301
    json.dumps(vars(progress), allow_nan=False)
    assert model(torch.ones(1, 2)).shape == (1, 1)
    return progress


def refused(action: Callable[[], object]) -> bool:
    """Return whether an action ends in one of the project's errors, with a message to show."""
    message = ""
    try:
        action()
    except (ConfigError, RunError) as error:
        message = for_terminal(error)
    message.encode()
    assert len(message) < 20_000
    return message != ""


@fuzz(state=mutated_json(STATE))
def test_a_changed_state_is_the_same_or_set_aside(pair: Path, state: bytes) -> None:
    """Only a file without version and hash, as of an earlier version, may hold anything else."""
    replace_file(pair / "step-00000002" / "state.json", state)
    progress = load(pair)
    if progress.step == 2:
        content = json.loads(state)
        earlier = "version" not in content["progress"] and "sha256_state" not in content
        assert earlier or {**content, **STATE} == content


@fuzz(state=mutated_json(VERSION_1))
def test_a_changed_state_of_an_earlier_version_is_used_or_set_aside(
    pair: Path, state: bytes
) -> None:
    replace_file(pair / "step-00000002" / "state.json", state)
    assert load(pair).step in (1, 2)


@fuzz(tensors=mutated_bytes(TENSORS) | mutated_header())
def test_changed_tensors_are_set_aside(pair: Path, tensors: bytes) -> None:
    replace_file(pair / "step-00000002" / "state.json", json.dumps(STATE).encode())
    replace_file(pair / "step-00000002" / "state.safetensors", tensors)
    try:
        assert load(pair).step == (2 if tensors == TENSORS else 1)
    finally:
        replace_file(pair / "step-00000002" / "state.safetensors", TENSORS)


@fuzz(tensors=mutated_bytes(TENSORS) | mutated_header())
def test_changed_tensors_with_their_hash_are_one_message(pair: Path, tensors: bytes) -> None:
    """As someone may write them who also writes the hashes."""
    folder = pair / "step-00000002"
    checkpoint._write_state(folder, SAVED, hashlib.sha256(tensors).hexdigest())
    replace_file(folder / "state.safetensors", tensors)
    try:
        refused(lambda: load(pair))
    finally:
        replace_file(folder / "state.safetensors", TENSORS)


@fuzz(content=mutated_bytes(METRICS), step=st.integers(0, 5))
def test_a_changed_log_is_rewound_or_refused(pair: Path, content: bytes, step: int) -> None:
    file = pair / "metrics.jsonl"
    replace_file(file, content)
    log: Any = SimpleNamespace(main=True, file=file)
    if refused(lambda: MetricsLog.rewind(log, step)):
        assert file.read_bytes() == content
        return
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(line["step"] <= step for line in lines)
    before = file.read_bytes()
    MetricsLog.rewind(log, step)
    assert file.read_bytes() == before


@pytest.fixture(scope="module")
def run(
    loaded: LoadedTarget, made: TrainingData, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trainer]:
    """A finished run, opened again."""
    settings = config(tmp_path_factory.mktemp("run"), "train.max_steps=2", "train.eval_every=2")
    loop.fit(settings, loaded, made, QUIET)
    run = Trainer(settings, loaded, made)
    run.progress, _ = checkpoint.load_newest(run.checkpoints(), run.objective, run.optimizer)
    yield run
    run.close()


MANIFEST = {
    "argv": ["train"], "config": {}, "versions": {"python": "3"},
    "data": {
        "source": "tiny", "sha256_documents": "", "traces": "features",
        "layout": {"states": "int8", "top": 8},
    },
}  # fmt: skip


@fuzz(content=mutated_value(MANIFEST), exact=st.booleans())
def test_a_changed_manifest_is_compared_or_refused(run: Trainer, content: Any, exact: bool) -> None:
    data = content.get("data") if isinstance(content, dict) else None
    if isinstance(data, dict) and exact:
        data["sha256_documents"] = run.data.about["sha256_documents"]
    with kept(run.folder / "manifest.json") as file:
        replace_file(file, json.dumps(content).encode())
        refused(lambda: resume.require_same_text(run))


@fuzz(content=mutated_bytes(json.dumps(MANIFEST).encode()))
def test_a_changed_manifest_of_bytes_is_refused(run: Trainer, content: bytes) -> None:
    with kept(run.folder / "manifest.json") as file:
        replace_file(file, content)
        assert refused(lambda: resume.require_same_text(run))


@contextmanager
def kept(file: Path) -> Iterator[Path]:
    """Give a file its content again afterwards."""
    content = file.read_bytes()
    try:
        yield file
    finally:
        replace_file(file, content)


@pytest.fixture(scope="module")
def changed_config(run: Trainer) -> Any:
    """Mutations of config.yaml: of its bytes, or of its values."""
    text = (run.folder / "config.yaml").read_bytes()
    as_json = mutated_value(yaml.safe_load(text)).map(lambda value: json.dumps(value).encode())
    return mutated_bytes(text) | as_json


@fuzz(draw=st.data())
def test_a_changed_configuration_is_compared_or_refused(
    run: Trainer, changed_config: Any, draw: Any
) -> None:
    with kept(run.folder / "config.yaml") as file:
        replace_file(file, draw.draw(changed_config))
        if not refused(lambda: parse(read_saved_config(run.folder))):
            refused(lambda: resume.require_same_settings(run.config))


SUMMARY = {"steps": 2, "seconds": 1.5, "phases": {"steps": 1.0}, "held_out": {"loss@1": 2.0}}


@fuzz(content=mutated_json(SUMMARY))
def test_a_changed_training_summary_is_used_or_refused(run: Trainer, content: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch, kept(run.folder / "training.json") as file:
        replace_file(file, content)
        refused(lambda: best_drafter.has_result(run))
        patch.setattr(train, "quick_report", lambda *_: None)
        patch.setattr(train, "has_reports", lambda *_: False)
        loaded: Any = SimpleNamespace(target=run.target)
        seconds = {"loading": 1.0}
        measured = not refused(
            lambda: train._measure(run.config, loaded, run.data, QUIET, [], seconds)
        )
        if measured:
            assert json.loads(file.read_text())["phases"]["loading"] == 1.0


@fuzz(draw=st.data())
def test_a_changed_best_drafter_is_published_or_refused(run: Trainer, draw: Any) -> None:
    with kept(best_drafter.best_folder(run) / "config.json") as file:
        replace_file(file, draw.draw(mutated_json(json.loads(file.read_text()))))
        refused(lambda: best_drafter.write_result(run))
