"""`outrider watch`: loss and acceptance of a run in the terminal, while it trains.

It reads `metrics.jsonl` of the run folder, and may therefore run in another terminal, or on another
machine that has the folder. Without a terminal, in a pipe, every line of the log is printed as one
line. It ends with the run, or with Ctrl-C.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard

from rich.live import Live
from rich.text import Text

from outrider.conf.compose import compose, to_container
from outrider.conf.console import Console
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.json_shapes import number
from outrider.train.manifest import read_training
from outrider.train.metrics_log import METRICS, read_log
from outrider.train.schedule import format_seconds

EVERY = 2.0  # seconds between two readings
WIDEST, LOWEST, HIGHEST = 100, 4, 14  # columns of a plot, and rows
LARGEST = 1e100  # of a number that is drawn
MARKS = "*o"
PLOTS = (  # metric, and the kinds of lines that have it, one for each of MARKS
    ("objective", {"train": "training"}),
    ("accept_length", {"held": "held-out text", "own": "the target's own answers"}),
)
Points = Sequence[tuple[float, float]]


def watch(words: Sequence[str]) -> int:
    """Show a run until it is finished. Returns the exit code.

    Raises:
        ConfigError, RunError: no run is named, its folder does not exist, or its log is damaged.
    """
    folder = to_container(compose(words, "watch"))["run"]["dir"]
    if not folder:
        raise ConfigError("run.dir", folder, "Which run?", "Add run.dir=runs/<name>.")
    if not Path(folder).is_dir():
        fix = f"Start it: outrider train run.dir={folder}, or name another folder."
        raise RunError(f"{folder} does not exist.", fix)
    console = Console()
    with suppress(KeyboardInterrupt):
        (_draw if console.is_terminal else _print_lines)(Path(folder), console)
    return 0


def _draw(folder: Path, console: Console) -> None:
    with Live(console=console, auto_refresh=False) as live:
        while True:
            log, ended = read_log(folder), is_finished(folder)
            live.update(view(folder, log, console.width, console.height, ended), refresh=True)
            if ended:
                return
            time.sleep(EVERY)


def _print_lines(folder: Path, console: Console) -> None:
    if not read_log(folder):
        console.print(_no_metrics(folder), soft_wrap=True)
    shown = 0
    while True:
        ended, log = is_finished(folder), read_log(folder)
        for line in log[shown:]:
            console.print(format_line(line), soft_wrap=True)
        shown = len(log)  # less than before, where a continued run has removed lines
        if ended:
            console.print(f"{folder} is finished", soft_wrap=True)
            return
        time.sleep(EVERY)


def is_finished(folder: Path) -> bool:
    """Return whether the summary of a run is newer than its log: both are written by the run."""
    if read_training(folder) is None or not (folder / "metrics.jsonl").is_file():
        return False
    times = [(folder / name).stat().st_mtime_ns for name in ("training.json", "metrics.jsonl")]
    return times[0] >= times[1]


def view(
    folder: Path, log: Sequence[Mapping[str, Any]], width: int, height: int, ended: bool
) -> Text:
    """Return a line on the state of the run, and a plot of each of PLOTS that has points."""
    if not log:
        return Text(_no_metrics(folder))
    age = time.time() - (folder / "metrics.jsonl").stat().st_mtime
    state = "finished" if ended else f"last line {format_seconds(age)} ago, Ctrl-C ends"
    parts = [f"{folder}: {state}", format_line(log[-1])]
    rows = min(HIGHEST, max(LOWEST, (height - 3) // len(PLOTS) - 4))
    for metric, kinds in PLOTS:
        curves = {name: _points(log, kind, metric) for kind, name in kinds.items()}
        if any(curves.values()):
            drawn = zip(MARKS, curves.items(), strict=False)
            legend = ", ".join(f"{mark} {name}" for mark, (name, points) in drawn if points)
            parts.append(f"\n{metric} [{METRICS[metric].unit}]: {legend}")
            parts.append(plot(list(curves.values()), min(width, WIDEST), rows))
    return Text("\n".join(parts))


def _no_metrics(folder: Path) -> str:
    return (
        f"{folder} has no metrics yet: a run writes the first line after its target is loaded, its "
        "text is read and held-out text is measured. Waiting; Ctrl-C ends."
    )


def format_line(line: Mapping[str, Any]) -> str:
    """Return a line of the log without the metrics of single depths and terms."""
    numbers = {
        name: value
        for name, value in line.items()
        if number(value) and name != "step" and not set("@.") & set(name)
    }
    values = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
    return f"step {line['step']}, {line['kind']}: {values}"


def _points(log: Sequence[Mapping[str, Any]], kind: str, metric: str) -> Points:
    values = [(x["step"], x.get(metric)) for x in log if x["kind"] == kind]
    return [(float(x), float(y)) for x, y in values if _is_drawable(x) and _is_drawable(y)]


def _is_drawable(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number of which differences are finite, too."""
    return isinstance(value, float | int) and abs(value) < LARGEST


def plot(curves: Sequence[Points], width: int, height: int) -> str:
    """Draw points in characters, a mark of MARKS for each curve, with the ends of both axes.

    Args:
        curves: points (x, y) of each; some have points.
        width, height: of the whole in columns, labels included, and of the area in rows.
    """
    points = [point for curve in curves for point in curve]
    (left, right), (low, high) = ((min(z), max(z)) for z in zip(*points, strict=True))
    labels = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"]
    margin = max(map(len, labels))
    columns = max(1, width - margin - 3)
    grid = [[" "] * columns for _ in range(height)]
    for mark, curve in zip(MARKS, curves, strict=False):
        for x, y in curve:
            column = round((x - left) / ((right - left) or 1) * (columns - 1))
            row = round((high - y) / ((high - low) or 1) * (height - 1))
            grid[row][column] = mark
    area = zip(labels, grid, strict=True)
    rows = [f"{name:>{margin}} | {''.join(row).rstrip()}".rstrip() for name, row in area]
    first, last = f"{left:.0f}", f" step {right:.0f}"
    return "\n".join([*rows, f"{'':{margin}}   {first}{last:>{max(1, columns - len(first))}}"])
