"""Measurement of a cost table when it is first needed.

The grid is small: a few drafts, batches of one, four and the largest number of requests, the
longest context and a short one. It takes seconds; other points are linear, and the rounds correct
the rest (`live_costs.py`).
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from outrider.conf.errors import RunError
from outrider.models.decode.costs.cost_table import CostSetting, read_costs, write_costs
from outrider.models.decode.costs.forward_times import measure_forwards
from outrider.models.decode.costs.round_costs import Grid, MeasuredTimes
from outrider.models.drafting.drafter import Drafter
from outrider.models.target.target import Target

REPEATS, SECONDS = 15, 6.0  # of each set of forwards: fewer repetitions if they take longer
SHORT = 64  # rows of the short context
VERIFIED = (2, 3, 4, 5, 6, 7, 8, 9, 16, 32, 64)  # tokens of a forward: those of a chain one by one,
# since kernels work on several rows at once: on one processor 8 take less than 7, and 9 much more
BATCH_ROWS = 64  # verified rows of all prompts together, beyond which times are extrapolated,
LEAST_TOKENS = 9  # but of each prompt at least as many as those of an ordinary chain
BEYOND = 2  # times the largest measured context or batch, up to which times are extrapolated

Announce = Callable[[str], object]


def say_nothing(text: str) -> None:
    """Ignore a sentence for the user."""


def covers(
    times: MeasuredTimes,
    slots: int,
    rows: int,
    shape: tuple[int, int, int],
    bends: Sequence[int] = (),
) -> bool:
    """Return whether times may be used for batches of `slots` requests of `rows` rows.

    Args:
        shape: depth, width and nodes of the largest draft.
        bends: of the drafter.
    """
    batches, contexts = times.target.axes["batch"], times.target.axes["context"]
    drafts, (depth, width, nodes) = times.draft.axes, shape
    drafted = drafts["depth"][-1] >= depth and drafts["width"][-1] >= (
        width if nodes > depth else 1
    )
    drafted = drafted and all(one in drafts["depth"] for one in bends if one < depth)
    return drafted and batches[-1] >= slots and BEYOND * contexts[-1] >= rows


def read_or_measure(
    target: Target,
    drafter: Drafter,
    file: Path | None,
    slots: int,
    rows: int,
    shape: tuple[int, int, int],
    announce: Announce = say_nothing,
) -> tuple[MeasuredTimes, str]:
    """Return the times of a file, or measure and keep them there; and a sentence for the user.

    Args:
        file: None: in the user's cache.
        shape: depth, width and nodes of the largest draft.
        announce: called with a sentence before anything is measured.
    """
    setting = CostSetting.of(target, drafter)
    file = setting.cached_file() if file is None else file
    times, why = read_costs(file, setting)
    if times is not None and covers(times, slots, rows, shape, drafter.bends):
        return times, ""
    sets = 2 * len(_contexts(target, rows, shape)) * len(_batches(slots))
    announce(
        f"measuring the costs of rounds, once; for most targets less than {sets * SECONDS:.0f} s"
    )
    start = time.perf_counter()
    times = _measure(target, drafter, setting.name, slots, rows, shape)
    seconds = f"costs of rounds measured in {time.perf_counter() - start:.1f} s"
    place = ""
    with suppress(RunError):  # a folder that cannot be written: measured again next time
        write_costs(file, times, setting)
        place = ", which replace it" if why else f", kept in {file}"
    return times, f"{why}; {seconds}{place}" if why else f"{seconds}{place}"


def _measure(
    target: Target,
    drafter: Drafter,
    name: str,
    slots: int,
    rows: int,
    shape: tuple[int, int, int],
) -> MeasuredTimes:
    depth, width, nodes = shape
    contexts, batches = _contexts(target, rows, shape), _batches(slots)
    most = min(nodes + 1, max(LEAST_TOKENS, BATCH_ROWS // slots))
    # beyond the last point a row costs what the rows before it do: these are two at least
    tokens = sorted({min(count, most) for count in VERIFIED} - {most - 1})
    widths = (1, width) if nodes > depth else (1,)
    bends = [one for one in drafter.bends if one < depth]
    grid = Grid(sorted({1, min(2, depth), depth, *bends}), widths, (), batches, contexts)
    return measure_forwards(target, drafter, name, tokens, grid, REPEATS, seconds=SECONDS)


def _contexts(target: Target, rows: int, shape: tuple[int, int, int]) -> list[int]:
    longest = max(1, min(rows, target.shape().max_positions - shape[2] - 1))
    return sorted({min(SHORT, longest), longest})


def _batches(slots: int) -> list[int]:
    return sorted({1, min(4, slots), slots})
