"""`outrider bench trainers`: EAGLE-3 trained by Outrider and by speculators on the same text.

Both train one layer with the whole vocabulary on the same conversations and the same states of the
target, for the same number of steps, depths and tokens, each by its own recipe; speculators at
several learning rates, its default first, and with and without its `norm_before_fc`. Outrider's
engine decodes the same prompts with every drafter. speculators runs in the environment that
`make engines ENGINES=speculators` builds. Finished trainings and evaluations in `folder` are kept,
interrupted trainings begin again.

Unequal:
    first weights   random in speculators, a linear fit and the target's head in Outrider
    head            speculators keeps the target's head and norm of it, Outrider trains its own
    rows            speculators counts a row by the token it reads, Outrider by the one it predicts
    packing         speculators packs whole conversations: its limit is half a mean conversation
                    above `tokens`, so that its steps do not read less
    attention       full in both, which in speculators needs `--full-attention-indices 0`
    learning rate   `rates` are tried for speculators, Outrider's is its default
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import time
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from rich.table import Table

from outrider.conf.compose import compose
from outrider.conf.console import Console
from outrider.conf.errors import ConfigError
from outrider.conf.fields import option
from outrider.conf.files import read_json, write_json
from outrider.conf.options import parse_words
from outrider.data.corpus import load_training_data
from outrider.data.pack import split_holdout
from outrider.data.reporter import Reporter
from outrider.eval.metrics import bootstrap
from outrider.eval.publish import engines
from outrider.launch.bench import speculators_data
from outrider.launch.bench.common import (
    PeakMemory,
    children_bytes,
    number_table,
    report,
    run_command,
    run_outrider,
)
from outrider.models import drafters
from outrider.models.adapt import adapt
from outrider.models.target.load import load_target
from outrider.train.settings import parse

OURS, THEIRS = "outrider", "speculators"
SCRIPT = Path(engines.__file__).parent / "train_speculators.py"
COST = "cost.json"  # of a finished training
BUILD = "Build it in the repository, and run there: make engines ENGINES=speculators"
AGAIN = "Delete this folder and run the benchmark again."


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `outrider bench trainers`."""

    MAY_BE_EMPTY: ClassVar = ("rates",)  # then Outrider's training alone is measured

    target: str = option("tiny", "tiny, smollm2, or folder or hub id of a language model")
    python: str = option(".engines/speculators/bin/python", "Python of speculators' environment")
    words: tuple[str, ...] = option((), "further settings of Outrider's training, such as data=...")
    rates: tuple[float, ...] = option((1e-3, 1e-2), "learning rates of speculators", "(0, inf)")
    norms: tuple[bool, ...] = option((True, False), "norm_before_fc of speculators")
    steps: int = option(300, "optimizer steps of each training", "[1, inf)")
    tokens: int = option(512, "tokens of a step", "[1, inf)")
    depths: int = option(4, "depths of training", "[1, 1024]")
    seeds: tuple[int, ...] = option((0, 1, 2), "seeds of each training", "[0, inf)")
    chains: tuple[int, ...] = option((4, 7), "draft tokens of a round", "[1, 1024]")
    temperatures: tuple[float, ...] = option((0.0, 1.0), "temperatures of decoding", "[0, inf)")
    prompts: int = option(0, "prompts to decode; 0: all", "[0, inf)")
    folder: str = option("runs/trainers", "folder of the trainings and evaluations")
    out: str = option("", "JSON file for the result")


class Contender(NamedTuple):
    """One recipe: its name in the table, the trainer, and the trainer's further arguments."""

    name: str
    trainer: str
    words: tuple[str, ...] = ()


def trainers(words: list[str]) -> int:
    options, console = parse_words(Options, words), Console()
    python = Path(options.python).expanduser().absolute()
    if options.rates:
        _check_environment(options.python, python)
    with console.status("writing the text and the target's states"):
        _write_data(options)
    every = contenders(options)
    for seed, contender in product(options.seeds, every):  # by turns, so that times compare
        with console.status(f"{contender.name}: training with seed {seed}"):
            _train(contender, options, seed, str(python))
    results = dict[str, dict[str, Any]]()
    for contender in every:
        with console.status(f"{contender.name}: decoding"):
            results[contender.name] = _measure(contender, options)
    rows = summarise(results)
    report(console, _table(rows, options), options.out, {
        "setting": dataclasses.asdict(options), "rows": rows,
    })  # fmt: skip
    return 0


def _check_environment(given: str, python: Path) -> None:
    """Raise a ConfigError if there is no such Python, or if it has no speculators."""
    if not python.is_file():
        raise ConfigError("python", given, f"{python} does not exist.", BUILD)
    code = "import importlib.util as u; raise SystemExit(u.find_spec('speculators') is None)"
    if subprocess.run([python, "-I", "-c", code], check=False).returncode:
        raise ConfigError("python", given, "It has no package speculators.", BUILD)


def contenders(options: Options) -> list[Contender]:
    out = [Contender(OURS, OURS, options.words)]
    for rate, norm in product(options.rates, options.norms):
        flag = "--norm-before-fc" if norm else "--no-norm-before-fc"
        name = f"{THEIRS} lr {rate:g}, {flag.removeprefix('--')}"
        out.append(Contender(name, THEIRS, ("--lr", f"{rate:g}", flag)))
    return out


# ---- data ----


def _common_words(options: Options) -> list[str]:
    """Return the settings that say what is trained on."""
    return [
        f"target={options.target}", "drafter=eagle3", "drafter.draft_vocab_size=null",
        f"drafter.depths={options.depths}", "data.mode=online", *options.words,
    ]  # fmt: skip


def _write_data(options: Options) -> None:
    """Write text and states for speculators, and the target as a folder, unless they are there."""
    place = Path(options.folder)
    if (place / "data" / speculators_data.SPLIT).is_file():
        return
    config = parse(compose(_common_words(options)))
    loaded = load_target(config.target, "cpu")
    config = adapt(config, lambda _: None, loaded.target.shape())
    taps = drafters.resolve_taps(config.drafter, loaded.target.num_layers)
    data = load_training_data(config, loaded, taps, Reporter(Console(), messages=False))
    loaded.target.model.save_pretrained(place / "target")
    loaded.tokenizer.save_pretrained(place / "target")
    write_json(place / "taps.json", {"inputs": [tap + 1 for tap in taps]})
    train, held = split_holdout(data.documents, config.data.holdout)
    speculators_data.write(place / "data", train, held, loaded.target, taps)


# ---- training and decoding ----


def _folder(contender: Contender, options: Options, seed: int) -> Path:
    return Path(options.folder) / re.sub(r"[^a-z0-9.]+", "-", f"{contender.name} seed {seed}")


def _train(contender: Contender, options: Options, seed: int, python: str) -> None:
    """Train with a seed, unless it has been done; keep the seconds and the highest memory."""
    run = _folder(contender, options, seed)
    if (run / COST).is_file():
        return
    shutil.rmtree(run, ignore_errors=True)  # the seconds of an interrupted training are not known
    train = _train_ours if contender.trainer == OURS else _train_theirs
    start = time.monotonic()
    with PeakMemory(children_bytes, 0.05) as peak:
        train(contender, options, run, seed, python)
    cost = {"seconds": time.monotonic() - start, "mib": peak.highest / 2**20}
    write_json(run / COST, cost)


def _measure(contender: Contender, options: Options) -> dict[str, Any]:
    """Return tokens and rounds of each dialogue by decoding, summed over seeds, and the costs."""
    decoded, taus = dict[str, dict[str, list[float]]](), dict[str, list[float]]()
    costs: dict[str, list[float]] = {"seconds": [], "mib": []}
    for seed in options.seeds:
        run = _folder(contender, options, seed)
        for name, value in read_json(run / COST, AGAIN).items():
            costs[name].append(value)
        for chain, temperature in product(options.chains, options.temperatures):
            key = f"chain {chain}, T={temperature:g}"
            sums = decoded.setdefault(key, {})
            one = _decode(options, run, chain, temperature)
            for name, (tokens, rounds) in one.items():
                old = sums.get(name, [0.0, 0.0])
                sums[name] = [old[0] + tokens, old[1] + rounds]
            taus.setdefault(key, []).append(_tau(one))
    return {"decoded": decoded, "taus": taus, **costs}


def _train_ours(contender: Contender, options: Options, run: Path, seed: int, _: str) -> None:
    steps = options.steps
    run_outrider(
        "train", *_common_words(options), f"run.dir={run}", f"run.seed={seed}",
        f"train.batch_tokens={options.tokens}", f"train.max_steps={steps}",
        f"train.eval_every={steps}", f"train.save_every={steps}", "train.max_minutes=null",
        "train.quick_eval=false", "train.own_prompts=0",
    )  # fmt: skip


def _train_theirs(
    contender: Contender, options: Options, run: Path, seed: int, python: str
) -> None:
    place = Path(options.folder).absolute()
    split = read_json(place / "data" / speculators_data.SPLIT, AGAIN)
    limit = options.tokens + round(split["tokens"] / split["documents"] / 2)
    epochs = 2 + options.steps * limit // split["tokens"]  # the number of steps ends it
    layers = map(str, read_json(place / "taps.json", AGAIN)["inputs"])
    command = [
        python, str(SCRIPT), "--speculator-type", "eagle3",
        "--verifier-name-or-path", str(place / "target"), "--data-path", str(place / "data"),
        "--train-data-ratio", repr(split["share"]), "--target-layer-ids", *layers,
        "--total-seq-len", str(limit), "--ttt-steps", str(options.depths),
        "--full-attention-indices", "0", "--loss-implementation", "eager",
        "--draft-attn-impl", "sdpa", "--num-workers", "0", "--hidden-states-dtype", "float32",
        "--on-missing", "raise", "--max-steps", str(options.steps), "--epochs", str(epochs),
        "--seed", str(seed), "--save-path", str(run.absolute()),
        "--log-dir", str(run.absolute() / "logs"), *contender.words,
    ]  # fmt: skip
    run_command(command, {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""})


def _drafter_of(run: Path) -> Path:
    """Return the folder of a finished training: of speculators, its last epoch's."""
    if (run / "drafter").is_dir():
        return run / "drafter"
    return max((p for p in run.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))


def _decode(
    options: Options, run: Path, chain: int, temperature: float
) -> dict[str, tuple[float, float]]:
    """Decode the prompts; return tokens and rounds of each dialogue."""
    name = f"chain{chain}-t{temperature:g}"
    place = run / "decoded"  # a published drafter's reports need a folder without a training
    if not (place / "eval" / f"{name}.json").is_file():
        limit = [f"eval.limit={options.prompts}"] if options.prompts else []
        run_outrider(
            "eval", f"eval.drafter={_drafter_of(run)}", f"target={options.target}",
            f"run.dir={place}", f"eval.out={name}", "decode=chain", f"decode.depth={chain}",
            f"decode.temperature={temperature}", "eval.baseline=false", "eval.warmup=0", *limit,
        )  # fmt: skip
    sums = dict[str, tuple[float, float]]()
    for line in (place / "eval" / f"{name}.outputs.jsonl").read_text().splitlines():
        row = json.loads(line)
        tokens, rounds = sums.get(row["dialogue"], (0.0, 0.0))
        emitted = len(row["output_ids"]) - 1  # the first token is the prefill's
        sums[row["dialogue"]] = tokens + emitted, rounds + len(row["accepted"])
    return sums


# ---- result ----


def _tau(sums: dict[str, Any]) -> float:
    tokens, rounds = np.array([*sums.values()]).sum(0)
    return float(tokens / rounds)


def summarise(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return per contender and decoding tau, its seeds, and the ratio of Outrider's to it.

    The ratio has a 95 % interval paired by dialogue. Seconds and MiB are those of a whole training
    with its start; their ratios are medians over seeds, whose trainings take turns.
    """
    ours, rows = results[OURS]["decoded"], dict[str, dict[str, Any]]()
    for name, result in results.items():
        rows[name] = {
            cost: {
                "median": float(np.median(result[cost])), "seeds": result[cost],
                "ratio": float(np.median(np.divide(results[OURS][cost], result[cost]))),
            }
            for cost in ("seconds", "mib")
        }  # fmt: skip
        for key, sums in result["decoded"].items():
            pairs = [[*ours[key][dialogue], *sums[dialogue]] for dialogue in sums]
            rows[name][key] = {
                "tau": _tau(sums), "seeds": result["taus"][key],
                "ratio": _tau(ours[key]) / _tau(sums),
                "ratio_95": None if name == OURS else bootstrap(pairs, [*sums], 0),
            }  # fmt: skip
    return rows


def _table(rows: dict[str, dict[str, Any]], options: Options) -> Table:
    keys = [f"chain {c}, T={t:g}" for c, t in product(options.chains, options.temperatures)]
    title = f"tau, and Outrider's over it: {options.steps} steps of {options.tokens} tokens"
    table = number_table(title, ("trained by", *keys, "s", "MiB"), ("trained by",))
    for name, row in rows.items():
        costs = (f"{row[cost]['median']:.0f}" for cost in ("seconds", "mib"))
        ratios = (f"  x{row[cost]['ratio']:.2f}" for cost in ("seconds", "mib"))
        shown = costs if name == OURS else map("".join, zip(costs, ratios, strict=True))
        table.add_row(name, *(_cell(row[key]) for key in keys), *shown)
    return table


def _cell(value: dict[str, Any]) -> str:
    if value["ratio_95"] is None:
        return f"{value['tau']:.2f}"
    low, high = value["ratio_95"]
    return f"{value['tau']:.2f}  x{value['ratio']:.2f} ({low:.2f}-{high:.2f})"
