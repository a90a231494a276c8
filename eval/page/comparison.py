"""Sections of a report page on several runs, and on a search.

The tables on runs are those of `outrider compare`.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table as ConsoleTable

from outrider.conf.errors import RunError
from outrider.conf.json_shapes import read_object
from outrider.eval import compare, seeds
from outrider.eval.compare import decoding_label
from outrider.eval.page.elements import (
    Note,
    Part,
    Section,
    from_console_table,
    metric_definitions,
    text_table,
)
from outrider.eval.page.figures import are_several, bars, curves, draw, points
from outrider.eval.page.speed import SPEEDS, draw_predicted_tau
from outrider.eval.page.training import logged_definitions, metric_series
from outrider.eval.run_results import RunResults, all_reports
from outrider.eval.search_results import SEARCH, pareto_front, rate_and_depth, short_name
from outrider.train.metrics_log import read_log


def comparison_sections(runs: Sequence[RunResults], without: Sequence[RunError]) -> list[Section]:
    """Return sections on speed and training, and the reports side by side if they are few."""
    notes: list[Part] = [Note(f"Left out: {error.message}") for error in without]
    notes += [Note(line) for line in compare.ranking(runs)]
    notes += [Note(warning.plain) for warning in compare.warnings(runs)]
    cost, decoding, _ = compare.overview(runs).renderables
    assert isinstance(cost, ConsoleTable), "the first part of an overview is a table"
    assert isinstance(decoding, ConsoleTable), "the second part of an overview is a table"
    best = "Highlighted: the best of a column that ranks the runs."
    definition = f"{compare.DECODING_LEGEND}. {metric_definitions('tau', 'speedup')} {best}"
    speed = from_console_table(decoding, "decoding", definition)
    costs = from_console_table(cost, "training", f"{compare.COST_LEGEND}. {best}")
    figures = [*_speeds(runs), *_draft_times(runs), *_predicted_tau(runs)]
    sections = [
        Section("speed", "Speed", [*figures, *notes, speed, *_over_seeds(runs)]),
        Section("training", "Cost of training and held-out acceptance", [*_curves(runs), costs]),
    ]
    reports = all_reports(runs)
    if len(reports) <= compare.MAX_FULL_REPORTS:
        names = ("speedup", "tau", "alpha", "overhead", "accept_at", "exact")
        definition = metric_definitions(*names)
        source = compare.report_table(reports)
        table = from_console_table(source, "reports side by side", definition)
        sections.append(Section("reports", "Reports side by side", [table]))
    return sections


def _over_seeds(runs: Sequence[RunResults]) -> Iterable[Part]:
    """Return the table of runs that differ in their seed alone."""
    if rows := seeds.seed_rows(runs):
        what = "Runs that differ in their seed alone; intervals over seeds and dialogues."
        definition = f"{what} {metric_definitions('tau', 'speedup', 'ms.draft')}"
        yield from_console_table(seeds.table(rows), "over the seeds", definition)


def _speeds(runs: Sequence[RunResults]) -> Iterable[Part]:
    """Draw tau and speedup, a bar for every run and way of decoding."""
    newest = [{decoding_label(r): r for r in run.reports.values()} for run in runs]
    labels = dict.fromkeys(label for of_run in newest for label in of_run)
    reports = {label: [of_run.get(label, {}) for of_run in newest] for label in labels}
    for name, xlabel, level in SPEEDS:
        values = {label: [r.get(name) for r in of_runs] for label, of_runs in reports.items()}
        values = {label: numbers for label, numbers in values.items() if any(numbers)}
        intervals = {label: [r.get(f"{name}_95") for r in reports[label]] for label in values}
        if are_several(values):
            paint = bars([run.name for run in runs], values, xlabel, intervals, level)
            yield draw(name, metric_definitions(name, f"{name}_95"), paint)


def _draft_times(runs: Sequence[RunResults]) -> Iterable[Part]:
    """Draw tau over the time of a draft, where times were measured under the same conditions."""
    groups = dict[str, list[tuple[float, float]]]()
    for label in compare.timed_alike(runs) if len(runs) > 1 else ():
        for run in runs:
            report = compare.newest_report(run, label)
            if report["tau"] is not None and report["ms"]["draft"] is not None:
                point = float(report["ms"]["draft"]), float(report["tau"])
                groups.setdefault(_run_name(run), []).append(point)
    if len(groups) > 1:
        what = "A point for every run and decoding; more tokens in less time are better."
        definition = f"{metric_definitions('tau', 'ms.draft')} {what}"
        paint = points(groups, "ms to draft, per round", "tau")
        yield draw("tau against draft time", definition, paint)


def _predicted_tau(runs: Sequence[RunResults]) -> Iterable[Part]:
    """Draw predicted and decoded tau of every report."""
    return draw_predicted_tau({
        f"{run.name} {name}": (report["forecast"], report["tau"])
        for run in runs
        for name, report in run.reports.items()
        if report.get("forecast") is not None
    })  # fmt: skip


def _run_name(run: RunResults) -> str:
    return f"{run.name}: {run.drafter}, lr {run.lr}"


def _curves(runs: Sequence[RunResults]) -> Iterable[Part]:
    """Draw the held-out acceptance length of every run with a log."""
    lines = {}
    for run in runs:
        series = metric_series(read_log(run.folder), "held", "accept_length")
        if points := series.get("accept_length"):
            lines[run.name] = points
    if lines:
        paint = curves(lines, "step", "tokens per round", marks=True)
        definition = f"{logged_definitions('accept_length')} Of the held-out text of each run."
        yield draw("held-out acceptance length", definition, paint)


def search_section(folder: Path, name: str) -> Section:
    """Return the section of one search, from its `search.json`; `name` is its anchor."""
    fix = f"Write it again: outrider compare {folder}"
    content = read_object(folder / "search.json", fix, SEARCH)
    trials, metric = content["trials"], content["metric"]
    complete = [t for t in trials if t["state"] == "COMPLETE" and t["value"] is not None]
    complete.sort(key=lambda trial: (-trial["value"], trial["number"]))
    parts: list[Part] = []
    if complete:
        overrides = map(shlex.quote, [*content["overrides"], *complete[0].get("words", [])])
        parts.append(Note("The best recipe:", f"outrider train {' '.join(overrides)}"))
        parts.append(_cost(complete, metric))
        if scatter := rate_and_depth(complete, metric):
            title = f"{scatter.ylabel} against {' and '.join(scatter.settings)}"
            meaning = logged_definitions(scatter.ylabel) or metric_definitions("tau")
            definition = f"Every complete trial. {meaning}"
            paint = points(scatter.groups, scatter.xlabel, scatter.ylabel, log=scatter.log)
            parts.append(draw(title, definition, paint))
    if importance := dict(sorted(content["importance"].items(), key=lambda item: -item[1])):
        definition = (
            "PED-ANOVA (arXiv:2304.10255): how much the better trials' values of a key differ from "
            "all trials' values; shares of 1."
        )
        shares = {"importance": list(importance.values())}
        keys = [short_name(key) for key in importance]
        if are_several(shares):
            parts.append(draw("importance", definition, bars(keys, shares, "share of importance")))
        rows = [[key, f"{share:.1%}"] for key, share in importance.items()]
        parts.append(text_table("importance", ["key", "importance"], rows, definition))
    parts.append(_trials(trials, complete, metric))
    return Section(name, f"Search: maximise {metric}", parts)


def _cost(complete: Sequence[Mapping[str, Any]], metric: str) -> Part:
    costs = [float(trial.get("seconds", 0)) / 60 for trial in complete]
    values = [float(trial["value"]) for trial in complete]
    best = [(costs[i], values[i]) for i in pareto_front(costs, values)]
    definition = f"minutes of training and {metric}. The second colour is the Pareto front."
    trials = {"trials": list(zip(costs, values, strict=True))}
    paint = points(trials, "minutes of training", metric, front=best)
    return draw("value against cost", f"Every complete trial: {definition}", paint)


def _trials(
    trials: Sequence[Mapping[str, Any]], complete: Sequence[Mapping[str, Any]], metric: str
) -> Part:
    others = [trial for trial in trials if trial not in complete]
    keys = list(dict.fromkeys(key for trial in trials for key in trial["params"]))
    head = ["trial", "state", metric, *map(short_name, keys), "minutes", "tau", "speedup"]
    rows = [
        [
            str(trial["number"]), trial["state"].lower(), _format(trial["value"]),
            *(_format(trial["params"].get(key)) for key in keys),
            f"{trial['seconds'] / 60:.1f}" if "seconds" in trial else "-",
            _format(trial.get("decoded tau")), _format(trial.get("decoded speedup")),
        ]
        for trial in [*complete, *others]
    ]  # fmt: skip
    definition = (
        "Complete trials first, the best on top. pruned: stopped below the median of the others. "
        f"{metric_definitions('tau', 'speedup')}"
    )
    return text_table("trials", head, rows, definition)


def _format(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace('"', "")
