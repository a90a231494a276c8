"""Speed sections of a report page: all reports, the time of a round, predicted speedups."""

from collections.abc import Iterator, Mapping

from outrider.eval.metrics import ROUND_PARTS, Summary
from outrider.eval.page.elements import (
    Figure,
    Note,
    Part,
    Table,
    metric_definitions,
    text_table,
)
from outrider.eval.page.figures import Interval, are_several, bars, draw, points, stacked_bars
from outrider.eval.page.run_files import RunFiles
from outrider.eval.report import Report, describe_policy, exact_in_a_word, format_number
from outrider.eval.report_auto import shares_of

THEORY = (
    "from times: tau x plain step / round, equal to the measured one. no overhead: the same with "
    "verify, commit and other at no cost. free verification: and a forward at the cost of a plain "
    "step. formula: Leviathan et al., one alpha at every depth (chains). best gamma: chain length "
    "with the largest predicted speedup, at most the measured depth."
)
PREDICTED = {"no overhead": "no_overhead", "free verification": "free_verify", "formula": "iid"}
SPEEDS = (  # metric, label of its axis, line to compare with
    ("speedup", "times as fast as plain decoding", 1.0),
    ("tau", "tokens per round", None),
)


def speed_parts(run: RunFiles) -> Iterator[Part]:
    """Yield speedup and tokens per round of every report."""
    if not run.reports:
        yield no_report_note(run)
        return
    for name, xlabel, level in SPEEDS:
        values = {name: [getattr(r.summary, name) for r in run.reports.values()]}
        if are_several(values):
            intervals = {name: [getattr(r.summary, f"{name}_95") for r in run.reports.values()]}
            paint = bars(list(run.reports), values, xlabel, intervals, level)
            yield draw(xlabel, metric_definitions(name, f"{name}_95"), paint)
    names = ("tau", "ms.round", "ms.baseline", "speedup", "speedup_95", "exact")
    head = ["report", "decoding", "prompts", "tokens", "tau (95 %)", "ms/round", "ms/plain",
            "speedup (95 %)", "exact"]  # fmt: skip
    rows = [_row(out, report) for out, report in run.reports.items()]
    yield text_table("reports", head, rows, metric_definitions(*names))
    yield from automatic_parts(run.reports)


def automatic_parts(reports: Mapping[str, Report]) -> Iterator[Table]:
    """Yield what decode=auto has drafted, and its ledger."""
    summaries = {out: r.setting["auto"] for out, r in reports.items() if "auto" in r.setting}
    if not summaries:
        return
    head = ["report", "rounds", "time, s", "plain decoding, estimated, s", "bound, s",
            "answers within bound", "pauses, s"]  # fmt: skip
    rows = [
        [out, shares_of(one["choices"]),
         *(format_number(one[name]) for name in ("real", "plain", "bound")),
         f"{one['kept']} of {one['answers']}", format_number(one.get("paused", 0.0))]
        for out, one in summaries.items()
    ]  # fmt: skip
    names = ("auto.real", "auto.plain", "auto.bound", "auto.kept", "auto.paused")
    yield text_table("automatic drafts", head, rows, metric_definitions(*names))


def _row(out: str, report: Report) -> list[str]:
    total, temperature = report.summary, report.setting["temperature"]
    sampling = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return [
        out, f"{describe_policy(report.setting)}, {sampling}", str(total.prompts),
        str(total.tokens), with_interval(total.tau, total.tau_95), format_number(total.ms["round"]),
        format_number(total.ms["baseline"]), with_interval(total.speedup, total.speedup_95, "x"),
        exact_in_a_word(report.fields()),
    ]  # fmt: skip


def time_parts(run: RunFiles) -> Iterator[Part]:
    """Yield the time of a round, and predicted speedups."""
    if timed := {out: r for out, r in run.reports.items() if r.summary.rounds}:
        yield from _round_times(timed)
        yield from _predictions(timed)
    else:
        yield no_report_note(run)
    yield from _predicted_tau(run)


def _predicted_tau(run: RunFiles) -> Iterator[Part]:
    """Yield tau, predicted by teacher forcing on the decoded text, against the decoded one."""
    known = {out: r for out, r in run.reports.items() if r.forecast is not None}
    if not known:
        return
    title, definition = "tau, measured and predicted", metric_definitions("tau", "forecast")
    pairs = {out: (r.forecast or 0.0, r.summary.tau) for out, r in known.items()}
    yield from draw_predicted_tau(pairs)
    rows = [
        [out, str(r.setting["depth"]), format_number(r.summary.tau), format_number(r.forecast)]
        for out, r in known.items()
    ]
    yield text_table(title, ["report", "depth", "measured", "predicted"], rows, definition)


def draw_predicted_tau(pairs: Mapping[str, tuple[float, float | None]]) -> Iterator[Figure]:
    """Yield a scatter plot of predicted and decoded tau by name, if there are two or more."""
    groups = {name: [(tau, own)] for name, (tau, own) in pairs.items() if own is not None}
    if len(groups) < 2:
        return
    paint = points(groups, "predicted tau", "decoded tau", diagonal=True)
    definition = f"{metric_definitions('tau', 'forecast')} Dotted: where both are equal."
    yield draw("predicted and decoded tau", definition, paint)


def _round_times(timed: dict[str, Report]) -> Iterator[Part]:
    kinds = (*ROUND_PARTS, "other")
    split = {k: [r.summary.ms[k] or 0.0 for r in timed.values()] for k in kinds}
    names = (*(f"ms.{kind}" for kind in kinds), "ms.round", "shares", "overhead")
    definition = metric_definitions(*names)
    yield draw("time of a round", definition, stacked_bars(list(timed), split, "ms per round"))
    rows = [
        [out, *(_with_share(r.summary, kind) for kind in kinds),
         format_number(r.summary.ms["round"]),
         "-" if r.summary.overhead is None else f"{r.summary.overhead:.1%}"]
        for out, r in timed.items()
    ]  # fmt: skip
    yield text_table("time of a round", ["ms of", *kinds, "round", "overhead"], rows, definition)


def _with_share(total: Summary, part: str) -> str:
    share = total.shares[part]
    return format_number(total.ms[part]) + ("" if share is None else f" ({share:.0%})")


def _predictions(timed: dict[str, Report]) -> Iterator[Part]:
    """Yield the measured and the predicted speedups."""
    predicted = [
        (out, r, r.theory) for out, r in timed.items() if r.theory is not None and r.summary.speedup
    ]
    if not predicted:
        return
    values: dict[str, list[float | None]] = {
        "measured": [r.summary.speedup for _, r, _ in predicted],
        **{kind: [theory[key] for *_, theory in predicted] for kind, key in PREDICTED.items()},
    }
    title = "measured and predicted speedup"
    definition = f"{metric_definitions('speedup', 'speedup_95', 'alpha')} {THEORY}"
    intervals = {"measured": [r.summary.speedup_95 for _, r, _ in predicted]}
    kinds = {kind: speedups for kind, speedups in values.items() if any(speedups)}
    names = [out for out, *_ in predicted]
    paint = bars(names, kinds, "times as fast as plain decoding", intervals, 1.0)
    if are_several(kinds):
        yield draw(title, definition, paint)
    head = ["report", "measured", "from times", *PREDICTED, "alpha", "best gamma"]
    rows = [
        [out, format_number(r.summary.speedup, 2, "x"),
         *(format_number(theory[key], 2, "x") for key in ("from_times", *PREDICTED.values())),
         format_number(r.summary.alpha), format_number(theory["best_gamma"], 0)]
        for out, r, theory in predicted
    ]  # fmt: skip
    yield text_table(title, head, rows, definition)


def no_report_note(run: RunFiles) -> Note:
    return Note("There is no report.", f"outrider eval run.dir={run.folder}")


def with_interval(value: float | None, interval: Interval, unit: str = "") -> str:
    text = format_number(value, 2, unit)
    return text if interval is None else "{} ({:.2f}-{:.2f})".format(text, *interval)
