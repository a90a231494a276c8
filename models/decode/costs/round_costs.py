"""Duration of a decoding round, interpolated between measurements on this machine.

Two grids of forward times (`forward_times.py`) are interpolated linearly.

    target   new tokens x prompts x cached rows                 the head included
    draft    nodes per step x steps x prompts x cached rows     absorbing `ABSORBED_ROWS` included

Forwards take longer within decoding than in isolation, and a round has overhead. Both
are measured on rounds of a few shapes and interpolated by a plane in depth and nodes. Times are
milliseconds of the whole batch.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from outrider.models.decode.tree_shapes import Paths

TARGET_AXES = ("tokens", "batch", "context")
DRAFT_AXES = ("width", "depth", "batch", "context")
ABSORBED_ROWS = 3  # verified rows that the drafter absorbs per round: about tau of a round


@dataclass(frozen=True)
class TimeGrid:
    """Milliseconds for every combination of ascending points, linear between them."""

    axes: Mapping[str, tuple[int, ...]]
    ms: Mapping[tuple[int, ...], float]

    def at(self, extrapolate: bool = False, **point: float) -> float:
        """Return the time at one point.

        Args:
            extrapolate: continue the outermost segments beyond the grid, where a point is a
                ValueError otherwise; the result is at least the smallest time of the grid.
        """
        corners: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
        for name, points in self.axes.items():
            if not (extrapolate or points[0] <= point[name] <= points[-1]):
                message = f"{name} = {point[name]}: measured were {points[0]} to {points[-1]}"
                raise ValueError(message)
            shares = _segment(points, point[name])
            corners = [((*c, at), w * share) for c, w in corners for at, share in shares if share]
        ms = sum(weight * self.ms[corner] for corner, weight in corners)
        return max(ms, min(self.ms.values())) if extrapolate else ms

    def fields(self) -> list[dict[str, float]]:
        return [dict(zip((*self.axes, "ms"), (*p, v), strict=True)) for p, v in self.ms.items()]

    @classmethod
    def from_fields(cls, axes: Sequence[str], rows: Sequence[Mapping[str, float]]) -> "TimeGrid":
        """Return the grid that `fields` describes.

        Raises:
            ValueError: there is no point, a combination of the points is missing, or a point or
                a time is not positive.
        """
        ms = {tuple(int(row[name]) for name in axes): float(row["ms"]) for row in rows}
        points = {name: tuple(sorted({at[i] for at in ms})) for i, name in enumerate(axes)}
        complete = ms and len(ms) == math.prod(map(len, points.values()))
        if not complete or min(ms.values()) <= 0 or min(map(min, points.values())) < 1:
            raise ValueError(f"the times over {', '.join(axes)} are not a grid")
        return cls(points, ms)


def _segment(points: Sequence[int], x: float) -> list[tuple[int, float]]:
    """Return the two points around x, or nearest to it, each with its linear weight."""
    if len(points) == 1:
        return [(points[0], 1.0)]
    i = min(max(bisect_right(points, x), 1), len(points) - 1)
    low, high = points[i - 1], points[i]
    share = (x - low) / (high - low)
    return [(low, 1 - share), (high, share)]


class Grid(NamedTuple):
    """Shapes and settings to predict; a chain of every depth is always included."""

    depths: Sequence[int]
    widths: Sequence[int] = (1,)  # children per node at most
    nodes: Sequence[int] = ()
    batches: Sequence[int] = (1,)
    contexts: Sequence[int] = (256,)  # cached tokens of each prompt


class DraftShape(NamedTuple):
    """Size of a draft: what a round requires of both models."""

    depth: int  # levels drafted; 0 is plain decoding
    nodes: int  # draft tokens, all verified by the target
    parents: tuple[int, ...]  # per level, the nodes that the drafter expands; the root at first

    @classmethod
    def of(cls, paths: Paths) -> "DraftShape":
        """Return the shape of a static tree; without a path it is plain decoding."""
        depth = max(map(len, paths), default=0)
        parents = {path[:-1] for path in paths}
        expanded = tuple(sum(len(above) == level for above in parents) for level in range(depth))
        return cls(depth, len(paths), expanded)

    @property
    def kind(self) -> str:
        return "tree" if self.nodes > self.depth else "chain" if self.depth else "plain"

    @property
    def width(self) -> float:
        """Mean number of nodes per drafter step after the first, which expands only the root."""
        return sum(self.parents[1:]) / (self.depth - 1) if self.depth > 1 else 1.0


PLAIN = DraftShape(0, 0, ())


@cache
def chain_shape(depth: int) -> DraftShape:
    """Return the shape of a chain; PLAIN for depth 0."""
    return DraftShape(depth, depth, (1,) * depth)


SHAPE_KEYS = ("depth", "nodes", "expanded")  # of a shape in plan/*.json


class RoundCost(NamedTuple):
    """Milliseconds of a round of the batch."""

    draft: float
    target: float
    rest: float

    @property
    def total(self) -> float:
        return self.draft + self.target + self.rest


class DecodedRound(NamedTuple):
    """A round measured within decoding."""

    shape: DraftShape
    draft: float  # multiple of the time of isolated forwards
    target: float  # the same
    rest: float  # ms of everything else

    def fields(self) -> dict[str, Any]:
        return {**self._asdict(), "shape": dict(zip(SHAPE_KEYS, self.shape, strict=True))}

    @classmethod
    def from_fields(cls, row: Mapping[str, Any]) -> "DecodedRound":
        """Return the round that `fields` describes."""
        depth, nodes, expanded = (row["shape"][key] for key in SHAPE_KEYS)
        others: list[Any] = [row.get(name) for name in cls._fields[1:]]
        if min(others) < 0 or row["target"] == 0:
            raise ValueError("a decoded round takes no time")
        return cls(DraftShape(depth, nodes, tuple(expanded)), *others)


@dataclass(frozen=True)
class MeasuredTimes:
    """Measured round times of this machine, for `surface.make_plan`.

    Attributes:
        decoded: batch -> measured rounds of some shapes; without any, a round is its forwards.
        read: milliseconds per row where the drafter absorbs many rows of a prompt at once.
    """

    name: str
    target: TimeGrid  # axes tokens, batch, context
    draft: TimeGrid  # axes width, depth, batch, context
    decoded: Mapping[int, Sequence[DecodedRound]] = field(default_factory=dict)
    read: float = 0.0

    @property
    def assumptions(self) -> tuple[str, ...]:
        return (
            f"Forwards were timed on {self.name}; times are linear between measured points.",
            "The slowdown within decoding and the cost besides forwards were measured on plain "
            "decoding, the shortest and longest chain and up to three trees; those of other chains "
            "and trees are linear in depth and nodes, within the measured range.",
            f"The drafter was timed with {ABSORBED_ROWS} accepted rows to absorb in every round, "
            "however many a draft of this shape has accepted.",
        )

    def parts(
        self, shape: DraftShape, batch: int, context: int, extrapolate: bool = False
    ) -> RoundCost:
        """Return the time of the forwards, slowed down as within decoding, and the rest."""
        alone = self.forwards_only(shape, batch, context, extrapolate)
        rounds = [r for r in self.decoded.get(batch, ()) if r.shape.kind == shape.kind]
        if not rounds:
            return alone
        draft, target, rest = _plane(rounds, shape)
        return RoundCost(draft * alone.draft, target * alone.target, rest)

    def forwards_only(
        self, shape: DraftShape, batch: int, context: int, extrapolate: bool = False
    ) -> RoundCost:
        """Return the times of the forwards alone."""
        setting = {"batch": batch, "context": context}
        size = {"width": shape.width, "depth": shape.depth}
        draft = self.draft.at(extrapolate, **size, **setting) if shape.depth else 0.0
        target = self.target.at(extrapolate, tokens=shape.nodes + 1, **setting)
        return RoundCost(draft, max(target, self._beyond(shape.nodes + 1, batch, context)), 0.0)

    def _beyond(self, tokens: int, batch: int, context: int) -> float:
        """Return the least time of more tokens than were measured: with those of the largest batch.

        A few rows more of one request cost next to nothing, many rows cost what they cost in a
        batch. 0 within the grid.
        """
        *_, most = points = self.target.axes["tokens"]
        if tokens <= most or len(points) < 2:
            return 0.0
        largest, setting = self.target.axes["batch"][-1], {"batch": batch, "context": context}
        before, last = (
            self.target.at(True, tokens=n, **setting | {"batch": largest}) for n in points[-2:]
        )
        row = max(0.0, last - before) / (largest * (most - points[-2]))
        return self.target.at(True, tokens=most, **setting) + row * batch * (tokens - most)

    def fields(self) -> dict[str, Any]:
        decoded = {batch: [r.fields() for r in rounds] for batch, rounds in self.decoded.items()}
        grids = {"target": self.target.fields(), "draft": self.draft.fields()}
        return {**grids, "decoded": decoded, "read": self.read}

    @classmethod
    def from_fields(cls, name: str, content: Mapping[str, Any]) -> "MeasuredTimes":
        """Return the times that `fields` describes, also as JSON has written them.

        Raises:
            ValueError: they are not grids.
        """
        decoded = {
            int(batch): [DecodedRound.from_fields(row) for row in rows]
            for batch, rows in content["decoded"].items()
        }
        target, draft = (
            TimeGrid.from_fields(axes, content[part])
            for part, axes in (("target", TARGET_AXES), ("draft", DRAFT_AXES))
        )
        return cls(name, target, draft, decoded, content["read"])


def _plane(rounds: Sequence[DecodedRound], shape: DraftShape) -> list[float]:
    """Return draft, target and rest on the plane through the rounds, clipped to their range."""
    points = np.array([(r.shape.depth, r.shape.nodes) for r in rounds], dtype=float)
    values = np.array([r[1:] for r in rounds])
    slope = np.linalg.lstsq(points - points.mean(0), values - values.mean(0), rcond=None)[0]
    fitted = values.mean(0) + ((shape.depth, shape.nodes) - points.mean(0)) @ slope
    clipped: list[float] = fitted.clip(values.min(0), values.max(0)).tolist()
    return clipped
