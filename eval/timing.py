"""What a round takes on this machine: the target over n tokens, the drafter over its steps.

Few forwards are timed, on a grid, and the rest is read off piecewise linearly; beyond the grid
nothing is known, and asking is an error. The runs that are compared take turns behind one warm-up
each, so that drift strikes all alike, and of each the median counts.

    target_ms   new tokens x prompts x cached rows                  the head included
    draft_ms    nodes per step x steps x prompts x cached rows      taking in `ROWS` rows included

What the tokens are changes no time, so they are drawn at random, and so are the target's states
that the drafter is given. What ran before does change it, because the processor's caches are then
full of something else: as in decoding, the target runs in front of every draft, the drafter in
front of every forward that verifies, and a plain step in front of a plain step. Even so forwards
take longer in decoding than alone, and a round costs more than its forwards: both are measured on
rounds of a few shapes, and follow a plane in depth and nodes between these. Times are milliseconds
of the whole batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.eval.decode.clock import Stopwatch
from outrider.eval.decode.shapes import Paths
from outrider.models.base import Drafter, State, Trace
from outrider.models.slots import SlotCache
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

    def at(self, **wanted: int | float) -> float:
        """The time at one point.

        Raises:
            ValueError: it lies outside of what was measured.
        """
        return self._between([wanted[name] for name in self.axes], ())

    def _between(self, wanted: list[int | float], known: tuple[int, ...]) -> float:
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


class Shape(NamedTuple):
    """What a round asks of both models.

    Attributes:
        depth: levels drafted; 0 is plain decoding.
        nodes: drafted ones, which the target verifies.
        asked: nodes of each level whose children the drafter is asked for, the root at first.
    """

    depth: int
    nodes: int
    asked: tuple[int, ...]

    @classmethod
    def of(cls, paths: Paths) -> "Shape":
        """Of a static tree; of no path, plain decoding."""
        depth = max(map(len, paths), default=0)
        parents = {path[:-1] for path in paths}
        asked = tuple(sum(len(above) == level for above in parents) for level in range(depth))
        return cls(depth, len(paths), asked)

    @property
    def kind(self) -> str:
        """plain, chain or tree."""
        return "tree" if self.nodes > self.depth else "chain" if self.depth else "plain"

    @property
    def width(self) -> float:
        """Nodes per drafter step behind the first, which knows the root alone."""
        return sum(self.asked[1:]) / (self.depth - 1) if self.depth > 1 else 1.0


PLAIN = Shape(0, 0, ())


class Parts(NamedTuple):
    """Milliseconds of a round of the batch."""

    draft: float
    target: float
    rest: float

    @property
    def whole(self) -> float:
        return self.draft + self.target + self.rest


class Decoded(NamedTuple):
    """A round as decoding had it.

    Attributes:
        draft, target: multiples of what the models take alone.
        rest: ms besides.
    """

    shape: Shape
    draft: float
    target: float
    rest: float


@dataclass(frozen=True)
class Timing:
    """Times of this machine, as `plan.make_plan` asks for them.

    Attributes:
        name: the machine in words.
        target: axes tokens, batch, context.
        draft: axes width, depth, batch, context.
        decoded: rounds of some shapes per batch; none: forwards take what they take alone.
    """

    name: str
    target: Measured
    draft: Measured
    decoded: Mapping[int, Sequence[Decoded]] = field(default_factory=dict)

    @property
    def assumptions(self) -> tuple[str, ...]:
        return (
            f"Forwards were timed on {self.name}; between measured points time is linear.",
            "How much longer they take in decoding, and what a round costs besides, was measured "
            "on plain decoding, the shortest and longest chain and up to three trees; other chains "
            "and trees follow these, linear in depth and nodes, and never beyond what was seen.",
            f"The drafter takes in {ROWS} verified rows per round, however many there are.",
        )

    def parts(self, shape: Shape, batch: int, context: int) -> Parts:
        alone = self.alone(shape, batch, context)
        like = [one for one in self.decoded.get(batch, ()) if one.shape.kind == shape.kind]
        if not like:
            return alone
        draft, target, rest = _between(like, shape)
        return Parts(draft * alone.draft, target * alone.target, rest)

    def alone(self, shape: Shape, batch: int, context: int) -> Parts:
        """Forwards by themselves."""
        where = {"batch": batch, "context": context}
        target = self.target.at(tokens=shape.nodes + 1, **where)
        if not shape.depth:
            return Parts(0.0, target, 0.0)
        return Parts(self.draft.at(width=shape.width, depth=shape.depth, **where), target, 0.0)

    def fields(self) -> dict[str, Any]:
        """For json."""
        decoded = {
            batch: [{**one._asdict(), "shape": one.shape._asdict()} for one in rounds]
            for batch, rounds in self.decoded.items()
        }
        return {"target": self.target.fields(), "draft": self.draft.fields(), "decoded": decoded}


def _between(rounds: Sequence[Decoded], shape: Shape) -> list[float]:
    """Draft, target and rest on the plane through some rounds, and never beyond all of them."""
    places = np.array([(one.shape.depth, one.shape.nodes) for one in rounds], dtype=float)
    values = np.array([one[1:] for one in rounds])
    slope = np.linalg.lstsq(places - places.mean(0), values - values.mean(0), rcond=None)[0]
    found = values.mean(0) + ((shape.depth, shape.nodes) - places.mean(0)) @ slope
    out: list[float] = found.clip(values.min(0), values.max(0)).tolist()
    return out


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
