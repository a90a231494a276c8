"""Checkpoints: atomic folders with hashes, independent of the number of ranks.

A checkpoint is a folder `step-00000100` with `state.safetensors` (fp32 parameters and the states of
the optimizer, by parameter name) and `state.json` (progress and hashes). A folder with this name is
complete: it is renamed after writing and before removal. Other names are not touched. Ranks of ZeRO
hold slices: full tensors are gathered for saving and divided again on loading. All else that a run
depends on (data order, random numbers, learning rate) is a function of the step and, if limited by
minutes, the seconds.
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.conf.errors import CorruptFile, RunError
from outrider.conf.files import read_json, remove_folder, sync_folder, write_json
from outrider.conf.tensor_files import read_tensors, write_tensors
from outrider.train.weight_average import WeightAverage

FIX = "Continue from an older checkpoint (remove this folder), or start with train.resume=never."
STEP = re.compile(r"step-([0-9]{8,10})")
VERSION = 2  # of state.json, in its hashed part; version 1 had neither the field nor a hash
DAMAGED = re.compile("^damaged-([0-9]+-)?")  # of `quarantine`
LARGEST = 1e300  # of a number in state.json
NOT_STATES = ("buffer", "parameter", "average")  # tensors that are no states of the optimizer
PARTIAL = re.compile(r"\.step-[0-9]{8,10}\.([0-9]+|gone)")  # of `save` and `remove_folder`


@dataclass
class Progress:
    """Progress of a training run."""

    step: int = 0  # optimizer steps done
    seconds: float = 0.0  # training time so far, for train.max_minutes
    best: float = 0.0  # longest acceptance length so far, as in best_drafter.py
    best_step: int = 0  # the step that it was measured at
    finished: bool = False
    skipped: int = 0  # bad steps
    recent: list[float] = field(default_factory=list)  # losses of the last other steps
    phases: dict[str, float] = field(default_factory=dict)  # seconds by activity
    stale: int = 0  # evaluations since the best one, for train.patience
    ended: bool = False  # a callback asked for the end

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of a block to a phase."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - start


def save(
    folder: Path, tensors: dict[str, Tensor], progress: Progress, last: int, every: int | None
) -> None:
    """Write `folder/step-N` and remove old checkpoints. Called on one rank.

    Args:
        tensors: from `collect_state`, which every rank calls.
        last: newest checkpoints that stay, at least 1.
        every: those of every `every` steps stay too; None: no others.

    Raises:
        DiskFull, RunError: it could not be written; older checkpoints are unchanged.
    """
    final = folder / f"step-{progress.step:08d}"
    if final.is_dir():  # the one that was loaded: only the progress changed
        _, sha256 = read_state(final)
        _write_state(final, progress, sha256)
        return
    partial = folder / f".{final.name}.{os.getpid()}"
    for left in folder.glob(".step-*"):  # of a process that was killed while it saved
        if PARTIAL.fullmatch(left.name):
            shutil.rmtree(left, ignore_errors=True)
    try:
        sha256 = write_tensors(partial / "state.safetensors", tensors, {})
        _write_state(partial, progress, sha256)
    except RunError:
        shutil.rmtree(partial, ignore_errors=True)  # free its space
        raise
    partial.rename(final)
    sync_folder(folder)
    for old in list_checkpoints(folder)[:-last]:
        if not every or step_of(old) % every:
            remove_folder(old)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return complete checkpoints, oldest first; other folders, as `step-00000014.bak`, are not."""
    return sorted((f for f in folder.glob("step-*") if step_of(f) >= 0), key=step_of)


def step_of(folder: Path) -> int:
    """Return the step that a folder is named after, as `save` does; -1 for any other name."""
    match = STEP.fullmatch(folder.name)
    step = int(match[1]) if match else -1
    return step if folder.name == f"step-{step:08d}" else -1


def read_state(folder: Path) -> tuple[Progress, str]:
    """Return the progress of a checkpoint and the hash of its tensors.

    Raises:
        CorruptFile: `state.json` is not what was written. Files of earlier versions have no hash
            of their own; fields, types and step are checked, `joules` is skipped.
    """
    file = folder / "state.json"
    about = read_json(file, FIX)
    values, sha256 = about.get("progress"), about.get("sha256")
    values = values if isinstance(values, dict) else {}
    hashed = "version" in values or "sha256_state" in about
    if hashed and about.get("sha256_state") != _state_hash(values, sha256):
        raise CorruptFile(f"{file} is damaged: its values are not the ones that were written.", FIX)
    if not isinstance(sha256, str):
        raise CorruptFile(f"{file} is damaged: sha256 is missing.", FIX)
    defaults = vars(Progress())
    values = {k: x for k, x in values.items() if k not in ("joules", "version")}
    progress = Progress(**{k: x for k, x in values.items() if k in defaults})
    right = all(k in defaults and _is_like(x, defaults[k]) for k, x in values.items())
    if right:
        numbers = [*progress.recent, *progress.phases.values()]
        right = all(_is_like(x, 0.0) for x in numbers) and progress.step == step_of(folder)
        right &= 0 <= progress.skipped <= progress.step >= progress.best_step >= 0
        right &= progress.stale >= 0
    if not right:
        raise CorruptFile(f"{file} is damaged: progress is not that of this step.", FIX)
    return progress, sha256


def _is_like(value: Any, default: Any) -> bool:
    if type(default) is not float:
        return type(value) is type(default)
    return type(value) in (int, float) and abs(value) <= LARGEST  # false for nan


def _write_state(folder: Path, progress: Progress, sha256: str) -> None:
    values = {**vars(progress), "version": VERSION}
    about = {"sha256": sha256, "sha256_state": _state_hash(values, sha256)}
    write_json(folder / "state.json", {"progress": values, **about})


def _state_hash(values: Any, sha256: Any) -> str:
    return hashlib.sha256(json.dumps([values, sha256], sort_keys=True).encode()).hexdigest()


def load_newest(
    checkpoints: list[Path], model: nn.Module, optimizer: Any, average: WeightAverage | None = None
) -> tuple[Progress, list[CorruptFile]]:
    """Load the newest of the checkpoints (oldest first, at least one) that is not damaged.

    Returns:
        Its progress, and the errors of the newer ones; the same on every rank.

    Raises:
        RunError: it belongs to another configuration.
        CorruptFile: all are damaged.
    """
    errors: list[CorruptFile] = []
    for folder in reversed(checkpoints):
        try:
            progress, sha256 = read_state(folder)
            tensors = read_tensors(folder / "state.safetensors", sha256, FIX)
        except CorruptFile as error:
            errors.append(error)
            continue
        try:
            restore_state(model, optimizer, tensors, progress.step - progress.skipped)
            if average is not None:
                average.load({name: tensors[f"average.{name}"] for name in average.tensors})
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise RunError(f"{folder} does not fit this configuration: {error}", FIX) from None
        return progress, errors
    raise errors[0]


def remove_all(folder: Path) -> None:
    """Remove the checkpoints, or best drafters, of a folder, and the folder if it is then empty."""
    for old in folder.glob("*step-*"):
        own = step_of(Path(DAMAGED.sub("", old.name))) >= 0
        if own or PARTIAL.fullmatch(old.name):
            remove_folder(old)
    with suppress(OSError):
        folder.rmdir()


def quarantine(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that `list_checkpoints` skips it; earlier ones stay."""
    place, number = folder.with_name(f"damaged-{folder.name}"), 1
    while place.exists() or place.is_symlink():
        number += 1
        place = folder.with_name(f"damaged-{number}-{folder.name}")
    return folder.rename(place)


def collect_state(
    model: nn.Module, optimizer: Any | None, average: WeightAverage | None = None
) -> dict[str, Tensor]:
    """Return copies of fp32 parameters, their states (if an optimizer) and buffers, by name.

    With an average, also of the averages.

    A state `exp_avg` of the parameter `fc.weight` is `exp_avg.fc.weight`. The number of steps is
    not one of them: `restore_state` is given it.
    """
    out = {f"buffer.{n}": value.to("cpu", copy=True) for n, value in model.named_buffers()}
    kinds = _state_kinds(optimizer) if optimizer is not None else []
    for name, parameter in _trained(model):
        out[f"parameter.{name}"] = _master(parameter).to("cpu", copy=True)
        for kind in kinds:
            value = _state(optimizer, parameter, kind)
            if value is not None:
                out[f"{kind}.{name}"] = value.to("cpu", copy=True)
    averages = average.tensors if average is not None else {}
    return out | {f"average.{n}": value.to("cpu", copy=True) for n, value in averages.items()}


def restore_state(model: nn.Module, optimizer: Any, tensors: dict[str, Tensor], step: int) -> None:
    """Load what `collect_state` returned; KeyError or ValueError for different names or shapes.

    Args:
        step: steps that the optimizer took, as AdamW needs to correct its first moments.
    """
    states = dict[str, dict[str, Tensor]]()  # by parameter and kind
    for key, value in tensors.items():
        kind, _, name = key.partition(".")
        if kind not in NOT_STATES:
            states.setdefault(name, {})[kind] = value
    for name, buffer in model.named_buffers():
        buffer.copy_(tensors[f"buffer.{name}"])
    for name, parameter in _trained(model):
        value = tensors[f"parameter.{name}"]
        shape = getattr(parameter, "ds_shape", parameter.shape)  # of ZeRO-3's whole tensor
        if value.shape != shape:
            raise ValueError(f"{name} is {tuple(value.shape)}, not {tuple(shape)}")
        own = states.get(name, {})
        if _is_partitioned(parameter):
            _set_partitioned(parameter, value, own, optimizer, step)
        else:
            with torch.no_grad():
                parameter.copy_(value)
            if own:
                unwrap_optimizer(optimizer).state[parameter] = {
                    "step": torch.tensor(float(step)),
                    **{kind: v.to(parameter.device).clone() for kind, v in own.items()},
                }


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer inside the wrappers of accelerate and DeepSpeed."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _is_partitioned(parameter: nn.Parameter) -> bool:
    """Return whether DeepSpeed divides this parameter's master or moments over the ranks."""
    return hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id")


def _master(parameter: nn.Parameter) -> Tensor:
    if not _is_partitioned(parameter):
        return parameter.detach()
    from deepspeed.utils import safe_get_full_fp32_param

    out: Tensor = safe_get_full_fp32_param(parameter)
    return out.detach()


def _state_kinds(optimizer: Any) -> list[str]:
    """Return the names of the optimizer's states, sorted: the same on every rank."""
    states = unwrap_optimizer(optimizer).state.values()
    return sorted({k for one in states for k, v in one.items() if k != "step" and v is not None})


def _state(optimizer: Any, parameter: nn.Parameter, kind: str) -> Tensor | None:
    if not _is_partitioned(parameter):
        value = unwrap_optimizer(optimizer).state.get(parameter, {}).get(kind)
        if value is not None and not isinstance(value, Tensor):
            why = f"The optimizer's state {kind} is of type {type(value).__name__}, not a tensor."
            raise RunError(why, "Use an optimizer whose states, but for `step`, are tensors.")
        return value
    from deepspeed.utils import safe_get_full_optimizer_state

    out: Tensor | None = safe_get_full_optimizer_state(parameter, kind)
    return out


def _set_partitioned(
    parameter: nn.Parameter, value: Tensor, states: dict[str, Tensor], optimizer: Any, step: int
) -> None:
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    safe_set_full_fp32_param(parameter, value)
    sliced = hasattr(parameter, "ds_id")
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=sliced):
        parameter.data.copy_(value)  # the copy that the forward computes with
    for kind, tensor in states.items():
        safe_set_full_optimizer_state(parameter, tensor, kind)
    for state in unwrap_optimizer(optimizer).state.values():
        if "step" in state:
            state["step"] = torch.full_like(torch.as_tensor(state["step"]), step)
