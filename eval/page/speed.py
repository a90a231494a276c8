"""What a page says of speed: every report on a line, a round's time, what theory makes of it.

All numbers are those of the reports.
"""

from collections.abc import Iterator, Sequence

from outrider.eval.metrics import PARTS, Summary
from outrider.eval.page.elements import Note, Part, Section, meanings, table
from outrider.eval.page.figures import Span, bars, draw, stacks
from outrider.eval.page.run_files import Run
from outrider.eval.report import Report, describe_policy, number

THEORY = (
    "from times: tau x plain step / round, which restates the measured one. no overhead: the same "
    "with verify, commit and other at no cost. free verification: moreover a forward at a plain "
    "step's cost. formula: Leviathan et al., one alpha at every depth (chains). best gamma: chain "
    "length with the largest predicted speedup, no deeper than was measured."
)


def measured_of(run: Run) -> Section:
    """Speedup and tokens per round of every report."""
    reports = list(run.reports.values())
    if not reports:
        return Section("speed", "Speed", nothing(run))
    parts: list[Part] = []
    for name, across, values, spans in (
        ("speedup", "times as fast as plain decoding", [r.summary.speedup for r in reports],
         [r.summary.speedup_95 for r in reports]),
        ("tau", "tokens per round", [r.summary.tau for r in reports],
         [r.summary.tau_95 for r in reports]),
    ):  # fmt: skip
        if any(values):
            level = 1.0 if name == "speedup" else None
            paint = bars(list(run.reports), {name: values}, across, {name: spans}, level)
            parts.append(draw(across, meanings(name, f"{name}_95"), paint))
    told = meanings("tau", "ms.round", "ms.baseline", "speedup", "speedup_95", "exact")
    head = ["report", "how", "prompts", "tokens", "tau (95 %)", "ms/round", "ms/plain",
            "speedup (95 %)", "exact"]  # fmt: skip
    rows = [_line(out, report) for out, report in run.reports.items()]
    parts.append(table("reports", head, rows, told))
    return Section("speed", "Speed", parts)


def _line(out: str, report: Report) -> list[str]:
    total = report.summary
    return [
        out, describe_policy(report.setting) + f", {drawn(report)}", str(total.prompts),
        str(total.tokens), with_span(total.tau, total.tau_95), number(total.ms["round"]),
        number(total.ms["baseline"]), with_span(total.speedup, total.speedup_95, "x"),
        {True: "yes", False: "NO", None: "-"}[report.exact],
    ]  # fmt: skip


def times_of(run: Run) -> Section:
    """Where a round's time goes, and what theory makes of it."""
    timed = {out: r for out, r in run.reports.items() if r.summary.rounds}
    parts: list[Part] = [*_times(timed), *_foreseen(timed)] if timed else nothing(run)
    forecasts = [
        [out, number(r.summary.tau), number(r.forecast)]
        for out, r in run.reports.items()
        if r.forecast is not None
    ]
    if forecasts:
        head = ["report", "tau measured", "tau foreseen"]
        parts.append(table("tau foreseen", head, forecasts, meanings("tau", "forecast")))
    return Section("time", "Time, measured and predicted", parts)


def _times(timed: dict[str, Report]) -> Iterator[Part]:
    kinds = (*PARTS, "other")
    split = {k: [r.summary.ms[k] or 0.0 for r in timed.values()] for k in kinds}
    told = meanings(*(f"ms.{kind}" for kind in kinds), "ms.round", "shares", "overhead")
    yield draw("a round's time", told, stacks(list(timed), split, "ms per round"))
    rows = [
        [out, *(_with_share(r.summary, kind) for kind in kinds), number(r.summary.ms["round"]),
         "-" if r.summary.overhead is None else f"{r.summary.overhead:.1%}"]
        for out, r in timed.items()
    ]  # fmt: skip
    yield table("a round's time", ["ms of", *kinds, "round", "overhead"], rows, told)


def _with_share(total: Summary, part: str) -> str:
    share = total.shares[part]
    return number(total.ms[part]) + ("" if share is None else f" ({share:.0%})")


def _foreseen(timed: dict[str, Report]) -> Iterator[Part]:
    """The measured speedup beside those that theory gives."""
    known = {out: r for out, r in timed.items() if r.theory is not None and r.summary.speedup}
    if not known:
        return
    theory = [r.theory or {} for r in known.values()]
    values: dict[str, Sequence[float | None]] = {
        "measured": [r.summary.speedup for r in known.values()],
        "no overhead": [t["no_overhead"] for t in theory],
        "free verification": [t["free_verify"] for t in theory],
        "formula": [t["iid"] for t in theory],
    }
    told = f"{meanings('speedup', 'speedup_95', 'alpha')} {THEORY}"
    spans = {"measured": [r.summary.speedup_95 for r in known.values()]}
    shown = {kind: found for kind, found in values.items() if any(found)}
    paint = bars(list(known), shown, "times as fast as plain decoding", spans, 1.0)
    yield draw("measured against predicted speedup", told, paint)
    head = ["report", "measured", "from times", "no overhead", "free verification", "formula",
            "alpha", "best gamma"]  # fmt: skip
    rows = [
        [out, number(r.summary.speedup, 2, "x"),
         *(number(t[k], 2, "x") for k in ("from_times", "no_overhead", "free_verify", "iid")),
         number(r.summary.alpha), number(t["best_gamma"], 0)]
        for (out, r), t in zip(known.items(), theory, strict=True)
    ]  # fmt: skip
    yield table("measured against predicted speedup", head, rows, told)


def nothing(run: Run) -> list[Part]:
    """Where there is no report."""
    return [Note("Nothing was decoded yet.", f"outrider eval run.dir={run.folder}")]


def drawn(report: Report) -> str:
    heat = report.setting["temperature"]
    return "greedy" if heat == 0 else f"temperature {heat:g}"


def with_span(value: float | None, span: Span, unit: str = "") -> str:
    """A number, and its interval where there is one."""
    return number(value, 2, unit) + ("" if span is None else " ({:.2f}-{:.2f})".format(*span))
