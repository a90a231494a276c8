"""What a round takes on this machine: the target over n tokens, the drafter over its steps.

Few forwards are timed, on a grid, and the rest is read off piecewise linearly; beyond the grid
nothing is known, and asking is an error. The runs that are compared take turns behind one warm-up
each, so that drift strikes all alike, and of each the median counts.

    target_ms   new tokens x prompts of a batch x cached rows    the head included
    draft_ms    nodes per step x steps x cached rows             taking in `ROWS` rows included

What the tokens are changes no time, so they are drawn at random, and so are the target's states
that the drafter is given. What ran before does: in front of every draft the target runs, as it does
in decoding, and leaves the processor's caches without the drafter's weights. Times are milliseconds
of a forward, whatever the batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor

from outrider.eval.decode.clock import Stopwatch
from outrider.models.base import Drafter, State, Trace
from outrider.models.cache import RowCache
from outrider.models.target import Target

ROWS = 3  # verified rows that the drafter takes in per round: about what a round emits
CHUNK = 512  # tokens of a prompt that are read at once


@dataclass(frozen=True)
class Measured:
    """Milliseconds on a grid, piecewise linear between its points and exact on them.

    Attributes:
        axes: name of each axis -> its points, ascending.
        ms: one value for every combination of points, in the order of the axes.

    Raises:
        ValueError: points that do not ascend, or a combination without a value.
    """

    axes: Mapping[str, tuple[int, ...]]
    ms: Mapping[tuple[int, ...], float]

    def __post_init__(self) -> None:
        for name, points in self.axes.items():
            if not points or list(points) != sorted(set(points)):
                raise ValueError(f"{name} {points}: points ascend, each once, at least one")
        for point in product(*self.axes.values()):
            if point not in self.ms:
                raise ValueError(f"no time was measured at {point} of {tuple(self.axes)}")

    def at(self, **wanted: int) -> float:
        """The time at one point.

        Raises:
            ValueError: it lies outside of what was measured.
        """
        return self._between([wanted[name] for name in self.axes], ())

    def _between(self, wanted: list[int], known: tuple[int, ...]) -> float:
        """The axes of `known` are settled; the next one is settled here."""
        if len(known) == len(wanted):
            return self.ms[known]
        name, points = list(self.axes.items())[len(known)]
        here = wanted[len(known)]
        if not points[0] <= here <= points[-1]:
            raise ValueError(f"{name} = {here}: measured were {points[0]} to {points[-1]}")
        low = max(point for point in points if point <= here)
        high = min(point for point in points if point >= here)
        below = self._between(wanted, (*known, low))
        if low == high:
            return below
        above = self._between(wanted, (*known, high))
        return below + (above - below) * (here - low) / (high - low)

    def fields(self) -> list[dict[str, int | float]]:
        """The measured points, for json."""
        return [dict(zip((*self.axes, "ms"), (*p, v), strict=True)) for p, v in self.ms.items()]


@dataclass(frozen=True)
class Timing:
    """Times of this machine, as `plan.make_plan` asks for them.

    Attributes:
        name: the machine in words.
        target: axes tokens, batch, context.
        draft: axes nodes, depth, context.
        overhead_ms: of a round, besides both models: choosing the tree, verifying, bookkeeping.
    """

    name: str
    target: Measured
    draft: Measured
    overhead_ms: float = 0.0

    @property
    def assumptions(self) -> tuple[str, ...]:
        return (
            f"Forwards were timed on {self.name}; between measured points time is linear.",
            f"A round costs {self.overhead_ms:g} ms besides the two models, whatever its shape.",
            f"The drafter takes in {ROWS} verified rows per round, however many there are.",
            "A batch is drafted like one prompt with batch x width nodes from its second step on: "
            "weights are read once, keys and values those of a single prompt.",
        )

    def verify_ms(self, tokens: int, batch: int, context: int) -> float:
        return self.target.at(tokens=tokens, batch=batch, context=context)

    def draft_ms(self, width: int, depth: int, batch: int, context: int) -> float:
        return self.draft.at(nodes=batch * width, depth=depth, context=context)

    def fields(self) -> dict[str, Any]:
        """For json."""
        return {
            "target": self.target.fields(),
            "draft": self.draft.fields(),
            "overhead_ms": self.overhead_ms,
        }


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
    overhead_ms: float = 0.0,
) -> Timing:
    """Fill both grids.

    Args:
        name: the machine in words, printed with the figures.
        tokens: new tokens per prompt, nodes of the tree and its root; 1 is added.
        widths: nodes per drafter step; what the largest batch makes of the widest is added.
    """
    counts = tuple(sorted({1, *tokens}))
    nodes = tuple(sorted({*widths, *(max(widths) * batch for batch in batches)}))
    prompts, rows = tuple(sorted(set(batches))), tuple(sorted(set(contexts)))
    levels = tuple(sorted(set(depths)))
    verified: dict[tuple[int, ...], float] = {}
    drafted: dict[tuple[int, ...], float] = {}
    taps = target.taps
    target.set_taps(drafter.taps)  # a round's forward keeps them
    try:
        for batch, context in product(prompts, rows):
            found = target_ms(target, counts, batch, context, repeats)
            verified |= {(n, batch, context): ms for n, ms in found.items()}
        for context in rows:
            times = draft_ms(drafter, target, nodes, levels, context, repeats)
            drafted |= {(*shape, context): ms for shape, ms in times.items()}
    finally:
        target.set_taps(taps)
    axes = {"tokens": counts, "batch": prompts, "context": rows}
    return Timing(
        name,
        Measured(axes, verified),
        Measured({"nodes": nodes, "depth": levels, "context": rows}, drafted),
        overhead_ms,
    )


def target_ms(
    target: Target, tokens: Sequence[int], batch: int, context: int, repeats: int = 7
) -> dict[int, float]:
    """Median milliseconds of one forward, head included, per number of new tokens.

    Args:
        tokens: new tokens of each prompt.
        batch: prompts.
        context: rows that the cache holds of each.
    """
    _check_room(target, context + max(tokens))
    with torch.no_grad():
        cache = _filled(target, batch, context, context + max(tokens))

        def forward(count: int) -> Callable[[], object]:
            ids, places, seen = _new(target, batch, context, count)

            def run() -> object:
                cache.crop(context)
                return target.logits(target.forward(ids, places, seen, cache).last)

            return run

        times = medians([forward(count) for count in tokens], repeats, target.device)
    return dict(zip(tokens, times, strict=True))


def draft_ms(
    drafter: Drafter,
    target: Target,
    widths: Sequence[int],
    depths: Sequence[int],
    context: int,
    repeats: int = 7,
) -> dict[tuple[int, int], float]:
    """Median milliseconds of taking in `ROWS` rows and drafting, per (width, depth).

    Args:
        widths: nodes per step, from the second one on; the first step knows the root alone.
        depths: steps, at most the drafter's reach.
        context: rows it has taken in before, at least 1.
    """
    _check_room(target, context + ROWS + max(depths))
    if max(depths) > drafter.reach:
        raise ValueError(f"depth {max(depths)}: this drafter reaches {drafter.reach}")
    play = rehearsal(drafter, target)
    with torch.no_grad():
        state = drafter.absorb(None, play.rows(0, context))
        fresh = play.rows(context, context + ROWS)

        def draft(width: int, depth: int) -> Callable[[], object]:
            def run() -> object:
                now = drafter.absorb(state, fresh)
                for level in range(1, depth + 1):
                    now = play.step(drafter, now, level, width)
                return now

            return run

        def verify() -> object:
            return target.logits(target.forward(*_new(target, 1, 0, 1)).last)

        shapes = list(product(widths, depths))
        times = medians([draft(*shape) for shape in shapes], repeats, target.device, verify)
    return dict(zip(shapes, times, strict=True))


def medians(
    runs: Sequence[Callable[[], object]],
    repeats: int,
    device: torch.device,
    before: Callable[[], object] | None = None,
) -> list[float]:
    """Median milliseconds of each run; they take turns, behind one warm-up of each.

    Args:
        before: run in front of each, and not counted.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats}: at least one")
    spent: list[list[float]] = [[] for _ in runs]
    watch = Stopwatch(device)
    for turn in range(repeats + 1):
        for run, times in zip(runs, spent, strict=True):
            if before is not None:
                before()
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

    def step(self, drafter: Drafter, state: State, depth: int, width: int) -> State:
        """One level: the root at depth 1, its children at 2, then a child of each node."""
        count = 1 if depth == 1 else width
        ids = self.words[torch.arange(count, device=self.words.device) % len(self.words)]
        parents = torch.arange(count, device=ids.device) * (depth > 2)
        return drafter.step(state, depth, ids, parents)[1]


def rehearsal(drafter: Drafter, target: Target) -> Rehearsal:
    """Material for this drafter."""
    return Rehearsal(target, len(drafter.taps), drafter.vocab.kept.to(target.device))


def _filled(target: Target, batch: int, context: int, capacity: int) -> RowCache:
    """A cache that holds `context` rows of every prompt."""
    cache = target.new_cache(capacity)
    while cache.length < context:
        count = min(CHUNK, context - cache.length)
        ids, places, seen = _new(target, batch, cache.length, count)
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
