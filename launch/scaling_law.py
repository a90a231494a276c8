"""Fits of acceptance length against training tokens, and a forecast for more tokens.

    saturating   tau(n) = a - b * (n / n0)^-c   three sizes or more; a is the limit
    line         tau(n) = a + b * ln(n / n0)    two sizes; else a second candidate

n0 is the smallest size, so b has tau's unit. Both are least-squares fits, limited to the longest
possible acceptance. With few points a standard error means little, so a forecast's range is that
over all candidates: both fits, and fits with each point left out. If the saturating fit is hardly
better than the line, its limit is unknown: a forecast for much more text includes a gain of zero.

Source: the saturating form is that of Kaplan et al. 2020 (arXiv:2001.08361) for losses.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

Point = tuple[float, float]  # tokens, acceptance length
EXPONENTS = (0.05, 2.0)  # bounds of c
FAR = 4  # times the largest size: beyond it the curve may saturate unseen
SATURATION = 0.5  # residual of the saturating fit, at most, as a share of the line's
MIN_SIZES = 3  # of a saturating fit, which has three parameters


class ScalingFit(NamedTuple):
    """A fitted curve, see the head of this file; `most` is the largest value."""

    kind: str
    a: float
    b: float
    c: float
    n0: float
    most: float

    def at(self, tokens: float) -> float:
        """Return the acceptance length after training on so many tokens."""
        x, is_line = tokens / self.n0, self.kind == "line"
        value = self.a + self.b * np.log(x) if is_line else self.a - self.b * x**-self.c
        return float(min(self.most, value))

    def formula(self) -> str:
        n0 = f"{self.n0:,.0f}"
        if self.kind == "line":
            return f"tau = {self.a:.3f} + {self.b:.3f} ln(tokens / {n0})"
        return f"tau = {self.a:.3f} - {self.b:.3f} (tokens / {n0})^-{self.c:.2f}"


class Forecast(NamedTuple):
    """Acceptance length for a number of tokens and for twice as many."""

    tokens: float
    now: float  # at `tokens`; its range is now_low..now_high
    now_low: float
    now_high: float
    twice: float
    gain: float  # twice - now; its range is low..high
    low: float
    high: float


def fit_line(points: Sequence[Point], most: float) -> ScalingFit:
    """Fit the line in ln(tokens) by least squares; the points need two sizes."""
    tokens, values = np.array(points, dtype=float).T
    if len(set(tokens)) < 2:
        raise ValueError("a line needs two sizes")
    n0 = float(tokens.min())
    b, a = np.polyfit(np.log(tokens / n0), values, 1)
    return ScalingFit("line", float(a), float(b), 0.0, n0, most)


def fit_saturating(points: Sequence[Point], most: float) -> ScalingFit:
    """Fit the saturating curve by least squares; b >= 0, c within EXPONENTS, a <= most.

    For a given c the curve is a line in n^-c: a and b start from that line at the best of 12 values
    of c, then all three are refined together.
    """
    tokens, values = np.array(points, dtype=float).T
    n0 = float(tokens.min())
    x = tokens / n0
    starts = [_start(x, values, c, most) for c in np.geomspace(*EXPONENTS, 12)]
    best = min(starts, key=lambda s: float(np.square(_residual(s, x, values)).sum()))
    lower, upper = (-np.inf, 0.0, EXPONENTS[0]), (most, np.inf, EXPONENTS[1])
    start = np.clip(best, np.array(lower) + 1e-9, np.array(upper) - 1e-9)
    a, b, c = least_squares(_residual, start, bounds=(lower, upper), args=(x, values)).x.tolist()
    return ScalingFit("saturating", a, b, c, n0, most)


def _start(x: np.ndarray, values: np.ndarray, c: float, most: float) -> np.ndarray:
    """Return a, b of the best curve with this c, as a start for the refinement."""
    slope, a = np.polyfit(x**-c, values, 1)
    if a > most:  # fix a, fit only b
        a, slope = most, float((x**-c) @ (values - most) / ((x**-c) @ (x**-c)))
    if slope > 0:  # acceptance falls with text: a constant is the nearest curve
        a, slope = float(values.mean()), 0.0
    return np.array([a, -slope, c])


def _residual(abc: np.ndarray, x: np.ndarray, values: np.ndarray) -> np.ndarray:
    a, b, c = abc
    out: np.ndarray = a - b * x**-c - values
    return out


def scaling_fit(points: Sequence[Point], most: float) -> ScalingFit:
    """Return the saturating fit if there are enough sizes, else the line."""
    sizes = len({tokens for tokens, _ in points})
    return fit_saturating(points, most) if sizes >= MIN_SIZES else fit_line(points, most)


def candidate_fits(points: Sequence[Point], most: float) -> list[ScalingFit]:
    """Return the chosen fit, the line, and the fits with each point left out."""
    fits = [scaling_fit(points, most), fit_line(points, most)]
    for i in range(len(points)):
        rest = [*points[:i], *points[i + 1 :]]
        if len({tokens for tokens, _ in rest}) >= 2:
            fits.append(scaling_fit(rest, most))
    return fits


def saturates(points: Sequence[Point], most: float) -> bool:
    """Return whether the saturating curve fits the points clearly better than a line."""
    fits = scaling_fit(points, most), fit_line(points, most)
    squares = [sum((fit.at(tokens) - value) ** 2 for tokens, value in points) for fit in fits]
    return fits[0].kind != "line" and fits[0].b != 0 and squares[0] < SATURATION * squares[1]


def forecast(points: Sequence[Point], tokens: float, most: float) -> Forecast:
    """Return the acceptance length for `tokens` and twice as many, with ranges."""
    fits = candidate_fits(points, most)
    nows = [fit.at(tokens) for fit in fits]
    gains = [fit.at(2 * tokens) - now for fit, now in zip(fits, nows, strict=True)]
    largest = max(size for size, _ in points)
    if tokens > FAR * largest and not saturates(points, most):  # may saturate at the largest pilot
        nows.append(fits[0].at(largest))
        gains.append(0.0)
    ranges = min(nows), max(nows), fits[0].at(2 * tokens), gains[0], min(gains), max(gains)
    return Forecast(tokens, nows[0], *ranges)
