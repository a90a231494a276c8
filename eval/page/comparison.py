"""What a page says of several runs side by side, and of a search.

The tables are those that `outrider compare` prints; of a search, those of its `search.json`.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table as Shown

from outrider.conf.errors import Damaged, RunError
from outrider.conf.files import read_json, read_lines
from outrider.eval import compare
from outrider.eval.compare import Measured
from outrider.eval.page.elements import Note, Part, Section, meanings, of_console, table
from outrider.eval.page.figures import Span, bars, curves, draw, points
from outrider.eval.page.training import defined, series
from outrider.eval.search_results import FORMAT, front, short

SIDE = "The best of a row stands out."


def compared(runs: Sequence[Measured], without: Sequence[RunError]) -> list[Section]:
    """Sections of several runs: speed, training, and the reports in full if they are few."""
    notes: list[Part] = [Note(f"Left out: {error.message}") for error in without]
    notes += [Note(warning.plain) for warning in compare.warnings(runs)]
    training, decoding, _ = compare.overview(runs).renderables
    best = "The best of a column stands out."
    brings = f"{compare.BRINGS}. {meanings('tau', 'speedup')} {best}"
    assert isinstance(training, Shown), "the first part of an overview is a table"
    assert isinstance(decoding, Shown), "the second part of an overview is a table"
    sections = [
        Section("speed", "What it brings", [
            *_speeds(runs), *notes, of_console(decoding, "what it brings", brings),
        ]),
        Section("training", "What it cost, and what held-out text says", [
            *_curves(runs), of_console(training, "what it cost", f"{compare.COST}. {best}"),
        ]),
    ]  # fmt: skip
    reports = compare.all_reports(runs)
    if len(reports) <= compare.FULL:
        shown = compare.table_of(reports)
        told = f"{SIDE} {meanings('speedup', 'tau', 'alpha', 'overhead', 'accept_at', 'exact')}"
        full = of_console(shown, "reports side by side", told)
        sections.append(Section("reports", "Reports side by side", [full]))
    return sections


def _speeds(runs: Sequence[Measured]) -> Iterable[Part]:
    """For tau and speedup, a bar for every run and way of decoding."""
    ways = dict.fromkeys(compare.shape(r) for run in runs for r in run.reports.values())
    found = {
        way: [
            next((r for r in reversed(run.reports.values()) if compare.shape(r) == way), {})
            for run in runs
        ]
        for way in ways
    }
    for name, across in (
        ("speedup", "times as fast as plain decoding"),
        ("tau", "tokens per round"),
    ):
        values = {way: [report.get(name) for report in of] for way, of in found.items()}
        values = {way: of for way, of in values.items() if any(of)}
        spans: dict[str, list[Span]] = {
            way: [_span(report.get(f"{name}_95")) for report in found[way]] for way in values
        }
        if values:
            level = 1.0 if name == "speedup" else None
            paint = bars([run.folder.name for run in runs], values, across, spans, level)
            yield draw(name, meanings(name, f"{name}_95"), paint)


def _span(pair: Sequence[float] | None) -> Span:
    return None if pair is None else (pair[0], pair[1])


def _curves(runs: Sequence[Measured]) -> Iterable[Part]:
    """The held-out acceptance length of every run that has a log."""
    lines = {}
    for run in runs:
        file = run.folder / "metrics.jsonl"
        log = read_lines(file, "Restore it, or train again.", torn=True) if file.is_file() else []
        if found := series(log, "held", "accept_length").get("accept_length"):
            lines[run.folder.name] = found
    if lines:
        paint = curves(lines, "step", "tokens per round", marks=True)
        told = f"{defined('accept_length')} At every held-out evaluation."
        yield draw("held-out acceptance length", told, paint)


# ---- a search ----


def read_search(folder: Path) -> dict[str, Any]:
    """
    Raises:
        Damaged: `search.json` is missing or not one.
    """
    fix = f"It is written by: outrider compare {folder}"
    content = read_json(folder / "search.json", fix)
    if content.get("format") != FORMAT:
        raise Damaged(f"{folder / 'search.json'} is not of this format ({FORMAT}).", fix)
    return content


def searched(content: Mapping[str, Any], name: str = "search") -> list[Section]:
    """The section of one search."""
    trials, metric = content["trials"], content["metric"]
    whole = sorted(
        (t for t in trials if t["state"] == "COMPLETE"), key=lambda t: (-t["value"], t["number"])
    )
    parts: list[Part] = []
    if whole:
        words = [*content["overrides"], *whole[0]["words"]]
        parts.append(
            Note("The best recipe:", f"python train.py {' '.join(map(shlex.quote, words))}")
        )
        parts.append(_cost(whole, metric))
    if mattered := dict(sorted(content["importance"].items(), key=lambda item: -item[1])):
        told = (
            "PED-ANOVA (arXiv:2304.10255): how much the better trials' values of a key differ from "
            "all trials' values; shares of 1."
        )
        shares = {"importance": list(mattered.values())}
        keys = [short(key) for key in mattered]
        parts.append(draw("what mattered", told, bars(keys, shares, "share of importance")))
        rows = [[key, f"{share:.1%}"] for key, share in mattered.items()]
        parts.append(table("what mattered", ["key", "importance"], rows, told))
    parts.append(_trials(trials, whole, metric))
    return [Section(name, f"Search: {metric} made large", parts)]


def _cost(whole: Sequence[Mapping[str, Any]], metric: str) -> Part:
    costs = [float(trial.get("seconds", 0)) / 60 for trial in whole]
    values = [float(trial["value"]) for trial in whole]
    best = [(costs[i], values[i]) for i in front(costs, values)]
    told = (
        f"Every whole trial: minutes of training and {metric}. Line: nobody is better and cheaper."
    )
    every = {"trials": list(zip(costs, values, strict=True))}
    return draw("what it costs", told, points(every, "minutes of training", metric, front=best))


def _trials(
    trials: Sequence[Mapping[str, Any]], whole: Sequence[Mapping[str, Any]], metric: str
) -> Part:
    others = [trial for trial in trials if trial not in whole]
    keys = list(dict.fromkeys(key for trial in trials for key in trial["params"]))
    head = ["trial", "state", metric, *map(short, keys), "minutes", "tau", "speedup"]
    rows = [
        [
            str(trial["number"]), trial["state"].lower(), _said(trial["value"]),
            *(_said(trial["params"].get(key)) for key in keys),
            f"{trial['seconds'] / 60:.1f}" if "seconds" in trial else "-",
            _said(trial.get("decoded tau")), _said(trial.get("decoded speedup")),
        ]
        for trial in [*whole, *others]
    ]  # fmt: skip
    told = (
        "Whole trials first, the best on top. pruned: stopped, below the median of the others. "
        f"{meanings('tau', 'speedup')}"
    )
    return table("trials", head, rows, told)


def _said(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace('"', "")
