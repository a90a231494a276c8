"""`outrider bench context`: sparse_kv by context length, batch size and budget.

MagicDec (arXiv:2408.11049) claims that drafting with few rows of a cache pays where
reading the cache dominates: at long contexts and large batches. For each context and batch the
prompts are read once; plain decoding and every budget then decode the same number of rounds from
there, interleaved, all prompts in every round. Medians of the repetitions count. With `path` a
draft model drafts, over the rows of its own cache.

    T        one round of plain decoding
    draft    time of a draft step / T
    verify   time of the target's forward over a drafted chain / T
    alpha    acceptance rate: accepted draft tokens / (accepted + rejected)
    tau      tokens per round and prompt
    plan     speedup by theory.py from alpha, draft and verify; no overhead
    found    speedup that was measured
"""

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress
from rich.table import Table

from outrider.conf.console import Console
from outrider.conf.errors import ConfigError
from outrider.conf.fields import option
from outrider.conf.options import parse_words
from outrider.data.conversations import read_prompts
from outrider.data.sources import suite_source
from outrider.eval.report_tables import narrow_table
from outrider.eval.theory import speedup_from_alpha
from outrider.launch.bench.common import build_drafter, report, target_settings, use_threads
from outrider.models.cache.kv_cache import KVCache
from outrider.models.cache.split_cache import SplitCache
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.decode.request import ActiveRequest, DialogueCache, Output, Request
from outrider.models.drafters.sparse_kv import METHODS, Config
from outrider.models.drafting.drafter import Absorbed, Drafter
from outrider.models.target import process
from outrider.models.target.load import load_target
from outrider.models.target.target import Target

WARMUP = 2  # rounds before those that count: the first one selects rows


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `outrider bench context`."""

    target: str = option("tiny", "tiny, smollm2, or folder or hub id of a language model")
    contexts: tuple[int, ...] = option((512, 1024), "tokens of prompt and answer", "[64, 4194304]")
    batches: tuple[int, ...] = option((1, 4), "batch sizes", "[1, 65536]")
    budgets: tuple[int, ...] = option((128,), "rows that a draft reads", "[1, 4194304]")
    path: str = option("", "folder or hub id of a draft model; empty: the target itself")
    method: str = option("streaming", "which rows: streaming or snapkv")
    sinks: int = option(4, "method=streaming: first rows of the text", "[0, 4194304]")
    window: int = option(32, "method=snapkv: last tokens of a prompt", "[1, 4194304]")
    depth: int = option(4, "draft tokens of a round", "[1, 1024]")
    rounds: int = option(16, "rounds of a repetition that count", "[1, 65536]")
    repeats: int = option(3, "repetitions; medians count", "[1, inf)")
    text: str = option("", "text file for the prompts; empty: shipped prompts, repeated")
    threads: int = option(0, "CPU threads; 0: PyTorch's default", "[0, 1024]")
    out: str = option("", "JSON file for the result")

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            fix = f"Use {' or '.join(METHODS)}."
            raise ConfigError("method", self.method, "There is no such method.", fix)
        for budget in self.budgets:
            try:
                if adjusted := self.config(budget).adjusted:
                    raise ValueError(f"It needs {' and '.join(adjusted)}")
            except ValueError as error:
                fix = "Change budgets, sinks or window."
                why = str(error).replace("drafter.", "")  # the options have no prefix
                raise ConfigError("budgets", budget, f"{why}.", fix) from None

    def config(self, budget: int) -> Config:
        """Return the settings of the drafter with this budget."""
        return Config(
            depths=self.depth, path=self.path or None, method=self.method, budget=budget,
            sinks=self.sinks, window=self.window,
        )  # fmt: skip

    @property
    def room(self) -> int:
        """Tokens of a context that are decoded at most."""
        return (WARMUP + self.rounds + 1) * (self.depth + 1)


class ReadPrompt(DialogueCache):
    """A prompt whose first rows are in the cache already."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def match_prefix(self, prompt: Sequence[int]) -> Absorbed:
        return Absorbed(self.rows)

    def add_prompt(self, cache: KVCache | SplitCache, text: list[int], absorbed: Absorbed) -> None:
        """Keep nothing."""


class ReadPrompts(Engine):
    """An engine whose prompts are in a cache already, but for their last tokens."""

    rows = 0

    def use_cache(self, cache: KVCache, rows: int) -> "ReadPrompts":
        self.given, self.rows = cache, rows
        return self

    def start(
        self, requests: Sequence[Request], slots: int, dialogue: DialogueCache | None = None
    ) -> None:
        super().start(requests, slots, dialogue)
        self.cache = self.given

    def _prefill(
        self, started: list[ActiveRequest], first: int, dialogue: DialogueCache | None
    ) -> None:
        super()._prefill(started, first, ReadPrompt(self.rows) if len(started) == 1 else None)


def context(words: list[str]) -> int:
    """Run the benchmark."""
    options = parse_words(Options, words)
    use_threads(options.threads)
    process.set_threads()
    settings = target_settings(options.target, "auto")
    target, tokenizer, _ = load_target(settings, process.device())
    check(options, target)
    ids = tokenizer(_text(options))["input_ids"]
    rows = list[dict[str, Any]]()
    loaded = [build_drafter(options.config(budget), target) for budget in options.budgets]
    cases = [(length, batch) for length in options.contexts for batch in options.batches]
    work = sum(length * batch for length, batch in cases)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=work)
        for length, batch in cases:
            progress.update(task, description=f"context {length}, batch {batch}")
            rows.extend(measure(options, target, loaded, ids, length, batch))
            progress.advance(task, length * batch)
    console = Console()
    for line in verdicts(options, rows):
        console.print(line, highlight=False)
    setting = {**dataclasses.asdict(options), "dtype": str(target.dtype)}
    report(console, table_of(options, rows), options.out, {"setting": setting, "rows": rows})
    return 0


def check(options: Options, target: Target) -> None:
    """Raise ConfigError for a context that the target or the prompts cannot have."""
    positions = target.shape().max_positions
    for i, length in enumerate(options.contexts):
        if length > positions:
            why = f"{target.name} has {positions} positions."
            raise ConfigError(f"contexts[{i}]", length, why, "Use a shorter context.")
        if length <= options.room + options.window:
            why = f"Up to {options.room} tokens are decoded, and a prompt must come before them."
            raise ConfigError(f"contexts[{i}]", length, why, "Use fewer rounds, or a longer one.")


def _text(options: Options) -> str:
    if options.text:
        try:
            return Path(options.text).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = f"It cannot be read: {error}."
            raise ConfigError("text", options.text, why, "Give a text file in UTF-8.") from None
    prompts = read_prompts(
        suite_source("tiny" if options.target == "tiny" else "outrider", "prompts")
    )
    return "\n\n".join(turn for prompt in prompts for turn in prompt.turns)


def requests_of(ids: Sequence[int], length: int, batch: int, budget: int) -> list[Request]:
    """Return prompts of `length` tokens that start at different places of the text, repeated."""
    starts = (i * len(ids) // batch for i in range(batch))
    prompts = ([ids[(start + i) % len(ids)] for i in range(length)] for start in starts)
    return [Request(prompt, budget) for prompt in prompts]


def measure(
    options: Options, target: Target, loaded: Sequence[Drafter], ids: Sequence[int], length: int,
    batch: int,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield a row per budget at one context and batch.

    Args:
        loaded: the drafter of each budget.
    """
    prompt, policy = length - options.room, Chain(options.depth)
    requests = requests_of(ids, prompt, batch, options.room)
    cache = loaded[0].new_cache(target, length, batch)
    assert isinstance(cache, KVCache)
    events = ReadPrompts(target, loaded[0], policy).use_cache(cache, 0).run(requests, batch)
    [*zip(requests, events, strict=False)]  # reads every prompt once; no round follows
    plain = ReadPrompts(target, None, None)
    engines = [ReadPrompts(target, drafter, policy) for drafter in loaded]
    for engine in (plain, *engines):
        engine.use_cache(cache, prompt - options.window)  # a selection reads these tokens again
    found = list[list[dict[str, float]]]()
    for _ in range(options.repeats):
        found.append([timed(options, engine, requests) for engine in (plain, *engines)])
    for i, budget in enumerate(options.budgets, start=1):
        runs = [compare(options, one[0], one[i]) for one in found]
        row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        yield {"context": length, "batch": batch, "budget": budget, **row}


def timed(options: Options, engine: ReadPrompts, requests: Sequence[Request]) -> dict[str, float]:
    """Decode all prompts together; return seconds per round and its parts, tau and alpha."""
    outputs, before = dict[int, Output](), dict[str, float]()
    for event in engine.run(requests, len(requests)):
        outputs[event.number] = event.out
        if engine.rounds == WARMUP:
            before = before or _totals(outputs.values())
        if engine.rounds == WARMUP + options.rounds:
            break
    after, rounds = _totals(outputs.values()), options.rounds
    total = {key: after[key] - before[key] for key in after}
    return {
        "seconds": total["rounds"] / rounds, "draft": total["draft"] / rounds,
        "target": total["target"] / rounds, "tau": total["tokens"] / (rounds * len(requests)),
        "alpha": total["accepted"] / max(1, total["trials"]),
    }  # fmt: skip


def _totals(outputs: Iterable[Output]) -> dict[str, float]:
    outputs = list(outputs)
    pairs = [(a, d) for out in outputs for a, d in zip(out.accepted, out.drafted, strict=True)]
    return {
        "rounds": sum(out.times.rounds for out in outputs),
        "draft": sum(out.times.draft for out in outputs),
        "target": sum(out.times.target for out in outputs),
        "tokens": sum(len(out.ids) for out in outputs),
        "accepted": sum(a for a, _ in pairs),
        "trials": sum(min(a + 1, d) for a, d in pairs),
    }


def compare(
    options: Options, plain: dict[str, float], drafted: dict[str, float]
) -> dict[str, float]:
    """Return the ratios of one repetition."""
    step = plain["seconds"]
    draft, verify = drafted["draft"] / options.depth / step, drafted["target"] / step
    return {
        "plain_ms": 1000 * step, "draft": draft, "verify": verify,
        "alpha": drafted["alpha"], "tau": drafted["tau"],
        "plan": speedup_from_alpha(drafted["alpha"], options.depth, draft, verify),
        "found": drafted["tau"] / plain["tau"] * step / drafted["seconds"],
    }  # fmt: skip


def verdicts(options: Options, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield, for each batch, the shortest context from which drafting is faster."""
    for batch in options.batches:
        best = {
            length: max(r["found"] for r in rows if (r["context"], r["batch"]) == (length, batch))
            for length in options.contexts
        }
        slower = [length for length, speedup in best.items() if speedup <= 1]
        faster = [n for n in best if n > max(slower, default=0)]
        top = max(best.values())
        if faster:
            yield f"batch {batch}: faster from a context of {min(faster)}, at most {top:.2f}x"
        else:
            yield f"batch {batch}: not faster at {max(slower)}, at most {top:.2f}x"


def table_of(options: Options, rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table of all rows."""
    head = "context", "batch", "budget", "T ms", "draft", "verify", "alpha", "tau", "plan", "found"
    table = narrow_table(head)
    table.caption = f"{options.method}, greedy, chains of {options.depth}; draft, verify: in T"
    if options.path:
        table.caption += f"\ndraft model: {options.path}"
    for row in rows:
        ratios = (f"{row[key]:.2f}" for key in ("draft", "verify", "alpha", "tau", "plan", "found"))
        names = (str(row[key]) for key in ("context", "batch", "budget"))
        table.add_row(*names, f"{row['plain_ms']:.1f}", *ratios)
    return table
