"""`outrider bench launches`: one recipe under every launch, and how far the results are apart.

    outrider bench launches steps=12

The same run on 1, 2 and 4 ranks, by DDP and every stage of ZeRO, with accumulation in place of
ranks, and with what waits in the CPU's memory. Losses of every step and the weights behind the last
one are compared with those of the first run. Each rank computes with its part of the batch, so sums
are taken in another order: equal means to rounding.
"""

import dataclasses
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from torch import Tensor

from outrider.conf.compose import plain
from outrider.conf.errors import RunError
from outrider.conf.fields import key, read
from outrider.conf.files import read_json, read_tensors, write_json
from outrider.launch.job_pool import bare, train_on
from outrider.train.checkpoint import found

LOSS, WEIGHT = 1e-4, 1e-3  # aims: absolute for losses, relative for weights
RUN = [
    "target=tiny", "data.max_length=128", "data.max_samples=60", "train.batch_tokens=512",
    "train.log_every=1", "train.eval_every=100", "train.save_every=100", "drafter.depths=2",
    "train.quick_eval=false",
    "train.lr=1e-3",  # the recipe's makes 0.1 of a sum in another order within these few steps
]  # fmt: skip


class Way(NamedTuple):
    """Who shares the work."""

    launch: str
    ranks: int
    accumulation: int = 1
    offload: str = "none"


class Row(NamedTuple):
    """One line of the table: a `Way`, how far from the first one it ended, and its speed."""

    launch: str
    ranks: int
    accumulation: int
    offload: str
    losses: float  # largest difference of a step's loss
    weights: float  # largest difference of a tensor, as a share of its norm
    pace: float  # tokens per second of steps
    seconds: float  # of the whole command


class Result(NamedTuple):
    """What a run has left."""

    losses: list[float]
    weights: dict[str, Tensor]
    pace: float

    @classmethod
    def of(cls, place: Path) -> "Result":
        lines = map(json.loads, (place / "metrics.jsonl").read_text().splitlines())
        losses = [line["loss@1"] for line in lines if line["kind"] == "train"]
        state = read_tensors(found(place / "checkpoints")[-1] / "state.safetensors", None, "")
        weights = {name: value for name, value in state.items() if name.startswith("parameter.")}
        account = read_json(place / "training.json", "")
        return cls(losses, weights, account["tokens"] / account["phases"]["steps"])

    def apart(self, first: "Result") -> tuple[float, float]:
        """Largest differences of losses and weights."""
        pairs = zip(self.losses, first.losses, strict=True)
        weights = [
            float((self.weights[name] - old).norm() / old.norm().clamp(min=1e-9))
            for name, old in first.weights.items()
        ]
        return max(abs(a - b) for a, b in pairs), max(weights)


WAYS = [
    Way("single", 1), Way("single", 1, 2), Way("single", 1, 4),
    *(Way(name, ranks) for ranks in (2, 4) for name in ("ddp", "zero1", "zero2", "zero3")),
    Way("ddp", 2, 2), Way("zero2", 2, 2),
    Way("zero2", 2, offload="optimizer"), Way("zero3", 2, offload="parameters"),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """What `outrider bench launches` takes."""

    drafter: str = key("eagle3", "what is trained")
    steps: int = key(12, "optimizer steps of each run", "[1, inf)")
    dir: str = key("runs/launches", "the runs lie there; what is there is removed")
    out: str = key("", "json file for the result")


def launches(words: list[str]) -> int:
    """The bench. Returns 0 if all agree."""
    options = read(Options, plain(OmegaConf.from_dotlist(list(words))), "")
    folder, console = Path(options.dir), Console()
    shutil.rmtree(folder, ignore_errors=True)
    table = Table(title=f"{options.drafter}, {options.steps} steps of 512 tokens, float32")
    heads = ("launch", "ranks", "accumulation", "offload", "losses apart", "weights apart",
             "tokens/s", "s")  # fmt: skip
    for head in heads:
        text = head in ("launch", "offload")
        table.add_column(head, justify="left" if text else "right", no_wrap=text)
    rows, first = list[Row](), None
    for way in WAYS:
        began = time.monotonic()
        place = _trained(way, options, folder)
        found = Result.of(place)
        first = first or found
        rows.append(Row(*way, *found.apart(first), found.pace, time.monotonic() - began))
        row = rows[-1]
        cells = (f"{row.losses:.1e}", f"{row.weights:.1e}", f"{row.pace:.0f}", f"{row.seconds:.0f}")
        table.add_row(row.launch, str(row.ranks), str(row.accumulation), row.offload, *cells)
    console.print(table)
    equal = all(row.losses < LOSS and row.weights < WEIGHT for row in rows)
    said = "equal" if equal else "[red]NOT EQUAL[/red]"
    console.print(f"{said} (losses within {LOSS:g}, weights within {WEIGHT:g} of their norm)")
    if options.out:
        write_json(
            Path(options.out),
            {
                "options": dataclasses.asdict(options),
                "rows": [row._asdict() for row in rows],
                "equal": equal,
            },
        )
    return int(not equal)


def _trained(way: Way, options: Options, folder: Path) -> Path:
    """The folder of its run."""
    place = folder / f"{way.launch}-{way.ranks}-{way.accumulation}-{way.offload}"
    words = [
        *RUN, f"drafter={options.drafter}", f"train.max_steps={options.steps}",
        f"launch={way.launch}", f"launch.accumulation={way.accumulation}",
        f"launch.offload={way.offload}", f"run.dir={place}",
    ]  # fmt: skip
    done = subprocess.run(
        [*train_on(way.ranks), *words], capture_output=True, text=True,
        env={**bare(), "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    if done.returncode:
        message = f"{way} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        raise RunError(message, "Run it alone to see more.")
    return place
