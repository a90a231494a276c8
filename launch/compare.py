"""`outrider compare`: tables of finished runs, and a page."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from outrider.conf.errors import RunError
from outrider.eval.compare import (
    MAX_FULL_REPORTS,
    RunResults,
    all_reports,
    load_runs,
    overview,
    side_by_side,
    warnings,
)


def compare(words: list[str]) -> int:
    """Print tables of runs and searches; with `to=FOLDER` also write a page there.

    Raises:
        RunError: a run has no report, or one that cannot be read.
    """
    paths = [Path(word) for word in words if not word.startswith("to=")]
    runs, without, searches = load_runs(paths)
    for path in searches:
        from outrider.eval.search_results import show

        show(path, Console(width=None if sys.stdout.isatty() else 160))
    if runs:
        _show(runs, without)
    for folder in (word.removeprefix("to=") for word in words if word.startswith("to=")):
        from outrider.eval.page.build import write_comparison

        write_comparison(runs, without, searches, Path(folder))
    return 0


def _show(runs: Sequence[RunResults], without: Sequence[RunError]) -> None:
    reports = all_reports(runs)
    console = Console(width=None if sys.stdout.isatty() else max(180, 20 + 18 * len(reports)))
    for left_out in without:
        console.print(f"left out: {left_out.message}", highlight=False)
    console.print(overview(runs))
    for warning in warnings(runs):
        console.print(warning)
    if len(reports) <= MAX_FULL_REPORTS:
        console.print(side_by_side(reports))
