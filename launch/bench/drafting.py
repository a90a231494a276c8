"""`outrider bench drafting`: milliseconds per round that each drafter needs, by context length.

Drafters have untrained weights, and decode after a prompt of repeated tokens: their time depends on
sizes only. The time of attention is measured apart, so that the rest shows what else grows with
the context. A drafter's time includes absorbing verified rows.
"""

import dataclasses
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any
from unittest.mock import patch

import torch

from outrider.conf.console import Console
from outrider.conf.errors import ConfigError
from outrider.conf.fields import COUNT0, option
from outrider.conf.options import parse_words
from outrider.eval.report_tables import narrow_table
from outrider.launch.bench import common
from outrider.models import drafters
from outrider.models.cache import budget_view, kv_cache, layer_rows
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.decode.request import Request
from outrider.models.decode.round_times import Stopwatch
from outrider.models.drafting.drafter import Drafter
from outrider.models.target import process
from outrider.models.target.load import load_target
from outrider.models.target.target import Target

BLOCK = 97  # tokens that the prompt repeats: look-ups find them
UNCOUNTED = 2  # first rounds, in which buffers are allocated
ATTENTION = (  # of drafters, of draft models, of views of a cache, of caches
    (layer_rows.LayerRows, "attend"),
    (budget_view, "split_attention"),
    (budget_view, "gqa_attention"),
    (kv_cache, "gqa_attention"),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `outrider bench drafting`."""

    target: str = option("tiny", "target: tiny, smollm2, or a folder or hub id")
    dtype: str = option("auto", "its precision")
    drafters: tuple[str, ...] = option((), "which drafters; none: all")
    contexts: tuple[int, ...] = option(
        (512, 2048, 8192), "context lengths, tokens", "[16, 4194304]"
    )
    depth: int = option(4, "draft tokens per round, at most the drafter's", "[1, 1024]")
    draft_vocab: int = option(0, "tokens that trained drafters propose; 0: all", COUNT0)
    rounds: int = option(16, "rounds; medians count", "[1, 65536]")
    threads: int = option(0, "CPU threads; 0: PyTorch's default", "[0, 1024]")
    out: str = option("", "JSON file for the result")

    def __post_init__(self) -> None:
        for i, name in enumerate(self.drafters):
            if name not in drafters.names():
                fix = f"Use: {', '.join(drafters.names())}."
                raise ConfigError(f"drafters[{i}]", name, "There is no such drafter.", fix)


def drafting(words: list[str]) -> int:
    options = parse_words(Options, words)
    common.use_threads(options.threads)
    settings = common.target_settings(options.target, options.dtype)
    target = load_target(settings, process.device()).target
    new_tokens = 2 + (UNCOUNTED + options.rounds) * (1 + options.depth)
    common.allow_positions(target, max(options.contexts) + new_tokens)
    console, rows = Console(), list[dict[str, Any]]()
    head = ("drafter", "depth", "context", "draft ms", "attention", "rest", "target ms")
    table = narrow_table(head, ("drafter",))
    with console.status("") as status:
        for name in options.drafters or drafters.complete_names():
            size = options.draft_vocab if name in drafters.trained_names() else 0
            drafter = common.default_drafter(name, target, size)
            depth = min(options.depth, drafter.max_depth)
            for context in options.contexts:
                status.update(f"{name}, {context} tokens")
                row = _measure(target, drafter, context, depth, options.rounds)
                rows.append({"drafter": name, "depth": depth, "context": context, **row})
                cells = (f"{row[key]:.2f}" for key in ("draft", "attention", "rest", "target"))
                table.add_row(name, str(depth), str(context), *cells)
    common.report(console, table, options.out, {"setting": vars(options), "rows": rows})
    return 0


def _measure(
    target: Target, drafter: Drafter, context: int, depth: int, count: int
) -> dict[str, float]:
    """Return medians of milliseconds per round, after two rounds that are not counted."""
    block = random.Random(0).choices(range(target.vocab_size), k=BLOCK)
    prompt = (block * (1 + context // BLOCK))[:context]
    engine = Engine(target, drafter, Chain(depth))
    rounds = islice(_rounds(engine, prompt, UNCOUNTED + count), UNCOUNTED, None)
    draft, attention, forward = (
        1000 * statistics.median(part) for part in zip(*rounds, strict=True)
    )
    return {"draft": draft, "attention": attention, "rest": draft - attention, "target": forward}


def _rounds(
    engine: Engine, prompt: Sequence[int], count: int
) -> Iterator[tuple[float, float, float]]:
    """Yield the seconds of each round: of the drafter, of its attention, of the target."""
    assert engine.drafter is not None
    assert engine.policy is not None
    budget = 2 + count * (1 + engine.policy.nodes)
    with timed_attention(engine.drafter, engine.target.device) as seconds:
        events = engine.run([Request(prompt, budget)], 1)
        times = next(events).out.times
        for _ in range(count):
            before = times.draft, sum(seconds), times.target
            next(events)
            after = times.draft, sum(seconds), times.target
            yield tuple(b - a for a, b in zip(before, after, strict=True))  # type: ignore[misc]


@contextmanager
def timed_attention(drafter: Drafter, device: torch.device) -> Iterator[list[float]]:
    """Inside, record the seconds of every attention that the drafter computes."""
    clock = _AttentionClock(device)
    with ExitStack() as patches:
        for owner, name in ATTENTION:
            timed = clock.timed(getattr(owner, name))
            patches.enter_context(patch.object(owner, name, timed))
        for name in ("absorb_batch", "step_batch"):
            drafting = clock.drafting(getattr(drafter, name))
            patches.enter_context(patch.object(drafter, name, drafting))
        yield clock.seconds


class _AttentionClock:
    """Times calls of attention functions inside of calls of a drafter's methods."""

    def __init__(self, device: torch.device) -> None:
        self.seconds, self._watch, self._depth = list[float](), Stopwatch(device), 0

    def timed(self, attend: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._depth:
                return attend(*args, **kwargs)
            self._watch.lap()
            out = attend(*args, **kwargs)
            self.seconds.append(self._watch.lap())
            return out

        return run

    def drafting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1

        return run
