"""`outrider compare`: tables of finished runs, and a page."""

import sys
from pathlib import Path

from outrider.conf.console import Console
from outrider.eval import compare as tables


def compare(words: list[str]) -> int:
    """Print tables of runs and searches; with `to=FOLDER` also write a page there."""
    paths = [Path(word) for word in words if not word.startswith("to=")]
    runs, without, searches = tables.load_runs(paths)
    for path in searches:
        from outrider.eval.search_results import show  # imports Optuna

        show(path, Console(width=None if sys.stdout.isatty() else 160))
    reports = tables.all_reports(runs)
    console = Console(width=None if sys.stdout.isatty() else max(180, 20 + 18 * len(reports)))
    if runs:
        for left_out in without:
            console.print(f"left out: {left_out.message}", highlight=False)
        console.print(tables.overview(runs))
        for warning in tables.warnings(runs):
            console.print(warning)
        if len(reports) <= tables.MAX_FULL_REPORTS:
            console.print(tables.side_by_side(reports))
    for folder in (word.removeprefix("to=") for word in words if word.startswith("to=")):
        from outrider.eval.page.build import write_comparison

        write_comparison(runs, without, searches, Path(folder))
    return 0
