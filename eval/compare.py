"""Comparison of runs: cost of training, acceptance and speed of every drafter.

The overview has one row per run, with tau and speedup of every measurement (`dynamic_tree@1` is a
tree at temperature 1); a few reports are also shown side by side. The best of a column is green.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outrider.conf.errors import RunError
from outrider.eval.report import describe_policy, format_number, read_fields
from outrider.train.manifest import read_training

MB = 2.0**20
# default draft and rule of a policy above temperature 0
DEFAULT_RULES = {"chain": ("drawn", "ratio"), "sampled_tree": ("drawn", "without_replacement")}
COST_LEGEND = (
    "tokens/s: of training, with evaluations and saves; start: seconds of initialisation; "
    "peak: of the process with the target; alpha@d: held-out, sum of min(p, q) at depth d; "
    "tau greedy, tau T=1: predicted on held-out text for a chain of the drafter's depths"
)
DECODING_LEGEND = (
    "chain@0: chains decoded at temperature 0, and so on; "
    "predicted: tau of a chain, predicted by teacher forcing on the decoded text"
)
STUDY = "study.db"  # in a search folder (eval/search_results.py)
MAX_FULL_REPORTS = 6  # reports shown side by side


class ComparisonField(NamedTuple):
    """A field to compare: how it is read from a report or run, and which direction is better."""

    name: str
    read: Callable[[Any], Any]
    digits: int = 2
    better: int = 0  # 1: larger, -1: smaller, 0: neither


RESULT_FIELDS = (
    ComparisonField("speedup", lambda r: r["speedup"], 2, 1),
    ComparisonField("tau", lambda r: r["tau"], 2, 1),
    ComparisonField("ms/round", lambda r: r["ms"]["round"], 1),
    ComparisonField("tokens/s", lambda r: r["tokens_per_second"], 1, 1),
    ComparisonField("plain tokens/s", lambda r: r["baseline_tokens_per_second"], 1),
    ComparisonField("ms/draft step", lambda r: r["ms"]["draft_step"], 2, -1),
    ComparisonField("overhead", lambda r: r["overhead"], 3, -1),
    ComparisonField("alpha", lambda r: r["alpha"], 3, 1),
    ComparisonField("exact", lambda r: {True: "yes", False: "NO", None: "-"}[r["exact"]]),
    ComparisonField("mismatches", lambda r: len(r["mismatches"]), 0, -1),
    *(ComparisonField(name, itemgetter(name)) for name in ("drafter", "target")),
)
# reports that differ here are not comparable
CONDITION_FIELDS = (
    ComparisonField("policy", describe_policy),
    ComparisonField("temperature", lambda r: r["temperature"]),
    ComparisonField("guesses", lambda r: r.get("draft", "-")),
    ComparisonField("verified by", lambda r: r.get("verify", "-")),
    ComparisonField("target weights", lambda r: r["fingerprints"]["target"][:8]),
    ComparisonField("target changed", lambda r: r.get("target_changed") or "no"),
    *(
        ComparisonField(name, itemgetter(name))
        for name in ("dtype", "device", "threads", "prompts")
    ),
    ComparisonField("prompt file", lambda r: r["fingerprints"]["prompts"][:8]),
    ComparisonField("template", lambda r: r["fingerprints"]["template"][:8]),
    ComparisonField("max new tokens", lambda r: r["max_new_tokens"]),
)


class RunResults(NamedTuple):
    """A run: its folder, `training.json` (None while it trains), its reports by name."""

    folder: Path
    training: dict[str, Any] | None
    reports: dict[str, dict[str, Any]]


def load_runs(paths: Sequence[Path]) -> tuple[list[RunResults], list[RunError], list[Path]]:
    """Return runs with reports, an error for each run without, and search folders.

    Raises:
        RunError: there is nothing to compare, a path does not exist, or a report is damaged.
    """
    runs, without, searches = list[RunResults](), list[RunError](), list[Path]()
    for path in paths:
        if (path / STUDY).is_file():
            searches.append(path)
        elif list((path / "eval").glob("*.json")):
            runs.append(read_results(path))
        elif path.is_dir():
            without.append(_no_report(path))
        else:
            raise _no_report(path)
    if not runs and not searches:
        raise without[0]
    return runs, without, searches


def all_reports(runs: Sequence[RunResults]) -> dict[str, dict[str, Any]]:
    """Return all reports by run folder and, where a run has several, report name."""
    return {
        str(run.folder) if len(run.reports) == 1 else f"{run.folder} {name}": report
        for run in runs
        for name, report in run.reports.items()
    }


def warnings(runs: Sequence[RunResults]) -> list[Text]:
    """Return what makes the comparison unfair: differences of training and of conditions."""
    budgets = [run.training.get("budget", {}) for run in runs if run.training is not None]
    names = dict.fromkeys(name for budget in budgets for name in budget)
    columns = {name: [budget.get(name) for budget in budgets] for name in names}
    training, reports = _differences("not trained on equal terms", columns), all_reports(runs)
    messages = [training] if training else []
    for label in dict.fromkeys(map(decoding_label, reports.values())):
        comparable = {name: r for name, r in reports.items() if decoding_label(r) == label}
        if differences := condition_differences(comparable):
            messages.append(Text(f"{label}: ", "bold red") + differences)
    return messages


# ---- one row per run ----


def decoding_label(report: dict[str, Any]) -> str:
    """Return `chain@0` for policy and temperature, `chain@1 (block)` for an unusual rule."""
    name = f"{report['policy']}@{report['temperature']:g}"
    rule = DEFAULT_RULES.get(report["policy"], ("best", "match"))
    usual = zip(("draft", "verify"), rule, strict=True)
    unusual = [report[key] for key, value in usual if report.get(key, value) != value]
    return f"{name} ({', '.join(unusual)})" if unusual and report["temperature"] else name


def overview(runs: Sequence[RunResults]) -> Group:
    """Return two tables with a row per run, training cost and speed; the best in green."""
    training = _table("training cost and held-out acceptance", runs, _training_fields(runs))
    decoding = _table("decoding", runs, _decoding_fields(runs))
    return Group(training, decoding, Text(f"{COST_LEGEND}; {DECODING_LEGEND}", "dim"))


def _table(title: str, runs: Sequence[RunResults], columns: Sequence[ComparisonField]) -> Table:
    table = Table(title=f"{title}; the best of a column is green")
    table.add_column("run")
    for column in columns:
        table.add_column(column.name, justify="right")
    cells = [list(_cells(column, runs)) for column in columns]
    for i, run in enumerate(runs):
        table.add_row(run.folder.name, *(column[i] for column in cells))
    return table


def _training_fields(runs: Sequence[RunResults]) -> list[ComparisonField]:
    names = {name for run in runs for name in (run.training or {}).get("held_out", {})}
    rates = sorted((n for n in names if n.startswith("alpha@")), key=lambda n: (len(n), n))
    return [
        ComparisonField("M params", partial(_training_value, "parameters", 1e6), 2, -1),
        ComparisonField("tokens/s", partial(_training_value, "tokens_per_second", 1.0), 0, 1),
        ComparisonField("start", partial(_training_value, "start_seconds", 1.0), 0),
        ComparisonField("peak MB", partial(_training_value, "peak_memory_bytes", MB), 0, -1),
        *(ComparisonField(name, partial(_held_out_value, name), 3, 1) for name in rates),
        ComparisonField("tau greedy", partial(_held_out_value, "accept_length"), 2),
        ComparisonField("tau T=1", partial(_held_out_value, "accept_length_sampling"), 2),
    ]


def _decoding_fields(runs: Sequence[RunResults]) -> list[ComparisonField]:
    rows = []
    for kind in dict.fromkeys(decoding_label(r) for run in runs for r in run.reports.values()):
        value = partial(partial, _decoding_value, kind)
        rows.append(ComparisonField(f"{kind} tau", value("tau"), 2, 1))
        if kind.startswith("chain"):
            rows.append(ComparisonField("predicted", value("forecast"), 2))
        rows.append(ComparisonField(f"{kind} speedup", value("speedup"), 2, 1))
    return rows


def _training_value(name: str, unit: float, run: RunResults) -> float | None:
    value = None if run.training is None else run.training.get(name)
    return None if value is None else value / unit


def _held_out_value(name: str, run: RunResults) -> float | None:
    return None if run.training is None else run.training.get("held_out", {}).get(name)


def _decoding_value(kind: str, name: str, run: RunResults) -> float | None:
    values = [report.get(name) for report in run.reports.values() if decoding_label(report) == kind]
    return values[-1] if values else None


def _differences(title: str, columns: Mapping[str, Iterable[object]]) -> Text | None:
    """Return a red text of the columns with several values, or None."""
    distinct = {name: dict.fromkeys(map(str, values)) for name, values in columns.items()}
    differing = [f"{name} ({' | '.join(v)})" for name, v in distinct.items() if len(v) > 1]
    return Text(f"{title}: {'; '.join(differing)}", style="bold red") if differing else None


# ---- reports side by side ----


def condition_differences(reports: dict[str, dict[str, Any]]) -> Text | None:
    columns = {row.name: map(row.read, reports.values()) for row in CONDITION_FIELDS}
    return _differences("not the same conditions", columns)


def side_by_side(reports: dict[str, dict[str, Any]]) -> RenderableType:
    """Return the table of reports, and the conditions that differ."""
    table, warning = report_table(reports), condition_differences(reports)
    return table if warning is None else Group(table, warning)


def report_table(reports: dict[str, dict[str, Any]]) -> Table:
    """Return a table with a row per metric and a column per report."""
    table = Table("", *reports, title="reports side by side; the best of a row is green")
    contents = list(reports.values())
    for row in RESULT_FIELDS:
        table.add_row(row.name, *_cells(row, contents))
    accept_at = zip_longest(*(report["accept_at"] for report in contents))
    for k, rates in enumerate(accept_at, start=1):
        row = ComparisonField(f"accept@{k}", lambda rate: rate, 2, 1)
        table.add_row(row.name, *_cells(row, rates))
    table.add_section()
    for row in CONDITION_FIELDS:
        table.add_row(row.name, *(str(row.read(report)) for report in contents))
    return table


def _cells(row: ComparisonField, reports: Sequence[Any]) -> Iterable[Text]:
    values = [row.read(report) for report in reports]
    numbers = [value for value in values if isinstance(value, float | int)]
    differ = row.better and len(set(numbers)) > 1
    best = max(numbers, key=lambda v: v * row.better) if differ else None
    for value in values:
        text = value if isinstance(value, str) else format_number(value, row.digits)
        yield Text(text, style="bold green" if value is not None and value == best else "")


# ---- reading ----


def read_results(run: Path) -> RunResults:
    reports = {file.stem: read_fields(file) for file in sorted((run / "eval").glob("*.json"))}
    return RunResults(run, read_training(run), reports)


def _no_report(run: Path) -> RunError:
    measured = sorted(str(f.parents[1]) for f in run.parent.glob("*/eval/*.json"))
    what = "has no report yet (eval/*.json)" if run.is_dir() else "does not exist"
    others = f"Runs with a report beside it: {', '.join(dict.fromkeys(measured)) or 'none'}."
    return RunError(f"{run} {what}.", f"{others} Measure one with: outrider eval run.dir={run}")
