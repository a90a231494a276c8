"""`outrider bench`: what a training step costs on this machine.

`train-step` times one drafter step (unroll, losses, backward; the target's features are given) in
the fast path and in the slow reference, side by side in one process, and reads the peak memory of
each from a process of its own. Ratios within one run are the result; seconds belong to the machine
that is printed with them. Paths:

    noted       fast, with the target's favourites given too, as recorded text has them
    fast        from the target's last states alone
    reference   dense mask, all rows at once, the formulas as they read
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from outrider.conf.errors import ConfigError
from outrider.conf.files import write_json
from outrider.models.decode.sampling import first_argmax
from outrider.models.drafter import Shape, Trace
from outrider.models.drafters.eagle3 import Config as Eagle3Config
from outrider.models.drafters.eagle3 import Eagle3
from outrider.models.vocab import DraftVocab
from outrider.train.objective import Objective

# the sizes of docs/benchmarks.md: a SmolLM2-135M target
SIZES: dict[str, int | str] = {
    "hidden": 576, "intermediate": 1536, "heads": 9, "kv_heads": 3, "vocab": 49152,
    "draft_vocab": 8192, "rows": 4, "length": 512, "repeats": 5, "threads": 0, "out": "",
    "depths": "3,7", "precision": "fp32,bf16", "paths": "noted,fast,reference",
}  # fmt: skip
CHOICES = {"precision": ("fp32", "bf16"), "paths": ("noted", "fast", "reference")}


def main(words: list[str]) -> int:
    """The verb."""
    options = _options(words)
    if os.environ.get("OUTRIDER_BENCH_CHILD"):
        print(json.dumps(_peak(options)))
        return 0
    return train_step(options, Console())


def _options(words: list[str]) -> dict[str, Any]:
    return read_options(words, SIZES, _read)


def read_options(
    words: list[str], known: Mapping[str, Any], convert: Callable[[str, str, Any], Any]
) -> dict[str, Any]:
    """Options of a benchmark, `key=value` each; `threads` is obeyed at once.

    Args:
        known: all options with their defaults.
        convert: (key, word, default) -> value; refuses what makes no sense.

    Raises:
        ConfigError: there is no such option.
    """
    options = dict(known)
    for word in words:
        key, _, value = word.partition("=")
        if key not in known:
            fix = f"Use: {', '.join(known)}."
            raise ConfigError(key, value, "This benchmark has no such option.", fix)
        options[key] = convert(key, value, known[key])
    if options.get("threads"):
        torch.set_num_threads(options["threads"])
    return options


def _read(key: str, value: str, default: Any) -> Any:
    """A whole number where the default is one, else words between commas, checked."""
    whole = isinstance(default, int)
    words = value.split(",") if key in ("depths", *CHOICES) else [value]
    for word in words if whole or key == "depths" else ():
        if not word.isdecimal():
            raise ConfigError(key, value, "A whole number is expected.", f"Like {key}={default}.")
    for word in words if key in CHOICES else ():
        if word not in CHOICES[key]:
            raise ConfigError(key, value, f"There is no {word}.", f"Use: {','.join(CHOICES[key])}.")
    return int(value) if whole else value


class Case(NamedTuple):
    """A drafter step ready to run."""

    objective: Objective
    trace: Trace
    precision: str

    def step(self) -> float:
        """One step; returns the loss."""
        depths = len(self.objective.weights)
        divide = torch.stack([self.trace.counts(d).sum() for d in range(1, depths + 1)]).float()
        enabled = self.precision == "bf16"
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss, _ = self.objective(self.trace, divide)
        loss.backward()
        self.objective.zero_grad()
        return float(loss.detach())


class _Ends:
    """The part of a target that a step with given features needs: its embedding and its head."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.weight = torch.randn(shape.vocab, shape.hidden, dtype=dtype) * shape.hidden**-0.5
        self.vocab, self._shape = shape.vocab, shape

    def shape(self) -> Shape:
        return self._shape

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(last, self.weight)

    def logits_of(self, last: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(last, self.weight[ids])

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(ids, self.weight)


def case(o: dict[str, Any], depths: int, precision: str, path: str) -> Case:
    """A drafter of these sizes on a random trace, half of the rows supervised."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    shape = Shape(
        hidden=o["hidden"], intermediate=o["intermediate"], layers=30, heads=o["heads"],
        kv_heads=o["kv_heads"], head_dim=o["hidden"] // o["heads"], vocab=o["vocab"], eps=1e-5,
        rope_theta=1e4, activation="silu", max_positions=8192,
    )  # fmt: skip
    head = _Ends(shape, dtype)
    kept = torch.randperm(o["vocab"])[: o["draft_vocab"]].sort().values
    reference = path == "reference"
    cfg = Eagle3Config(depths=depths, attention="reference" if reference else "fast")
    drafter = Eagle3(cfg, head, DraftVocab(kept, o["vocab"]), (1, 14, 26))
    objective = Objective(
        drafter, head, weights=[0.8**d for d in range(depths)],
        path="plain" if reference else "fused",
        loss=["soft_ce_reference" if reference else "soft_ce"],
    )  # fmt: skip
    trace = _trace(o, dtype)
    if path == "noted":
        best = first_argmax(head.logits(trace.last.flatten(0, 1)))
        trace = replace(trace, favourite=best.view_as(trace.ids))
    return Case(objective, trace, precision)


def _trace(o: dict[str, Any], dtype: torch.dtype) -> Trace:
    size = (o["rows"], o["length"])
    ids = torch.randint(o["vocab"], size)
    answer = torch.zeros(size, dtype=torch.bool)
    answer[:, o["length"] // 2 :] = True
    following = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], dim=1)
    positions = torch.arange(o["length"]).expand(size)
    taps = torch.randn(*size, 3 * o["hidden"]).to(dtype)
    last = torch.randn(*size, o["hidden"]).to(dtype)
    return Trace(ids, following, answer, torch.zeros_like(ids), positions, taps, last)


def train_step(o: dict[str, Any], console: Console) -> int:
    """Print and optionally write (`out=FILE.json`) the table of docs/benchmarks.md."""
    table = Table("step", "path", "s (median)", "spread", "peak MB", "against reference")
    results: list[dict[str, Any]] = []
    for precision in str(o["precision"]).split(","):
        for depths in map(int, str(o["depths"]).split(",")):
            paths = str(o["paths"]).split(",")
            seconds = _interleaved(
                {path: case(o, depths, precision, path).step for path in paths}, int(o["repeats"])
            )
            slow = statistics.median(seconds["reference"]) if "reference" in paths else None
            for path in paths:
                median = statistics.median(seconds[path])
                spread = (max(seconds[path]) - min(seconds[path])) / median
                peak = _measured_apart(o, depths, precision, path)
                results.append(
                    {"depths": depths, "precision": precision, "path": path, "seconds": median,
                     "spread": spread, "peak_mb": peak, "all": seconds[path]}
                )  # fmt: skip
                table.add_row(
                    f"{depths} depths {precision}", path, f"{median:.2f}", f"{spread:.0%}",
                    f"{peak:.0f}", "-" if slow is None else f"{median / slow:.2f}",
                )  # fmt: skip
    console.print(table)
    console.print(machine())
    if o["out"]:
        write_json(Path(o["out"]), {"machine": machine(), "options": o, "results": results})
    return 0


def _interleaved(steps: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each, taken in turns after one warm-up, so that drift strikes all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 1):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def _measured_apart(o: dict[str, Any], depths: int, precision: str, path: str) -> float:
    """Peak resident memory of one step above its start, MB, from a fresh process."""
    words = {**o, "depths": depths, "precision": precision, "paths": path, "out": ""}
    command = [sys.executable, "-m", "outrider.launch.cli", "bench", "train-step"]
    command += [f"{key}={value}" for key, value in words.items() if value != ""]
    done = subprocess.run(
        command, env={**os.environ, "OUTRIDER_BENCH_CHILD": "1"}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def _peak(o: dict[str, Any]) -> float:
    ready = case(o, int(o["depths"]), str(o["precision"]), str(o["paths"]))
    few = case({**o, "length": 16}, int(o["depths"]), str(o["precision"]), str(o["paths"]))
    few.step()  # libraries allocate their own memory on the first call
    before, watch = resident(), Peak()
    with watch:
        ready.step()
    return (watch.highest - before) / 2**20


def resident() -> int:
    """Bytes of memory this process holds now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """Highest resident memory while the block runs, looked at every millisecond."""

    def __init__(self) -> None:
        self.highest = resident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(0.001):
            self.highest = max(self.highest, resident())

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def machine() -> str:
    """The machine in words, for the page of figures."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            line.split(":")[1].strip()
            for line in info.read_text().splitlines()
            if "model name" in line
        ]
        model = names[0] if names else model
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{model}, {torch.get_num_threads()} threads, {device}, torch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
