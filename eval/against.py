"""`outrider bench assisted`: this decoder beside transformers' own assisted generation.

One draft model drafts on both sides: here as a `draft_lm` chain, there as `assistant_model` with
gamma tokens a round, a constant schedule and no stop by confidence. Both decode greedily in float32
on one copy of the target's weights, so all systems owe the same tokens, prompt by prompt:

    outrider               chains of gamma guesses      transformers assisted   the same draft model
    outrider plain         the same engine, no draft    transformers plain      its dynamic cache
                                                        transformers lookup     guesses of the text

Time is that of a whole call, from prompt to tokens. The systems take turns on every prompt, each
first in its turn, and the median of the repeats counts.

Forwards of the target are counted by a hook on its body, the same for all. The two libraries start
differently: transformers drafts behind the prompt before the target has read it. With gamma = 2,
every guess right, `|` ends a forward:

    outrider               prompt -> x1 | x1 d d -> x2 x3 x4 | x4 d d -> x5 x6 x7 |
    transformers assisted  prompt d d -> x1 x2 x3 | x3 d d -> x4 x5 x6 | x6 -> x7 |

Given the prompt and x1 it must need exactly our rounds, and `Sides.same_rounds` asks that.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, GenerationConfig

from outrider.data.chat import prompt_ids
from outrider.data.sources import SUITE, prompts
from outrider.eval import bench
from outrider.eval.decode.answer import Stops
from outrider.eval.decode.engine import Engine
from outrider.eval.decode.policy import Chain
from outrider.eval.metrics import RESAMPLES
from outrider.eval.report import Mismatch
from outrider.launch import start
from outrider.models import drafters
from outrider.models.base import Drafter
from outrider.models.drafters.draft_lm import Config, DraftLm
from outrider.models.formats import native
from outrider.models.load import load, stop_ids
from outrider.models.target import Target
from outrider.models.vocab import DraftVocab
from outrider.train.config import TargetConfig
from outrider.train.errors import ConfigError
from outrider.train.files import write_json

OURS, PLAIN = "outrider", "outrider plain"
ASSISTED, THEIR_PLAIN = "transformers assisted", "transformers plain"
LOOKUP = "transformers lookup"
GENERAL = Path(__file__).parent.parent / "data" / "prompts" / "eval.jsonl"
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
    options: dict[str, Any] = dict(OPTIONS)
    for word in words:
        key, _, value = word.partition("=")
        if key not in options:
            fix = f"Use: {', '.join(options)}."
            raise ConfigError(key, value, "This benchmark has no such option.", fix)
        options[key] = _whole(key, value) if isinstance(OPTIONS[key], int) else value
    if not options["draft"]:
        why = "Both sides draft with one language model, and none was named."
        fix = "Give a run folder of a trained draft_lm, or a folder or hub id of a language model."
        raise ConfigError("draft", "", why, fix)
    if options["threads"]:
        torch.set_num_threads(options["threads"])
    return options


def _whole(key: str, value: str) -> int:
    least = 0 if key == "threads" else 1
    if not value.isdecimal() or int(value) < least:
        why = f"A whole number from {least} on is expected."
        raise ConfigError(key, value, why, f"Like {key}={OPTIONS[key]}.")
    return int(value)


# ---- two libraries, one pair of models -----------------------------------------------------------


class Answer(NamedTuple):
    """What a system said, and what it cost."""

    ids: list[int]
    forwards: int  # of the target, the prompt's included
    seconds: float


System = Callable[[list[int], int], list[int]]  # prompt, budget -> new tokens
Asked = list[tuple[str, list[int]]]  # name and ids of each prompt


class Sides:
    """Both sides, ready; as a context it counts the target's forwards."""

    def __init__(
        self, target: Target, drafter: Drafter, assistant: Any, stops: Sequence[int],
        gamma: int, lookup: int = 10,
    ) -> None:  # fmt: skip
        """
        Args:
            target: its own settings of generation are set aside, and so are the assistant's.
            drafter: the draft model on our side.
            assistant: the same model as transformers has it.
            stops: tokens that end an answer.
            lookup: tokens that transformers' prompt lookup guesses at most.
        """
        self.target, self.assistant = target, assistant
        ends = Stops(stops)
        self.engine = Engine(target, drafter, Chain(gamma), stops=ends)
        self.plain = Engine(target, None, None, stops=ends)
        self.gauge = Engine(target, None, None, keep_gaps=True)
        target.model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=list(stops) or None, pad_token_id=next(iter(stops), 0)
        )
        assistant.generation_config = GenerationConfig(
            num_assistant_tokens=gamma, num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )  # fmt: skip
        self.systems: dict[str, System] = {
            OURS: lambda ids, budget: self.engine.generate(ids, budget).ids,
            PLAIN: lambda ids, budget: self.plain.generate(ids, budget).ids,
            ASSISTED: lambda ids, budget: self._theirs(ids, budget, assistant_model=assistant),
            LOOKUP: lambda ids, budget: self._theirs(ids, budget, prompt_lookup_num_tokens=lookup),
            THEIR_PLAIN: self._theirs,
        }
        self.forwards = 0

    def __enter__(self) -> "Sides":
        self._hook = self.target.body.register_forward_pre_hook(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _count(self, *_: object) -> None:
        self.forwards += 1

    @torch.no_grad()
    def _theirs(self, ids: list[int], budget: int, **how: Any) -> list[int]:
        prompt = torch.tensor([ids], device=self.target.device)
        how |= {"attention_mask": torch.ones_like(prompt), "max_new_tokens": budget}
        new: list[int] = self.target.model.generate(prompt, **how)[0, len(ids) :].tolist()
        return new

    def answer(self, name: str, ids: list[int], budget: int) -> Answer:
        """One whole call."""
        before, began = self.forwards, time.perf_counter()
        said = self.systems[name](ids, budget)
        return Answer(said, self.forwards - before, time.perf_counter() - began)

    def same_rounds(self, ids: list[int], budget: int) -> bool:
        """Whether transformers, given our first token too, needs as many forwards as we rounds."""
        ours = self.answer(OURS, ids, budget)
        if ours.forwards == 1:
            return True  # the prompt's forward said it all
        theirs = self.answer(ASSISTED, [*ids, ours.ids[0]], budget - 1)
        return theirs.forwards == ours.forwards - 1

    def mismatches(self, case: "Case") -> list[Mismatch]:
        """Where answers leave transformers' plain one, and how sure the target is there."""
        plain, found = case.said(THEIR_PLAIN), list[Mismatch]()
        for name in case.answers:
            said = case.said(name)
            if said != plain:
                at = _parting(said, plain)
                gap = self.gauge.generate([*case.prompt, *plain[:at]], 1).gaps[0]
                tokens = [answer[at] if at < len(answer) else None for answer in (said, plain)]
                found.append(Mismatch(f"{case.id}: {name}", at, tokens[0], tokens[1], gap))
        return found


def _parting(one: list[int], other: list[int]) -> int:
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


# ---- prompt by prompt ----------------------------------------------------------------------------


@dataclass
class Case:
    """One prompt, answered by every system several times."""

    id: str
    prompt: list[int]
    answers: dict[str, list[Answer]]
    same_rounds: bool

    def said(self, name: str) -> list[int]:
        return self.answers[name][0].ids

    def seconds(self, name: str) -> float:
        return statistics.median(run.seconds for run in self.answers[name])

    def fields(self) -> dict[str, Any]:
        """For the file."""
        seconds = {name: [run.seconds for run in runs] for name, runs in self.answers.items()}
        return {
            "id": self.id, "prompt_tokens": len(self.prompt), "same_rounds": self.same_rounds,
            "output_ids": self.said(THEIR_PLAIN), "seconds": seconds,
            "forwards": {name: runs[0].forwards for name, runs in self.answers.items()},
        }  # fmt: skip


def compare(sides: Sides, name: str, ids: list[int], budget: int, repeats: int) -> Case:
    """All systems on one prompt, by turns; the question about the rounds warms it up."""
    names = list(sides.systems)
    answers: dict[str, list[Answer]] = {system: [] for system in names}
    same = sides.same_rounds(ids, budget)
    for repeat in range(repeats):
        turn = repeat % len(names)
        for system in names[turn:] + names[:turn]:
            answers[system].append(sides.answer(system, ids, budget))
    return Case(name, ids, answers, same)


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
    suite = prompts(SUITE if wanted == "tiny" else GENERAL, key="prompts")
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
    return {
        "system": name, "prompts": len(cases), "tokens": tokens, "forwards": forwards,
        "tokens_per_second": float(_speed(costs)), "tokens_per_forward": tokens / forwards,
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
    table = Table("system", "tokens/s", "x assisted", "95 %", "tokens/forward", "same answers")
    for row in result["results"]:
        low, high = row["against_assisted_95"] or (float("nan"), float("nan"))
        table.add_row(
            row["system"], f"{row['tokens_per_second']:.1f}", f"{row['against_assisted']:.2f}",
            f"{low:.2f}..{high:.2f}", f"{row['tokens_per_forward']:.3f}",
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
    if result["left_out"]:
        yield f"too long, left out: {', '.join(result['left_out'])}"
    yield result["machine"]
