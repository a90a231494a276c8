"""How a sweep goes about its runs, as settings: the group `sweep` of `train -m`."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from outrider.conf.compose import compose, plain
from outrider.conf.errors import ConfigError
from outrider.conf.fields import key, read

COUNT = "[1, inf)"
RANGE = "Give a list of values, or a range: {low: 1e-4, high: 1e-2, log: true}."


@dataclasses.dataclass(frozen=True)
class SweepConfig:
    """Every combination, or a search."""

    dir: str = key("runs/sweep", "of a search: its study and its runs; of Slurm: its jobs' papers")
    by: Literal["local", "slurm"] = key("local", "where runs are started: here, or as Slurm jobs")
    jobs: int = key(1, "runs at a time; with Slurm, jobs in the queue at a time", COUNT)
    devices: tuple[str, ...] = key((), "GPUs of each job: ['0,1','2,3']; empty: all see all")
    processes: int = key(1, "ranks of each run (choose launch=ddp or zero*)", COUNT)
    retries: int = key(0, "times a run that failed is started again", "[0, inf)")
    partition: str | None = key(None, "slurm: partition; null: the cluster's default")
    hours: float = key(
        24.0, "slurm: time limit of a job; behind it the run is queued again", "(0, inf)"
    )
    gpus: int = key(1, "slurm: GPUs of each job, one per rank; 0: it has none", "[0, inf)")
    cores: int = key(8, "slurm: CPU cores of each job", COUNT)
    grace: int = key(120, "slurm: seconds before the limit in which a run saves and leaves", COUNT)
    trials: int | None = key(None, "runs of a search; null: no search, every combination", COUNT)
    minutes: float | None = key(None, "no run of a search begins after this", "(0, inf)")
    metric: Literal["accept_length", "accept_length_sampling", "tau", "speedup"] = key(
        "accept_length", "what a search makes large: held-out, or of the run's first decoding"
    )
    prune: bool = key(True, "stop runs that fall behind at a held-out evaluation")
    seed: int = key(0, "of the search")
    over: Any = key(None, "what is varied: key -> list of values, or range with low and high")

    def __post_init__(self) -> None:
        if self.devices and len(self.devices) < self.jobs:
            raise ValueError(f"devices = {list(self.devices)}: needs one entry per job")
        if self.devices and self.by == "slurm":
            raise ValueError(f"devices = {list(self.devices)}: Slurm deals the GPUs out itself")
        if self.by == "slurm" and self.gpus not in (0, self.processes):
            raise ValueError(f"gpus = {self.gpus}: with sweep.processes={self.processes}, as many")
        if self.over is not None and not isinstance(self.over, Mapping):
            raise ValueError(f"over = {self.over}: needs keys with values")
        for name, values in (self.over or {}).items():
            _check(name, values)


def _check(name: str, values: object) -> None:
    if isinstance(values, Mapping):
        known = {"low", "high", "log", "step"}
        low, high = values.get("low"), values.get("high")
        if not (set(values) <= known and _number(low) and _number(high)):
            raise ConfigError(f"sweep.over.{name}", dict(values), "This is no range.", RANGE)
        step = values.get("step")
        if step is not None and (values.get("log") or not (_number(step) and step > 0)):
            why = "A step is a number above 0, and of no use on a log scale."
            raise ConfigError(f"sweep.over.{name}", dict(values), why, RANGE)
        if not values["low"] < values["high"] or (values.get("log") and values["low"] <= 0):
            why = "A range ascends, on a log scale from above 0."
            raise ConfigError(f"sweep.over.{name}", dict(values), why, RANGE)
    elif not isinstance(values, list | tuple) or not values:
        raise ConfigError(f"sweep.over.{name}", values, "There is nothing to choose from.", RANGE)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_sweep(overrides: Sequence[str]) -> tuple[SweepConfig, list[str]]:
    """The settings behind `sweep=..` and `sweep.*`, and the other overrides.

    Raises:
        ConfigError: an unknown key or choice, a wrong type, a value out of range.
    """
    own = [word for word in overrides if word.lstrip("+~").startswith(("sweep=", "sweep."))]
    rest = [word for word in overrides if word not in own]
    choice = next((w.partition("=")[2] for w in own if w.startswith("sweep=")), "default")
    drafter = next((w.partition("=")[2] for w in rest if w.startswith("drafter=")), "eagle3")
    words = [w for w in own if not w.startswith("sweep=")]
    whole = [w.lstrip("+") for w in words if w.lstrip("+").startswith("sweep.over=")]
    if whole:  # in place of what the file varies, not beside it
        words = [w for w in words if w.lstrip("+") not in whole] + ["~sweep.over", f"+{whole[-1]}"]
    values = plain(compose([*words, f"+drafter.name={drafter!r}"], f"sweep/{choice}"))["sweep"]
    values["over"] = dict(_dotted(values["over"]))
    settings: SweepConfig = read(SweepConfig, values, "sweep")
    return settings, rest


def _dotted(over: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """`over` by full keys, whether written with dots or nested."""
    found = []
    for name, value in (over or {}).items():
        if isinstance(value, Mapping) and not {"low", "high"} & set(value):
            found += _dotted(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def word(name: str, value: object) -> str:
    """An override, such as drafter.loss=["tv"]."""
    return f"{name}={json.dumps(value)}"
