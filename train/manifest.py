"""Provenance: what made this run, written into its folder before it starts; and what it took."""

import hashlib
import importlib.metadata
import json
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
from outrider.models.chat_template import template_hash
from outrider.models.formats.native import target_fingerprint
from outrider.models.load import Loaded
from outrider.train.settings import Config, resolved, to_yaml

PACKAGES = (
    "outrider", "torch", "transformers", "accelerate", "deepspeed", "datasets", "hydra-core",
    "safetensors", "tokenizers", "numpy", "wandb",
)  # fmt: skip


def versions() -> dict[str, str]:
    out = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = "not installed"
    return out


def git_state() -> dict[str, Any]:
    """Commit of the checkout this code runs from, and whether it was changed; {} outside one."""
    here = Path(__file__).resolve().parent.parent

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(here), *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return {}


def machine() -> dict[str, Any]:
    """Processors, memory and GPUs, in the words of the system."""
    memory = psutil.virtual_memory().total
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "gpus": gpus,
    }


def _processor() -> str:
    """Its name, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def identify(loaded: Loaded) -> dict[str, str]:
    """Short names for what the text and the features depend on."""
    return {
        "target": target_fingerprint(loaded.target),
        "tokenizer": hashlib.sha256(_rules(loaded.tokenizer).encode()).hexdigest()[:16],
        "template": template_hash(loaded.tokenizer),
    }


def _rules(tokenizer: Any) -> str:
    """Everything that turns text into ids, as one text; of a slow tokenizer the vocabulary."""
    if (fast := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return json.dumps(sorted(tokenizer.get_vocab().items()))
    rules = json.loads(fast.to_str())
    changing = ("padding", "truncation")  # settings of the last call
    return json.dumps({k: v for k, v in rules.items() if k not in changing}, sort_keys=True)


def write_manifest(folder: Path, config: Config, facts: dict[str, Any]) -> None:
    """`config.yaml` (what `eval` reads back) and `manifest.json`."""
    write(folder / "config.yaml", to_yaml(config).encode())
    write_json(
        folder / "manifest.json",
        {
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "argv": sys.argv,
            "config": resolved(config),
            "versions": versions(),
            "git": git_state(),
            "machine": machine(),
            **facts,
        },
    )


def peak_memory(device: torch.device) -> int:
    """Bytes: of the device's allocator, or on a CPU of the whole process, target included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
