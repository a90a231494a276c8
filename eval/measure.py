"""Interleaved measurement of plain and speculative decoding on the same prompts, in one process.

The plain engine is first on even prompts, the speculative one on odd ones, so that a drift of the
machine affects both. Medians of repeats are reported. A dialogue is decoded turn by turn with
the *plain* answers as its history, so that both engines see the same prompt; each turn is one
prompt. A sampled answer depends only on run.seed and the prompt's index: repeats draw the same
tokens.

Greedy and coupled answers must equal plain decoding, which is checked here: where one differs, the
difference of the target's two largest logits there distinguishes rounding from an error.
"""

import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import outrider
from outrider.conf.errors import RunError
from outrider.conf.schema import Config
from outrider.conf.tensor_files import fingerprint
from outrider.data.conversations import Message, Prompt
from outrider.data.rendered_text import Tokenizer
from outrider.data.suite import eval_source, load_suite
from outrider.data.tokenise import prompt_ids
from outrider.eval.auto_policy import policy_beside
from outrider.eval.metrics import Record, median_times, predicted_speedups, ratio, summarise
from outrider.eval.rank_tables import tables_for
from outrider.eval.report import Mismatch, Report, format_number
from outrider.eval.report_auto import answer_fields, summarise_auto
from outrider.models.decode.costs.measurement import Announce
from outrider.models.decode.engine import Engine
from outrider.models.decode.from_config import depth_warning, rule_of, sampling_of
from outrider.models.decode.request import Output, Stops
from outrider.models.decode.rules.rule_table import RULES
from outrider.models.decode.verifier import CoupledVerifier
from outrider.models.drafters.parts.part import folder_of
from outrider.models.drafting.drafter import Drafter
from outrider.models.formats import native
from outrider.models.interface import Trace
from outrider.models.target.chat_template import template_hash
from outrider.models.target.load import stop_ids
from outrider.models.target.target import Target
from outrider.train.objective import Objective

WARM_TOKENS = 32  # of a warm-up answer: enough to run every shape of a round
REPORTED = (  # fields of `decode` in every report
    "width", "nodes", "confidence", "acceptance_goal", "gain", "temperature", "top_p", "top_k",
    "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "banned", "lenience",
    "epsilon", "delta",
)  # fmt: skip
ROUNDS = ("accepted", "drafted", "room", "origins", "rejected")  # lists of an `Output`
SEED_STRIDE = 1_000_003  # the seed of prompt i is run.seed * SEED_STRIDE + i


def measure(
    target: Target,
    tokenizer: Tokenizer,
    drafter: Drafter,
    config: Config,
    console: Console,
    suite: Sequence[Prompt] | None = None,
) -> Report:
    """Decode prompts with and without the drafter, and return the report.

    Args:
        drafter: in eval mode, on the target's device. The target's taps are restored.
        suite: None reads `config.eval.prompts`.

    Raises:
        ConfigError, RunError: the prompts cannot be read, or none fits the target.
    """
    suite = load_suite(config, config.eval.limit) if suite is None else suite
    taps = target.taps
    try:
        announce = partial(console.print, style="dim", soft_wrap=True)
        measurement = Measurement(target, tokenizer, drafter, config, announce)
        if warning := depth_warning(measurement.policy, drafter):
            console.print(warning, style="yellow")
        measurement.warm_up(suite[: config.eval.warmup])
        for note in getattr(measurement.policy, "notes", ()):
            console.print(note, style="dim", soft_wrap=True)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        status = TextColumn("{task.fields[status]}"), TimeRemainingColumn()
        with Progress(*columns, *status, console=console, transient=True) as progress:
            task = progress.add_task("decoding", total=sum(len(p.turns) for p in suite), status="")
            for prompt in suite:
                for _ in measurement.decode(prompt):
                    progress.update(task, advance=1, status=measurement.progress_text())
        if not measurement.records:
            count, most = config.eval.max_new_tokens, target.shape().max_positions
            message = f"No prompt fits the target's {most} positions with {count} new tokens."
            raise RunError(message, "Use a smaller eval.max_new_tokens, or shorter prompts.")
        return measurement.report()
    finally:
        target.set_taps(taps)


class Measurement:
    """Both engines, and the results of the prompts decoded so far."""

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer,
        drafter: Drafter,
        config: Config,
        announce: Announce,
    ) -> None:
        self.target, self.tokenizer, self.drafter, self.config = target, tokenizer, drafter, config
        self.records, self.outputs = list[Record](), list[dict[str, Any]]()
        self.mismatches, self.left_out = list[Mismatch](), list[str]()
        decode, stops = config.decode, Stops(stop_ids(tokenizer, target))
        sampling = sampling_of(decode, target.vocab_size)
        run = Path(config.run.dir)
        other = config.eval.drafter
        own = run / "drafter" if other is None else folder_of(other)
        self.policy = policy = policy_beside(decode, own, tables_for(config), announce)
        rule = rule_of(decode, policy)
        self.rule = rule.name
        self.fast = Engine(target, drafter, policy, sampling=sampling, stops=stops, rule=rule)
        plain = partial(Engine, target, None, None, sampling=sampling)
        plain_rule = rule if rule.coupled else None
        self.plain = plain(stops=stops, rule=plain_rule)
        self.gap_engine = plain(rule=plain_rule, keep_gaps=True)
        self.comparable = sampling.greedy or rule.coupled  # answers must be equal
        self.engines = [self.plain, self.fast] if config.eval.baseline else [self.fast]
        self.depth = min(policy.levels, drafter.max_depth)  # of the deepest draft
        self.max_prompt = target.shape().max_positions - config.eval.max_new_tokens

    def warm_up(self, suite: Sequence[Prompt]) -> None:
        """Decode the first turns, unrecorded."""
        for prompt in suite:
            ids = prompt_ids(self.tokenizer, prompt.first_messages())
            if 0 < len(ids) <= self.max_prompt:
                for engine in self.engines:
                    engine.generate(ids, min(WARM_TOKENS, self.config.eval.max_new_tokens))

    def decode(self, prompt: Prompt) -> Iterator[Record]:
        """Decode every turn of a dialogue, up to the first that exceeds the target's context."""
        messages: list[Message] = prompt.first_messages()[:-1]
        for turn, question in enumerate(prompt.turns, start=1):
            name = prompt.id if turn == 1 else f"{prompt.id}/{turn}"
            messages.append(Message(role="user", content=question))
            ids = prompt_ids(self.tokenizer, messages)
            if not 0 < len(ids) <= self.max_prompt:
                self.left_out.append(name)
                return
            runs = self._runs(ids)
            yield self._record(name, prompt, question, ids, runs)
            messages.append(Message(role="assistant", content=self._text(runs[0][0].ids)))

    def _runs(self, ids: list[int]) -> list[list[Output]]:
        index = len(self.records)
        runs: dict[Engine, list[Output]] = {engine: [] for engine in self.engines}
        for repeat in range(self.config.eval.repeats):
            reverse = (index + repeat) % 2 == 1
            for engine in self.engines[::-1] if reverse else self.engines:
                engine.generator.seed(self._seed(index))
                runs[engine].append(engine.generate(ids, self.config.eval.max_new_tokens))
        return list(runs.values())

    def _record(
        self, name: str, prompt: Prompt, question: str, ids: list[int], runs: list[list[Output]]
    ) -> Record:
        fast, plain = runs[-1][0], runs[0][0] if self.config.eval.baseline else None
        row = {
            "id": name, "dialogue": prompt.id, "category": prompt.category, "prompt": question,
            "prompt_ids": ids, "output_ids": fast.ids,
            "baseline_ids": None if plain is None else plain.ids, **answer_fields(fast),
            **{key: getattr(fast, key) for key in ROUNDS},
            "steps": sum(fast.steps), "seconds": asdict(_median_times(runs[-1])),
            "baseline_seconds": None if plain is None else asdict(_median_times(runs[0])),
        }  # fmt: skip
        self.outputs.append(row)
        self.records.append(record := Record.from_output(row))
        if plain is not None and self.comparable and fast.ids != plain.ids:
            seed = self._seed(len(self.records) - 1)
            self.mismatches.append(self._mismatch(name, ids, fast.ids, plain.ids, seed))
        return record

    def _seed(self, index: int) -> int:
        return self.config.run.seed * SEED_STRIDE + index

    def _mismatch(
        self, name: str, prompt: list[int], ids: list[int], plain: list[int], seed: int
    ) -> Mismatch:
        """Return the first difference of two answers, and the gap of the target's logits there."""
        at, tokens = first_difference(ids, plain)
        if isinstance(self.gap_engine.verifier, CoupledVerifier):
            # the noise of a position is drawn after that of earlier ones
            self.gap_engine.generator.seed(seed)
            gap = self.gap_engine.generate(prompt, at + 1).gaps[at]
        else:
            gap = self.gap_engine.generate([*prompt, *plain[:at]], 1).gaps[0]
        return Mismatch(name, at, *tokens, gap)

    def _text(self, ids: list[int]) -> str:
        """Return an answer as the next turn's history."""
        content = [token for token in ids if token not in self.fast.stops.ids]
        return str(self.tokenizer.decode(content, skip_special_tokens=True))

    def progress_text(self) -> str:
        """Return tau, ms per round and speedup so far, for the progress bar."""
        rounds = sum(len(r.accepted) for r in self.records)
        emitted = sum(r.emitted for r in self.records)
        seconds = sum(r.times.rounds for r in self.records)
        plain = sum(r.baseline.rounds for r in self.records if r.baseline is not None)
        per_plain = ratio(plain, sum(r.baseline_emitted for r in self.records))
        speedup = format_number(ratio(per_plain, ratio(seconds, emitted)) or None, 2, "x")
        step = format_number(ratio(1000 * seconds, rounds), 1)
        return f"tau {format_number(ratio(emitted, rounds))} at {step} ms/round, {speedup}"

    def report(self) -> Report:
        depth, seed = self.depth, self.config.run.seed
        total = summarise(self.records, depth, seed)
        names = dict.fromkeys(record.category for record in self.records)
        parts = {name: [r for r in self.records if r.category == name] for name in names}
        compared = self.config.eval.baseline and self.comparable
        return Report(
            summary=total,
            categories={name: summarise(part, depth, seed) for name, part in parts.items()},
            exact=not self.mismatches if compared else None,
            mismatches=self.mismatches,
            theory=predicted_speedups(total, depth, chain=self.config.decode.kind == "chain"),
            setting=self._setting(),
            outputs=self.outputs,
            forecast=self._forecast(),
        )

    @torch.no_grad()
    def _forecast(self) -> float | None:
        """Return tau predicted by the training objective on the decoded text, where defined."""
        decode, depths = self.config.decode, self.config.drafter.depths
        default_rule = decode.verify in ("auto", "ratio") and decode.draft_kind == "drawn"
        if not self.drafter.is_trained or self.depth > depths or not decode.is_unwarped:
            return None
        if decode.name != "chain":
            return None
        if decode.confidence or (decode.temperature and not default_rule):
            return None
        objective = Objective(self.drafter, self.target, weights=[1.0] * self.depth)
        self.target.set_taps(self.drafter.taps)
        total = torch.zeros(3, dtype=torch.float64)
        for row in self.outputs:
            trace = answered_trace(self.target, row["prompt_ids"], row["output_ids"])
            total += objective(trace, torch.ones(self.depth), measure=True)[1].rounds.cpu()
        tokens, greedy, sampled = total.tolist()
        return ratio(tokens, sampled if decode.temperature else greedy)

    def _setting(self) -> dict[str, Any]:
        config, decode = self.config, self.config.decode
        return {
            "drafter": config.drafter.name,
            "target_changed": self.drafter.patch_target(self.target),
            "target": self.target.name,
            "policy": decode.name,
            "depth": self.depth,
            "trained_depths": config.drafter.depths if self.drafter.is_trained else None,
            "draft": self.policy.draft,
            "verify": self.rule if decode.temperature else "greedy",
            "lossy": decode.temperature > 0 and RULES[self.rule].lossy,
            **{name: getattr(decode, name) for name in REPORTED},
            "nodes": self.policy.nodes,
            "tree": getattr(self.policy, "paths", None),
            **{n: getattr(config.eval, n) for n in ("max_new_tokens", "repeats", "warmup")},
            "seed": config.run.seed,
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "device": self.target.device.type,
            "threads": torch.get_num_threads(),
            "left_out": self.left_out,
            **summarise_auto(self.outputs, getattr(self.policy, "notes", ())),
            "fingerprints": self._fingerprints(),
            "versions": {
                "outrider": outrider.__version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }

    def _fingerprints(self) -> dict[str, str]:
        return {
            "target": native.target_fingerprint(self.target),
            "drafter": fingerprint(self.drafter.state_dict()),
            "template": template_hash(self.tokenizer),
            "prompts": eval_source(self.config).fingerprint(),
        }


def first_difference(ids: Sequence[int], plain: Sequence[int]) -> tuple[int, tuple[Any, Any]]:
    """Return where two different answers differ first, and the two tokens; None after an end."""
    return next((at, pair) for at, pair in enumerate(zip_longest(ids, plain)) if len({*pair}) > 1)


def answered_trace(target: Target, prompt: list[int], answer: list[int]) -> Trace:
    """Return the target's trace of one answered prompt."""
    ids = torch.tensor([[*prompt, *answer]], device=target.device)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    return target.trace(ids, positions >= len(prompt), torch.zeros_like(ids), positions)


def _median_times(runs: Sequence[Output]) -> Any:
    """Return the median of the repeats with the first one's answer (on a GPU some may differ)."""
    return median_times([run.times for run in runs if run.ids == runs[0].ids])
