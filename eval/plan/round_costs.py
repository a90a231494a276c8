"""Duration of a decoding round, interpolated between measurements on this machine.

Two grids of forward times (`forward_times.py`) are interpolated linearly.

    target   new tokens x prompts x cached rows                 the head included
    draft    nodes per step x steps x prompts x cached rows     absorbing `ABSORBED_ROWS` included

Forwards take longer within decoding than in isolation, and a round has overhead. Both
are measured on rounds of a few shapes and interpolated by a plane in depth and nodes. Times are
milliseconds of the whole batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from scipy.interpolate import interpn

from outrider.models.decode.tree_shapes import Paths

ABSORBED_ROWS = 3  # verified rows that the drafter absorbs per round: about tau of a round


@dataclass(frozen=True)
class TimeGrid:
    """Milliseconds for every combination of ascending points, linear between them."""

    axes: Mapping[str, tuple[int, ...]]
    ms: Mapping[tuple[int, ...], float]

    def at(self, **point: float) -> float:
        """Return the time at one point; outside the grid it is a ValueError."""
        for name, points in self.axes.items():
            if not points[0] <= point[name] <= points[-1]:
                message = f"{name} = {point[name]}: measured were {points[0]} to {points[-1]}"
                raise ValueError(message)
        axes = [*self.axes.values()]
        grid = np.reshape([self.ms[corner] for corner in product(*axes)], [*map(len, axes)])
        return float(interpn(axes, grid, [point[name] for name in self.axes])[0])

    def fields(self) -> list[dict[str, float]]:
        return [dict(zip((*self.axes, "ms"), (*p, v), strict=True)) for p, v in self.ms.items()]


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


@dataclass(frozen=True)
class MeasuredTimes:
    """Measured round times of this machine, for `surface.make_plan`.

    Attributes:
        decoded: batch -> measured rounds of some shapes; without any, a round is its forwards.
    """

    name: str
    target: TimeGrid  # axes tokens, batch, context
    draft: TimeGrid  # axes width, depth, batch, context
    decoded: Mapping[int, Sequence[DecodedRound]] = field(default_factory=dict)

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

    def parts(self, shape: DraftShape, batch: int, context: int) -> RoundCost:
        """Return the time of the forwards, slowed down as within decoding, and the rest."""
        alone = self.forwards_only(shape, batch, context)
        rounds = [r for r in self.decoded.get(batch, ()) if r.shape.kind == shape.kind]
        if not rounds:
            return alone
        draft, target, rest = _plane(rounds, shape)
        return RoundCost(draft * alone.draft, target * alone.target, rest)

    def forwards_only(self, shape: DraftShape, batch: int, context: int) -> RoundCost:
        """Return the times of the forwards alone."""
        setting = {"batch": batch, "context": context}
        size = {"width": shape.width, "depth": shape.depth}
        draft = self.draft.at(**size, **setting) if shape.depth else 0.0
        return RoundCost(draft, self.target.at(tokens=shape.nodes + 1, **setting), 0.0)

    def fields(self) -> dict[str, Any]:
        decoded = {batch: [r.fields() for r in rounds] for batch, rounds in self.decoded.items()}
        return {"target": self.target.fields(), "draft": self.draft.fields(), "decoded": decoded}


def _plane(rounds: Sequence[DecodedRound], shape: DraftShape) -> list[float]:
    """Return draft, target and rest on the plane through the rounds, clipped to their range."""
    points = np.array([(r.shape.depth, r.shape.nodes) for r in rounds], dtype=float)
    values = np.array([r[1:] for r in rounds])
    slope = np.linalg.lstsq(points - points.mean(0), values - values.mean(0), rcond=None)[0]
    fitted = values.mean(0) + ((shape.depth, shape.nodes) - points.mean(0)) @ slope
    clipped: list[float] = fitted.clip(values.min(0), values.max(0)).tolist()
    return clipped
