"""Runs beside each other: what each drafter cost to train, and what it brings.

One line per run first: parameters, training speed and memory, held-out acceptance, then tau and
speedup of every measurement (`chain@0` is a chain, greedy; `dynamic_tree@1` a tree at temperature
1). The best of every column is green. A few reports are also put side by side in full.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from outrider.conf.errors import RunError
from outrider.conf.files import read_json
from outrider.eval.report import FORMAT, describe_policy, number

MB = 2.0**20
# above temperature 0: how guesses come about and are verified unless something else was asked for
USUAL = {"chain": ("drawn", "ratio"), "sampled_tree": ("drawn", "without_replacement")}
COST = (
    "tokens/s: tokens trained on, evaluations and saves in; start: seconds for first weights; "
    "peak: of the process, target in; alpha@d: held-out, sum of min(p, q) at depth d; "
    "tau greedy, tau T=1: foreseen on held-out text for a chain as deep as the drafter's own depths"
)
BRINGS = (
    "chain@0: chains decoded at temperature 0, and so on; "
    "foreseen: tau that the measure of training gives for the decoded text"
)
STUDY = "study.db"  # in the folder of a search (eval/search_results.py)
FULL = 6  # reports that are shown in full, at most


class Row(NamedTuple):
    """A number to compare: what is read from each report or run, and which way is better."""

    name: str
    read: Callable[[Any], Any]
    digits: int = 2
    better: int = 0  # 1: larger, -1: smaller, 0: neither


ROWS = (
    Row("speedup", lambda r: r["speedup"], 2, 1),
    Row("tau", lambda r: r["tau"], 2, 1),
    Row("ms/round", lambda r: r["ms"]["round"], 1),
    Row("tokens/s", lambda r: r["tokens_per_second"], 1, 1),
    Row("plain tokens/s", lambda r: r["baseline_tokens_per_second"], 1),
    Row("ms/draft step", lambda r: r["ms"]["draft_step"], 2, -1),
    Row("overhead", lambda r: r["overhead"], 3, -1),
    Row("alpha", lambda r: r["alpha"], 3, 1),
    Row("exact", lambda r: {True: "yes", False: "NO", None: "-"}[r["exact"]]),
    Row("mismatches", lambda r: len(r["mismatches"]), 0, -1),
    Row("drafter", lambda r: r["drafter"]),
    Row("target", lambda r: r["target"]),
)
# where runs differ here, their numbers do not compare
SAME = (
    Row("policy", describe_policy),
    Row("temperature", lambda r: r["temperature"]),
    Row("guesses", lambda r: r.get("draft", "-")),
    Row("verified by", lambda r: r.get("verify", "-")),
    Row("target weights", lambda r: r["fingerprints"]["target"][:8]),
    Row("target changed", lambda r: r.get("target_changed") or "no"),
    Row("dtype", lambda r: r["dtype"]),
    Row("device", lambda r: r["device"]),
    Row("threads", lambda r: r["threads"]),
    Row("prompts", lambda r: r["prompts"]),
    Row("prompt file", lambda r: r["fingerprints"]["prompts"][:8]),
    Row("template", lambda r: r["fingerprints"]["template"][:8]),
    Row("max new tokens", lambda r: r["max_new_tokens"]),
)


class Measured(NamedTuple):
    """A run: its folder, what training it cost (None before it was noted), its reports by name."""

    folder: Path
    training: dict[str, Any] | None
    reports: dict[str, dict[str, Any]]


def compare(words: list[str]) -> int:
    """`outrider compare RUN... [to=FOLDER]`: tables, and a page of them in a folder.

    Raises:
        RunError: a run has no report, or one that cannot be read.
    """
    paths = [Path(word) for word in words if not word.startswith("to=")]
    runs, without, searches = found(paths)
    for path in searches:
        from outrider.eval.search_results import show

        show(path, Console(width=None if sys.stdout.isatty() else 160))
    if runs:
        _show(runs, without)
    for folder in (word.removeprefix("to=") for word in words if word.startswith("to=")):
        from outrider.eval.page.build import write_compared

        write_compared(runs, without, searches, Path(folder))
    return 0


def found(paths: Sequence[Path]) -> tuple[list[Measured], list[RunError], list[Path]]:
    """Runs with reports, what is wrong with those without, and searches.

    Raises:
        RunError: there is nothing to compare, a path does not exist, or a report is damaged.
    """
    runs, without, searches = list[Measured](), list[RunError](), list[Path]()
    for path in paths:
        if (path / STUDY).is_file():
            searches.append(path)
        elif list((path / "eval").glob("*.json")):
            runs.append(_measured(path))
        elif path.is_dir():
            without.append(_no_report(path))
        else:
            raise _no_report(path)
    if not runs and not searches:
        raise without[0]
    return runs, without, searches


def all_reports(runs: Sequence[Measured]) -> dict[str, dict[str, Any]]:
    """Those of all runs, by the run's folder and, where it has several, the report's name."""
    return {
        str(run.folder) if len(run.reports) == 1 else f"{run.folder} {name}": report
        for run in runs
        for name, report in run.reports.items()
    }


def _show(runs: Sequence[Measured], without: Sequence[RunError]) -> None:
    reports = all_reports(runs)
    console = Console(width=None if sys.stdout.isatty() else max(180, 20 + 18 * len(reports)))
    for left_out in without:
        console.print(f"left out: {left_out.message}", highlight=False)
    console.print(overview(runs))
    for warning in warnings(runs):
        console.print(warning)
    if len(reports) <= FULL:
        console.print(side_by_side(reports))


def warnings(runs: Sequence[Measured]) -> list[Text]:
    """What makes the comparison unfair: terms of training, and of reports of one shape."""
    unlike, reports = unequal(runs), all_reports(runs)
    said = [unlike] if unlike else []
    for kind in dict.fromkeys(map(shape, reports.values())):
        alike = {name: r for name, r in reports.items() if shape(r) == kind}
        if warning := unfair(alike):
            said.append(Text(f"{kind}: ", "bold red") + warning)
    return said


# ---- one line per run ----


def shape(report: dict[str, Any]) -> str:
    """`chain@0`: how a report drafted, and at which temperature; `chain@1 (block)`: how verified.

    What is usual for a policy is not said: columns of one name hold numbers of one kind.
    """
    name = f"{report['policy']}@{report['temperature']:g}"
    draft, verify = USUAL.get(report["policy"], ("best", "match"))
    if not report["temperature"]:
        return name
    unusual = [
        report[key]
        for key, usual in (("draft", draft), ("verify", verify))
        if report.get(key, usual) != usual
    ]
    return f"{name} ({', '.join(unusual)})" if unusual else name


def overview(runs: Sequence[Measured]) -> Group:
    """Two tables with a line per run: what it cost, what it brings; the best in green."""
    training = _table("what it cost, and what held-out text says", runs, _training(runs))
    decoding = _table("what it brings", runs, _decoding(runs))
    return Group(training, decoding, Text(f"{COST}; {BRINGS}", "dim"))


def _table(title: str, runs: Sequence[Measured], columns: Sequence[Row]) -> Table:
    table = Table(title=f"{title}; the best of a column is green")
    table.add_column("run")
    for column in columns:
        table.add_column(column.name, justify="right")
    cells = [list(_cells(column, runs)) for column in columns]
    for i, run in enumerate(runs):
        table.add_row(run.folder.name, *(column[i] for column in cells))
    return table


def _training(runs: Sequence[Measured]) -> list[Row]:
    depths = [
        int(name.partition("@")[2])
        for run in runs
        for name in (run.training or {}).get("held_out", {})
        if name.startswith("alpha@")
    ]
    rates = [f"alpha@{depth}" for depth in range(1, max(depths, default=0) + 1)]
    return [
        Row("M params", partial(_trained, "parameters", 1e6), 2, -1),
        Row("tokens/s", partial(_trained, "tokens_per_second", 1.0), 0, 1),
        Row("start", partial(_trained, "start_seconds", 1.0), 0),
        Row("peak MB", partial(_trained, "peak_memory_bytes", MB), 0, -1),
        *(Row(name, partial(_held, name), 3, 1) for name in rates),
        Row("tau greedy", partial(_held, "accept_length"), 2),
        Row("tau T=1", partial(_held, "accept_length_sampling"), 2),
    ]


def _decoding(runs: Sequence[Measured]) -> list[Row]:
    rows = []
    for kind in dict.fromkeys(shape(report) for run in runs for report in run.reports.values()):
        rows.append(Row(f"{kind} tau", partial(_decoded, kind, "tau"), 2, 1))
        if kind.startswith("chain"):
            rows.append(Row("foreseen", partial(_decoded, kind, "forecast"), 2))
        rows.append(Row(f"{kind} speedup", partial(_decoded, kind, "speedup"), 2, 1))
    return rows


def _trained(name: str, unit: float, run: Measured) -> float | None:
    value = None if run.training is None else run.training.get(name)
    return None if value is None else value / unit


def _held(name: str, run: Measured) -> float | None:
    return None if run.training is None else run.training["held_out"].get(name)


def _decoded(kind: str, name: str, run: Measured) -> float | None:
    found = [report.get(name) for report in run.reports.values() if shape(report) == kind]
    return found[-1] if found else None


def unequal(runs: Sequence[Measured]) -> Text | None:
    """In red, which terms of training were not the same."""
    budgets = [run.training.get("budget", {}) for run in runs if run.training is not None]
    names = dict.fromkeys(name for budget in budgets for name in budget)
    differing = []
    for name in names:
        values = dict.fromkeys(str(budget.get(name)) for budget in budgets)
        if len(values) > 1:
            differing.append(f"{name} ({' | '.join(values)})")
    if not differing:
        return None
    return Text(f"not trained on equal terms: {'; '.join(differing)}", style="bold red")


# ---- reports in full ----


def unfair(reports: dict[str, dict[str, Any]]) -> Text | None:
    """In red, what makes reports of one shape no fair comparison."""
    differing = []
    for row in SAME:
        values = dict.fromkeys(str(row.read(report)) for report in reports.values())
        if len(values) > 1:
            differing.append(f"{row.name} ({' | '.join(values)})")
    if not differing:
        return None
    return Text(f"not the same conditions: {'; '.join(differing)}", style="bold red")


def side_by_side(reports: dict[str, dict[str, Any]]) -> RenderableType:
    """One table, and what makes it unfair."""
    table, warning = table_of(reports), unfair(reports)
    return table if warning is None else Group(table, warning)


def table_of(reports: dict[str, dict[str, Any]]) -> Table:
    """A row per metric, a column per report."""
    table = Table("", *reports, title="reports side by side; the best of a row is green")
    every = list(reports.values())
    for row in ROWS:
        table.add_row(row.name, *_cells(row, every))
    deepest = max(len(report["accept_at"]) for report in every)
    for k in range(1, deepest + 1):
        row = Row(f"accept@{k}", partial(_accept_at, k), 2, 1)
        table.add_row(row.name, *_cells(row, every))
    table.add_section()
    for row in SAME:
        table.add_row(row.name, *(str(row.read(report)) for report in every))
    return table


def _accept_at(k: int, report: dict[str, Any]) -> float | None:
    rates: list[float] = report["accept_at"]
    return rates[k - 1] if k <= len(rates) else None


def _cells(row: Row, reports: Sequence[Any]) -> Iterable[Text]:
    values = [row.read(report) for report in reports]
    known = [value for value in values if isinstance(value, float | int)]
    best = max(known, key=lambda v: v * row.better) if row.better and len(set(known)) > 1 else None
    for value in values:
        text = value if isinstance(value, str) else number(value, row.digits)
        yield Text(text, style="bold green" if value is not None and value == best else "")


# ---- reading ----


def _measured(run: Path) -> Measured:
    fix = "Measure that run again: outrider eval run.dir=..."
    reports = {}
    for file in sorted((run / "eval").glob("*.json")):
        reports[file.stem] = read_json(file, fix)
        if reports[file.stem].get("format") != FORMAT:
            raise RunError(f"{file} is not a report of this format ({FORMAT}).", fix)
    account = run / "training.json"
    training = read_json(account, fix) if account.is_file() else None
    return Measured(run, training, reports)


def _no_report(run: Path) -> RunError:
    beside = sorted(str(f.parents[1]) for f in run.parent.glob("*/eval/*.json"))
    what = "has no report yet (eval/*.json)" if run.is_dir() else "does not exist"
    found = f"Runs with a report beside it: {', '.join(dict.fromkeys(beside)) or 'none'}."
    return RunError(f"{run} {what}.", f"{found} Measure one with: outrider eval run.dir={run}")
