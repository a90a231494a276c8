"""What the run will take, by the sums of `launch/cost_estimate.py` and `launch/memory.py`."""

import shutil
from pathlib import Path
from typing import Any

from outrider.data.traces import Store
from outrider.launch.cost_estimate import Cost, existing
from outrider.launch.doctor.finding import Finding, size_of, time_of
from outrider.train.settings import Config
from outrider.train.trainer import Run

WIDE, FAST = 512, 2e-3  # states from this size on, and a learning rate that is too much for them


def memory(run: Run, cost: Cost) -> Finding:
    said = f"about {size_of(cost.memory)} per rank, by the sums of outrider memory"
    return Finding("memory", "ok", said, {"by_sums": cost.memory})


def disk(run: Run, cost: Cost, text: float = 0.0, recording: float = 0.0) -> Finding:
    """Checkpoints and the drafter beside the room there is, and recorded traces.

    Args:
        text: bytes of text that is still to be written.
        recording: bytes of a recording that is.
    """
    free = shutil.disk_usage(existing(run.folder)).free
    facts: dict[str, Any] = {"checkpoints": cost.disk, "free": free, "text_to_write": text}
    said = f"about {size_of(cost.disk)} in {run.folder}, {size_of(free)} free"
    if run.material.recorded is not None:
        traces = run.material.recorded[0]
        facts |= {"traces": traces.size(), "traces_folder": str(traces.where)}
        said += f"\nrecorded traces: {size_of(traces.size())} in {traces.where}"
    if text:
        said += f"\ntext that is still to be written: at most {size_of(text)}"
    if recording:
        facts["recording"] = recording
        said += f"\na recording that is still to be written: about {size_of(recording)}"
    if free < cost.disk + text + recording:
        fix = "Make room, or choose another run.dir; fewer train.keep_last take less."
        return Finding("disk", "wrong", said, facts, fix)
    if free < 2 * (cost.disk + text + recording):
        return Finding("disk", "note", said, facts, "Little will be left.")
    return Finding("disk", "ok", said, facts)


def still_to_write(config: Config, sample: Store, answers: int, tokens: int) -> float:
    """Bytes of data=self at most, foreseen from a sample: every answer as long as it may be.

    Args:
        answers: how many will be written.
        tokens: of the sample's documents, prompts included.
    """
    wish = config.data.generate
    assert wish is not None, "data=self has it"
    usual = tokens / max(1, len(sample.answers()))
    longest = min(config.data.max_length, usual + wish.max_new_tokens)
    return sample.size() / max(1, tokens) * answers * longest


def time(run: Run, cost: Cost) -> Finding:
    train = run.config.train
    limits = []
    if train.max_steps:
        limits.append(time_of(cost.seconds * train.max_steps))
    if train.max_minutes:
        limits.append(f"at most {train.max_minutes:g} min")
    each = f"about {cost.seconds:.2g} s per step of {run.rows} rows"
    said = f"{each}, {' and '.join(limits)} of training"
    return Finding("time", "ok", said, {"seconds_per_step_by_sums": cost.seconds})


def rate(run: Run) -> Finding:
    """A learning rate found for small states is too much for wide ones."""
    lr, hidden = run.config.train.lr, run.target.shape().hidden
    facts = {"lr": lr, "hidden": hidden}
    said = f"train.lr={lr:g} for {hidden} numbers per state"
    if hidden >= WIDE and lr > FAST:
        fix = "It suits the embedded target; begin near 5e-4 here, or 5e-5 (EAGLE-3)."
        return Finding("rate", "note", said, facts, fix)
    return Finding("rate", "ok", said, facts)


def folder(config: Config) -> Finding:
    """Whether the run would begin, or go on with what lies there."""
    from outrider.train import checkpoint

    place = Path(config.run.dir)
    steps = checkpoint.found(place / "checkpoints")
    facts = {"folder": str(place), "checkpoints": len(steps)}
    if steps and config.train.resume != "never":
        said = f"{place} holds a run; training goes on with {steps[-1].name}"
        return Finding("folder", "note", said, facts, "Another run.dir begins a new one.")
    return Finding("folder", "ok", f"{place}: a new run", facts)
