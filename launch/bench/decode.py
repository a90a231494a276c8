"""`outrider bench rounds` and `batch`: where a round's time goes, and what a batch brings.

Both decode a finished run's prompts greedily. `rounds` tells the parts of a round apart, for a
chain and for trees, at temperature 0 and 1, there by the usual rule and coupled: the models'
forwards, and all that is not the models' (choosing the tree, verifying, thinning caches,
bookkeeping), which is the decoder's own cost.
`batch` decodes the same prompts 1, 4, 16 at a time, with the drafter and without it, by turns; one
at a time, prompt by prompt.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import write_json
from outrider.data.suite import suite_of
from outrider.data.tokenise import prompt_ids
from outrider.eval.console_tables import add_numbers, narrow
from outrider.eval.plan.interleaved import parts_of
from outrider.launch.bench.train_step import read_options
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.request import Output, Request, Stops
from outrider.models.decode.rules import COUPLED, default_rule
from outrider.models.decode.sampling_params import Sampling
from outrider.models.formats import native
from outrider.models.load import load, stop_ids
from outrider.train import distributed as start
from outrider.train.settings import load_run

SHAPES: dict[str, Chain | DynamicTree] = {
    "chain of 3": Chain(3),
    "tree of 8": DynamicTree(4, 4, 8),
    "tree of 60": DynamicTree(6, 10, 60),
}
PARTS = ("draft", "target", "verify", "commit")
KNOWN = {
    "run.dir": "",
    "limit": "16",
    "tokens": "64",
    "repeats": "5",
    "batches": "1,4,16",
    "forward": "lean",
    "out": "",
}
TEXTS = ("run.dir", "forward", "out")  # all other options are numbers


class Scene(NamedTuple):
    """A run, loaded, and its prompts as requests."""

    engine: Callable[[Policy | None, Sampling], Engine]
    requests: list[Request]
    repeats: int
    batches: list[int]
    out: str
    setting: dict[str, Any]


def rounds(words: list[str]) -> int:
    """The bench: milliseconds per round, by part."""
    scene, console = _scene(words), Console()
    rows: list[dict[str, Any]] = []
    table = narrow("milliseconds per round (medians)")
    table.add_column("draft shape", no_wrap=True)
    table.add_column("rule")
    add_numbers(table, "T", "tau", *PARTS, "other", "round", "overhead")
    for temperature, coupled in ((0.0, False), (1.0, False), (1.0, True)):
        for name, shape in SHAPES.items():
            policy = replace(shape, draft=COUPLED) if coupled else shape
            rule = default_rule(policy.draft, not policy.branches) if temperature else "greedy"
            row = _parts(scene, policy, Sampling(temperature))
            rows.append({"shape": name, "rule": rule, "temperature": temperature, **row})
            cells = [f"{row[part]:.2f}" for part in ("tau", *PARTS, "other", "round")]
            share = f"{100 * row['overhead']:.1f} %"
            table.add_row(name, rule, f"{temperature:g}", *cells, share)
    return _show(scene, console, table, rows)


def _parts(scene: Scene, policy: Policy, sampling: Sampling) -> dict[str, float]:
    engine = scene.engine(policy, sampling)
    engine.generate_all(scene.requests[:2], 1)  # warm
    turns = [_mean(engine.generate_all(scene.requests, 1)) for _ in range(scene.repeats)]
    row = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    row["overhead"] = 1 - (row["draft"] + row["target"]) / row["round"]
    return row


def _mean(outputs: Sequence[Output]) -> dict[str, float]:
    """Tau, and milliseconds per round.

    Raises:
        RunError: there was none.
    """
    count = sum(out.rounds for out in outputs)
    if count == 0:
        raise RunError("Every answer ended with its first token.", "Use a larger limit or tokens.")
    parts = {p: 1000 * sum(getattr(out.clock, p) for out in outputs) / count for p in PARTS}
    whole = 1000 * sum(out.clock.rounds for out in outputs) / count
    tau = sum(len(out.ids) - 1 for out in outputs) / count
    return {"tau": tau, **parts, "other": whole - sum(parts.values()), "round": whole}


def batch(words: list[str]) -> int:
    """The bench: tokens per second, with the drafter and without it, for several batches."""
    scene, console = _scene(words), Console()
    if max(scene.batches) > len(scene.requests):
        why = f"There are {len(scene.requests)} prompts; a batch that is never full says nothing."
        raise ConfigError("batches", scene.batches, why, "Use smaller ones, or a larger limit.")
    rows: list[dict[str, Any]] = []
    table = Table(title=f"{len(scene.requests)} prompts, greedy (medians)")
    for name in ("batch", "draft shape", "tau", "tokens/s", "plain tokens/s", "speedup", "same"):
        table.add_column(name, justify="left" if name == "draft shape" else "right")
    alone = [out.ids for out in scene.engine(None, Sampling()).generate_all(scene.requests, 1)]
    for size in scene.batches:
        for name in ("chain of 3", "tree of 8"):
            row = _paces(scene, SHAPES[name], size, alone)
            rows.append({"batch": size, "shape": name, **row})
            cells = (f"{row['tau']:.2f}", f"{row['pace']:.1f}", f"{row['plain']:.1f}")
            same = f"{row['same']} of {len(alone)}"
            table.add_row(str(size), name, *cells, f"{row['speedup']:.2f}x", same)
    return _show(scene, console, table, rows)


def _paces(scene: Scene, policy: Policy, size: int, alone: list[list[int]]) -> dict[str, Any]:
    """Both engines by turns; the same words are asked for as of one plain prompt at a time."""
    fast, plain = (scene.engine(how, Sampling()) for how in (policy, None))
    for engine in (fast, plain):
        engine.generate_all(scene.requests[:size], size)  # warm
    turns = []
    for _ in range(scene.repeats):
        parts = [
            (fast.generate_all(part, size), plain.generate_all(part, size))
            for part in parts_of(scene.requests, size)
        ]
        with_it, without = (list(chain(*outputs)) for outputs in zip(*parts, strict=True))
        turns.append((_pace(with_it), _pace(without), _pace(with_it) / _pace(without)))
    pace, slow, speedup = (statistics.median(column) for column in zip(*turns, strict=True))
    same = sum(out.ids == ids for out, ids in zip(with_it, alone, strict=True))
    tau = _mean(with_it)["tau"]
    return {"tau": tau, "pace": pace, "plain": slow, "speedup": speedup, "same": same}


def _pace(outputs: Sequence[Output]) -> float:
    """Tokens per second of rounds."""
    tokens = sum(len(out.ids) - 1 for out in outputs)
    return tokens / sum(out.clock.rounds for out in outputs)


def _show(scene: Scene, console: Console, table: Table, rows: list[dict[str, Any]]) -> int:
    console.print(table)
    if scene.out:
        write_json(Path(scene.out), {"setting": scene.setting, "rows": rows})
        console.print(f"written: {scene.out}")
    return 0


def _scene(words: list[str]) -> Scene:
    options = _options(words)
    folder = Path(options["run.dir"])
    config = load_run(folder, [])
    if not (folder / "drafter").is_dir():
        message = f"{folder} holds no drafter/: its training has not finished."
        raise RunError(message, "Give the folder of a finished run.")
    start.use_cores()
    target, tokenizer, _ = load(config.target, start.device())
    if options["forward"] == "modules":
        target.lean = None
    drafter, _ = native.load(folder / "drafter", target)
    drafter.change(target)
    stops = Stops(stop_ids(tokenizer, target))
    prompts = suite_of(config, int(options["limit"]))
    requests = [
        Request(prompt_ids(tokenizer, prompt.opening()), int(options["tokens"]), number)
        for number, prompt in enumerate(prompts)
    ]

    def engine(policy: Policy | None, sampling: Sampling) -> Engine:
        with_it = None if policy is None else drafter
        return Engine(target, with_it, policy, sampling=sampling, stops=stops)

    setting = {
        "drafter": config.drafter.name,
        "target": target.name,
        "dtype": str(target.dtype),
        "device": target.device.type,
        "threads": torch.get_num_threads(),
        **options,
    }
    batches = [int(size) for size in options["batches"].split(",")]
    return Scene(engine, requests, int(options["repeats"]), batches, options["out"], setting)


def _options(words: list[str]) -> dict[str, str]:
    options = read_options(words, KNOWN, _checked)
    if not options["run.dir"]:
        raise ConfigError("run.dir", "", "A finished run is measured.", "Add run.dir=runs/<name>.")
    return options


def _checked(key: str, value: str, default: str) -> str:
    if key == "forward" and value not in ("lean", "modules"):
        fix = "lean: our own where the family has one; modules: transformers' modules."
        raise ConfigError(key, value, "There is no such forward.", fix)
    numbers = value.split(",") if key == "batches" else [value]
    if key not in TEXTS and not all(n.isdecimal() and int(n) for n in numbers):
        raise ConfigError(key, value, "Whole numbers from 1.", f"Like {key}={default}.")
    return value
