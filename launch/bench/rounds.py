"""`outrider bench rounds`: milliseconds of the parts of a decoding round.

Decodes the prompts of a finished run with a chain and two trees, greedily and at temperature 1,
there with the default rule and with coupled sampling.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from rich.table import Table

from outrider.conf.compose import flatten
from outrider.conf.console import Console
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.fields import option
from outrider.conf.garbage import exempt_objects
from outrider.conf.options import parse_words
from outrider.data.conversations import Prompt
from outrider.data.suite import load_suite
from outrider.data.tokenise import prompt_ids
from outrider.eval.open_drafter import load_run_models
from outrider.eval.report_tables import narrow_table
from outrider.launch.bench.common import save_result
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.request import Output, Request, Stops
from outrider.models.decode.rules.rule_table import COUPLED, default_rule
from outrider.models.decode.sampling_params import Sampling
from outrider.models.drafting.drafter import Drafter
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
class RunOptions:
    """Options of the benchmarks that decode with a finished run."""

    run: RunFolder = dataclasses.field(default_factory=RunFolder)
    limit: int = option(16, "prompts", "[1, inf)")
    tokens: int = option(64, "tokens of each answer", "[1, 4194304]")
    repeats: int = option(5, "repetitions; medians count", "[1, inf)")
    forward: Literal["fast", "modules"] = option(
        "fast", "of the target; fast: Outrider's own, modules: transformers' modules"
    )
    out: str = option("", "JSON file for the result")


Options = RunOptions  # of `outrider bench rounds`
T = TypeVar("T", bound=RunOptions)


class LoadedRun(Generic[T]):
    """A finished run, loaded, and its prompts as requests."""

    def __init__(self, words: list[str], schema: type[T]) -> None:
        self.options = parse_words(schema, words)
        if not self.options.run.dir:
            why = "This benchmark measures a finished run."
            raise ConfigError("run.dir", "", why, "Add run.dir=runs/<name>.")
        config = load_run(Path(self.options.run.dir), [])
        self.config, self.folder = config, Path(config.run.dir)
        (self.target, self.tokenizer, _), self.drafter = load_run_models(config)
        if self.options.forward == "modules":
            self.target.fast_forward = None
        self.stops = Stops(stop_ids(self.tokenizer, self.target))
        exempt_objects()

    def requests(self, prompts: Sequence[Prompt]) -> list[Request]:
        """Return the first turn of every prompt as a request."""
        ids = [prompt_ids(self.tokenizer, prompt.first_messages()) for prompt in prompts]
        return [Request(one, self.options.tokens, number) for number, one in enumerate(ids)]

    def engine(
        self,
        policy: Policy | None,
        sampling: Sampling,
        drafter: Drafter | None = None,
        endless: bool = False,
    ) -> Engine:
        """Return a decoder with this policy; None decodes without the drafter.

        Args:
            drafter: in place of the run's.
            endless: end tokens do not end answers.
        """
        drafter = None if policy is None else drafter or self.drafter
        stops = Stops() if endless else self.stops
        return Engine(self.target, drafter, policy, sampling=sampling, stops=stops)

    def show(self, table: Table, rows: list[dict[str, Any]]) -> None:
        """Print the table, and write the rows to `out`."""
        Console().print(table)
        self.save(rows)
        out = self.options.out
        Console().print(f"written: {out}" if out else "not saved; out=FILE saves every number")

    def save(self, rows: list[dict[str, Any]]) -> None:
        """Write the rows measured so far to `out`, if it is set."""
        setting = {
            "drafter": self.config.drafter.name, "target": self.target.name,
            "dtype": str(self.target.dtype), "device": self.target.device.type,
            "threads": torch.get_num_threads(), **dict(flatten(dataclasses.asdict(self.options))),
        }  # fmt: skip
        save_result(self.options.out, {"setting": setting, "rows": rows})


def rounds(words: list[str]) -> int:
    """Measure milliseconds per round, by part."""
    run = LoadedRun(words, Options)
    requests = run.requests(load_suite(run.config, run.options.limit))
    rows: list[dict[str, Any]] = []
    head = "draft shape", "rule", "T", "tau", *PARTS, "other", "round", "overhead"
    table = narrow_table(head, ("draft shape", "rule"))
    table.title = "milliseconds per round (medians)"
    for temperature, coupled in ((0.0, False), (1.0, False), (1.0, True)):
        for name, shape in SHAPES.items():
            policy = replace(shape, draft=COUPLED) if coupled else shape
            rule = default_rule(policy.draft, not policy.branches) if temperature else "greedy"
            row = _round_parts(run, requests, policy, Sampling(temperature))
            rows.append({"shape": name, "rule": rule, "temperature": temperature, **row})
            cells = [f"{row[part]:.2f}" for part in ("tau", *PARTS, "other", "round")]
            table.add_row(name, rule, f"{temperature:g}", *cells, f"{100 * row['overhead']:.1f} %")
    run.show(table, rows)
    return 0


def _round_parts(
    run: LoadedRun[Options], requests: list[Request], policy: Policy, sampling: Sampling
) -> dict[str, float]:
    """Return medians of the repetitions; `overhead` is the share outside model forwards."""
    engine = run.engine(policy, sampling)
    engine.generate_all(requests[:2], 1)  # warm-up
    runs = (engine.generate_all(requests, 1) for _ in range(run.options.repeats))
    means = list(map(_per_round, runs))
    row = {name: statistics.median(mean[name] for mean in means) for name in means[0]}
    row["overhead"] = 1 - (row["draft"] + row["target"]) / row["round"]
    return row


def _per_round(outputs: Sequence[Output]) -> dict[str, float]:
    """Return tau, and mean milliseconds per round; RunError: there was none."""
    _require_rounds(outputs)
    count = sum(out.rounds for out in outputs)
    parts = {p: 1000 * sum(getattr(out.times, p) for out in outputs) / count for p in PARTS}
    whole = 1000 * sum(out.times.rounds for out in outputs) / count
    tau = sum(len(out.ids) - 1 for out in outputs) / count
    return {"tau": tau, **parts, "other": whole - sum(parts.values()), "round": whole}


def tokens_per_second(outputs: Sequence[Output]) -> float:
    """Return the tokens after the first of each answer over the seconds they took.

    These are the rounds, and the time in which the drafter reads the prompts: `decode=auto` lets it
    read them in a round. The target reads them in all decodings, which is left out.
    """
    _require_rounds(outputs)
    seconds = sum(out.times.rounds + out.times.prompt for out in outputs)
    return sum(len(out.ids) - 1 for out in outputs) / seconds


def _require_rounds(outputs: Sequence[Output]) -> None:
    if not any(out.rounds for out in outputs):
        raise RunError("Every answer ended with its first token.", "Use a larger limit or tokens.")
