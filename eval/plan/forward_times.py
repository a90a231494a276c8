"""What forwards take on this machine: the target over n tokens, the drafter over its steps.

Few forwards are timed, on a grid; `timing.py` reads off the rest. The runs that are compared take
turns behind one warm-up each, so that drift strikes all alike, and of each the median counts.

What the tokens are changes no time, so they are drawn at random, and so are the target's states
that the drafter is given. What ran before does change it, because the processor's caches are then
full of something else: as in decoding, the target runs in front of every draft, the drafter in
front of every forward that verifies, and a plain step in front of a plain step. Times are
milliseconds of the whole batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

import torch
from torch import Tensor

from outrider.eval.plan.round_costs import ROWS, Measured, Timing
from outrider.models.batch_kv_cache import SlotCache
from outrider.models.decode.round_times import Stopwatch
from outrider.models.drafter import Drafter, State, Trace
from outrider.models.target import Target

CHUNK = 512  # tokens of a prompt that are read at once


def measure(
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
) -> Timing:
    """Fill both grids.

    Args:
        name: the machine in words, printed with the figures.
        tokens: new tokens per prompt, nodes of the tree and its root; 1 is added.
        widths: nodes per drafter step; 1 is added.
    """
    counts, wide = tuple(sorted({1, *tokens})), tuple(sorted({1, *widths}))
    levels, prompts, rows = (tuple(sorted(set(axis))) for axis in (depths, batches, contexts))
    verified: dict[tuple[int, ...], float] = {}
    drafted: dict[tuple[int, ...], float] = {}
    taps = target.taps
    target.set_taps(drafter.taps)  # a round's forward keeps them
    try:
        for batch, context in product(prompts, rows):
            found = target_ms(target, drafter, counts, batch, context, repeats)
            verified |= {(n, batch, context): ms for n, ms in found.items()}
            times = draft_ms(drafter, target, wide, levels, batch, context, repeats)
            drafted |= {(*shape, batch, context): ms for shape, ms in times.items()}
    finally:
        target.set_taps(taps)
    axes = {"tokens": counts, "batch": prompts, "context": rows}
    return Timing(
        name,
        Measured(axes, verified),
        Measured({"width": wide, "depth": levels, "batch": prompts, "context": rows}, drafted),
    )


def target_ms(
    target: Target,
    drafter: Drafter,
    tokens: Sequence[int],
    batch: int,
    context: int,
    repeats: int = 7,
) -> dict[int, float]:
    """Median milliseconds of one forward, head included, per number of new tokens.

    Args:
        drafter: drafts in front of every forward of more than one token.
        tokens: new tokens of each prompt.
        batch: prompts.
        context: rows that the cache holds of each.
    """
    _check_room(target, context + max(tokens))
    with torch.no_grad():
        cache = _filled(target, batch, context, context + max(tokens))
        draft = rehearsal(drafter, target).drafts(drafter, batch, 1)

        def forward(count: int) -> Callable[[], object]:
            ids, places, seen = _new(target, batch, context, count)

            def run() -> object:
                for slot in range(batch):
                    cache.crop(slot, context)
                return target.logits(target.forward(ids, places, seen, cache).last)

            return run

        runs = [forward(count) for count in tokens]
        drafted = draft(1, 1)
        before = [run if n == 1 else drafted for n, run in zip(tokens, runs, strict=True)]
        times = medians(runs, repeats, target.device, before)
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
    """Median milliseconds of taking in `ROWS` rows and drafting, per (width, depth).

    Args:
        widths: nodes per step, from the second one on; the first step knows the root alone.
        depths: steps, at most the drafter's reach.
        batch: prompts.
        context: rows it has taken in before of each, at least 1.
    """
    _check_room(target, context + ROWS + max(depths))
    if max(depths) > drafter.reach:
        raise ValueError(f"depth {max(depths)}: this drafter reaches {drafter.reach}")
    with torch.no_grad():
        draft = rehearsal(drafter, target).drafts(drafter, batch, context)

        def verify() -> object:
            return target.logits(target.forward(*_new(target, batch, 0, 1)).last)

        shapes = list(product(widths, depths))
        runs = [draft(*shape) for shape in shapes]
        times = medians(runs, repeats, target.device, [verify] * len(runs))
    return dict(zip(shapes, times, strict=True))


def medians(
    runs: Sequence[Callable[[], object]],
    repeats: int,
    device: torch.device,
    before: Sequence[Callable[[], object] | None] | None = None,
) -> list[float]:
    """Median milliseconds of each run; they take turns, behind one warm-up of each.

    Args:
        before: run in front of each, and not counted.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats}: at least one")
    first = before or [None] * len(runs)
    spent: list[list[float]] = [[] for _ in runs]
    watch = Stopwatch(device)
    for turn in range(repeats + 1):
        for prepare, run, times in zip(first, runs, spent, strict=True):
            if prepare is not None:
                prepare()
            watch.lap()
            run()
            if turn:
                times.append(1000 * watch.lap())
    return [median(times) for times in spent]


# ---- random material ----


@dataclass(frozen=True)
class Rehearsal:
    """Rows and nodes of no meaning, shaped as the engine would hand them to a drafter."""

    target: Target
    taps: int
    words: Tensor  # target ids that the drafter can propose

    def rows(self, start: int, stop: int) -> Trace:
        """Verified rows start..stop of one prompt, with random states."""
        count, device = stop - start, self.target.device
        hidden = self.target.shape().hidden
        ids = torch.randint(self.target.vocab, (1, count + 1), device=device)
        nothing = torch.zeros_like(ids[:, 1:])
        wide = torch.randn(1, count, (self.taps + 1) * hidden, device=device)
        taps, last = wide.to(self.target.dtype).split([self.taps * hidden, hidden], dim=-1)
        places = torch.arange(start, stop, device=device)[None]
        return Trace(ids[:, :-1], ids[:, 1:], nothing.bool(), nothing, places, taps, last)

    def drafts(
        self, drafter: Drafter, batch: int, context: int
    ) -> Callable[[int, int], Callable[[], object]]:
        """(width, depth) -> a draft of that shape behind so many rows of every prompt."""
        before = [drafter.absorb(None, self.rows(0, context)) for _ in range(batch)]
        fresh = [self.rows(context, context + ROWS) for _ in range(batch)]

        def shaped(width: int, depth: int) -> Callable[[], object]:
            def run() -> object:
                now = drafter.absorb_all(before, fresh)
                for level in range(1, depth + 1):
                    now = self.step(drafter, now, level, width)
                return now

            return run

        return shaped

    def step(
        self, drafter: Drafter, states: Sequence[State], depth: int, width: int
    ) -> list[State]:
        """One level: the roots at depth 1, their children at 2, then a child of each node."""
        count = 1 if depth == 1 else width
        ids = self.words[torch.arange(count, device=self.words.device) % len(self.words)]
        parents = torch.arange(count, device=ids.device) * (depth > 2)
        both = (part.expand(len(states), -1) for part in (ids, parents))
        return drafter.step_all(states, depth, *both)[1]


def rehearsal(drafter: Drafter, target: Target) -> Rehearsal:
    """Material for this drafter."""
    return Rehearsal(target, len(drafter.taps), drafter.vocab.kept.to(target.device))


def _filled(target: Target, batch: int, context: int, capacity: int) -> SlotCache:
    """A cache that holds `context` rows of every prompt."""
    cache = target.new_slots(batch, capacity)
    for start in range(0, context, CHUNK):
        ids, places, seen = _new(target, batch, start, min(CHUNK, context - start))
        target.forward(ids, places, seen, cache)
    return cache


def _new(target: Target, batch: int, context: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, positions and visibility of `count` new tokens, one behind the other."""
    device = target.device
    ids = torch.randint(target.vocab, (batch, count), device=device)
    places = (context + torch.arange(count, device=device)).expand(batch, -1)
    seen = torch.ones(batch, count, context + count, dtype=torch.bool, device=device)
    return ids, places, seen.tril(diagonal=context)


def _check_room(target: Target, length: int) -> None:
    limit = target.shape().max_positions
    if length > limit:
        raise ValueError(f"{target.name} reads {limit} tokens; {length} would be needed")
