"""`outrider bench launches`: numerical equality of single-process, DDP and ZeRO training.

The losses of every step and the final weights are compared with those of the first run. Each rank
computes a part of the batch, so results are equal up to the rounding of sums.
"""

import dataclasses
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

from rich.text import Text
from torch import Tensor

from outrider.conf.console import Console
from outrider.conf.fields import option
from outrider.conf.json_shapes import read_object
from outrider.conf.options import parse_words
from outrider.conf.tensor_files import read_tensors
from outrider.launch.bench.common import (
    local_environment,
    number_table,
    run_command,
    save_result,
)
from outrider.launch.processes import train_command
from outrider.train.checkpoint import list_checkpoints
from outrider.train.metrics_log import read_log

LOSS, WEIGHT = 1e-4, 1e-3  # tolerances: absolute for losses, relative for weights
RUN = [
    "target=tiny", "data.max_length=128", "data.max_samples=60", "train.batch_tokens=512",
    "train.log_every=1", "train.eval_every=100", "train.save_every=100", "drafter.depths=2",
    "train.quick_eval=false",
    "train.lr=1e-3",  # the recipe's rate amplifies rounding to 0.1 within these steps
]  # fmt: skip


class LaunchVariant(NamedTuple):
    """How ranks share the work."""

    launch: str
    ranks: int
    accumulation: int = 1
    offload: str = "none"


class TrainingResult(NamedTuple):
    """Losses and final weights of a finished run, and its speed in tokens per second of steps."""

    losses: list[float]
    weights: dict[str, Tensor]
    speed: float

    @classmethod
    def read(cls, run: Path) -> "TrainingResult":
        losses = [line["loss@1"] for line in read_log(run) if line["kind"] == "train"]
        newest = list_checkpoints(run / "checkpoints")[-1]
        state = read_tensors(newest / "state.safetensors", None, "")
        weights = {name: value for name, value in state.items() if name.startswith("parameter.")}
        shape = {"tokens": int, "phases": {"steps": float}}
        summary = read_object(run / "training.json", "Run the benchmark again.", shape)
        return cls(losses, weights, summary["tokens"] / summary["phases"]["steps"])

    def max_difference(self, first: "TrainingResult") -> tuple[float, float]:
        """Return the largest difference of a step's loss, and of a tensor relative to its norm."""
        pairs = zip(self.losses, first.losses, strict=True)
        weights = [
            float((self.weights[name] - weight).norm() / weight.norm().clamp(min=1e-9))
            for name, weight in first.weights.items()
        ]
        return max(abs(a - b) for a, b in pairs), max(weights)


VARIANTS = [
    LaunchVariant("single", 1), LaunchVariant("single", 1, 2), LaunchVariant("single", 1, 4),
    *(LaunchVariant(name, n) for n in (2, 4) for name in ("ddp", "zero1", "zero2", "zero3")),
    LaunchVariant("ddp", 2, 2), LaunchVariant("zero2", 2, 2),
    LaunchVariant("zero2", 2, offload="optimizer"), LaunchVariant("zero3", 2, offload="parameters"),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `outrider bench launches`."""

    drafter: str = option("eagle3", "which drafter is trained")
    steps: int = option(12, "optimizer steps of each run", "[1, inf)")
    dir: str = option("runs/launches", "folder of the runs; its content is removed first")
    out: str = option("", "JSON file for the result")


def launches(words: list[str]) -> int:
    """Run the benchmark. Returns 0 if all results are equal within the tolerances."""
    options, console = parse_words(Options, words), Console()
    shutil.rmtree(options.dir, ignore_errors=True)
    title = f"{options.drafter}, {options.steps} steps of 512 tokens, float32"
    head = (*LaunchVariant._fields, "loss difference", "weight difference", "tokens/s", "s")
    table = number_table(title, head, ("launch", "offload"))
    rows, first = list[dict[str, Any]](), None
    for variant in VARIANTS:
        start = time.monotonic()
        result = TrainingResult.read(_train(variant, options))
        first = first or result
        seconds = time.monotonic() - start
        losses, weights = result.max_difference(first)
        figures = {"losses": losses, "weights": weights, "speed": result.speed, "seconds": seconds}
        rows.append({**variant._asdict(), **figures})
        cells = (f"{losses:.1e}", f"{weights:.1e}", f"{result.speed:.0f}", f"{seconds:.0f}")
        table.add_row(*map(str, variant), *cells)
    console.print(table)
    equal = all(row["losses"] < LOSS and row["weights"] < WEIGHT for row in rows)
    verdict = ("equal", "") if equal else ("NOT EQUAL", "red")
    bounds = f" (losses within {LOSS:g}, weights within {WEIGHT:g} of their norm)"
    console.print(Text.assemble(verdict, bounds))
    settings = dataclasses.asdict(options)
    save_result(options.out, {"options": settings, "rows": rows, "equal": equal})
    return int(not equal)


def _train(variant: LaunchVariant, options: Options) -> Path:
    run = Path(options.dir) / "-".join(map(str, variant))
    run_command(
        [*train_command(variant.ranks), *RUN, f"drafter={options.drafter}",
         f"train.max_steps={options.steps}", f"launch={variant.launch}",
         f"launch.accumulation={variant.accumulation}", f"launch.offload={variant.offload}",
         f"run.dir={run}"],
        local_environment(max(one.ranks for one in VARIANTS)),
    )  # fmt: skip
    return run
