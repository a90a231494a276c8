"""Checkpoints: complete, atomic, checked, and the same whoever holds the pieces.

A checkpoint is a folder `step-00000100` with `state.safetensors` (fp32 masters and both moments of
AdamW, by parameter name) and `state.json` (step, best so far, hashes). It is built under another
name and renamed, and renamed again before it is removed, so a folder with this name is whole. Ranks
of ZeRO hold slices; the full tensors are gathered for saving and dealt out again on loading, so the
layout on disk knows no rank count. Everything else a run depends on (data order, random numbers,
learning rate) is a function of the step; of a run bounded by minutes, of the step and the seconds,
which are saved too.
"""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.conf.errors import Damaged, RunError
from outrider.conf.files import (
    read_json,
    read_tensors,
    remove,
    sync_folder,
    write_json,
    write_tensors,
)

FIX = "Continue from an older checkpoint (remove this folder), or start with train.resume=never."
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Progress:
    """Where a run stands.

    Attributes:
        step: optimizer steps done.
        seconds: training time so far, for train.max_minutes.
        best: longest held-out acceptance so far, and the step it was measured at.
        skipped: bad steps that were left out.
        recent: losses of the last steps that were not (train/bad_steps.py).
        phases: seconds by what was done.
        joules: energy so far; None where it cannot be read.
    """

    step: int = 0
    seconds: float = 0.0
    best: float = 0.0
    best_step: int = 0
    finished: bool = False
    skipped: int = 0
    recent: list[float] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    joules: float | None = None


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay.

    Attributes:
        last: so many of the newest.
        every: and those of every so many steps; None: no others.
    """

    last: int
    every: int | None = None

    def superfluous(self, known: list[Path]) -> list[Path]:
        """Of these, oldest first, what may go."""
        return [old for old in known[: -self.last] if not self.every or _step(old) % self.every]


def save(folder: Path, tensors: dict[str, Tensor], progress: Progress, keep: Keep) -> None:
    """Write `folder/step-N` and remove those that need not stay. One rank calls it.

    Args:
        tensors: what `gather` has returned, on every rank.

    Raises:
        NoRoom, RunError: it could not be written; those that were there still are.
    """
    final = folder / f"step-{progress.step:08d}"
    if final.is_dir():  # reached again right after it was loaded: only the progress is news
        known = read_json(final / "state.json", FIX)
        write_json(final / "state.json", {**known, "progress": vars(progress)})
        return
    partial = folder / f".{final.name}.{os.getpid()}"
    for left in folder.glob(".step-*"):  # of a process that was killed while it saved
        shutil.rmtree(left, ignore_errors=True)
    try:
        sha256 = write_tensors(partial / "state.safetensors", tensors, {})
        write_json(partial / "state.json", {"progress": vars(progress), "sha256": sha256})
    except RunError:
        shutil.rmtree(partial, ignore_errors=True)  # give its room back
        raise
    partial.rename(final)
    sync_folder(folder)
    for old in keep.superfluous(found(folder)):
        remove(old)


def found(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(folder.glob("step-*"))


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def newest(known: list[Path], model: nn.Module, optimizer: Any) -> tuple[Progress, list[Damaged]]:
    """`load` the newest checkpoint that is whole; every rank finds the same one.

    Args:
        known: oldest first, at least one.

    Returns:
        Its progress, and what is wrong with the newer ones.

    Raises:
        RunError: it belongs to another configuration.
        Damaged: all are damaged.
    """
    wrong: list[Damaged] = []
    for folder in reversed(known):
        try:
            return load(folder, model, optimizer), wrong
        except Damaged as error:
            wrong.append(error)
    raise wrong[0]


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that nobody takes it for one."""
    aside = folder.with_name(f"damaged-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)


def load(folder: Path, model: nn.Module, optimizer: Any) -> Progress:
    """Put a checkpoint into model and optimizer. Every rank calls it.

    Raises:
        Damaged: it cannot be read.
        RunError: it belongs to another configuration.
    """
    about = read_json(folder / "state.json", FIX)
    tensors = read_tensors(folder / "state.safetensors", about.get("sha256"), FIX)
    try:
        progress = Progress(**about["progress"])
        scatter(model, optimizer, tensors, progress.step - progress.skipped)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RunError(f"{folder} does not fit this configuration: {error}", FIX) from None
    return progress


def gather(model: nn.Module, optimizer: Any | None) -> dict[str, Tensor]:
    """fp32 parameters, their moments (when an optimizer is given) and the buffers, by name.

    All are copies: they are written while training goes on.
    """
    out = {f"buffer.{n}": value.to("cpu", copy=True) for n, value in model.named_buffers()}
    for name, parameter in _trained(model):
        out[f"parameter.{name}"] = _master(parameter).to("cpu", copy=True)
        for moment in MOMENTS if optimizer is not None else ():
            value = _moment(optimizer, parameter, moment)
            if value is not None:
                out[f"{moment}.{name}"] = value.to("cpu", copy=True)
    return out


def scatter(model: nn.Module, optimizer: Any, tensors: dict[str, Tensor], step: int) -> None:
    """The reverse of `gather`.

    Args:
        step: steps that the optimizer took, for AdamW's correction of its first moments.

    Raises:
        KeyError, ValueError: names or shapes differ.
    """
    for name, buffer in model.named_buffers():
        buffer.copy_(tensors[f"buffer.{name}"])
    for name, parameter in _trained(model):
        value = tensors[f"parameter.{name}"]
        if value.shape != _shape(parameter):
            raise ValueError(f"{name} is {tuple(value.shape)}, not {tuple(_shape(parameter))}")
        moments = {m: tensors[f"{m}.{name}"] for m in MOMENTS if f"{m}.{name}" in tensors}
        if _sliced(parameter):
            _set_sliced(parameter, value, moments, optimizer, step)
        else:
            with torch.no_grad():
                parameter.copy_(value)
            if moments:
                inner(optimizer).state[parameter] = {
                    "step": torch.tensor(float(step)),
                    **{m: v.to(parameter.device).clone() for m, v in moments.items()},
                }


def inner(optimizer: Any) -> Any:
    """The torch optimizer inside the wrappers of accelerate and DeepSpeed."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _sliced(parameter: nn.Parameter) -> bool:
    """DeepSpeed holds this parameter's master or moments in slices."""
    return hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id")


def _shape(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)


def _master(parameter: nn.Parameter) -> Tensor:
    if not _sliced(parameter):
        return parameter.detach()
    from deepspeed.utils import safe_get_full_fp32_param

    out: Tensor = safe_get_full_fp32_param(parameter)
    return out.detach()


def _moment(optimizer: Any, parameter: nn.Parameter, name: str) -> Tensor | None:
    if not _sliced(parameter):
        value: Tensor | None = inner(optimizer).state.get(parameter, {}).get(name)
        return value
    from deepspeed.utils import safe_get_full_optimizer_state

    out: Tensor | None = safe_get_full_optimizer_state(parameter, name)
    return out


def _show_forward(parameter: nn.Parameter, value: Tensor) -> None:
    """The master is set; the copy that the next forward computes with is another tensor."""
    if not hasattr(parameter, "ds_id"):
        parameter.data.copy_(value)
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        parameter.data.copy_(value)


def _set_sliced(
    parameter: nn.Parameter, value: Tensor, moments: dict[str, Tensor], optimizer: Any, step: int
) -> None:
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    safe_set_full_fp32_param(parameter, value)
    _show_forward(parameter, value)
    for moment, tensor in moments.items():
        safe_set_full_optimizer_state(parameter, tensor, moment)
    for state in inner(optimizer).state.values():
        if "step" in state:
            state["step"] = torch.full_like(torch.as_tensor(state["step"]), step)
