"""`outrider bench assisted`: Outrider's decoder and transformers' assisted generation.

`against_transformers.py` describes the systems.
"""

import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM

from outrider.conf.console import Console
from outrider.conf.errors import ConfigError
from outrider.conf.fields import option
from outrider.conf.files import read_json
from outrider.conf.options import parse_words
from outrider.data.conversations import read_prompts
from outrider.data.sources import suite_source
from outrider.data.tokenise import prompt_ids
from outrider.eval.metrics import bootstrap
from outrider.launch.bench import against_transformers as systems
from outrider.launch.bench.common import (
    describe_machine,
    save_result,
    target_settings,
    use_threads,
)
from outrider.models import drafters
from outrider.models.drafters.draft_lm import Config, DraftLm
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.formats import native
from outrider.models.target import process
from outrider.models.target.load import load_target, stop_ids
from outrider.models.target.target import Target

ROUNDING = 1e-3  # difference of logits that another order of summation can reverse


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `outrider bench assisted`."""

    target: str = option("tiny", "tiny, smollm2, or folder or hub id of a language model")
    draft: str = option("", "run folder of a draft_lm, or folder or hub id of a language model")
    gamma: int = option(4, "draft tokens of a round", "[1, 1024]")
    lookup: int = option(10, "draft tokens of transformers' prompt lookup", "[1, 1024]")
    prompts: int = option(8, "prompts to decode", "[1, inf)")
    new_tokens: int = option(64, "tokens of each answer", "[1, 4194304]")
    repeats: int = option(3, "repetitions of each call; medians count", "[1, inf)")
    threads: int = option(0, "CPU threads; 0: PyTorch's default", "[0, 1024]")
    out: str = option("", "JSON file for the result")


def assisted(words: list[str]) -> int:
    """Run the benchmark. Returns 1 if answers differ by more than rounding explains."""
    options = parse_words(Options, words)
    if not options.draft:
        why = "Both decoders use a language model as draft model."
        fix = "Give a run folder of a trained draft_lm, or a folder or hub id of a language model."
        raise ConfigError("draft", "", why, fix)
    use_threads(options.threads)
    decoders, prompts, skipped = _prepare(options)
    with decoders:
        for name in decoders.systems:  # libraries allocate on their first calls
            decoders.answer(name, prompts[0][1], options.new_tokens)
        progress = track(prompts, "decoding", console=Console(stderr=True), transient=True)
        cases = [
            systems.compare(decoders, name, ids, options.new_tokens, options.repeats)
            for name, ids in progress
        ]
        mismatches = [miss for case in cases for miss in decoders.mismatches(case)]
    result = {
        "machine": describe_machine(), "options": dataclasses.asdict(options),
        "results": rows(cases),
        "mismatches": [miss._asdict() for miss in mismatches], "left_out": skipped,
        "prompts": [case.fields() for case in cases],
    }  # fmt: skip
    show(result, Console(width=None if sys.stdout.isatty() else 120))
    save_result(options.out, result)
    return int(any(miss.gap > ROUNDING for miss in mismatches))


def _prepare(options: Options) -> tuple[systems.Decoders, systems.TokenizedPrompts, list[str]]:
    """Return the models, the prompts that fit both, and the names of those that do not."""
    process.set_threads()
    name = options.target
    config = target_settings(name)
    target, tokenizer, _ = load_target(config, process.device())
    stops = stop_ids(tokenizer, target)
    drafter, assistant = draft_models(options.draft, target)
    sizes = options.gamma, options.lookup
    decoders = systems.Decoders(target, drafter, assistant, stops, *sizes)
    longest = min(lm.shape().max_positions for lm in (target, drafter.lm)) - options.new_tokens
    suite = read_prompts(suite_source("tiny" if name == "tiny" else "outrider", "prompts"))
    count = min(options.prompts, len(suite))
    chosen = [suite[i * len(suite) // count] for i in range(count)]  # of all categories
    tokenized = {prompt.id: prompt_ids(tokenizer, prompt.first_messages()) for prompt in chosen}
    prompts = [(name, ids) for name, ids in tokenized.items() if 0 < len(ids) <= longest]
    skipped = [name for name, ids in tokenized.items() if not 0 < len(ids) <= longest]
    if not prompts:
        why = "No prompt fits the models' positions together with so many new tokens."
        raise ConfigError("new_tokens", options.new_tokens, why, "Use fewer new tokens.")
    return decoders, prompts, skipped


def draft_models(path: str, target: Target) -> tuple[DraftLm, Any]:
    """Load one language model as Outrider's drafter and as transformers' assistant, float32.

    Both draft with the model's whole vocabulary.

    Raises:
        ConfigError: another drafter, another vocabulary, or no model at all.
        RunError: the run was for another target, or is damaged.
    """
    with tempfile.TemporaryDirectory() as scratch:
        place = _transformers_folder(path, target, Path(scratch))
        try:
            cfg = Config(path=place, draft_vocab_size=None)
            drafter = drafters.build(cfg, target, DraftVocab.identity(target.vocab_size))
        except ConfigError as error:
            raise ConfigError("draft", path, error.why, error.fix) from None
        model = AutoModelForCausalLM.from_pretrained(
            place, dtype=torch.float32, use_safetensors=True
        )
    for each in (drafter, model):
        each.to(target.device).eval().requires_grad_(False)
    assert isinstance(drafter, DraftLm), "Config belongs to another drafter"
    return drafter, model


def _transformers_folder(path: str, target: Target, scratch: Path) -> str:
    """Return where transformers can read the draft model: a trained one is saved to `scratch`."""
    folder = Path(path).expanduser()
    if (folder / "drafter" / "config.json").is_file():
        folder = folder / "drafter"
    if not (folder / "config.json").is_file():
        return path
    if read_json(folder / "config.json", native.FIX).get("format") != native.FORMAT:
        return str(folder)
    drafter, cfg = native.load(folder, target)
    if not isinstance(drafter, DraftLm):
        why = f"It holds a drafter of kind {cfg.name}, and an assistant is a language model."
        raise ConfigError("draft", path, why, "Use a run of drafter=draft_lm.")
    drafter.lm.model.save_pretrained(scratch)
    return str(scratch)


def rows(cases: Sequence[systems.Case], seed: int = 0) -> list[dict[str, Any]]:
    """Return a row per system, from the sums over prompts of median times."""
    return [_row(cases, name, seed) for name in cases[0].answers]


def _row(cases: Sequence[systems.Case], name: str, seed: int) -> dict[str, Any]:
    costs, base = _costs(cases, name), _costs(cases, systems.ASSISTED)
    tokens, seconds = costs.sum(0)
    base_tokens, base_seconds = base.sum(0)
    forwards = sum(case.answers[name][0].forwards for case in cases)
    return {
        "system": name, "prompts": len(cases), "tokens": int(tokens), "forwards": forwards,
        "tokens_per_second": float(tokens / seconds),
        "tokens_per_forward": float(tokens / forwards),
        "in_models": sum(case.median(name, "model_seconds") for case in cases) / float(seconds),
        "against_assisted": float((tokens / seconds) / (base_tokens / base_seconds)),
        "against_assisted_95": bootstrap(np.hstack([costs, base]), range(len(cases)), seed),
        "same_answers": sum(case.ids(name) == case.ids(systems.THEIR_PLAIN) for case in cases),
        "same_rounds": sum(case.same_rounds for case in cases) if name == systems.OURS else None,
    }  # fmt: skip


def _costs(cases: Sequence[systems.Case], name: str) -> np.ndarray:
    """Return tokens and median seconds of each prompt, [P, 2]."""
    return np.array([(len(case.ids(name)), case.median(name, "seconds")) for case in cases], float)


def show(result: dict[str, Any], console: Console) -> None:
    head = "system", "tokens/s", "x assisted", "95 %", "in the models", "tokens/forward"
    table = Table(*head, "same answers")
    for row in result["results"]:
        low, high = row["against_assisted_95"] or (float("nan"), float("nan"))
        table.add_row(
            row["system"], f"{row['tokens_per_second']:.1f}", f"{row['against_assisted']:.2f}",
            f"{low:.2f}..{high:.2f}", f"{100 * row['in_models']:.0f} %",
            f"{row['tokens_per_forward']:.3f}",
            f"{row['same_answers']} of {row['prompts']}",
        )  # fmt: skip
    console.print(table)
    console.print("; ".join(_notes(result)))
    for miss in result["mismatches"]:
        difference = f"{miss['token']} for {miss['baseline_token']} at {miss['position']}"
        console.print(f"{miss['id']}: {difference}, lead {miss['gap']:.2g}", style="yellow")


def _notes(result: dict[str, Any]) -> Iterator[str]:
    first, options = result["results"][0], result["options"]
    yield f"greedy, float32, gamma {options['gamma']}, {options['new_tokens']} tokens a prompt"
    yield f"same rounds on both sides: {first['same_rounds']} of {first['prompts']} prompts"
    (theirs,) = (row for row in result["results"] if row["system"] == systems.ASSISTED)
    if theirs["in_models"]:
        yield f"upper limit with the same forwards: {1 / theirs['in_models']:.2f}x assisted"
    if result["left_out"]:
        yield f"too long, left out: {', '.join(result['left_out'])}"
    yield result["machine"]
