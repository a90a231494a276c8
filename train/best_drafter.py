"""The best drafter of a run so far, and the result that it becomes in the end.

Best is the one with the longest held-out acceptance, not the one with the lowest loss.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider.conf.errors import RunError
from outrider.conf.files import copy_folder, read_json, remove, write_json
from outrider.models.formats import native
from outrider.train import checkpoint
from outrider.train.manifest import peak_memory

if TYPE_CHECKING:
    from outrider.train.trainer import Run


def keep(run: "Run", metrics: dict[str, float]) -> bool:
    """Keep the drafter if it is the best so far; whether it is."""
    now = run.progress
    if metrics["accept_length"] <= now.best:
        return False
    now.best, now.best_step = metrics["accept_length"], now.step
    _save(run, folder_of(run), metrics)
    return True


def folder_of(run: "Run") -> Path:
    """One folder per step, so that a kill never leaves half of a new best in an old one."""
    return run.folder / "best" / f"step-{run.progress.best_step:08d}"


def _save(run: "Run", folder: Path, metrics: dict[str, float]) -> None:
    tensors = checkpoint.gather(run.objective, None)
    if run.main:
        prefix = len("parameter.drafter.")
        weights = {k[prefix:]: v for k, v in tensors.items() if k.startswith("parameter.")}
        about = {"step": run.progress.step, "held_out": metrics}
        native.save(run.drafter, folder, run.target, run.config.drafter, about, weights)


def publish(run: "Run") -> Path:
    """The best drafter becomes the run's result, `drafter/`."""
    final = run.folder / "drafter"
    if run.main:
        if not folder_of(run).is_dir():
            raise RunError(f"{folder_of(run)} is missing.", "Train with train.resume=never.")
        copy_folder(folder_of(run), final)
        write_json(run.folder / "training.json", account(run))
    run.accelerator.wait_for_everyone()
    return final


def published(run: "Run") -> bool:
    """Whether `drafter/` is what these steps have led to; all ranks are told the same."""
    here = False
    if run.main and (run.folder / "drafter").is_dir():
        file = run.folder / "training.json"
        here = file.is_file() and read_json(file, checkpoint.FIX)["steps"] == run.progress.step
    return bool(run.reduce(torch.tensor(float(here))) > 0)


def account(run: "Run") -> dict[str, Any]:
    """What the training cost and led to, for `outrider compare`."""
    now, best = run.progress, read_json(folder_of(run) / "config.json", checkpoint.FIX)
    tokens = now.step * run.rows * run.config.data.max_length
    return {
        "parameters": sum(p.numel() for p in run.drafter.parameters() if p.requires_grad),
        "steps": now.step,
        "seconds": now.seconds,
        "start_seconds": run.start_seconds,
        "phases": now.phases,
        "joules": now.joules,
        "tokens": tokens,
        "tokens_per_second": tokens / max(now.seconds, 1e-9),
        "peak_memory_bytes": peak_memory(run.target.device),
        "best_step": now.best_step,
        "held_out": best["about"]["held_out"],
        "budget": {
            "text": run.material.about["sha256_documents"][:8],
            "minutes": run.config.train.max_minutes,
            "steps": run.config.train.max_steps,
            "batch_tokens": run.config.train.batch_tokens,
            "precision": run.config.launch.precision,
            "ranks": run.accelerator.num_processes,
        },
    }


def forget(run: "Run", newest: int) -> None:
    """Keep the best drafters that some checkpoint refers to, or will."""
    files = [f / "state.json" for f in checkpoint.found(run.folder / "checkpoints")]
    steps = {read_json(f, checkpoint.FIX)["progress"]["best_step"] for f in files}
    for old in (run.folder / "best").glob("step-*"):
        step = int(old.name.removeprefix("step-"))
        if step < newest and step not in steps:
            remove(old)
