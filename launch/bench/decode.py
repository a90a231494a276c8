"""`outrider bench rounds` and `batch`: the parts of a decoding round, and throughput by batch size.

Both decode the prompts of a finished run. `rounds` measures milliseconds per round for a chain and
two trees, greedily and at temperature 1, there with the default rule and with coupled sampling.
`batch` measures tokens per second with and without the drafter, interleaved.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table

from outrider.conf.compose import flatten
from outrider.conf.console import Console
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.fields import option
from outrider.conf.options import parse_words
from outrider.conf.quantities import format_count
from outrider.data.suite import load_suite
from outrider.data.tokenise import prompt_ids
from outrider.eval.open_drafter import load_run_models
from outrider.eval.plan.interleaved import request_groups
from outrider.eval.report_tables import narrow_table
from outrider.launch.bench.common import number_table, save_result
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.request import Output, Request, Stops
from outrider.models.decode.rules.rule_table import COUPLED, default_rule
from outrider.models.decode.sampling_params import Sampling
from outrider.models.target.load import stop_ids
from outrider.train.settings import load_run

SHAPES: dict[str, Chain | DynamicTree] = {
    "chain of 3": Chain(3),
    "tree of 8": DynamicTree(4, 4, 8),
    "tree of 60": DynamicTree(6, 10, 60),
}
PARTS = ("draft", "target", "verify", "commit")


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The group `run` of the options."""

    dir: str = option("", "folder of a finished run")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `outrider bench rounds` and `outrider bench batch`."""

    run: RunFolder = dataclasses.field(default_factory=RunFolder)
    limit: int = option(16, "prompts", "[1, inf)")
    tokens: int = option(64, "tokens of each answer", "[1, 4194304]")
    repeats: int = option(5, "repetitions; medians count", "[1, inf)")
    batches: tuple[int, ...] = option((1, 4, 16), "batch sizes (bench batch)", "[1, 65536]")
    forward: Literal["fast", "modules"] = option(
        "fast", "of the target; fast: Outrider's own, modules: transformers' modules"
    )
    out: str = option("", "JSON file for the result")


class LoadedRun:
    """A finished run, loaded, and its prompts as requests."""

    def __init__(self, words: list[str]) -> None:
        self.options = parse_words(Options, words)
        if not self.options.run.dir:
            why = "This benchmark measures a finished run."
            raise ConfigError("run.dir", "", why, "Add run.dir=runs/<name>.")
        config = load_run(Path(self.options.run.dir), [])
        (self.target, tokenizer, _), self.drafter = load_run_models(config)
        if self.options.forward == "modules":
            self.target.fast_forward = None
        self.stops = Stops(stop_ids(tokenizer, self.target))
        self.requests = [
            Request(prompt_ids(tokenizer, prompt.first_messages()), self.options.tokens, number)
            for number, prompt in enumerate(load_suite(config, self.options.limit))
        ]
        self.drafter_name = config.drafter.name

    def engine(self, policy: Policy | None, sampling: Sampling) -> Engine:
        """Return a decoder with this policy; None decodes without the drafter."""
        drafter = None if policy is None else self.drafter
        return Engine(self.target, drafter, policy, sampling=sampling, stops=self.stops)

    def show(self, table: Table, rows: list[dict[str, Any]]) -> None:
        """Print the table, and write the rows to `out`."""
        Console().print(table)
        setting = {
            "drafter": self.drafter_name, "target": self.target.name,
            "dtype": str(self.target.dtype), "device": self.target.device.type,
            "threads": torch.get_num_threads(), **dict(flatten(dataclasses.asdict(self.options))),
        }  # fmt: skip
        save_result(self.options.out, {"setting": setting, "rows": rows})
        if self.options.out:
            Console().print(f"written: {self.options.out}")


def rounds(words: list[str]) -> int:
    """Measure milliseconds per round, by part."""
    run = LoadedRun(words)
    rows: list[dict[str, Any]] = []
    head = "draft shape", "rule", "T", "tau", *PARTS, "other", "round", "overhead"
    table = narrow_table(head, ("draft shape", "rule"))
    table.title = "milliseconds per round (medians)"
    for temperature, coupled in ((0.0, False), (1.0, False), (1.0, True)):
        for name, shape in SHAPES.items():
            policy = replace(shape, draft=COUPLED) if coupled else shape
            rule = default_rule(policy.draft, not policy.branches) if temperature else "greedy"
            row = _round_parts(run, policy, Sampling(temperature))
            rows.append({"shape": name, "rule": rule, "temperature": temperature, **row})
            cells = [f"{row[part]:.2f}" for part in ("tau", *PARTS, "other", "round")]
            table.add_row(name, rule, f"{temperature:g}", *cells, f"{100 * row['overhead']:.1f} %")
    run.show(table, rows)
    return 0


def _round_parts(run: LoadedRun, policy: Policy, sampling: Sampling) -> dict[str, float]:
    """Return medians of the repetitions; `overhead` is the share outside model forwards."""
    engine = run.engine(policy, sampling)
    engine.generate_all(run.requests[:2], 1)  # warm-up
    runs = (engine.generate_all(run.requests, 1) for _ in range(run.options.repeats))
    means = list(map(_per_round, runs))
    row = {name: statistics.median(mean[name] for mean in means) for name in means[0]}
    row["overhead"] = 1 - (row["draft"] + row["target"]) / row["round"]
    return row


def _per_round(outputs: Sequence[Output]) -> dict[str, float]:
    """Return tau, and mean milliseconds per round; RunError: there was none."""
    count = sum(out.rounds for out in outputs)
    if count == 0:
        raise RunError("Every answer ended with its first token.", "Use a larger limit or tokens.")
    parts = {p: 1000 * sum(getattr(out.times, p) for out in outputs) / count for p in PARTS}
    whole = 1000 * sum(out.times.rounds for out in outputs) / count
    tau = sum(len(out.ids) - 1 for out in outputs) / count
    return {"tau": tau, **parts, "other": whole - sum(parts.values()), "round": whole}


def batch(words: list[str]) -> int:
    """Run the benchmark: tokens per second by batch size, with and without the drafter."""
    run = LoadedRun(words)
    requests, batches = run.requests, run.options.batches
    if max(batches) > len(requests):
        why = f"There are {len(requests)} prompts: the batch would never be full."
        raise ConfigError("batches", batches, why, "Use smaller batches, or a larger limit.")
    rows: list[dict[str, Any]] = []
    head = ("batch", "draft shape", "tau", "tokens/s", "plain tokens/s", "speedup", "same")
    title = f"{format_count(len(requests), 'prompt')}, greedy (medians)"
    table = number_table(title, head, ("draft shape",))
    expected = [out.ids for out in run.engine(None, Sampling()).generate_all(requests, 1)]
    for size in batches:
        for name in ("chain of 3", "tree of 8"):
            row = _throughput(run, SHAPES[name], size, expected)
            rows.append({"batch": size, "shape": name, **row})
            cells = (f"{row['tau']:.2f}", f"{row['speed']:.1f}", f"{row['plain']:.1f}")
            same = f"{row['same']} of {len(expected)}"
            table.add_row(str(size), name, *cells, f"{row['speedup']:.2f}x", same)
    run.show(table, rows)
    return 0


def _throughput(
    run: LoadedRun, policy: Policy, size: int, expected: list[list[int]]
) -> dict[str, Any]:
    """Return tokens per second of both engines; `same` counts answers equal to `expected`."""
    engines = [run.engine(each, Sampling()) for each in (policy, None)]
    for engine in engines:
        engine.generate_all(run.requests[:size], size)  # warm-up
    speeds = []
    for _ in range(run.options.repeats):
        groups = [
            [engine.generate_all(group, size) for engine in engines]
            for group in request_groups(run.requests, size)
        ]
        drafted, plain = (list(chain(*outputs)) for outputs in zip(*groups, strict=True))
        speeds.append((_speed(drafted), _speed(plain), _speed(drafted) / _speed(plain)))
    speed, plain_speed, speedup = map(statistics.median, zip(*speeds, strict=True))
    same = sum(out.ids == ids for out, ids in zip(drafted, expected, strict=True))
    tau = _per_round(drafted)["tau"]
    return {"tau": tau, "speed": speed, "plain": plain_speed, "speedup": speedup, "same": same}


def _speed(outputs: Sequence[Output]) -> float:
    return sum(len(out.ids) - 1 for out in outputs) / sum(out.times.rounds for out in outputs)
