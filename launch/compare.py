"""`outrider compare`: tables of finished runs, and a page."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.table import Table
from rich.text import Text

from outrider.conf.console import Console
from outrider.eval import compare as tables
from outrider.eval import seeds
from outrider.eval.compare import decoding_label
from outrider.eval.report import exact_in_a_word, format_number
from outrider.eval.report_tables import explain_metrics, narrow_table
from outrider.eval.run_results import RunResults, all_reports, load_runs

MOST_ROWS = 8  # reports that are printed without --explain
MOST_CHARACTERS = 150  # of the ranking, and of a warning


def compare(words: list[str], explain: bool = False) -> int:
    """Print runs and searches; with `to=FOLDER` also write a page there.

    Args:
        explain: print every table and the definitions, too.
    """
    paths = [Path(word) for word in words if not word.startswith("to=")]
    runs, without, searches = load_runs(paths)
    console = Console()
    for path in searches:
        from outrider.eval.search_results import show  # imports Optuna

        show(path, console)
    if runs:
        for left_out in without:
            console.print(f"left out: {left_out.message}")
        print_runs(console, runs, explain)
    for folder in (word.removeprefix("to=") for word in words if word.startswith("to=")):
        from outrider.eval.page.build import write_comparison

        write_comparison(runs, without, searches, Path(folder))
    return 0


def print_runs(console: Console, runs: Sequence[RunResults], in_full: bool = False) -> None:
    """Print the ranking, what is not comparable and a row per report: at most 15 lines.

    Runs that differ in their seed alone follow in a table with intervals over the seeds.

    Args:
        in_full: the tables of the page, and the definitions, too.
    """
    ranking = tables.ranking(runs) or [_best_decoding(runs[0])]
    sentences = [Text(line, "bold") for line in ranking], tables.warnings(runs)
    for one in sentences:
        for text in one if in_full else map(_shorten, one[:1]):
            console.print(text)
    pairs = [(run, name) for run in runs for name in run.reports]
    rows = pairs if in_full or len(pairs) <= MOST_ROWS else _fastest(runs)[:MOST_ROWS]
    console.print(_table(rows))
    if joined := seeds.seed_rows(runs):
        console.print(seeds.table(joined))
    if not in_full:
        hidden = f"{len(pairs) - len(rows)} more reports, " * (len(rows) < len(pairs))
        more = "training cost and conditions: --explain, or to=FOLDER for a page"
        console.print(f"{_common(rows)}{hidden}{more}")
        return
    console.print(tables.overview(runs))
    console.print(tables.side_by_side(all_reports(runs)))
    explain_metrics(console)


def _shorten(text: Text) -> Text:
    """Return the first words of a long sentence, about two lines."""
    if len(text) <= MOST_CHARACTERS:
        return text
    return text[: text.plain.rindex(" ", 0, MOST_CHARACTERS)].append(" ...")


def _best_decoding(run: RunResults) -> str:
    """Return the fastest report of the only run."""
    ((_, name),) = _fastest([run])
    report = run.reports[name]
    speedup, tau = format_number(report["speedup"], 2, "x"), format_number(report["tau"])
    spread = report["speedup_95"]
    noise = ", within noise of plain decoding" if spread and spread[0] <= 1 <= spread[1] else ""
    label = f"{decoding_label(report)}, {speedup}{noise}, tau {tau}"
    return f"fastest decoding of {run.folder.name}: {label}"


def _fastest(runs: Sequence[RunResults]) -> list[tuple[RunResults, str]]:
    """Return each run with the name of its fastest report, the fastest first."""
    pairs = [(run, max(run.reports, key=partial(_speedup, run))) for run in runs]
    return sorted(pairs, key=lambda pair: -_speedup(*pair))


def _speedup(run: RunResults, name: str) -> float:
    return float(run.reports[name]["speedup"] or 0.0)


def _row_name(run: RunResults, name: str) -> str:
    """Return the run's name, with the report's if the run has several of this decoding."""
    labels = [decoding_label(report) for report in run.reports.values()]
    several = labels.count(decoding_label(run.reports[name])) > 1
    return f"{run.folder.name} {name}" if several else run.folder.name


def _table(pairs: Sequence[tuple[RunResults, str]]) -> Table:
    """Return the table of reports, each given by its run and its name.

    Drafter and learning rate are columns where they differ, instead of the speed in tokens; else
    `_common` has them.
    """
    differing = [name for name, values in _settings(pairs).items() if len(values) > 1]
    numbers = ["tau", "speedup", "95 %", *["tokens/s"] * (not differing)]
    texts = "run", "decoding", *differing
    table = narrow_table((*texts, *numbers, "exact"), (*texts, "exact"))
    for run, name in pairs:
        report = run.reports[name]
        spread = report["speedup_95"]
        cells = {
            "run": _row_name(run, name), "decoding": decoding_label(report),
            "drafter": run.drafter, "lr": run.lr, "tau": format_number(report["tau"]),
            "speedup": format_number(report["speedup"], 2, "x"),
            "95 %": "-" if spread is None else "{:.2f}-{:.2f}".format(*spread),
            "tokens/s": format_number(report["tokens_per_second"], 1),
            "exact": exact_in_a_word(report),
        }  # fmt: skip
        table.add_row(*(cells[str(column.header)] for column in table.columns))
    return table


def _settings(pairs: Sequence[tuple[RunResults, str]]) -> dict[str, set[str]]:
    return {"drafter": {run.drafter for run, _ in pairs}, "lr": {run.lr for run, _ in pairs}}


def _common(pairs: Sequence[tuple[RunResults, str]]) -> str:
    """Return drafter and learning rate of all reports, where they have one in common."""
    common = {name: values for name, values in _settings(pairs).items() if len(values) == 1}
    return "".join(f"{name} {value}, " for name, (value,) in common.items() if value != "-")
