"""`outrider bench lengths`: memory and time of one training step as rows grow longer.

One row of the given length is read by the embedded target (its positions stretched; the figures
do not depend on what it says) and learned from by an untrained drafter, each length in a process
of its own: with every depth remembered for the backward pass, and with gradient checkpointing. The
peak is of resident memory above what the process held before.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from outrider.conf.errors import ConfigError
from outrider.conf.files import write_json
from outrider.launch.bench.train_step import Peak, machine, read_options, resident
from outrider.models import drafters
from outrider.models.load import load
from outrider.models.vocab import DraftVocab
from outrider.train.losses import parse_depth_weights
from outrider.train.objective import Objective
from outrider.train.settings import TargetConfig

KNOWN = {
    "lengths": "1024,2048,4096,8192,16384,32768",
    "drafter": "eagle3",
    "depths": "4",
    "recompute": "no,yes",
    "threads": 0,
    "out": "",
}
MB = 2**20
CHILD = "OUTRIDER_BENCH_CHILD"


def lengths(words: list[str]) -> int:
    """The bench."""
    options = read_options(words, KNOWN, _read)
    if os.environ.get(CHILD):
        print(json.dumps(_step(options)))
        return 0
    console, rows = Console(), list[dict[str, Any]]()
    table = Table(title=f"one step of {options['drafter']}, one row")
    for name in ("tokens", "checkpointing", "target: peak MB", "s", "step: peak MB", "s"):
        table.add_column(name, justify="right")
    with console.status("") as status:
        for length in options["lengths"].split(","):
            for recompute in options["recompute"].split(","):
                status.update(f"{length} tokens, gradient checkpointing: {recompute}")
                row = _apart({**options, "lengths": length, "recompute": recompute, "out": ""})
                rows.append({"tokens": int(length), "recompute": recompute == "yes", **row})
                figures = (f"{row[key]:.{digits}f}" for key, digits in FIGURES.items())
                table.add_row(length, recompute, *figures)
    console.print(table)
    console.print(machine())
    if options["out"]:
        write_json(Path(options["out"]), {"machine": machine(), "setting": options, "rows": rows})
    return 0


FIGURES = {"target_mb": 0, "target_s": 1, "step_mb": 0, "step_s": 1}  # and their digits


def _read(key: str, value: str, default: Any) -> Any:
    numbers = value.split(",") if key in ("lengths", "depths", "threads") else []
    if not all(number.isdecimal() for number in numbers):
        raise ConfigError(key, value, "Whole numbers are expected.", f"Like {key}={default}.")
    if key == "recompute" and not set(value.split(",")) <= {"no", "yes"}:
        raise ConfigError(key, value, "Known are no and yes.", "Like recompute=no,yes.")
    if key == "drafter" and value not in drafters.names():
        raise ConfigError(key, value, "No such drafter.", f"Use: {', '.join(drafters.names())}.")
    return int(value) if isinstance(default, int) else value


def _apart(options: dict[str, Any]) -> dict[str, float]:
    """One length, in a fresh process."""
    words = [f"{key}={value}" for key, value in options.items() if value not in ("", 0)]
    command = [sys.executable, "-m", "outrider.launch.cli", "bench", "lengths", *words]
    done = subprocess.run(
        command, env={**os.environ, CHILD: "1"}, capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _step(options: dict[str, Any]) -> dict[str, float]:
    """Peaks and seconds of the target's pass and of the drafter's step."""
    length, depths = int(options["lengths"]), int(options["depths"])
    target = load(TargetConfig()).target
    target.text.max_position_embeddings = max(length, target.text.max_position_embeddings)
    name = options["drafter"]
    cfg = drafters.module(name).Config(name=name, depths=depths)
    target.set_taps(drafters.taps_of(cfg, target.depth))
    drafter = drafters.build(cfg, target, DraftVocab.whole(target.vocab))
    drafter.recompute = options["recompute"] == "yes"
    weights = parse_depth_weights(cfg.depth_weights, cfg.depths)
    objective = Objective(drafter, target, weights=weights, loss=cfg.loss)
    _once(objective, target, 16)  # libraries allocate their own memory on the first call
    return _once(objective, target, length)


def _once(objective: Objective, target: Any, length: int) -> dict[str, float]:
    torch.manual_seed(0)
    ids = torch.randint(target.vocab, (1, length))
    everything = torch.ones(1, length, dtype=torch.bool)
    before, began = resident(), time.perf_counter()
    with Peak() as reading:
        trace = target.trace(ids, everything, torch.zeros_like(ids), torch.arange(length)[None])
    read, middle = time.perf_counter(), resident()
    with Peak() as learning:
        loss, _ = objective(trace, torch.full((len(objective.weights),), float(length)))
        loss.backward()
    return {
        "target_mb": (reading.highest - before) / MB,
        "target_s": read - began,
        "step_mb": (learning.highest - middle) / MB,
        "step_s": time.perf_counter() - read,
    }
