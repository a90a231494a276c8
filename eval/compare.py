"""Comparison of runs: cost of training, acceptance and speed of every drafter.

The overview has one row per run, with tau and speedup of every measurement (`dynamic_tree@1` is a
tree at temperature 1); a few reports are also shown side by side. Runs are ranked only by numbers
that were measured on the same text (`ranking`); the best number of a column that ranks them is
green, and no other one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from operator import itemgetter
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outrider.eval.report import describe_policy, exact_in_a_word, format_number
from outrider.eval.run_results import RunResults, all_reports

MB = 1e6
# default draft and rule of a policy above temperature 0
DEFAULT_RULES = {"chain": ("drawn", "ratio"), "sampled_tree": ("drawn", "without_replacement")}
COST_LEGEND = (
    "tokens/s: of training, with evaluations and saves; start: seconds of initialisation; "
    "peak: of the process with the target; alpha@d: held-out, sum of min(p, q) at depth d; "
    "tau greedy, tau T=1: predicted on held-out text for a chain of `depths` tokens; "
    "own tau: the same, greedily, on the target's own answers to held-out prompts"
)
DECODING_LEGEND = (
    "chain@0: chains decoded at temperature 0, and so on, drafts of `depth` tokens along a path; "
    "predicted: tau of a chain of that depth, predicted by teacher forcing on the decoded text"
)
MAX_FULL_REPORTS = 6  # reports shown side by side


class ComparisonField(NamedTuple):
    """A field to compare: how it is read from a report or run, and whether it ranks them."""

    name: str
    read: Callable[[Any], Any]
    digits: int = 2
    ranks: bool = False  # the largest is the best


RESULT_FIELDS = (
    ComparisonField("speedup", lambda r: r["speedup"]),
    ComparisonField("tau", lambda r: r["tau"]),
    ComparisonField("ms/round", lambda r: r["ms"]["round"], 1),
    ComparisonField("tokens/s", lambda r: r["tokens_per_second"], 1),
    ComparisonField("plain tokens/s", lambda r: r["baseline_tokens_per_second"], 1),
    ComparisonField("ms/draft step", lambda r: r["ms"]["draft_step"], 2),
    ComparisonField("overhead", lambda r: r["overhead"], 3),
    ComparisonField("alpha", lambda r: r["alpha"], 3),
    ComparisonField("exact", exact_in_a_word),
    ComparisonField("mismatches", lambda r: len(r["mismatches"]), 0),
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
    ComparisonField("prompt file", lambda r: _short_source(r["fingerprints"]["prompts"])),
    ComparisonField("template", lambda r: shown_template(r["fingerprints"]["template"])),
    ComparisonField("max new tokens", lambda r: r["max_new_tokens"]),
)
SAME_TEXT = (  # conditions that reports must share to be ranked
    "target weights", "target changed", "prompts", "prompt file", "template", "max new tokens",
)  # fmt: skip
SAME_TIMES = ("dtype", "device", "threads")  # moreover, to be ranked by speedup


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


# ---- ranking ----


def ranking(runs: Sequence[RunResults]) -> list[str]:
    """Return the order of the runs by each decoding of the same prompts that all of them have.

    Without one they are ordered by the acceptance on the target's own text. Runs with different
    targets, or without numbers on the same kind of text, are not ranked: the line has the reason.
    """
    if len(runs) < 2:
        return []
    names, (metrics, reasons) = [run.name for run in runs], _ranked_decodings(runs)
    lines = [
        f"ranked by {metric} of {label} on the same prompts: "
        + _order(names, [newest_report(run, label)[metric] or 0.0 for run in runs])
        for label, metric in metrics.items()
    ]
    if lines:
        return lines
    reasons = reasons or ["there is no decoding that all runs have"]
    if is_rankable_by_own_text(runs):
        values = [run.own["accept_length"] for run in runs]
        how = f"predicted tau on the target's own text, chains of {runs[0].depths}"
        return [f"ranked by {how} ({'; '.join(reasons)}): {_order(names, values)}"]
    if len({run.target for run in runs}) > 1:
        reasons.append("the targets differ")
    elif without := [run.name for run in runs if "accept_length" not in run.own]:
        reasons.append(f"no acceptance on the target's own text in {', '.join(without)}")
    else:
        reasons.append("acceptance on the target's own text is for different depths")
    return [f"not ranked: {'; '.join(reasons)}"]


def newest_report(run: RunResults, label: str) -> dict[str, Any]:
    """Return the last report of a decoding; {} if there is none."""
    reports = [report for report in run.reports.values() if decoding_label(report) == label]
    return reports[-1] if reports else {}


def _ranked_decodings(runs: Sequence[RunResults]) -> tuple[dict[str, str], list[str]]:
    """Return the metric that ranks the runs in each decoding that all have, and why none does."""
    labels = [decoding_label(report) for report in runs[0].reports.values()]
    metrics, reasons = dict[str, str](), list[str]()
    for label in dict.fromkeys(labels):
        reports = [newest_report(run, label) for run in runs]
        if not all(reports):
            continue
        metric, differing = _ranking_metric(reports)
        if differing:
            reasons.append(f"{label} differs in {', '.join(differing)}")
        else:
            metrics[label] = metric
    return metrics, reasons


def _ranking_metric(reports: Sequence[dict[str, Any]]) -> tuple[str, list[str]]:
    """Return the metric that would rank the reports, and the conditions that prevent it."""
    timed = not differing(reports, SAME_TIMES) and all(r["speedup"] for r in reports)
    metric, same = ("speedup", SAME_TEXT) if timed else ("tau", (*SAME_TEXT, "policy"))
    return metric, differing(reports, same)


def timed_alike(runs: Sequence[RunResults]) -> list[str]:
    """Return the decodings whose times all runs have measured under the same conditions."""
    ranked = _ranked_decodings(runs)[0]
    return [label for label, metric in ranked.items() if metric == "speedup"]


def is_rankable_by_own_text(runs: Sequence[RunResults]) -> bool:
    """Return whether all runs have acceptance on text of one target, for equally many depths."""
    measured = all("accept_length" in run.own for run in runs)
    return measured and len({(run.target, run.depths) for run in runs}) == 1


def _order(names: Sequence[str], values: Sequence[float]) -> str:
    pairs = sorted(zip(values, names, strict=True), key=lambda pair: -pair[0])
    return ", ".join(f"{name} {value:.2f}" for value, name in pairs)


def differing(reports: Sequence[dict[str, Any]], conditions: Sequence[str]) -> list[str]:
    """Return which of these conditions have several values."""
    fields = [row for row in CONDITION_FIELDS if row.name in conditions]
    return [row.name for row in fields if len({str(row.read(r)) for r in reports}) > 1]


# ---- one row per run ----


def decoding_label(report: dict[str, Any]) -> str:
    """Return `chain@0` for policy and temperature, `chain@1 (block)` for an unusual rule."""
    name = f"{report['policy']}@{report['temperature']:g}"
    rule = DEFAULT_RULES.get(report["policy"], ("best", "match"))
    usual = zip(("draft", "verify"), rule, strict=True)
    unusual = [report[key] for key, value in usual if report.get(key, value) != value]
    return f"{name} ({', '.join(unusual)})" if unusual and report["temperature"] else name


def overview(runs: Sequence[RunResults]) -> Group:
    """Return two tables with a row per run: training cost, and tau and speedup."""
    training = _table("training cost and held-out acceptance", runs, _training_fields(runs))
    decoding = _table("decoding", runs, _decoding_fields(runs))
    return Group(training, decoding, Text(f"{COST_LEGEND}; {DECODING_LEGEND}", "dim"))


def _table(title: str, runs: Sequence[RunResults], columns: Sequence[ComparisonField]) -> Table:
    best = any(column.ranks for column in columns)
    table = Table("run", "drafter", "lr", title=title + "; the best is green" * best)
    for column in columns:
        table.add_column(column.name, justify="right")
    cells = [list(_cells(column, runs)) for column in columns]
    for i, run in enumerate(runs):
        names = run.name, run.drafter, run.lr
        table.add_row(*names, *(column[i] for column in cells))
    return table


def _training_fields(runs: Sequence[RunResults]) -> list[ComparisonField]:
    own = len(runs) > 1 and not _ranked_decodings(runs)[0] and is_rankable_by_own_text(runs)
    names = {name for run in runs for name in (run.training or {}).get("held_out", {})}
    rates = sorted((n for n in names if n.startswith("alpha@")), key=lambda n: (len(n), n))
    return [
        ComparisonField("M params", partial(_training_value, "parameters", 1e6), 2),
        ComparisonField("tokens/s", partial(_training_value, "tokens_per_second", 1.0), 0),
        ComparisonField("start", partial(_training_value, "start_seconds", 1.0), 0),
        ComparisonField("peak MB", partial(_training_value, "peak_memory_bytes", MB), 0),
        *(ComparisonField(name, partial(_held_out_value, name), 3) for name in rates),
        ComparisonField("depths", lambda run: run.depths, 0),
        ComparisonField("tau greedy", partial(_held_out_value, "accept_length"), 2),
        ComparisonField("tau T=1", partial(_held_out_value, "accept_length_sampling"), 2),
        ComparisonField("own tau", lambda run: run.own.get("accept_length"), 2, own),
    ]


def _decoding_fields(runs: Sequence[RunResults]) -> list[ComparisonField]:
    rows, ranked = [], _ranked_decodings(runs)[0]
    for kind in dict.fromkeys(decoding_label(r) for run in runs for r in run.reports.values()):
        value, metric = partial(partial, _decoding_value, kind), ranked.get(kind)
        rows.append(ComparisonField(f"{kind} depth", value("depth"), 0))
        rows.append(ComparisonField(f"{kind} tau", value("tau"), 2, metric == "tau"))
        if kind.startswith("chain"):
            rows.append(ComparisonField("predicted", value("forecast"), 2))
        rows.append(ComparisonField(f"{kind} speedup", value("speedup"), 2, metric == "speedup"))
    return rows


def _training_value(name: str, unit: float, run: RunResults) -> float | None:
    value = None if run.training is None else run.training.get(name)
    return None if value is None else value / unit


def _held_out_value(name: str, run: RunResults) -> float | None:
    return None if run.training is None else run.training.get("held_out", {}).get(name)


def _decoding_value(kind: str, name: str, run: RunResults) -> float | None:
    return newest_report(run, kind).get(name)


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
    contents = list(reports.values())
    metric, differing = _ranking_metric(contents)
    ranked = not differing and len(set(map(decoding_label, contents))) == 1
    table = Table("", *reports, title="reports side by side" + "; the best is green" * ranked)
    for row in RESULT_FIELDS:
        row = row._replace(ranks=ranked and row.name == metric)
        table.add_row(row.name, *_cells(row, contents))
    accept_at = zip_longest(*(report["accept_at"] for report in contents))
    for k, rates in enumerate(accept_at, start=1):
        row = ComparisonField(f"accept@{k}", lambda rate: rate)
        table.add_row(row.name, *_cells(row, rates))
    table.add_section()
    for row in CONDITION_FIELDS:
        table.add_row(row.name, *(str(row.read(report)) for report in contents))
    return table


def _cells(row: ComparisonField, reports: Sequence[Any]) -> Iterable[Text]:
    values = [row.read(report) for report in reports]
    numbers = [value for value in values if isinstance(value, float | int)]
    best = max(numbers) if row.ranks and len(set(numbers)) > 1 else None
    for value in values:
        text = value if isinstance(value, str) else format_number(value, row.digits)
        yield Text(text, style="bold green" if value is not None and value == best else "")


# ---- reading ----


def _short_source(fingerprint: str) -> str:
    """Return `tiny 1f0c9a2b` for the fingerprint of a source: its name and the end of its hash."""
    return " ".join(word if len(word) <= 16 else word[-8:] for word in fingerprint.split())


def shown_template(digest: str, digits: int = 8) -> str:
    """Return the beginning of a template's hash; older reports have another, of 64 digits."""
    return f"{digest[:digits]} (older hash)" if len(digest) == 64 else digest[:digits]
