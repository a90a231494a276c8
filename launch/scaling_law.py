"""How acceptance grows with text, from few points, and what doubling the text would bring.

    saturating   tau(n) = a - b * (n / n0)^-c   three sizes or more; a is what text alone can reach
    line         tau(n) = a + b * ln(n / n0)    two sizes; and beside the other, for its doubt

n0 is the smallest size, so that b has tau's unit. Both are least squares. Points are so few that a
standard error would say little: the doubt is the range over everything that could as well have
been fitted, both laws, and every point left out in turn. No value exceeds what the chain can
reach. Where the points show no bend (the saturating law leaves hardly less over than a line does),
nothing says where one will come, and far away a doubling may bring nothing: the range says so.

Source: the saturating law is that of Kaplan et al. 2020 (arXiv:2001.08361) for losses.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

Point = tuple[float, float]  # tokens, acceptance length
POWERS = (0.05, 2.0)  # smallest and largest c: slower is no saturation, faster a step
FAR = 4  # times the largest size, from where a bend that nobody has seen may lie between
BEND = 0.5  # of what a line leaves over (sum of squares), at most, is left by a law that bends
SIZES = 3  # from which the saturating law has a size for every number of its own


class Law(NamedTuple):
    """A fitted law; see the head of this file."""

    kind: str
    a: float
    b: float
    c: float
    n0: float
    most: float

    def at(self, tokens: float) -> float:
        x = tokens / self.n0
        if self.kind == "line":
            return float(min(self.most, self.a + self.b * np.log(x)))
        return float(min(self.most, self.a - self.b * x**-self.c))

    def said(self) -> str:
        n0 = f"{self.n0:,.0f}"
        if self.kind == "line":
            return f"tau = {self.a:.3f} + {self.b:.3f} ln(tokens / {n0})"
        return f"tau = {self.a:.3f} - {self.b:.3f} (tokens / {n0})^-{self.c:.2f}"


class Foreseen(NamedTuple):
    """What so much text would bring, and twice as much.

    Attributes:
        now: with its range.
        gain: twice - now, with its range.
    """

    tokens: float
    now: float
    now_low: float
    now_high: float
    twice: float
    gain: float
    low: float
    high: float


def line(points: Sequence[Point], most: float) -> Law:
    """Least squares in the logarithm.

    Raises:
        ValueError: all points have one size.
    """
    tokens, values = np.array(points, dtype=float).T
    if len(set(tokens)) < 2:
        raise ValueError("a line needs two sizes")
    n0 = float(tokens.min())
    b, a = np.polyfit(np.log(tokens / n0), values, 1)
    return Law("line", float(a), float(b), 0.0, n0, most)


def saturating(points: Sequence[Point], most: float) -> Law:
    """Least squares; b >= 0, c within POWERS, a at most what the chain can reach.

    For a given c the law is a line in n^-c, so a and b start from that line at the best of some
    values of c, and all three are refined together.
    """
    tokens, values = np.array(points, dtype=float).T
    n0 = float(tokens.min())
    x = tokens / n0
    starts = [_start(x, values, c, most) for c in np.geomspace(*POWERS, 12)]
    best = min(starts, key=lambda s: float(np.square(_residual(s, x, values)).sum()))
    lower, upper = (-np.inf, 0.0, POWERS[0]), (most, np.inf, POWERS[1])
    start = np.clip(best, np.array(lower) + 1e-9, np.array(upper) - 1e-9)
    found = least_squares(_residual, start, bounds=(lower, upper), args=(x, values)).x
    a, b, c = (float(value) for value in found)
    return Law("saturating", a, b, c, n0, most)


def _start(x: np.ndarray, values: np.ndarray, c: float, most: float) -> np.ndarray:
    slope, a = np.polyfit(x**-c, values, 1)
    if a > most:  # held there; b alone is free
        a, slope = most, float((x**-c) @ (values - most) / ((x**-c) @ (x**-c)))
    if slope > 0:  # more text did harm: flat is the nearest
        a, slope = float(values.mean()), 0.0
    return np.array([a, -slope, c])


def _residual(abc: np.ndarray, x: np.ndarray, values: np.ndarray) -> np.ndarray:
    a, b, c = abc
    out: np.ndarray = a - b * x**-c - values
    return out


def law_of(points: Sequence[Point], most: float) -> Law:
    """The saturating law where there are sizes enough, else the line."""
    sizes = len({tokens for tokens, _ in points})
    return saturating(points, most) if sizes >= SIZES else line(points, most)


def laws(points: Sequence[Point], most: float) -> list[Law]:
    """The chosen one first, then all that could as well have been fitted."""
    found = [law_of(points, most), line(points, most)]
    for out in range(len(points)):
        rest = [*points[:out], *points[out + 1 :]]
        if len({tokens for tokens, _ in rest}) >= 2:
            found.append(law_of(rest, most))
    return found


def left_over(law: Law, points: Sequence[Point]) -> float:
    """Sum of squares between the law and the points."""
    return sum((law.at(tokens) - value) ** 2 for tokens, value in points)


def bends(points: Sequence[Point], most: float) -> bool:
    """Whether the points themselves say that more text brings less and less."""
    first = law_of(points, most)
    if first.kind == "line" or first.b == 0:
        return False
    return left_over(first, points) < BEND * left_over(line(points, most), points)


def foresee(points: Sequence[Point], tokens: float, most: float) -> Foreseen:
    """What `tokens` of text would bring, and what twice as much would bring beyond that."""
    known = laws(points, most)
    nows = [law.at(tokens) for law in known]
    gains = [law.at(2 * tokens) - now for law, now in zip(known, nows, strict=True)]
    largest = max(size for size, _ in points)
    if tokens > FAR * largest and not bends(points, most):  # it may bend right behind the last
        nows.append(known[0].at(largest))
        gains.append(0.0)
    ranges = min(nows), max(nows), known[0].at(2 * tokens), gains[0], min(gains), max(gains)
    return Foreseen(tokens, nows[0], *ranges)
