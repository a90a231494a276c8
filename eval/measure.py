"""The measurement: every prompt decoded with and without the drafter, in one process, by turns.

Prompt after prompt, both engines decode the same ids: first the plain one on even prompts, first
the speculative one on odd ones, so that a machine that warms up or slows down slows both. Of
several repeats the middle one counts. A dialogue is decoded turn by turn with the *plain* answers
as its history, so that both engines always see the same prompt; each turn is one prompt. A sampled
answer depends on run.seed and the prompt's place alone: repeats draw the same tokens.

Greedy and coupled answers owe to be the plain ones, which is checked here too: where one differs,
the target's lead of its first over its second choice at that place tells rounding from error.
"""

import hashlib
import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import outrider
from outrider.conf import files
from outrider.conf.errors import RunError
from outrider.data.answer_spans import Tokenizer
from outrider.data.conversations import Message, Prompt
from outrider.data.suite import suite_of, suite_place
from outrider.data.tokenise import prompt_ids
from outrider.eval.metrics import Record, middle, predict, ratio, summarise
from outrider.eval.rank_tables import read_tables
from outrider.eval.report import Mismatch, Report, number
from outrider.models.decode.engine import Engine
from outrider.models.decode.from_config import policy_of, rule_of, sampling_of, shortfall
from outrider.models.decode.request import Output, Stops
from outrider.models.decode.rules import RULES
from outrider.models.drafter import Drafter, Trace
from outrider.models.formats import native
from outrider.models.load import stop_ids
from outrider.models.target import Target
from outrider.train.objective import Objective
from outrider.train.settings import Config

WARM_TOKENS = 32  # budget of a warm-up answer: enough to meet every shape of a round
SHOWN = (  # of `decode`, in every report
    "width", "nodes", "confidence", "gain", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "banned", "lenience", "epsilon", "delta",
)  # fmt: skip
SEEDS_APART = 1_000_003  # run.seed s starts its prompts' seeds at s times this


def measure(
    target: Target,
    tokenizer: Tokenizer,
    drafter: Drafter,
    config: Config,
    console: Console,
    suite: Sequence[Prompt] | None = None,
) -> Report:
    """Decode prompts as `config.eval` and `config.decode` say, and sum up.

    Args:
        drafter: in eval mode, on the target's device. The target's taps are left as found.
        suite: None takes those that `config.eval` names.

    Raises:
        ConfigError, RunError: the prompts cannot be read, or none fits the target.
    """
    suite = suite_of(config, config.eval.limit) if suite is None else suite
    taps = target.taps
    try:
        bench = Bench(target, tokenizer, drafter, config)
        if short := shortfall(bench.policy, drafter):
            console.print(short, style="yellow")
        bench.warm_up(suite[: config.eval.warmup])
        with _progress(console) as progress:
            task = progress.add_task("decoding", total=sum(len(p.turns) for p in suite), now="")
            for prompt in suite:
                for _ in bench.decode(prompt):
                    progress.update(task, advance=1, now=bench.standing())
        if not bench.records:
            message = "No prompt fits the target together with eval.max_new_tokens."
            raise RunError(message, "Use a smaller eval.max_new_tokens, or shorter prompts.")
        return bench.report()
    finally:
        target.set_taps(taps)


@dataclass
class Bench:
    """Both engines and what they have decoded so far."""

    target: Target
    tokenizer: Tokenizer
    drafter: Drafter
    config: Config
    records: list[Record] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        decode = self.config.decode
        stops = Stops(stop_ids(self.tokenizer, self.target))
        sampling = sampling_of(decode)
        self.policy = policy = policy_of(decode, read_tables(Path(self.config.run.dir)))
        rule, drafter = rule_of(decode, policy), self.drafter
        self.rule = rule.name
        self.fast = Engine(self.target, drafter, policy, sampling=sampling, stops=stops, rule=rule)
        plainly = rule if rule.coupled else None
        self.plain = Engine(self.target, None, None, sampling=sampling, stops=stops, rule=plainly)
        self.gauge = Engine(
            self.target, None, None, sampling=sampling, rule=plainly, keep_gaps=True
        )
        self.comparable = sampling.greedy or rule.coupled  # answers owe to be the same
        measured = [self.plain, self.fast] if self.config.eval.baseline else [self.fast]
        self.engines = measured
        self.depth = min(policy.levels, self.drafter.reach)  # of the deepest draft there can be
        self.room = self.target.shape().max_positions - self.config.eval.max_new_tokens

    def warm_up(self, suite: Sequence[Prompt]) -> None:
        """Decode the first turns, unrecorded."""
        for prompt in suite:
            ids = prompt_ids(self.tokenizer, prompt.opening())
            if 0 < len(ids) <= self.room:
                for engine in self.engines:
                    engine.generate(ids, min(WARM_TOKENS, self.config.eval.max_new_tokens))

    def decode(self, prompt: Prompt) -> Iterator[Record]:
        """Every turn of a dialogue; the rest of one that outgrows the target is left out."""
        said: list[Message] = prompt.opening()[:-1]
        for turn, question in enumerate(prompt.turns, start=1):
            name = prompt.id if turn == 1 else f"{prompt.id}/{turn}"
            said.append(Message(role="user", content=question))
            ids = prompt_ids(self.tokenizer, said)
            if not 0 < len(ids) <= self.room:
                self.left_out.append(name)
                return
            runs = self._runs(ids)
            yield self._record(name, prompt, question, ids, runs)
            said.append(Message(role="assistant", content=self._text(runs[0][0].ids)))

    def _runs(self, ids: list[int]) -> list[list[Output]]:
        """Per engine, its answers in the order of repetition."""
        place = len(self.records)
        runs: dict[Engine, list[Output]] = {engine: [] for engine in self.engines}
        for repeat in range(self.config.eval.repeats):
            turned = (place + repeat) % 2 == 1
            for engine in self.engines[::-1] if turned else self.engines:
                engine.generator.seed(self._seed(place))
                runs[engine].append(engine.generate(ids, self.config.eval.max_new_tokens))
        return list(runs.values())

    def _record(
        self, name: str, prompt: Prompt, question: str, ids: list[int], runs: list[list[Output]]
    ) -> Record:
        fast, plain = runs[-1][0], runs[0][0] if self.config.eval.baseline else None
        record = Record(
            id=name,
            dialogue=prompt.id,
            category=prompt.category,
            tokens=len(fast.ids),
            accepted=tuple(fast.accepted),
            drafted=tuple(fast.drafted),
            steps=self._steps(fast),
            clock=_clock(runs[-1]),
            baseline_tokens=0 if plain is None else len(plain.ids),
            baseline=None if plain is None else _clock(runs[0]),
        )
        self.records.append(record)
        self.outputs.append(
            {
                "id": name,
                "category": prompt.category,
                "prompt": question,
                "prompt_ids": ids,
                "output_ids": fast.ids,
                "baseline_ids": None if plain is None else plain.ids,
                "accepted": fast.accepted,
                "origins": fast.origins,
                "rejected": fast.rejected,
            }
        )
        if plain is not None and self.comparable and fast.ids != plain.ids:
            seed = self._seed(len(self.records) - 1)
            self.mismatches.append(self._mismatch(name, ids, fast.ids, plain.ids, seed))
        return record

    def _steps(self, out: Output) -> int:
        """Drafter steps of an answer: in each round the depth, or what the budget has room for."""
        decode = self.config.decode
        if decode.confidence or decode.gain:  # it may stop earlier
            return sum(out.drafted)
        steps, written = 0, 1
        for accepted in out.accepted:
            room = self.config.eval.max_new_tokens - written - 1  # one token is the bonus
            steps += min(self.depth, room)
            written += accepted + 1
        return steps

    def _seed(self, place: int) -> int:
        """Of the random numbers of a prompt."""
        return self.config.run.seed * SEEDS_APART + place

    def _mismatch(
        self, name: str, prompt: list[int], ids: list[int], plain: list[int], seed: int
    ) -> Mismatch:
        """Where two answers part, and how sure the target is there (not timed)."""
        shorter = min(len(ids), len(plain))
        at = next((i for i in range(shorter) if ids[i] != plain[i]), shorter)
        if self.gauge.coupled:  # a place's noise is made behind that of the places before it
            self.gauge.generator.seed(seed)
            gap = self.gauge.generate(prompt, at + 1).gaps[at]
        else:
            gap = self.gauge.generate([*prompt, *plain[:at]], 1).gaps[0]
        tokens = [answer[at] if at < len(answer) else None for answer in (ids, plain)]
        return Mismatch(name, at, tokens[0], tokens[1], gap)

    def _text(self, ids: list[int]) -> str:
        """An answer as the next turn's history."""
        kept = [token for token in ids if token not in self.fast.stops.ids]
        return str(self.tokenizer.decode(kept, skip_special_tokens=True))

    def standing(self) -> str:
        """Beside the progress bar: tau, and what it costs and brings."""
        rounds = sum(len(r.accepted) for r in self.records)
        emitted = sum(r.emitted for r in self.records)
        seconds = sum(r.clock.rounds for r in self.records)
        plain = sum(r.baseline.rounds for r in self.records if r.baseline is not None)
        per_plain = ratio(plain, sum(r.baseline_emitted for r in self.records))
        speedup = ratio(per_plain, ratio(seconds, emitted))
        step = number(ratio(1000 * seconds, rounds), 1)
        return (
            f"tau {number(ratio(emitted, rounds))} at {step} ms/round, "
            f"{number(speedup, 2, 'x') if speedup else '-'}"
        )

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
            theory=predict(total, depth, chain=self.config.decode.kind == "chain"),
            setting=self._setting(),
            outputs=self.outputs,
            forecast=self._forecast(),
        )

    @torch.no_grad()
    def _forecast(self) -> float | None:
        """What training's measure makes of the text just decoded: do the two still agree?"""
        decode, depths = self.config.decode, self.config.drafter.depths
        usual = decode.verify in ("auto", "ratio") and decode.tossing == "drawn"
        if decode.name != "chain" or self.depth > depths or not decode.plain_law:
            return None
        if decode.confidence or (decode.temperature and not usual):
            return None
        objective = Objective(self.drafter, self.target, weights=[1.0] * self.depth)
        self.target.set_taps(self.drafter.taps)
        total = torch.zeros(3, dtype=torch.float64)
        for row in self.outputs:
            trace = told(self.target, row["prompt_ids"], row["output_ids"])
            total += objective(trace, torch.ones(self.depth), measure=True)[1].rounds.cpu()
        tokens, greedy, sampled = total.tolist()
        return ratio(tokens, sampled if decode.temperature else greedy)

    def _setting(self) -> dict[str, Any]:
        """What was measured, on what, with which versions."""
        config, decode = self.config, self.config.decode
        return {
            "drafter": config.drafter.name,
            "target_changed": self.drafter.change(self.target),
            "target": self.target.name,
            "policy": decode.name,
            "depth": self.depth,
            "draft": self.policy.draft,
            "verify": self.rule if decode.temperature else "greedy",
            "lossy": decode.temperature > 0 and RULES[self.rule].lossy,
            **{name: getattr(decode, name) for name in SHOWN},
            "nodes": self.policy.nodes,
            "tree": getattr(self.policy, "paths", None),
            **{name: getattr(config.eval, name) for name in ("max_new_tokens", "repeats")},
            "warmup": config.eval.warmup,
            "seed": config.run.seed,
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "device": self.target.device.type,
            "threads": torch.get_num_threads(),
            "left_out": self.left_out,
            "fingerprints": self._fingerprints(),
            "versions": _versions(),
        }

    def _fingerprints(self) -> dict[str, str]:
        template = json.dumps(getattr(self.tokenizer, "chat_template", None))
        return {
            "target": native.target_fingerprint(self.target),
            "drafter": files.fingerprint(self.drafter.state_dict()),
            "template": hashlib.sha256(template.encode()).hexdigest(),
            "prompts": suite_place(self.config).fingerprint(),
        }


def told(target: Target, prompt: list[int], answer: list[int]) -> Trace:
    """The target's view of one answered prompt."""
    ids = torch.tensor([[*prompt, *answer]], device=target.device)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    return target.trace(ids, positions >= len(prompt), torch.zeros_like(ids), positions)


def _clock(runs: Sequence[Output]) -> Any:
    """The middle of the repeats that wrote the first one's answer (on a GPU some may differ)."""
    return middle([run.clock for run in runs if run.ids == runs[0].ids])


def _versions() -> dict[str, str]:
    return {
        "outrider": outrider.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
