"""Settings of a sweep or a search: the group `sweep` of `train -m`."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from outrider.conf.compose import compose, to_container
from outrider.conf.errors import ConfigError
from outrider.conf.fields import LARGEST, from_dict, option, require_word

COUNT = "[1, inf)"
RANGE_FIX = "Use a list of values, or a range: {low: 1e-4, high: 1e-2, log: true}."


@dataclasses.dataclass(frozen=True)
class SweepConfig:
    """A grid over all combinations, or a search."""

    dir: str = option("runs/sweep", "folder of a search and its runs; with Slurm, of the job files")
    by: Literal["local", "slurm"] = option("local", "start runs here, or as Slurm jobs")
    jobs: int = option(1, "runs at a time; with Slurm, jobs in the queue at a time", "[1, 4096]")
    devices: tuple[str, ...] = option((), "GPUs of each job: ['0,1','2,3']; empty: all GPUs")
    processes: int = option(1, "ranks per run (choose launch=ddp or zero*)", "[1, 65536]")
    retries: int = option(0, "restarts of a failed run", "[0, 1000]")
    partition: str | None = option(None, "slurm: partition; null: the cluster's default")
    hours: float = option(24.0, "slurm: time limit of a job, which is then requeued", "(0, inf)")
    gpus: int = option(1, "slurm: GPUs per job, one per rank; 0: none", "[0, inf)")
    cores: int = option(8, "slurm: CPU cores per job", COUNT)
    grace: int = option(120, "slurm: seconds before the time limit at which a run saves", COUNT)
    trials: int | None = option(
        None, "runs of a search; null: a grid over all combinations", "[1, 65536]"
    )
    minutes: float | None = option(None, "start no run of a search after this time", "(0, inf)")
    metric: Literal["accept_length", "accept_length_sampling", "tau", "speedup"] = option(
        "accept_length", "search objective: at held-out evaluations, or (tau, speedup) by decoding"
    )
    prune: bool = option(True, "stop runs below the median at a held-out evaluation")
    seed: int = option(0, "seed of the search", "[0, 4294967295]")
    over: Any = option(None, "key -> list of values, or range with low and high")

    def __post_init__(self) -> None:
        require_word("sweep.partition", self.partition)
        if self.devices and len(self.devices) < self.jobs:
            raise ValueError(f"devices = {list(self.devices)}: needs one entry per job")
        if self.devices and self.by == "slurm":
            raise ValueError(f"devices = {list(self.devices)}: Slurm assigns the GPUs itself")
        if self.by == "slurm" and self.gpus not in (0, self.processes):
            raise ValueError(f"gpus = {self.gpus}: must equal sweep.processes={self.processes}")
        if self.over is not None and not isinstance(self.over, Mapping):
            raise ValueError(f"over = {self.over}: needs keys with values")
        for name, values in (self.over or {}).items():
            if why := _values_error(values):
                raise ConfigError(f"sweep.over.{name}", values, why, RANGE_FIX)


def _values_error(values: Any) -> str:
    """Return what is wrong with a list of values or a range; "" if nothing is."""
    if not isinstance(values, Mapping):
        listed = isinstance(values, list | tuple) and values
        return "" if listed else "There are no values to choose from."
    low, high, step = list[Any](map(values.get, ("low", "high", "step")))
    unknown = set(values) - {"low", "high", "log", "step"}
    if unknown or not (_is_number(low) and _is_number(high)):
        return "This is not a range."
    if step is not None and (values.get("log") or not (_is_number(step) and step > 0)):
        return "A step must be above 0, and a log scale has none."
    if not low < high or (values.get("log") and low <= 0):
        return "low must be below high, and on a log scale above 0."
    return ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and abs(value) <= LARGEST


def read_sweep(overrides: Sequence[str]) -> tuple[SweepConfig, list[str]]:
    """Return the settings of `sweep=..` and `sweep.*`, and the other overrides."""
    own = [word for word in overrides if word.lstrip("+~").startswith(("sweep=", "sweep."))]
    rest = [word for word in overrides if word not in own]
    choice = next((w.partition("=")[2] for w in own if w.startswith("sweep=")), "default")
    drafter = next((w.partition("=")[2] for w in rest if w.startswith("drafter=")), "eagle3")
    words = [word for word in own if not word.startswith("sweep=")]
    over = [word for word in words if word.lstrip("+").startswith("sweep.over=")]
    if over:  # replaces the `over` of the yaml instead of merging with it
        words = [word for word in words if word not in over]
        words += ["~sweep.over", f"+{over[-1].lstrip('+')}"]
    node = compose([*words, f"+drafter.name={drafter!r}"], f"sweep/{choice}")
    values = to_container(node)["sweep"]
    if isinstance(values["over"], Mapping):
        values["over"] = dict(_flatten_over(values["over"]))
    settings: SweepConfig = from_dict(SweepConfig, values, "sweep")
    return settings, rest


def _flatten_over(over: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (full key, values), whether keys are dotted or nested; a range stays whole."""
    for name, value in over.items():
        if isinstance(value, Mapping) and not {"low", "high"} & set(value):
            yield from _flatten_over(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def to_override(name: str, value: object) -> str:
    """Return an override, such as drafter.loss=["tv"]."""
    return f"{name}={json.dumps(value)}"
