"""Speed sections of a report page: all reports, the time of a round, predicted speedups."""

from collections.abc import Iterator, Sequence

from outrider.eval.metrics import ROUND_PARTS, Summary
from outrider.eval.page.elements import Note, Part, Section, metric_definitions, text_table
from outrider.eval.page.figures import Interval, bars, draw, stacked_bars
from outrider.eval.page.run_files import RunFiles
from outrider.eval.report import Report, describe_policy, format_number

THEORY = (
    "from times: tau x plain step / round, equal to the measured one. no overhead: the same with "
    "verify, commit and other at no cost. free verification: and a forward at the cost of a plain "
    "step. formula: Leviathan et al., one alpha at every depth (chains). best gamma: chain length "
    "with the largest predicted speedup, at most the measured depth."
)


def speed_section(run: RunFiles) -> Section:
    """Return speedup and tokens per round of every report."""
    reports = list(run.reports.values())
    if not reports:
        return Section("speed", "Speed", no_report_note(run))
    parts: list[Part] = []
    for name, xlabel, values, intervals in (
        ("speedup", "times as fast as plain decoding", [r.summary.speedup for r in reports],
         [r.summary.speedup_95 for r in reports]),
        ("tau", "tokens per round", [r.summary.tau for r in reports],
         [r.summary.tau_95 for r in reports]),
    ):  # fmt: skip
        if any(values):
            level = 1.0 if name == "speedup" else None
            paint = bars(list(run.reports), {name: values}, xlabel, {name: intervals}, level)
            parts.append(draw(xlabel, metric_definitions(name, f"{name}_95"), paint))
    names = ("tau", "ms.round", "ms.baseline", "speedup", "speedup_95", "exact")
    head = ["report", "decoding", "prompts", "tokens", "tau (95 %)", "ms/round", "ms/plain",
            "speedup (95 %)", "exact"]  # fmt: skip
    rows = [_row(out, report) for out, report in run.reports.items()]
    parts.append(text_table("reports", head, rows, metric_definitions(*names)))
    return Section("speed", "Speed", parts)


def _row(out: str, report: Report) -> list[str]:
    total = report.summary
    return [
        out, describe_policy(report.setting) + f", {sampling_label(report)}", str(total.prompts),
        str(total.tokens), with_interval(total.tau, total.tau_95), format_number(total.ms["round"]),
        format_number(total.ms["baseline"]), with_interval(total.speedup, total.speedup_95, "x"),
        {True: "yes", False: "NO", None: "-"}[report.exact],
    ]  # fmt: skip


def time_section(run: RunFiles) -> Section:
    """Return the time of a round, and predicted speedups."""
    timed = {out: r for out, r in run.reports.items() if r.summary.rounds}
    parts: list[Part] = (
        [*_round_times(timed), *_predictions(timed)] if timed else no_report_note(run)
    )
    forecasts = [
        [out, format_number(r.summary.tau), format_number(r.forecast)]
        for out, r in run.reports.items()
        if r.forecast is not None
    ]
    if forecasts:
        head, definition = (
            ["report", "measured", "predicted"],
            metric_definitions("tau", "forecast"),
        )
        parts.append(text_table("tau, measured and predicted", head, forecasts, definition))
    return Section("time", "Time, measured and predicted", parts)


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
    reports = {out: r for out, r in timed.items() if r.theory is not None and r.summary.speedup}
    if not reports:
        return
    theory = [r.theory or {} for r in reports.values()]
    values: dict[str, Sequence[float | None]] = {
        "measured": [r.summary.speedup for r in reports.values()],
        "no overhead": [t["no_overhead"] for t in theory],
        "free verification": [t["free_verify"] for t in theory],
        "formula": [t["iid"] for t in theory],
    }
    title = "measured and predicted speedup"
    definition = f"{metric_definitions('speedup', 'speedup_95', 'alpha')} {THEORY}"
    intervals = {"measured": [r.summary.speedup_95 for r in reports.values()]}
    kinds = {kind: speedups for kind, speedups in values.items() if any(speedups)}
    paint = bars(list(reports), kinds, "times as fast as plain decoding", intervals, 1.0)
    yield draw(title, definition, paint)
    head = ["report", "measured", "from times", "no overhead", "free verification", "formula",
            "alpha", "best gamma"]  # fmt: skip
    keys = ("from_times", "no_overhead", "free_verify", "iid")
    rows = [
        [out, format_number(r.summary.speedup, 2, "x"),
         *(format_number(t[key], 2, "x") for key in keys),
         format_number(r.summary.alpha), format_number(t["best_gamma"], 0)]
        for (out, r), t in zip(reports.items(), theory, strict=True)
    ]  # fmt: skip
    yield text_table(title, head, rows, definition)


def no_report_note(run: RunFiles) -> list[Part]:
    """Return the note of a run without reports."""
    return [Note("There is no report.", f"outrider eval run.dir={run.folder}")]


def sampling_label(report: Report) -> str:
    temperature = report.setting["temperature"]
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def with_interval(value: float | None, interval: Interval, unit: str = "") -> str:
    """Format a number with its interval, if there is one."""
    text = format_number(value, 2, unit)
    return text if interval is None else "{} ({:.2f}-{:.2f})".format(text, *interval)
