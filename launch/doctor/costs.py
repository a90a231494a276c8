"""Checks of the run's costs, estimated by `launch/cost_estimate.py` and `launch/memory.py`."""

import shutil
from pathlib import Path
from typing import Any

import torch

from outrider.conf.files import MEMORY
from outrider.conf.quantities import format_bytes, format_count
from outrider.conf.schema import Config
from outrider.launch.cost_estimate import Cost
from outrider.launch.doctor.finding import Finding, State
from outrider.models.adapt import learning_rate
from outrider.models.target import process
from outrider.train.checkpoint import list_checkpoints
from outrider.train.loop import LESS_MEMORY
from outrider.train.schedule import format_seconds
from outrider.train.trainer import Trainer

TEXT_BYTES = 4  # per token of generated text
UNCERTAIN = 2  # factor between estimated and available memory from which a run is refused
FAST = 3  # times the usual learning rate from which one is too high


def check_memory(run: Trainer, cost: Cost) -> Finding:
    """Compare the estimated memory of a rank with all that its device has."""
    device, total = run.target.device, MEMORY / process.local_world_size()
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    message = f"about {format_bytes(cost.memory)} per rank, estimated as in outrider memory"
    state: State = "ok"
    if cost.memory > total:
        message += f", and it has {format_bytes(total)}"
        state = "wrong" if cost.memory > UNCERTAIN * total else "note"
    return Finding("memory", state, message, {"by_sums": cost.memory}, LESS_MEMORY)


def check_disk(run: Trainer, cost: Cost, text: float = 0.0, recording: float = 0.0) -> Finding:
    """Compare the free disk space with the bytes to write: `cost`, and new text and recording."""
    absolute = run.folder.absolute()
    free = shutil.disk_usage(next(p for p in (absolute, *absolute.parents) if p.exists())).free
    facts: dict[str, Any] = {"checkpoints": cost.disk, "free": free, "text_to_write": text}
    message = f"about {format_bytes(cost.disk)} in {run.folder}, {format_bytes(free)} free"
    if run.data.recorded is not None:
        traces = run.data.recorded[0]
        facts |= {"traces": traces.size(), "traces_folder": str(traces.path)}
        message += f"\nrecorded features: {format_bytes(traces.size())} in {traces.path}"
    if text:
        message += f"\ngenerated text, not yet written: at most {format_bytes(text)}"
    if recording:
        facts["recording"] = recording
        message += f"\nrecorded features, not yet written: about {format_bytes(recording)}"
    needed = cost.disk + text + recording
    if free < needed:
        fix = "Free disk space, choose another run.dir, or lower train.keep_last."
        return Finding("disk", "wrong", message, facts, fix)
    state: State = "note" if free < 2 * needed else "ok"
    return Finding("disk", state, message, facts, "Little disk space will be left.")


def check_time(run: Trainer, cost: Cost) -> Finding:
    train = run.config.train
    limits = [format_seconds(cost.seconds * train.max_steps)] if train.max_steps else []
    limits += [f"at most {train.max_minutes:g} min"] if train.max_minutes else []
    each = f"about {cost.seconds:.2g} s per step of {format_count(run.rows, 'row')}"
    message = f"{each}; training takes {', '.join(limits)} (estimated)"
    return Finding("time", "ok", message, {"seconds_per_step_by_sums": cost.seconds})


def check_learning_rate(run: Trainer) -> Finding:
    """Check the learning rate: one tuned for small hidden sizes is too high for large ones."""
    train, hidden = run.config.train, run.target.shape().hidden
    usual = learning_rate(hidden, train.batch_tokens)
    message = f"train.lr={train.lr:g}, hidden size {hidden}"
    fix = f"That is high for this size. Without train.lr it is {usual:g}."
    state: State = "note" if train.lr > FAST * usual else "ok"
    return Finding("rate", state, message, {"lr": train.lr, "hidden": hidden}, fix)


def check_run_folder(config: Config) -> Finding:
    """Report whether the run starts anew or resumes."""
    folder = Path(config.run.dir)
    steps = list_checkpoints(folder / "checkpoints")
    facts = {"folder": str(folder), "checkpoints": len(steps)}
    if steps and config.train.resume != "never":
        message = f"{folder} holds a run; training resumes from {steps[-1].name}"
        return Finding("folder", "note", message, facts, "Use another run.dir to start a new run.")
    return Finding("folder", "ok", f"{folder}: a new run", facts)
