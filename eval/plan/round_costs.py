"""What a round takes, read off what was measured: forwards on a grid, and a few whole rounds.

Between the grid's points (`forwards.py`) times are piecewise linear; beyond it nothing is known,
and asking is an error.

    target_ms   new tokens x prompts x cached rows                  the head included
    draft_ms    nodes per step x steps x prompts x cached rows      taking in `ROWS` rows included

Forwards take longer in decoding than alone, and a round costs more than its forwards: both are
measured on rounds of a few shapes, and follow a plane in depth and nodes between these. Times are
milliseconds of the whole batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from outrider.models.decode.tree_shapes import Paths

ROWS = 3  # verified rows that the drafter takes in per round: about what a round emits


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
