"""`outrider bench assisted`: the verb, its models and prompts, its table (see `against.py`)."""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM

from outrider.conf.errors import ConfigError
from outrider.conf.files import write_json
from outrider.data.conversations import prompts
from outrider.data.sources import suite_source
from outrider.data.tokenise import prompt_ids
from outrider.eval.metrics import RESAMPLES
from outrider.launch.bench import train_step as bench
from outrider.launch.bench.against_transformers import (
    ASSISTED,
    OURS,
    THEIR_PLAIN,
    Asked,
    Case,
    Sides,
    compare,
)
from outrider.models import drafters
from outrider.models.drafters.draft_lm import Config, DraftLm
from outrider.models.formats import native
from outrider.models.load import load, stop_ids
from outrider.models.target import Target
from outrider.models.vocab import DraftVocab
from outrider.train import distributed as start
from outrider.train.settings import TargetConfig

OPTIONS: dict[str, int | str] = {
    "target": "tiny", "draft": "", "gamma": 4, "lookup": 10, "prompts": 8, "new_tokens": 64,
    "repeats": 3, "threads": 0, "out": "",
}  # fmt: skip
ROUNDING = 1e-3  # a lead of the target, in logits, that another order of summing can turn over


def assisted(words: list[str]) -> int:
    """The verb.

    Returns:
        1 if an answer differs where rounding does not explain it, else 0.

    Raises:
        ConfigError, RunError: an option means nothing, or the models do not fit each other.
    """
    options = _options(words)
    sides, asked, left_out = _prepared(options)
    with sides:
        cases = _measured(sides, asked, options)
        wrong = [miss for case in cases for miss in sides.mismatches(case)]
    result = {
        "machine": bench.machine(), "options": options, "results": rows(cases),
        "mismatches": [miss._asdict() for miss in wrong], "left_out": left_out,
        "prompts": [case.fields() for case in cases],
    }  # fmt: skip
    show(result, Console(width=None if sys.stdout.isatty() else 120))
    if options["out"]:
        write_json(Path(options["out"]), result)
    return int(any(miss.gap > ROUNDING for miss in wrong))


def _options(words: list[str]) -> dict[str, Any]:
    options = bench.read_options(words, OPTIONS, _read)
    if not options["draft"]:
        why = "Both sides draft with one language model, and none was named."
        fix = "Give a run folder of a trained draft_lm, or a folder or hub id of a language model."
        raise ConfigError("draft", "", why, fix)
    return options


def _read(key: str, value: str, default: Any) -> Any:
    if not isinstance(default, int):
        return value
    least = 0 if key == "threads" else 1
    if not value.isdecimal() or int(value) < least:
        why = f"A whole number from {least} on is expected."
        raise ConfigError(key, value, why, f"Like {key}={OPTIONS[key]}.")
    return int(value)


def _measured(sides: Sides, asked: Asked, options: dict[str, Any]) -> list[Case]:
    budget, repeats = options["new_tokens"], options["repeats"]
    for name in sides.systems:  # libraries allocate and choose kernels on their first calls
        sides.answer(name, asked[0][1], budget)
    turns = track(asked, "decoding", console=Console(stderr=True), transient=True)
    return [compare(sides, name, ids, budget, repeats) for name, ids in turns]


# ---- models and prompts --------------------------------------------------------------------------


def _prepared(options: dict[str, Any]) -> tuple[Sides, Asked, list[str]]:
    """The models, the prompts that fit both, and the names of those that do not."""
    start.use_cores()
    wanted, known = options["target"], ("tiny", "smollm2")
    setting = TargetConfig(wanted) if wanted in known else TargetConfig("hf", path=wanted)
    target, tokenizer, _ = load(setting, start.device())
    stops = stop_ids(tokenizer, target)
    drafter, assistant = draft_models(options["draft"], target)
    sides = Sides(target, drafter, assistant, stops, options["gamma"], options["lookup"])
    room = min(one.shape().max_positions for one in (target, drafter.lm)) - options["new_tokens"]
    suite = prompts(suite_source("tiny" if wanted == "tiny" else "outrider", "prompts"))
    count = min(options["prompts"], len(suite))
    chosen = [suite[i * len(suite) // count] for i in range(count)]  # of all categories
    read = [(prompt.id, prompt_ids(tokenizer, prompt.opening())) for prompt in chosen]
    asked = [(name, ids) for name, ids in read if 0 < len(ids) <= room]
    left_out = [name for name, ids in read if not 0 < len(ids) <= room]
    if not asked:
        why = "No prompt fits the models' positions together with so many new tokens."
        raise ConfigError("new_tokens", options["new_tokens"], why, "Use fewer new tokens.")
    return sides, asked, left_out


def draft_models(path: str, target: Target) -> tuple[DraftLm, Any]:
    """The same language model as our drafter and as transformers' assistant, float32.

    Args:
        path: run folder (or its drafter/) of a trained draft_lm, or folder or hub id of a causal
            language model. Both sides propose the model's whole vocabulary.

    Raises:
        ConfigError: another drafter, another vocabulary, or no model at all.
        RunError: the run was for another target, or is damaged.
    """
    with tempfile.TemporaryDirectory() as room:
        place = _plain_folder(path, target, Path(room))
        try:
            cfg = Config(path=place, draft_vocab_size=None)
            drafter = drafters.build(cfg, target, DraftVocab.whole(target.vocab))
        except ConfigError as error:
            raise ConfigError("draft", path, error.why, error.fix) from None
        how: dict[str, Any] = {"dtype": torch.float32, "use_safetensors": True}
        model = AutoModelForCausalLM.from_pretrained(place, **how)
    for one in (drafter, model):
        one.to(target.device).eval().requires_grad_(False)
    assert isinstance(drafter, DraftLm), "Config belongs to another drafter"
    return drafter, model


def _plain_folder(path: str, target: Target, room: Path) -> str:
    """Where transformers can read the draft model: a trained one is written into `room`."""
    folder = Path(path).expanduser()
    if (folder / "drafter" / "config.json").is_file():
        folder = folder / "drafter"
    file = folder / "config.json"
    if not file.is_file():
        return path
    if json.loads(file.read_text()).get("format") != native.FORMAT:
        return str(folder)
    drafter, cfg = native.load(folder, target)
    if not isinstance(drafter, DraftLm):
        why = f"It holds a drafter of kind {cfg.name}, and an assistant is a language model."
        raise ConfigError("draft", path, why, "Use a run of drafter=draft_lm.")
    drafter.lm.model.save_pretrained(room)
    return str(room)


# ---- numbers -------------------------------------------------------------------------------------


def rows(cases: Sequence[Case], seed: int = 0) -> list[dict[str, Any]]:
    """The table: a row per system, sums over prompts of each one's median time."""
    base = _costs(cases, ASSISTED)
    return [_row(cases, name, base, seed) for name in cases[0].answers]


def _row(cases: Sequence[Case], name: str, base: np.ndarray, seed: int) -> dict[str, Any]:
    costs = _costs(cases, name)
    tokens = int(costs[:, 0].sum())
    forwards = sum(case.answers[name][0].forwards for case in cases)
    inside = sum(case.inside(name) for case in cases)
    return {
        "system": name, "prompts": len(cases), "tokens": tokens, "forwards": forwards,
        "tokens_per_second": float(_speed(costs)), "tokens_per_forward": tokens / forwards,
        "in_models": inside / float(costs[:, 1].sum()),
        "against_assisted": float(_speed(costs) / _speed(base)),
        "against_assisted_95": _interval(costs, base, seed),
        "same_answers": sum(case.said(name) == case.said(THEIR_PLAIN) for case in cases),
        "same_rounds": sum(case.same_rounds for case in cases) if name == OURS else None,
    }  # fmt: skip


def _costs(cases: Sequence[Case], name: str) -> np.ndarray:
    """Tokens and median seconds of each prompt, [P, 2]."""
    return np.array([(len(case.said(name)), case.seconds(name)) for case in cases], float)


def _speed(costs: np.ndarray) -> np.ndarray:
    """Tokens per second of all prompts together; [..., P, 2] -> [...]."""
    tokens, seconds = np.moveaxis(costs.sum(axis=-2), -1, 0)
    return np.asarray(tokens / seconds)


def _interval(costs: np.ndarray, base: np.ndarray, seed: int) -> tuple[float, float] | None:
    """95 % percentile interval of the ratio of speeds, prompts drawn with replacement."""
    if len(costs) < 2:
        return None
    drawn = np.random.default_rng(seed).integers(len(costs), size=(RESAMPLES, len(costs)))
    low, high = np.percentile(_speed(costs[drawn]) / _speed(base[drawn]), [2.5, 97.5])
    return float(low), float(high)


def show(result: dict[str, Any], console: Console) -> None:
    """Print what `assisted` writes."""
    table = Table(
        "system", "tokens/s", "x assisted", "95 %", "in the models", "tokens/forward",
        "same answers",
    )  # fmt: skip
    for row in result["results"]:
        low, high = row["against_assisted_95"] or (float("nan"), float("nan"))
        table.add_row(
            row["system"], f"{row['tokens_per_second']:.1f}", f"{row['against_assisted']:.2f}",
            f"{low:.2f}..{high:.2f}", f"{100 * row['in_models']:.0f} %",
            f"{row['tokens_per_forward']:.3f}",
            f"{row['same_answers']} of {row['prompts']}",
        )  # fmt: skip
    console.print(table)
    console.print("; ".join(_notes(result)), highlight=False)
    for miss in result["mismatches"]:
        said = f"{miss['token']} for {miss['baseline_token']} at {miss['position']}"
        console.print(f"{miss['id']}: {said}, lead {miss['gap']:.2g}", style="yellow")


def _notes(result: dict[str, Any]) -> Iterator[str]:
    first, options = result["results"][0], result["options"]
    yield f"greedy, float32, gamma {options['gamma']}, {options['new_tokens']} tokens a prompt"
    yield f"same rounds on both sides: {first['same_rounds']} of {first['prompts']} prompts"
    (theirs,) = (row for row in result["results"] if row["system"] == ASSISTED)
    if theirs["in_models"]:
        yield f"the same forwards without any decoder: {1 / theirs['in_models']:.2f}x assisted"
    if result["left_out"]:
        yield f"too long, left out: {', '.join(result['left_out'])}"
    yield result["machine"]
