"""Measurement of a cost table when it is first needed.

The grid is small: a few drafts, batches of one, four and the largest number of requests, the
longest context and a short one. It takes seconds; other points are linear, and the rounds correct
the rest (`live_costs.py`).
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from outrider.conf.errors import RunError
from outrider.models.decode.costs.cost_table import CostSetting, read_costs, write_costs
from outrider.models.decode.costs.forward_times import measure_forwards
from outrider.models.decode.costs.round_costs import Grid, MeasuredTimes
from outrider.models.drafting.drafter import Drafter
from outrider.models.target.target import Target

REPEATS, SECONDS = 15, 6.0  # of each set of forwards: fewer repetitions if they take longer
SHORT = 64  # rows of the short context, or half of the long one
# tokens of a forward: those of a chain one by one, since kernels work on several rows at once (on
# one processor 8 take less than 7, and 9 much more)
VERIFIED = (2, 3, 4, 5, 6, 7, 8, 9, 16, 32, 64)
BATCH_ROWS = 64  # verified rows of all prompts together, beyond which times are extrapolated
LEAST_TOKENS = 9  # timed of each prompt even where these exceed BATCH_ROWS: an ordinary chain
BEYOND = 2  # by which a text may exceed the longest of several measured contexts
MOST_TABLES = 8  # in a file

# tables of files that cannot be written
HELD: dict[tuple[Path, CostSetting], list[MeasuredTimes]] = {}
Announce = Callable[[str], object]


class TimedPoints(NamedTuple):
    """Tokens of a target forward, depths and widths of drafts."""

    tokens: list[int]
    depths: list[int]
    widths: list[int]


class LargestDraft(NamedTuple):
    """Up to what size drafts are timed; chains have a width of 1."""

    depth: int
    width: int
    nodes: int

    @classmethod
    def of(cls, times: MeasuredTimes) -> "LargestDraft":
        """Return the size of the largest draft in a table."""
        drafts, tokens = times.draft.axes, times.target.axes["tokens"]
        return cls(drafts["depth"][-1], drafts["width"][-1], tokens[-1] - 1)

    def tokens(self, slots: int) -> int:
        """Return the most tokens that are timed of each prompt of a batch, the root included."""
        return min(self.nodes + 1, max(LEAST_TOKENS, BATCH_ROWS // slots))

    def points(self, bends: Sequence[int], slots: int) -> TimedPoints:
        """Return what is timed for batches of up to so many requests.

        Args:
            bends: of the drafter.
        """
        most = self.tokens(slots)
        # beyond the last point a row costs what the rows before it do: these are two at least
        tokens = sorted({min(count, most) for count in VERIFIED} - {most - 1})
        depths = {1, min(2, self.depth), self.depth, *(one for one in bends if one < self.depth)}
        return TimedPoints(tokens, sorted(depths), sorted({1, self.width}))


def say_nothing(text: str) -> None:
    """Ignore a sentence for the user."""


def covers(
    times: MeasuredTimes,
    slots: int,
    rows: int,
    largest: LargestDraft,
    bends: Sequence[int] = (),
) -> bool:
    """Return whether times may be used for batches of `slots` requests of `rows` rows.

    Args:
        bends: of the drafter.
    """
    batches, known = times.target.axes["batch"], LargestDraft.of(times)
    drafted = known.depth >= largest.depth and known.width >= largest.width
    depths = times.draft.axes["depth"]
    drafted = drafted and all(one in depths for one in bends if one < largest.depth)
    # of a larger batch fewer tokens are timed, and not more of them for a smaller one
    verified = known.nodes + 1 >= largest.tokens(batches[-1])
    return (
        _is_usable(times)
        and drafted
        and verified
        and batches[-1] >= slots
        and most_rows(times) >= rows
    )


def _is_usable(times: MeasuredTimes) -> bool:
    """Return whether times are known of single requests and short contexts.

    An axis of one point is constant: a round of one request would take the time of a batch.
    """
    return times.target.axes["batch"][0] == 1 and times.target.axes["context"][0] <= SHORT


def most_rows(times: MeasuredTimes) -> int:
    """Return the longest text that times may be used for."""
    contexts = times.target.axes["context"]
    return contexts[-1] * (BEYOND if len(contexts) > 1 else 1)


def keep_costs(file: Path, times: MeasuredTimes, setting: CostSetting) -> bool:
    """Add a table to a file; return whether the file could be written.

    The file keeps the newest MOST_TABLES, without those that this one replaces, and none that
    cannot be used. Where it cannot be written, the table is held for this process.
    """
    others = [one for one in _known(file, setting)[0] if not _replaces(times, one)]
    tables = list(filter(_is_usable, [times, *others]))[:MOST_TABLES]
    try:
        write_costs(file, tables, setting)
    except RunError:
        HELD[file, setting] = tables
        return False
    return True


def _known(file: Path, setting: CostSetting) -> tuple[list[MeasuredTimes], str]:
    tables, why = read_costs(file, setting)
    return [*tables, *HELD.get((file, setting), [])], why


def _replaces(times: MeasuredTimes, old: MeasuredTimes) -> bool:
    """Return whether a table may be used wherever an older one may be, and times as many tokens."""
    slots, depths = old.target.axes["batch"][-1], old.draft.axes["depth"]
    largest = LargestDraft.of(old)
    as_many = LargestDraft.of(times).nodes >= largest.nodes
    return as_many and covers(times, slots, most_rows(old), largest, depths)


def read_or_measure(
    target: Target,
    drafter: Drafter,
    setting: CostSetting,
    file: Path | None,
    slots: int,
    rows: int,
    largest: LargestDraft,
    announce: Announce = say_nothing,
) -> tuple[MeasuredTimes, str]:
    """Return the times of a file, or measure and keep them there; and a sentence for the user.

    Args:
        file: None: in the user's cache.
        announce: called with a sentence before anything is measured.
    """
    file = setting.cached_file() if file is None else file
    known, why = _known(file, setting)
    fitting = [one for one in known if covers(one, slots, rows, largest, drafter.bends)]
    if fitting:
        return max(fitting, key=lambda one: LargestDraft.of(one).nodes), ""
    sets = 2 * len(_contexts(target, rows, largest, slots)) * len(_batches(slots))
    announce(f"measuring the costs of rounds; for most targets less than {sets * SECONDS:.0f} s")
    start = time.perf_counter()
    times = _measure(target, drafter, setting.name, slots, rows, largest)
    seconds = f"costs of rounds measured in {time.perf_counter() - start:.1f} s"
    place = ", which replace it" if why else f", kept in {file}"
    if not keep_costs(file, times, setting):
        place = ""
    return times, f"{why}; {seconds}{place}" if why else f"{seconds}{place}"


def _measure(
    target: Target,
    drafter: Drafter,
    name: str,
    slots: int,
    rows: int,
    largest: LargestDraft,
) -> MeasuredTimes:
    tokens, depths, widths = largest.points(drafter.bends, slots)
    grid = Grid(depths, widths, (), _batches(slots), _contexts(target, rows, largest, slots))
    return measure_forwards(target, drafter, name, tokens, grid, REPEATS, seconds=SECONDS)


def _contexts(target: Target, rows: int, largest: LargestDraft, slots: int) -> list[int]:
    new = max(largest.tokens(slots), largest.depth)
    longest = max(1, min(rows, target.shape().max_positions - new))
    return sorted({min(SHORT, max(1, longest // 2)), longest})


def _batches(slots: int) -> list[int]:
    return sorted({1, min(4, slots), slots})
