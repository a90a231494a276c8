"""Figures of a report page: curves, bars, stacked bars, heat maps, points.

Each is drawn twice by matplotlib, with the colours of a light and of a dark page on a transparent
background, as an SVG embedded in the page. Text stays text, in the reader's fonts; equal numbers
give equal bytes.
"""

import base64
import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.patheffects import withStroke
from matplotlib.ticker import ScalarFormatter

from outrider.eval.page.elements import Figure

SIZE = (4.8, 2.9)  # inches
LOWEST = 2.2  # inches, of a figure with few bars
BAR = 0.15  # inches per bar of a group
LEAST = 3  # points of a line
MAX_LABEL = 24  # characters
LEGEND_WIDTH, LEGEND_LABEL = 66, 44  # characters
INVALID = re.compile(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
Interval = Sequence[float] | None  # low and high


class Theme(NamedTuple):
    """Colours of a figure."""

    text: str
    ground: str  # of the page
    grid: str
    lines: tuple[str, ...]
    heat: str  # colour map of heat maps


LIGHT = Theme(
    "#333a42", "#ffffff", "#d5d9de",
    ("#1f6fb4", "#d1661a", "#2a8a57", "#b1396f", "#7357bd", "#8a6a2c", "#4b8a99", "#6d747c"),
    "YlGnBu",
)  # fmt: skip
DARK = Theme(
    "#d3d8de", "#14171a", "#41474e",
    ("#69b1f3", "#f2a15c", "#69c896", "#ea8cb7", "#b5a0f2", "#d4b878", "#84c4d3", "#a4abb3"),
    "YlGnBu_r",
)  # fmt: skip
DrawFn = Callable[[Any, Theme], None]  # draws on matplotlib's axes


def draw(title: str, definition: str, paint: DrawFn) -> Figure:
    """Draw a figure for both themes."""
    return Figure(title, definition, _svg(paint, LIGHT), _svg(paint, DARK))


def _svg(paint: DrawFn, theme: Theme) -> str:
    style = {
        "svg.fonttype": "none", "svg.hashsalt": "outrider", "text.parse_math": False,
        "font.size": 9, "font.family": "sans-serif", "text.color": theme.text,
        "axes.labelcolor": theme.text, "axes.edgecolor": theme.grid, "xtick.color": theme.text,
        "ytick.color": theme.text, "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "axes.axisbelow": True, "grid.color": theme.grid,
        "grid.linewidth": 0.5, "legend.frameon": False, "legend.fontsize": 8,
    }  # fmt: skip
    buffer = io.BytesIO()
    with rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the reader's fonts may have the glyph
        canvas = Canvas(figsize=SIZE, layout="constrained")
        FigureCanvasSVG(canvas)
        paint(canvas.subplots(), theme)
        metadata = {"Date": None, "Creator": None}
        canvas.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def label(text: object, longest: int = MAX_LABEL) -> str:
    """Shorten a text and replace characters that are invalid in SVG."""
    plain = INVALID.sub("\N{REPLACEMENT CHARACTER}", str(text)).replace("\n", " ")
    return plain if len(plain) <= longest else f"{plain[: longest - 2]}.."


def _legend(axes: Any) -> None:
    """Add a legend below the axes, if there is more than one label."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        longest = max(map(len, labels))
        lines = math.ceil(len(labels) / max(1, LEGEND_WIDTH // (longest + 6)))
        columns = math.ceil(len(labels) / lines)
        axes.figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def curves(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    xlabel: str,
    ylabel: str,
    intervals: Mapping[str, Sequence[Interval]] | None = None,
    marks: bool = False,
    diagonal: bool = False,
    log: bool = False,
) -> DrawFn:
    """Return a function that draws lines through points, with `marks` at the points.

    A line has LEAST points or more; fewer are drawn as points.

    Args:
        intervals: of every point.
        diagonal: draw the line of equal numbers, from 0 to 1.
        log: logarithmic y axis, if all values are above 0.
    """

    def paint(axes: Any, theme: Theme) -> None:
        for i, (name, points) in enumerate((n, p) for n, p in lines.items() if p):
            x, y = zip(*points, strict=True)
            colour = theme.lines[i % len(theme.lines)]
            style = "-" if i < len(theme.lines) else "--"
            style = style if len(points) >= LEAST else ""
            mark = "o" if marks or not style else None
            text = label(name, LEGEND_LABEL)
            axes.plot(x, y, ls=style, color=colour, marker=mark, ms=4, lw=1.4, label=text)
            for at, interval in _known_intervals(x, intervals, name):
                axes.plot([at, at], interval, color=colour, lw=1, alpha=0.6)
        if diagonal:
            axes.plot([0, 1], [0, 1], color=theme.text, lw=0.8, ls=":")
        axes.set(xlabel=xlabel, ylabel=ylabel)
        _scale(axes, [point for points in lines.values() for point in points], log)
        _legend(axes)

    return paint


def _known_intervals(
    at: Sequence[float], intervals: Mapping[str, Sequence[Interval]] | None, name: str
) -> list[tuple[float, Sequence[float]]]:
    """Return the known intervals and their coordinates."""
    values = (intervals or {}).get(name, ())
    return [(x, interval) for x, interval in zip(at, values, strict=False) if interval]


def _scale(axes: Any, points: Sequence[tuple[float, float]], log: bool) -> None:
    """Set integer ticks for integer x, one for a single x, and a log y axis for positive y."""
    if all(float(x).is_integer() for x, _ in points):
        axes.xaxis.get_major_locator().set_params(integer=True)
    if len({x for x, _ in points}) == 1:
        axes.set_xticks([points[0][0]])
    if log and all(y > 0 for _, y in points):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(ScalarFormatter())
        axes.yaxis.set_tick_params(which="minor", labelsize=7)


def bars(
    names: Sequence[str],
    values: Mapping[str, Sequence[float | None]],
    xlabel: str,
    intervals: Mapping[str, Sequence[Interval]] | None = None,
    level: float | None = None,
) -> DrawFn:
    """Draw a group of horizontal bars for every name, first on top, and a line at `level`.

    The bars of a single name are named by their kinds.

    Args:
        values: of each kind of bar, one for every name; None draws no bar.
    """
    if len(names) == 1 < len(values):
        known = {names[0]: [(intervals or {}).get(kind, [None])[0] for kind in values]}
        (column,) = zip(*values.values(), strict=True)
        return bars(list(values), {names[0]: column}, xlabel, known, level)

    def paint(axes: Any, theme: Theme) -> None:
        thick = 0.8 / len(values)
        for i, (kind, numbers) in enumerate(values.items()):
            colour = theme.lines[i % len(theme.lines)]
            at = [row + (i - (len(values) - 1) / 2) * thick for row in range(len(names))]
            widths = [float("nan") if number is None else number for number in numbers]
            axes.barh(at, widths, 0.9 * thick, color=colour, label=label(kind, LEGEND_LABEL))
            for y, interval in _known_intervals(at, intervals, kind):
                outline = withStroke(linewidth=3, foreground=theme.ground)
                axes.plot(interval, [y, y], color=theme.text, lw=1.2, path_effects=[outline])
        if level is not None:
            axes.axvline(level, color=theme.text, lw=0.8, ls=":")
        _name_rows(axes, names, xlabel)
        axes.figure.set_figheight(max(LOWEST, 1 + BAR * len(names) * len(values)))
        _legend(axes)

    return paint


def are_several(values: Mapping[str, Sequence[float | None]]) -> bool:
    """Return whether there are bars to compare: two or more that are not None or 0."""
    return sum(bool(number) for numbers in values.values() for number in numbers) > 1


def _name_rows(axes: Any, names: Sequence[str], xlabel: str) -> None:
    axes.set_yticks(range(len(names)), [label(name) for name in names])
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set(xlabel=xlabel)


def stacked_bars(names: Sequence[str], parts: Mapping[str, Sequence[float]], xlabel: str) -> DrawFn:
    """Draw a horizontal bar of parts for every name, first on top; a bar per part of one name."""
    if len(names) == 1:
        return bars(names, parts, xlabel)
    rows = range(len(names))

    def paint(axes: Any, theme: Theme) -> None:
        ends = [0.0] * len(names)
        for i, (part, widths) in enumerate(parts.items()):
            colour = theme.lines[i % len(theme.lines)]
            axes.barh(rows, widths, 0.6, left=ends, color=colour, label=label(part, LEGEND_LABEL))
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        _name_rows(axes, names, xlabel)
        _legend(axes)

    return paint


def heatmap(
    values: Sequence[Sequence[float | None]],
    columns: tuple[str, Sequence[object]],
    rows: tuple[str, Sequence[object]],
    limits: tuple[float, float],
) -> DrawFn:
    """Draw a list of numbers for every row as colours.

    Args:
        columns, rows: axis label and tick labels.
        limits: values of the first and the last colour.
    """

    def paint(axes: Any, theme: Theme) -> None:
        grid = np.array([[np.nan if v is None else v for v in row] for row in values], float)
        image = axes.imshow(grid, cmap=theme.heat, aspect="auto", origin="lower", clim=limits)
        for (row, column), value in np.ndenumerate(grid):
            if np.isfinite(value):
                red, green, blue, _ = image.cmap(image.norm(value))
                dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.55
                colour = "#ffffff" if dark else "#16191d"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour)
        axes.set_xticks(range(len(columns[1])), [label(x) for x in columns[1]])
        axes.set_yticks(range(len(rows[1])), [label(y) for y in rows[1]])
        axes.grid(False)
        axes.set(xlabel=columns[0], ylabel=rows[0])

    return paint


def points(
    groups: Mapping[str, Sequence[tuple[float, float]]],
    xlabel: str,
    ylabel: str,
    diagonal: bool = False,
    front: Sequence[tuple[float, float]] = (),
    log: bool = False,
) -> DrawFn:
    """Return a scatter plot of groups of points.

    Args:
        diagonal: draw the line x = y.
        front: points in the second colour, with a line if there are LEAST or more.
        log: logarithmic x axis.
    """

    def paint(axes: Any, theme: Theme) -> None:
        for i, (name, members) in enumerate(groups.items()):
            colour = theme.lines[i % len(theme.lines)]
            text = label(name, LEGEND_LABEL)
            axes.scatter(*zip(*members, strict=True), 22, color=colour, label=text)
        if diagonal:
            numbers = [number for group in groups.values() for point in group for number in point]
            ends = [min(numbers), max(numbers)]
            axes.plot(ends, ends, color=theme.text, lw=0.8, ls=":")
        if front:
            style = "-" if len(front) >= LEAST else ""
            colour = theme.lines[1]
            axes.plot(*zip(*front, strict=True), ls=style, color=colour, marker="o", ms=5, lw=1.2)
        if log:
            axes.set_xscale("log")
        axes.set(xlabel=xlabel, ylabel=ylabel)
        _legend(axes)

    return paint
