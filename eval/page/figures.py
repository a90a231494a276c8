"""Drawings of a page: curves, bars, parts of bars, a heat map, points.

Each is drawn twice by matplotlib, in the inks of a light and of a dark page on no ground of its
own, as an SVG that the page carries in itself. Texts stay texts, in the reader's fonts; the same
numbers give the same bytes.
"""

import base64
import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import ScalarFormatter

from outrider.eval.page.elements import Figure

SIZE = (4.6, 3.1)  # inches
BAR = 0.15  # inches that a bar needs in a group
LONGEST = 24  # letters of a label
LINE = 66  # letters of a line of the legend
BROKEN = re.compile(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
Span = tuple[float, float] | None


class Theme(NamedTuple):
    """Inks: of texts, of grids, of lines in their order, and the ends of a heat map."""

    ink: str
    faint: str
    lines: tuple[str, ...]
    heat: str


LIGHT = Theme(
    "#333a42", "#d5d9de",
    ("#1f6fb4", "#d1661a", "#2a8a57", "#b1396f", "#7357bd", "#8a6a2c", "#4b8a99", "#6d747c"),
    "YlGnBu",
)  # fmt: skip
DARK = Theme(
    "#d3d8de", "#41474e",
    ("#69b1f3", "#f2a15c", "#69c896", "#ea8cb7", "#b5a0f2", "#d4b878", "#84c4d3", "#a4abb3"),
    "YlGnBu_r",
)  # fmt: skip
Paint = Callable[[Any, Theme], None]  # what is drawn on matplotlib's axes


def draw(title: str, definition: str, paint: Paint) -> Figure:
    """A figure of a page."""
    light, dark = (_svg(paint, theme) for theme in (LIGHT, DARK))
    return Figure(title, definition, light, dark)


def _svg(paint: Paint, theme: Theme) -> str:
    style = {
        "svg.fonttype": "none", "svg.hashsalt": "outrider", "text.parse_math": False,
        "font.size": 9, "font.family": "sans-serif", "text.color": theme.ink,
        "axes.labelcolor": theme.ink, "axes.edgecolor": theme.faint, "xtick.color": theme.ink,
        "ytick.color": theme.ink, "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "axes.axisbelow": True, "grid.color": theme.faint,
        "grid.linewidth": 0.5, "legend.frameon": False, "legend.fontsize": 8,
    }  # fmt: skip
    buffer = io.BytesIO()
    with rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the reader's fonts may have it
        canvas = Canvas(figsize=SIZE, layout="constrained")
        FigureCanvasSVG(canvas)
        paint(canvas.subplots(), theme)
        nothing = {"Date": None, "Creator": None}
        canvas.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def label(text: object, longest: int = LONGEST) -> str:
    """Short, and nothing that an SVG cannot hold."""
    plain = BROKEN.sub("\N{REPLACEMENT CHARACTER}", str(text)).replace("\n", " ")
    return plain if len(plain) <= longest else f"{plain[: longest - 2]}.."


def of_legend(text: object) -> str:
    return label(text, LINE // 2)


def _legend(axes: Any) -> None:
    """Below the axes, where nothing is drawn; none of a single thing."""
    marks, words = axes.get_legend_handles_labels()
    if len(words) > 1:
        longest = max(map(len, words))
        lines = math.ceil(len(words) / max(1, LINE // (longest + 6)))
        columns = math.ceil(len(words) / lines)
        axes.figure.legend(marks, words, loc="outside lower center", ncols=columns)


def curves(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    across: str,
    up: str,
    spans: Mapping[str, Sequence[Span]] | None = None,
    marks: bool = False,
    diagonal: bool = False,
    log: bool = False,
) -> Paint:
    """Lines through points.

    Args:
        spans: the interval of every point.
        marks: a dot for every point.
        diagonal: the line where both numbers are equal, from 0 to 1.
        log: the scale upwards, where all values are above 0.
    """

    def paint(axes: Any, theme: Theme) -> None:
        for i, (name, points) in enumerate((n, p) for n, p in lines.items() if p):
            x, y = zip(*points, strict=True)
            colour = theme.lines[i % len(theme.lines)]
            style = "-" if i < len(theme.lines) else "--"
            mark = "o" if marks or len(points) == 1 else None
            axes.plot(x, y, style, color=colour, marker=mark, ms=4, lw=1.4, label=of_legend(name))
            for at, span in _there(x, spans, name):
                axes.plot([at, at], span, color=colour, lw=1, alpha=0.6)
        if diagonal:
            axes.plot([0, 1], [0, 1], color=theme.ink, lw=0.8, ls=":")
        axes.set(xlabel=across, ylabel=up)
        _scale(axes, [point for found in lines.values() for point in found], log)
        _legend(axes)

    return paint


def _there(
    at: Sequence[float], spans: Mapping[str, Sequence[Span]] | None, name: str
) -> list[tuple[float, tuple[float, float]]]:
    """The intervals that are known, and where each is drawn."""
    of = (spans or {}).get(name, ())
    return [(x, span) for x, span in zip(at, of, strict=False) if span]


def _scale(axes: Any, found: Sequence[tuple[float, float]], log: bool) -> None:
    """Whole numbers across where there are no others; powers upwards if that is wanted."""
    if all(float(x).is_integer() for x, _ in found):
        axes.xaxis.get_major_locator().set_params(integer=True)
    if log and all(y > 0 for _, y in found):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(ScalarFormatter())
        axes.yaxis.set_tick_params(which="minor", labelsize=7)


def bars(
    names: Sequence[str],
    values: Mapping[str, Sequence[float | None]],
    across: str,
    spans: Mapping[str, Sequence[Span]] | None = None,
    level: float | None = None,
) -> Paint:
    """A group of lying bars for every name, first on top.

    Args:
        values: of each kind of bar, one for every name; None is no bar.
        level: a value to compare with.
    """

    def paint(axes: Any, theme: Theme) -> None:
        thick = 0.8 / len(values)
        for i, (kind, numbers) in enumerate(values.items()):
            colour = theme.lines[i % len(theme.lines)]
            at = [place + (i - (len(values) - 1) / 2) * thick for place in range(len(names))]
            widths = [float("nan") if number is None else number for number in numbers]
            axes.barh(at, widths, 0.9 * thick, color=colour, label=of_legend(kind))
            for place, span in _there(at, spans, kind):
                axes.plot(span, [place, place], color=theme.ink, lw=1.2)
        if level is not None:
            axes.axvline(level, color=theme.ink, lw=0.8, ls=":")
        axes.set_yticks(range(len(names)), [label(name) for name in names])
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.set(xlabel=across)
        axes.figure.set_figheight(max(SIZE[1], 1 + BAR * len(names) * len(values)))
        _legend(axes)

    return paint


def stacks(names: Sequence[str], parts: Mapping[str, Sequence[float]], across: str) -> Paint:
    """A lying bar for every name, made of parts, first on top."""
    names_at = range(len(names))

    def paint(axes: Any, theme: Theme) -> None:
        ends = [0.0] * len(names)
        for i, (part, widths) in enumerate(parts.items()):
            colour = theme.lines[i % len(theme.lines)]
            axes.barh(names_at, widths, 0.6, left=ends, color=colour, label=of_legend(part))
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        axes.set_yticks(names_at, [label(name) for name in names])
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.set(xlabel=across)
        _legend(axes)

    return paint


def heat(
    values: Sequence[Sequence[float | None]],
    across: tuple[str, Sequence[object]],
    up: tuple[str, Sequence[object]],
    ends: tuple[float, float],
) -> Paint:
    """Numbers in a grid of colours.

    Args:
        values: a row for every one of `up`, a column for every one of `across`.
        ends: what the first and the last colour stand for.
    """
    import numpy as np

    def paint(axes: Any, theme: Theme) -> None:
        grid = np.array([[np.nan if v is None else v for v in row] for row in values], float)
        shown = axes.imshow(grid, cmap=theme.heat, aspect="auto", origin="lower", clim=ends)
        for (row, column), value in np.ndenumerate(grid):
            if np.isfinite(value):
                red, green, blue, _ = shown.cmap(shown.norm(value))
                dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.55
                ink = "#ffffff" if dark else "#16191d"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=ink)
        axes.set_xticks(range(len(across[1])), [label(x) for x in across[1]])
        axes.set_yticks(range(len(up[1])), [label(y) for y in up[1]])
        axes.grid(False)
        axes.set(xlabel=across[0], ylabel=up[0])

    return paint


def points(
    groups: Mapping[str, Sequence[tuple[float, float]]],
    across: str,
    up: str,
    diagonal: bool = False,
    front: Sequence[tuple[float, float]] = (),
) -> Paint:
    """Points in groups.

    Args:
        diagonal: the line where both numbers are equal.
        front: a line through some of them.
    """

    def paint(axes: Any, theme: Theme) -> None:
        for i, (name, found) in enumerate(groups.items()):
            x, y = zip(*found, strict=True)
            axes.scatter(x, y, 22, color=theme.lines[i % len(theme.lines)], label=of_legend(name))
        if diagonal:
            every = [number for found in groups.values() for point in found for number in point]
            ends = [min(every), max(every)]
            axes.plot(ends, ends, color=theme.ink, lw=0.8, ls=":")
        if front:
            axes.plot(*zip(*front, strict=True), color=theme.lines[1], lw=1.2)
        axes.set(xlabel=across, ylabel=up)
        _legend(axes)

    return paint
