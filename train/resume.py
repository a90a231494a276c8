"""Continuation of a run from its newest checkpoint."""

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from outrider.conf.compose import flatten
from outrider.conf.errors import SHOWN, ConfigError, RunError
from outrider.conf.files import read_json
from outrider.conf.schema import Config, to_dict
from outrider.conf.shown_text import mask_values
from outrider.train import best_drafter, checkpoint
from outrider.train.schedule import format_seconds, seconds_left
from outrider.train.settings import parse, read_saved_config
from outrider.train.trackers import IDENTITY
from outrider.train.trainer import Trainer

# settings that a continued run may change: limits, reports, storage, and the division of a step
# (noise, and text of the drafter's own, are then drawn anew)
CHANGEABLE = (
    "run.dir", "run.plugins", "train.max_steps", "train.max_minutes", "train.eval_every",
    "train.save_every", "train.keep_last", "train.keep_every", "train.patience", "train.resume",
    "train.log_every", "train.quick_eval", "train.wandb.", "train.tensorboard",
    "train.skip_bad", "train.spike",
    "train.gradient_checkpointing", "eval.", "decode.",
    "launch.name", "launch.accumulation", "launch.offload", "launch.wait",
    "data.generate.minutes", "data.traces", "data.max_gb", "data.workers", "record.damaged",
    "record.share", "record.shard", "record.check_every",
)  # fmt: skip
ACTIVATION = "drafter.activation"
OTHER_FOLDER = "Choose another run.dir, or start over with train.resume=never."


def resume(run: Trainer) -> list[str] | None:
    """Load the newest checkpoint, as `train.resume` sets, and quarantine damaged ones.

    Returns:
        Messages for the user; None when the run starts from the beginning.

    Raises:
        RunError: no undamaged checkpoint, where one is needed.
        RunError, ConfigError: as `require_same_text`, `require_same_settings` and
            `require_same_activation`.
    """
    mode, checkpoints = run.config.train.resume, run.checkpoints()
    if mode == "never":
        run.accelerator.wait_for_everyone()
        if run.main:
            for name in ("checkpoints", "best"):
                checkpoint.remove_all(run.folder / name)
            names = [f"drafter/{name}" for name in reversed(best_drafter.FILES)]
            for name in (*names, "metrics.jsonl", IDENTITY):
                (run.folder / name).unlink(missing_ok=True)
            with suppress(OSError):  # it holds other files
                (run.folder / "drafter").rmdir()
        return None
    if not checkpoints:
        if mode == "must":
            fix = "Use train.resume=auto."
            raise RunError(f"{run.folder / 'checkpoints'} holds no checkpoint.", fix)
        return None
    require_same_settings(run.config)
    require_same_text(run)
    require_same_activation(run)
    if run.config.launch.name.startswith("zero"):
        _create_moments(run)
    progress, errors = checkpoint.load_newest(
        checkpoints, run.objective, run.optimizer, run.average
    )
    run.progress = run.bad_steps.progress = progress
    run.accelerator.wait_for_everyone()  # all ranks have read
    if run.main:
        for _, folder in zip(errors, reversed(checkpoints), strict=False):
            checkpoint.quarantine(folder)
    reasons = (error.message.rstrip(".") for error in errors)
    return [f"{reason}. Continuing from step {progress.step}." for reason in reasons]


def resume_message(run: Trainer) -> str:
    """Return where a continued run goes on, and how long it takes at the pace so far."""
    train, progress = run.config.train, run.progress
    folder = run.folder / "checkpoints" / f"step-{progress.step:08d}"
    message = f"resuming from {folder}: step {progress.step}"
    message += f" of {train.max_steps}" if train.max_steps else ""
    if train.max_minutes:
        message += f", {progress.seconds / 60:.1f} of {train.max_minutes:g} min"
    if not progress.step:
        return message
    return f"{message}, about {format_seconds(seconds_left(train, progress))} left"


def _create_moments(run: Trainer) -> None:
    """Take a step of size zero: DeepSpeed creates its moments in the first step."""
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    micro_batches = run.step_data.micro_batches(0)
    denominators = run.loss_denominators(micro_batches)
    for batch, source in micro_batches:
        with run.accelerator.accumulate(run.model):
            loss, _ = run.model(source.trace(batch, run.target.device), denominators, False)
            run.accelerator.backward(0.0 * loss)
            run.optimizer.step()
            run.optimizer.zero_grad()


def as_it_began(config: Config) -> Config:
    """Return the configuration with the automatic settings of the run that it continues.

    They are chosen when a run begins, if the user does not set them (`models/adapt.py`): learning
    rate, row length, and the optimizer, which was AdamW where it is not stored.
    """
    begin = ("train.lr", "data.max_length", "train.optimizer")
    keys = [key for key in config.automatic if key in begin]
    folder = Path(config.run.dir)
    begun = checkpoint.list_checkpoints(folder / "checkpoints")
    if not keys or not begun or config.train.resume == "never":
        return config
    saved, values = read_saved_config(folder), to_dict(config)
    for key in keys:
        group, _, name = key.partition(".")
        adamw = {"name": "adamw"} if name == "optimizer" else None
        values[group][name] = OmegaConf.select(saved, key, default=adamw)
    return parse(OmegaConf.create(values))


def require_same_settings(config: Config) -> None:
    """Refuse settings that change what a step computes, before anything is loaded.

    Raises:
        ConfigError: the run folder has checkpoints of a run with other values of settings that are
            not in CHANGEABLE. All are named, the drafter first; of another drafter only the name.
    """
    folder = Path(config.run.dir)
    if config.train.resume == "never" or not checkpoint.list_checkpoints(folder / "checkpoints"):
        return
    # parsed again, because an older file lacks settings, which then have their defaults
    file, values = read_saved_config(folder), dict(flatten(mask_values(to_dict(config))))
    saved = dict(flatten(to_dict(parse(file))))
    if ACTIVATION in saved and OmegaConf.select(file, ACTIVATION) is None:
        saved[ACTIVATION] = values.get(ACTIVATION)  # see `require_same_activation`
    names = sorted({**values, **saved}, key=lambda name: not name.startswith("drafter."))
    other = [
        name
        for name in sorted(names, key=lambda name: name != "drafter.name")
        if not name.startswith(CHANGEABLE) and saved.get(name) != values.get(name)
    ]
    if other[:1] == ["drafter.name"]:  # its other keys follow from it
        other = [name for name in other if name == other[0] or not name.startswith("drafter.")]
    if other:
        began = ", ".join(f"{name} = {saved.get(name)!r}" for name in other)
        why = f"{folder} holds a run that began with {began}."
        if now := ", ".join(f"{name} = {values.get(name)!r}" for name in other[1:]):
            why += f" This one has also {now}."
        words = " ".join(_word(name, saved.get(name)) for name in other)
        fix = f"To continue it, add {words}. Or choose another run.dir, or train.resume=never."
        raise ConfigError(other[0], values.get(other[0]), why, fix)


def _word(name: str, value: Any) -> str:
    """Return a setting as it is written on the command line."""
    text = value if isinstance(value, str) else json.dumps(value)
    return shlex.quote(f"{name.removesuffix('.name')}={text}")


def require_same_activation(run: Trainer) -> None:
    """Refuse another activation than the target's for a run of a version without the setting.

    The drafters of that version had the activation of their target.

    Raises:
        ConfigError: the settings have another one.
    """
    own = getattr(run.config.drafter, "activation", None)
    began = run.target.shape().activation
    known = OmegaConf.select(read_saved_config(run.folder), ACTIVATION) is not None
    if own not in (None, began) and not known:
        why = f"{run.folder} holds a run that began with {ACTIVATION} = {began!r}, its target's."
        raise ConfigError(ACTIVATION, own, why, f"Set {ACTIVATION}={began} to continue it.")


def require_equal_ranks(run: Trainer) -> None:
    """Raise a RunError, on every rank, if the ranks have read different text."""
    number = int(run.data.about["sha256_documents"][:15], 16)
    numbers = run.accelerator.gather(torch.tensor([number], device=run.target.device))
    if len(set(numbers.tolist())) > 1:
        fix = "Give every rank the same file, or rows in the same order: seed what is random."
        raise RunError("The ranks have read different training text.", fix)


def require_same_text(run: Trainer) -> None:
    """Raise a RunError if the run was trained on other text, or traces of another precision."""
    about = read_json(run.folder / "manifest.json", checkpoint.FIX).get("data")
    about = about if isinstance(about, dict) else {}
    if about.get("sha256_documents") != run.data.about["sha256_documents"]:
        raise RunError(f"{run.folder} was trained on other text than this run has.", OTHER_FOLDER)
    if _lossy_layout(about) != _lossy_layout(run.data.about):
        old, new = _describe_traces(about), _describe_traces(run.data.about)
        why = f"{run.folder} was trained from {old}, and this run would continue from {new}."
        fix = "Give the data.traces that it began with, or start over with train.resume=never."
        raise RunError(why, fix)


def _lossy_layout(about: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the layout of a recording that rounds; None for one that stores the target's output.

    Online runs have no layout, nor have runs of earlier versions on self-generated text.
    """
    layout: Any = about.get("layout")
    rounds = layout and not (
        isinstance(layout, dict) and layout.get("states") == "same" and not layout.get("top")
    )
    return layout if rounds else None


def _describe_traces(about: Mapping[str, Any]) -> str:
    online = "the target's own output"
    text = f"{about.get('traces')} ({about['layout']})" if "layout" in about else online
    return text[:SHOWN]
