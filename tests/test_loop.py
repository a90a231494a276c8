"""`fit`: files of a run, stop and resume, refused settings."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import folder_lock
from outrider.conf.schema import to_yaml
from outrider.data.corpus import load_training_data
from outrider.data.reporter import Reporter
from outrider.data.training_data import TrainingData
from outrider.models.formats import native
from outrider.models.target import load
from outrider.models.target.load import LoadedTarget
from outrider.train import best_drafter, checkpoint, loop
from outrider.train.resume import require_same_activation, require_same_settings
from outrider.train.schedule import format_seconds, learning_rate, seconds_left
from outrider.train.settings import parse
from outrider.train.trainer import Trainer
from tests import tiny
from tests.runs import QUIET, config


def weights(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(folder / "drafter" / "model.safetensors")
    return tensors


def test_fit_writes_drafter_logs_and_manifest(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    final = loop.fit(config(tmp_path), loaded, made, QUIET)
    assert final == tmp_path / "drafter"
    drafter, cfg = native.load(final, loaded.target)
    assert cfg.depths == 2
    assert next(drafter.parameters()).dtype == torch.float32
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines if x["kind"] == "train"] == [0, 1, 2, 3, 4, 5]
    assert [x["step"] for x in lines if x["kind"] == "held"] == [0, 3, 6]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert {"argv", "config", "versions", "git", "data", "target"} <= set(manifest)
    checkpoints = sorted(f.name for f in (tmp_path / "checkpoints").iterdir())
    assert checkpoints == ["step-00000004", "step-00000006"]


def test_resume_after_sigterm_is_bit_exact(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    """A run stopped by SIGTERM and continued ends as an uninterrupted one."""
    loop.fit(config(tmp_path / "whole"), loaded, made, QUIET)
    stopped = config(tmp_path / "stopped")
    advance, steps = loop._advance, 0

    def interrupted(run: Trainer, tracker: Any) -> None:
        nonlocal steps
        advance(run, tracker)
        steps += 1
        if steps == 3:
            signal.raise_signal(signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_advance", interrupted)
        assert loop.fit(stopped, loaded, made, QUIET) is None
    assert (tmp_path / "stopped" / "checkpoints" / "step-00000003").is_dir()
    loop.fit(stopped, loaded, made, QUIET)
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    files = [tmp_path / name / "metrics.jsonl" for name in ("whole", "stopped")]
    logs = [file.read_text().splitlines() for file in files]
    losses = [[json.loads(x).get("loss@1") for x in log] for log in logs]
    assert losses[0] == losses[1]


def test_best_drafter_has_longest_accept_length(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    lengths = iter([1.1, 1.7, 1.3])
    held_out = Trainer.evaluate

    def scripted(run: Trainer, *where: Any) -> dict[str, float]:
        loss = 9.0 - run.progress.step
        return {**held_out(run, *where), "accept_length": next(lengths), "loss@1": loss}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "evaluate", scripted)
        loop.fit(config(tmp_path), loaded, made, QUIET)
    about = json.loads((tmp_path / "drafter" / "config.json").read_text())["about"]
    assert (about["step"], about["held_out"]["accept_length"]) == (3, 1.7)


def test_a_finished_run_names_the_limit_that_it_reached(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train.max_steps=400", "train.max_minutes=1e-9")
    loop.fit(config(tmp_path, *words), loaded, made, QUIET)
    loop.fit(config(tmp_path, *words), loaded, made, Console(width=200))
    shown = " ".join(capsys.readouterr().out.split())
    assert "is finished: 1 step. " in shown or "is finished: 0 steps. " in shown
    assert "raise train.max_minutes;" in shown


def test_phase_seconds_accumulate_over_resume(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    """Phases of both parts of a resumed run."""
    words = ("train.schedule=constant",)
    loop.fit(config(tmp_path, *words), loaded, made, QUIET)
    before = json.loads((tmp_path / "training.json").read_text())["phases"]
    loop.fit(config(tmp_path, *words, "train.max_steps=12"), loaded, made, QUIET)
    after = json.loads((tmp_path / "training.json").read_text())["phases"]
    assert before.keys() == after.keys() == {"steps", "held out", "saving"}
    assert all(0 < before[name] < after[name] for name in ("steps", "held out"))
    assert min(before["saving"], after["saving"]) > 0  # a checkpoint lacks the time of its own save


def test_resume_refuses_other_settings(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    loop.fit(config(tmp_path), loaded, made, QUIET)
    with pytest.raises(ConfigError, match=r"train.lr = 0.0005\n.*train.lr = 0.001"):
        loop.fit(config(tmp_path, "train.lr=5e-4"), loaded, made, QUIET)
    loop.fit(config(tmp_path, "train.lr=5e-4", "train.resume=never"), loaded, made, QUIET)


def test_all_differences_of_a_used_folder_are_named_the_drafter_first(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(to_yaml(config(tmp_path, "drafter=eagle3")))
    words = "train.lr=5e-4", "drafter.depths=3", "train.save_every=1"
    with pytest.raises(ConfigError) as error:
        require_same_settings(config(tmp_path, "drafter=eagle3", *words))
    assert error.value.key == "drafter.depths"
    assert "began with drafter.depths = 2, train.lr = 0.001." in error.value.why
    assert "This one has also train.lr = 0.0005." in error.value.why
    assert "To continue it, add drafter.depths=2 train.lr=0.001." in error.value.fix
    with pytest.raises(ConfigError) as error:
        require_same_settings(config(tmp_path, "drafter=medusa", *words))
    assert (error.value.key, error.value.value) == ("drafter.name", "medusa")
    assert "began with drafter.name = 'eagle3', train.lr = 0.001." in error.value.why
    assert "To continue it, add drafter=eagle3 train.lr=0.001." in error.value.fix
    assert "This one has also train.lr = 0.0005." in error.value.why


@pytest.mark.parametrize("words", [("train.resume=never",), ("train.max_steps=8",)])
def test_files_of_others_in_the_drafter_folder_stay(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """A second training writes the drafter anew, started over or continued."""
    constant = "train.schedule=constant"
    loop.fit(config(tmp_path, constant), loaded, made, QUIET)
    for name in ("README.md", "notes/mine"):
        (tmp_path / "drafter" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "drafter" / name).write_text("mine")
    before = (tmp_path / "drafter" / "config.json").stat().st_ino
    loop.fit(config(tmp_path, constant, *words), loaded, made, QUIET)
    assert (tmp_path / "drafter" / "config.json").stat().st_ino != before
    assert {file.name for file in (tmp_path / "drafter").iterdir()} == {
        "README.md", "notes", "config.json", "model.safetensors",
    }  # fmt: skip
    assert (tmp_path / "drafter" / "notes" / "mine").read_text() == "mine"
    native.load(tmp_path / "drafter", loaded.target)


def test_drafter_of_a_publication_cut_off_is_published_again(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    """Killed between the two files: the weights are new, the hash in config.json is not there."""
    loop.fit(config(tmp_path), loaded, made, QUIET)
    (tmp_path / "drafter" / "config.json").unlink()
    final = loop.fit(config(tmp_path), loaded, made, QUIET)
    assert final is not None
    native.load(final, loaded.target)


def test_a_continued_run_says_where_from_and_how_long(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the pace so far, 2 steps of 6 take half of the time of the first 4."""
    loop.fit(config(tmp_path, "train.max_steps=4"), loaded, made, QUIET)
    last = tmp_path / "checkpoints" / "step-00000004"
    seconds = checkpoint.read_state(last)[0].seconds
    console = Console(width=200)
    loop.fit(config(tmp_path, "train.max_steps=6"), loaded, made, console)
    left = format_seconds(seconds / 2)
    message = f"resuming from {last}: step 4 of 6, about {left} left"
    printed = capsys.readouterr().out
    assert message in printed
    assert printed.index(message) < printed.index("held out")


def test_time_left_is_that_of_the_nearest_limit() -> None:
    progress = checkpoint.Progress(step=10, seconds=60.0)
    for words, left in (
        (["train.max_steps=30"], 120.0),
        (["train.max_steps=null", "train.max_minutes=3"], 120.0),
        (["train.max_steps=30", "train.max_minutes=1.5"], 30.0),
        (["train.max_steps=10"], 0.0),
    ):
        train = parse(compose(words)).train
        assert seconds_left(train, progress) == left, words


def test_resume_of_older_config_uses_defaults(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    """Keys that are missing in config.yaml have their defaults."""
    loop.fit(config(tmp_path), loaded, made, QUIET)
    file = tmp_path / "config.yaml"
    lines = file.read_text().splitlines()
    file.write_text(
        "\n".join(line for line in lines if "place:" not in line and "spike:" not in line)
    )
    loop.fit(config(tmp_path, "train.max_steps=8"), loaded, made, QUIET)


@pytest.mark.untyped
def test_a_run_of_a_version_without_activations_has_the_one_of_its_target(tmp_path: Path) -> None:
    words = "drafter=eagle3", "drafter.activation=silu"
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    lines = to_yaml(config(tmp_path, *words)).splitlines()
    older = "\n".join(line for line in lines if "activation:" not in line)
    (tmp_path / "config.yaml").write_text(older)
    gemma: Any = tiny.target("gemma3")
    for value in ("silu", "gelu"):
        now = config(tmp_path, words[0], f"drafter.activation={value}")
        require_same_settings(now)
        run: Any = SimpleNamespace(config=now, folder=tmp_path, target=gemma)
        if value == "silu":
            with pytest.raises(ConfigError, match=r"Set drafter\.activation=gelu to continue"):
                require_same_activation(run)
        else:
            require_same_activation(run)
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"began with drafter\.activation = 'silu'"):
        require_same_settings(config(tmp_path, words[0], "drafter.activation=gelu"))


def test_resume_must_requires_checkpoint(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match="holds no checkpoint"):
        loop.fit(config(tmp_path, "train.resume=must"), loaded, made, QUIET)


def truncate_checkpoint(folder: Path) -> None:
    file = folder / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def test_truncated_checkpoint_is_quarantined(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    """A message names it, and the run ends as an uninterrupted one."""
    console = Console(record=True, width=200)
    words = ("train.save_every=2", "train.schedule=constant")  # independent of max_steps
    loop.fit(config(tmp_path / "whole", *words, "train.max_steps=8"), loaded, made, QUIET)
    loop.fit(config(tmp_path / "torn", *words), loaded, made, QUIET)
    place = tmp_path / "torn" / "checkpoints"
    truncate_checkpoint(place / "step-00000006")
    loop.fit(config(tmp_path / "torn", *words, "train.max_steps=8"), loaded, made, console)
    assert "step-00000006" in (output := console.export_text())
    assert "Continuing from step 4" in output
    assert (place / "damaged-step-00000006").is_dir()
    ends = [
        load_file(tmp_path / name / "checkpoints" / "step-00000008" / "state.safetensors")
        for name in ("whole", "torn")
    ]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_error_names_newest_if_all_checkpoints_are_truncated(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    loop.fit(config(tmp_path), loaded, made, QUIET)
    for folder in (tmp_path / "checkpoints").glob("step-*"):
        truncate_checkpoint(folder)
    with pytest.raises(RunError, match=r"step-00000006.*damaged"):
        loop.fit(config(tmp_path, "train.max_steps=8"), loaded, made, QUIET)
    assert (tmp_path / "checkpoints" / "step-00000006").is_dir()  # not quarantined


def test_folder_lock_is_exclusive(tmp_path: Path) -> None:
    """It can be acquired again after its release."""
    with (
        folder_lock(tmp_path),
        pytest.raises(RunError, match="Another process is using"),
        folder_lock(tmp_path),
    ):
        pass
    with folder_lock(tmp_path):
        pass


def test_unpublished_drafter_is_published_on_resume(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    """The drafter in place is that of the earlier, shorter run."""
    words = ("train.schedule=constant",)
    loop.fit(config(tmp_path, *words), loaded, made, QUIET)
    before = weights(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            best_drafter, "write_result", lambda run: run.folder / "drafter"
        )  # killed before
        loop.fit(config(tmp_path, *words, "train.max_steps=12"), loaded, made, QUIET)
    assert all(torch.equal(before[name], now) for name, now in weights(tmp_path).items())
    loop.fit(config(tmp_path, *words, "train.max_steps=12"), loaded, made, QUIET)
    assert any(not torch.equal(before[name], now) for name, now in weights(tmp_path).items())
    assert json.loads((tmp_path / "training.json").read_text())["steps"] == 12


def test_keep_every_retains_milestones(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    words = ("train.save_every=1", "train.keep_last=1", "train.keep_every=3")
    loop.fit(config(tmp_path, *words, "train.max_steps=7"), loaded, made, QUIET)
    checkpoints = sorted(folder.name for folder in (tmp_path / "checkpoints").glob("step-*"))
    assert checkpoints == ["step-00000003", "step-00000006", "step-00000007"]


def test_batch_of_nan_loss_is_saved(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "learning_rate", lambda train, fraction: float("inf"))
        with pytest.raises(RunError, match="Step 1 is bad: its loss is nan; its batch is in"):
            loop.fit(config(tmp_path), loaded, made, QUIET)
    (file,) = tmp_path.glob("bad-batch-*.safetensors")
    assert load_file(file)["ids"].shape == (4, 128)


def test_accumulation_equals_one_micro_batch(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    """With AdamW: Muon orthogonalises in bfloat16, which enlarges the rounding of sums."""
    words = ("train.eval_every=9", "train.optimizer=adamw")
    loop.fit(config(tmp_path / "one", *words), loaded, made, QUIET)
    loop.fit(config(tmp_path / "two", *words, "launch.accumulation=2"), loaded, made, QUIET)
    a, b = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-4, rtol=1e-3)


def test_learning_rate_warms_up_and_ends_at_zero(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    run = Trainer(config(tmp_path, "train.warmup=0.1", "train.lr=1e-3"), loaded, made)
    assert 0 < learning_rate(run.config.train, 0.0) < 1e-4
    assert learning_rate(run.config.train, 0.1) == pytest.approx(1e-3)
    assert learning_rate(run.config.train, 0.55) == pytest.approx(0.5e-3)
    assert learning_rate(run.config.train, 1.0) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("schedule", "half", "end"), [("cosine", 0.5, 0.0), ("linear", 0.5, 0.0), ("constant", 1, 1)]
)
def test_learning_rate_follows_schedule(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path, schedule: str, half: float, end: float
) -> None:
    words = ["train.warmup=0.2", "train.lr=1e-3", f"train.schedule={schedule}"]
    run = Trainer(config(tmp_path, *words), loaded, made)
    assert learning_rate(run.config.train, 0.2) == pytest.approx(1e-3)
    assert learning_rate(run.config.train, 0.6) == pytest.approx(half * 1e-3)
    assert learning_rate(run.config.train, 1.0) == pytest.approx(end * 1e-3, abs=1e-12)


def test_drafter_of_another_target_is_refused(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    final = loop.fit(config(tmp_path), loaded, made, QUIET)
    assert final is not None
    tensors = load_file(load.TINY / "model.safetensors")
    first = sorted(tensors)[0]
    tensors[first] = tensors[first] + 1
    other = tmp_path / "other"
    other.mkdir()
    for file in load.TINY.glob("*.json"):
        (other / file.name).write_bytes(file.read_bytes())
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    words = ["target=hf", f"target.path={other}", "target.dtype=float32"]
    other_target = load.load_target(parse(compose(words)).target)
    with pytest.raises(RunError, match="trained for other weights"):
        native.load(final, other_target.target)


def test_resume_refuses_other_text(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    loop.fit(config(tmp_path), loaded, made, QUIET)
    fewer = load_training_data(
        config(tmp_path, "data.max_samples=50"), loaded, (1, 3, 4), Reporter.silent()
    )
    with pytest.raises(RunError, match="other text"):
        loop.fit(config(tmp_path), loaded, fewer, QUIET)


def test_truncated_metrics_log_is_repaired(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    loop.fit(config(tmp_path, "train.max_steps=4"), loaded, made, QUIET)
    log = tmp_path / "metrics.jsonl"
    log.write_text(log.read_text() + '{"step": 4, "ki')
    loop.fit(config(tmp_path, "train.max_steps=6"), loaded, made, QUIET)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [x["step"] for x in lines if x["kind"] == "train"] == [0, 1, 2, 3, 4, 5]
