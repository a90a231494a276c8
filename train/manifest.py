"""Provenance of a run: command, configuration, versions, commit and machine."""

import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch

from outrider.conf.files import write, write_json
from outrider.conf.json_shapes import RATE, number, read_object
from outrider.conf.schema import Config, to_dict, to_yaml
from outrider.conf.shown_text import mask_values
from outrider.models.target.process import processor

PACKAGES = (
    "outrider", "torch", "transformers", "accelerate", "deepspeed", "datasets", "hydra-core",
    "safetensors", "tokenizers", "numpy", "wandb",
)  # fmt: skip
RESTORE = "Restore it from a copy, or train again."
MANIFEST = {
    "argv?": [str], "versions?": {str: str}, "git?": {"commit?": str},
    "config?": {
        "train?": ({str: object}, None), "drafter?": object,
        "target?": {"thinking?": (bool, None), "template_args?": ([str], None)},
    },
    "fingerprints?": {"template?": str, str: object},
}  # fmt: skip
TRAINING = {  # best_drafter.training_summary
    "parameters?, steps?, seconds?, start_seconds?, tokens?, tokens_per_second?": RATE,
    "peak_memory_bytes?, best_step?": RATE, "phases?": {str: float}, "budget?": {str: object},
    "held_out?, own_text?": {str: number},
}  # fmt: skip


def versions() -> dict[str, str]:
    out = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = "not installed"
    return out


def git_state() -> dict[str, Any]:
    """Return commit and state of the checkout that this code runs from; {} outside a checkout."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        process = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        )
        return process.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return {}


def machine() -> dict[str, Any]:
    """Return system, processor, memory and GPUs."""
    return {
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def write_manifest(folder: Path, config: Config, facts: dict[str, Any]) -> None:
    """Write `config.yaml`, which `eval` reads, and `manifest.json`."""
    write(folder / "config.yaml", to_yaml(config).encode())
    write_json(
        folder / "manifest.json",
        {
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "argv": mask_values(sys.argv),
            "config": mask_values(to_dict(config)),
            "versions": versions(),
            "git": git_state(),
            "machine": machine(),
            **mask_values(facts),
        },
    )


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the `manifest.json` of a run; None without one."""
    file = folder / "manifest.json"
    return read_object(file, RESTORE, MANIFEST) if file.is_file() else None


def read_training(folder: Path) -> dict[str, Any] | None:
    """Read the `training.json` of a run; None while it trains."""
    file = folder / "training.json"
    return read_object(file, RESTORE, TRAINING) if file.is_file() else None


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes of the CUDA allocator, or on a CPU of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
