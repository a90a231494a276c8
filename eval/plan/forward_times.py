"""Forward times on this machine: the target over n tokens, the drafter over its steps.

A grid of forwards is timed; `round_costs.py` interpolates the rest. All compared forwards are
interleaved after one warm-up each, so that drift affects all alike, and the median of each counts.

Token ids and target states are random, since they do not change the time. The forward that runs
before does, through the processor's caches. As in decoding, the target therefore runs before every
draft, the drafter before every verifying forward, and a plain step before a plain step. Times are
milliseconds of the whole batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

import torch
from torch import Tensor

from outrider.eval.plan.round_costs import ABSORBED_ROWS, MeasuredClock, TimeGrid
from outrider.models.batch_kv_cache import BatchKVCache
from outrider.models.decode.round_times import Stopwatch
from outrider.models.drafter import Drafter, State
from outrider.models.interface import Trace
from outrider.models.target import Target

CHUNK = 512  # tokens of a prompt per forward


def measure_forwards(
    target: Target,
    drafter: Drafter,
    *,
    name: str,
    tokens: Sequence[int],
    widths: Sequence[int],
    depths: Sequence[int],
    batches: Sequence[int],
    contexts: Sequence[int],
    repeats: int = 7,
) -> MeasuredClock:
    """Measure both grids.

    Args:
        name: description of the machine, printed with the plan.
        tokens: new tokens per prompt, the nodes of the tree and its root; 1 is added.
        widths: nodes per drafter step; 1 is added.
    """
    counts, wide = tuple(sorted({1, *tokens})), tuple(sorted({1, *widths}))
    levels, prompts, rows = (tuple(sorted(set(axis))) for axis in (depths, batches, contexts))
    verified: dict[tuple[int, ...], float] = {}
    drafted: dict[tuple[int, ...], float] = {}
    taps = target.taps
    target.set_taps(drafter.taps)  # as in a round
    try:
        for batch, context in product(prompts, rows):
            times = target_ms(target, drafter, counts, batch, context, repeats)
            verified |= {(n, batch, context): ms for n, ms in times.items()}
            step_times = draft_ms(drafter, target, wide, levels, batch, context, repeats)
            drafted |= {(*shape, batch, context): ms for shape, ms in step_times.items()}
    finally:
        target.set_taps(taps)
    axes = {"tokens": counts, "batch": prompts, "context": rows}
    return MeasuredClock(
        name,
        TimeGrid(axes, verified),
        TimeGrid({"width": wide, "depth": levels, "batch": prompts, "context": rows}, drafted),
    )


def target_ms(
    target: Target,
    drafter: Drafter,
    tokens: Sequence[int],
    batch: int,
    context: int,
    repeats: int = 7,
) -> dict[int, float]:
    """Return median milliseconds of one forward, head included, per number of new tokens.

    Args:
        drafter: drafts before every forward of more than one token.
        tokens: new tokens of each prompt.
        batch: prompts.
        context: cached rows of each.
    """
    _check_length(target, context + max(tokens))
    with torch.no_grad():
        cache = _filled_cache(target, batch, context, context + max(tokens))
        draft = synthetic_rounds(drafter, target).drafts(drafter, batch, 1)

        def forward(count: int) -> Callable[[], object]:
            ids, positions, visible = _new_tokens(target, batch, context, count)

            def run() -> object:
                for slot in range(batch):
                    cache.crop(slot, context)
                return target.logits(target.forward(ids, positions, visible, cache).last)

            return run

        runs = [forward(count) for count in tokens]
        drafted = draft(1, 1)
        before = [run if n == 1 else drafted for n, run in zip(tokens, runs, strict=True)]
        times = interleaved_medians(runs, repeats, target.device, before)
    return dict(zip(tokens, times, strict=True))


def draft_ms(
    drafter: Drafter,
    target: Target,
    widths: Sequence[int],
    depths: Sequence[int],
    batch: int,
    context: int,
    repeats: int = 7,
) -> dict[tuple[int, int], float]:
    """Return median milliseconds of absorbing `ABSORBED_ROWS` rows and drafting.

    The result maps (width, depth) to the time.

    Args:
        widths: nodes per step, from the second step on; the first step expands the root alone.
        depths: steps, at most `drafter.max_depth`.
        batch: prompts.
        context: rows of each absorbed before, at least 1.
    """
    _check_length(target, context + ABSORBED_ROWS + max(depths))
    if max(depths) > drafter.max_depth:
        raise ValueError(f"depth {max(depths)}: this drafter reaches {drafter.max_depth}")
    with torch.no_grad():
        draft = synthetic_rounds(drafter, target).drafts(drafter, batch, context)

        def verify() -> object:
            return target.logits(target.forward(*_new_tokens(target, batch, 0, 1)).last)

        shapes = list(product(widths, depths))
        runs = [draft(*shape) for shape in shapes]
        times = interleaved_medians(runs, repeats, target.device, [verify] * len(runs))
    return dict(zip(shapes, times, strict=True))


def interleaved_medians(
    runs: Sequence[Callable[[], object]],
    repeats: int,
    device: torch.device,
    before: Sequence[Callable[[], object] | None] | None = None,
) -> list[float]:
    """Return median milliseconds of each run; runs are interleaved after one warm-up of each.

    Args:
        before: run before each, not timed.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats}: at least one")
    preparations = before or [None] * len(runs)
    samples: list[list[float]] = [[] for _ in runs]
    watch = Stopwatch(device)
    for repeat in range(repeats + 1):
        for prepare, run, times in zip(preparations, runs, samples, strict=True):
            if prepare is not None:
                prepare()
            watch.lap()
            run()
            if repeat:  # the first is the warm-up
                times.append(1000 * watch.lap())
    return [median(times) for times in samples]


# ---- random inputs ----


@dataclass(frozen=True)
class SyntheticRounds:
    """Random rows and nodes in the shapes in which the engine passes them to a drafter."""

    target: Target
    taps: int
    token_ids: Tensor  # ids of the draft vocabulary in the target's

    def rows(self, start: int, stop: int) -> Trace:
        """Return verified rows start..stop of one prompt, with random states."""
        count, device = stop - start, self.target.device
        hidden = self.target.shape().hidden
        ids = torch.randint(self.target.vocab_size, (1, count + 1), device=device)
        zeros = torch.zeros_like(ids[:, 1:])
        wide = torch.randn(1, count, (self.taps + 1) * hidden, device=device)
        taps, last = wide.to(self.target.dtype).split([self.taps * hidden, hidden], dim=-1)
        positions = torch.arange(start, stop, device=device)[None]
        return Trace(ids[:, :-1], ids[:, 1:], zeros.bool(), zeros, positions, taps, last)

    def drafts(
        self, drafter: Drafter, batch: int, context: int
    ) -> Callable[[int, int], Callable[[], object]]:
        """Return (width, depth) -> a draft of that shape after `context` rows of every prompt."""
        states = [drafter.absorb(None, self.rows(0, context)) for _ in range(batch)]
        verified = [self.rows(context, context + ABSORBED_ROWS) for _ in range(batch)]

        def draft(width: int, depth: int) -> Callable[[], object]:
            def run() -> object:
                level_states = drafter.absorb_batch(states, verified)
                for level in range(1, depth + 1):
                    level_states = self.step(drafter, level_states, level, width)
                return level_states

            return run

        return draft

    def step(
        self, drafter: Drafter, states: Sequence[State], depth: int, width: int
    ) -> list[State]:
        """Draft one level: from the roots at depth 1, their children at 2, then a child each."""
        count = 1 if depth == 1 else width
        ids = self.token_ids[
            torch.arange(count, device=self.token_ids.device) % len(self.token_ids)
        ]
        parents = torch.arange(count, device=ids.device) * (depth > 2)
        both = (part.expand(len(states), -1) for part in (ids, parents))
        return drafter.step_batch(states, depth, *both)[1]


def synthetic_rounds(drafter: Drafter, target: Target) -> SyntheticRounds:
    """Return random inputs for this drafter."""
    return SyntheticRounds(target, len(drafter.taps), drafter.vocab.target_ids.to(target.device))


def _filled_cache(target: Target, batch: int, context: int, capacity: int) -> BatchKVCache:
    """Return a cache with `context` rows of every prompt."""
    cache = target.new_batch_cache(batch, capacity)
    for start in range(0, context, CHUNK):
        new = _new_tokens(target, batch, start, min(CHUNK, context - start))
        target.forward(*new, cache)
    return cache


def _new_tokens(
    target: Target, batch: int, context: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, positions and causal mask of `count` new tokens after `context` cached ones."""
    device = target.device
    ids = torch.randint(target.vocab_size, (batch, count), device=device)
    positions = (context + torch.arange(count, device=device)).expand(batch, -1)
    visible = torch.ones(batch, count, context + count, dtype=torch.bool, device=device)
    return ids, positions, visible.tril(diagonal=context)


def _check_length(target: Target, length: int) -> None:
    limit = target.shape().max_positions
    if length > limit:
        raise ValueError(f"{target.name} reads {limit} tokens; {length} would be needed")
