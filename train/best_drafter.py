"""The best drafter of a run so far, and its publication as the run's result.

Best means the longest acceptance length on the target's own answers, or on the held-out text where
there are none; not the lowest loss.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.conf.errors import CorruptFile, RunError
from outrider.conf.files import copy_files, read_json, write_json
from outrider.models.formats import native
from outrider.train import checkpoint
from outrider.train.manifest import peak_memory, read_training
from outrider.train.trainer import Trainer

FILES = ("model.safetensors", "config.json")  # of a drafter, in the order of writing


def save_if_best(
    run: Trainer, held: dict[str, float], own: dict[str, float], averaged: bool = False
) -> bool:
    """Save the drafter if it is the best so far; return whether it is.

    Args:
        held: metrics on the held-out text.
        own: metrics on the target's own answers; {} without them.
        averaged: they are those of the averaged weights, which are saved.
    """
    progress, length = run.progress, (own or held)["accept_length"]
    if length <= progress.best:
        return False
    progress.best, progress.best_step = length, progress.step
    if averaged and run.average is not None:
        tensors = run.average.tensors
    else:
        tensors = without_prefix(checkpoint.collect_state(run.objective, None), "parameter.")
    if run.main:
        weights = without_prefix(tensors, "drafter.")
        about = {"step": progress.step, "held_out": held, **({"own_text": own} if own else {})}
        about |= {"averaged": run.config.train.ema} if averaged else {}
        native.save(run.drafter, best_folder(run), run.target, run.config.drafter, about, weights)
    return True


def without_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return those whose names have a prefix, without it."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def best_folder(run: Trainer) -> Path:
    """Return the folder of the best drafter; each step has its own, so that writes are atomic."""
    return run.folder / "best" / f"step-{run.progress.best_step:08d}"


def write_result(run: Trainer) -> Path:
    """Copy the best drafter to `drafter/`, whose other files stay, and write `training.json`."""
    final = run.folder / "drafter"
    if run.main:
        if not best_folder(run).is_dir():
            raise RunError(f"{best_folder(run)} is missing.", "Train with train.resume=never.")
        summary = training_summary(run)
        copy_files(best_folder(run), final, FILES)
        write_json(run.folder / "training.json", summary)
    run.accelerator.wait_for_everyone()
    return final


def has_result(run: Trainer) -> bool:
    """Return whether `drafter/` is the result of these steps; the same on all ranks."""
    published = False
    if run.main and (run.folder / "drafter" / FILES[-1]).is_file():
        published = (read_training(run.folder) or {}).get("steps") == run.progress.step
    return bool(run.reduce(torch.tensor(float(published))) > 0)


def training_summary(run: Trainer) -> dict[str, Any]:
    """Return cost and result of the training, for `outrider compare`."""
    progress, file = run.progress, best_folder(run) / "config.json"
    about = read_json(file, checkpoint.FIX).get("about")
    if not isinstance(about, dict) or "held_out" not in about:
        raise CorruptFile(f"{file} is damaged: it has no held-out metrics.", checkpoint.FIX)
    tokens = progress.step * run.rows * run.config.data.max_length
    return {
        "parameters": sum(p.numel() for p in run.drafter.parameters() if p.requires_grad),
        "steps": progress.step,
        "seconds": progress.seconds,
        "start_seconds": run.start_seconds,
        "phases": progress.phases,
        "tokens": tokens,
        "tokens_per_second": tokens / max(progress.seconds, 1e-9),
        "peak_memory_bytes": peak_memory(run.target.device),
        "best_step": progress.best_step,
        "held_out": about["held_out"],
        **({"own_text": about["own_text"]} if "own_text" in about else {}),
        "budget": {
            "text": run.data.about["sha256_documents"][:8],
            "minutes": run.config.train.max_minutes,
            "steps": run.config.train.max_steps,
            "batch_tokens": run.config.train.batch_tokens,
            "precision": run.config.launch.precision,
            "ranks": run.accelerator.num_processes,
        },
    }
