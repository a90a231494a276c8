"""Acceptance sections of a report page: by draft token and category, by context, by temperature.

Rates are those of the reports; intervals of accept@k and cond@k, and what depends on the context,
are computed from the rounds in the outputs.
"""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from outrider.conf.quantities import format_count
from outrider.eval.compare import decoding_label
from outrider.eval.page import run_files
from outrider.eval.page.elements import (
    Collapsible,
    Note,
    Part,
    Table,
    from_console_table,
    metric_definitions,
    text_table,
)
from outrider.eval.page.figures import Interval, curves, draw
from outrider.eval.page.run_files import AnswerRounds, RunFiles
from outrider.eval.page.speed import no_report_note, with_interval
from outrider.eval.report import Report, describe_policy, format_number
from outrider.eval.report_tables import speed_table

MIN_ROUNDS = 20  # of a bin in the context figure
INTERVALS = (
    "Intervals: 95 %, bootstrap over dialogues; too narrow for a handful of dialogues, missing "
    "for a single one or if some resample has no such round."
)
NO_OUTPUTS = "has no file of outputs, so no intervals and no acceptance by context."


def acceptance_parts(run: RunFiles) -> Iterator[Part]:
    """Yield accept@k and cond@k of every report, for all prompts and by category."""
    if not run.reports:
        yield no_report_note(run)
    if len(run.reports) > 1:
        rates = {out: _points(report.summary.accept_at) for out, report in run.reports.items()}
        lines = {out: points for out, points in rates.items() if points}
        paint = curves(lines, "draft token k", "accept@k", marks=True)
        if lines:
            yield draw("accept@k of every report", metric_definitions("accept_at"), paint)
    for i, (out, report) in enumerate(run.reports.items()):
        details = list(_report_parts(run, out, report))
        prompts = format_count(report.summary.prompts, "prompt")
        title = f"{out}: {decoding_label(report.setting)}, {prompts}"
        yield from details if i == 0 else [Collapsible(title, details)]


def _report_parts(run: RunFiles, out: str, report: Report) -> Iterator[Part]:
    rounds = run_files.answer_rounds(report)
    if not rounds:
        yield Note(f"{out} {NO_OUTPUTS}", f"outrider eval run.dir={run.folder} eval.out={out}")
    definition = f"{metric_definitions('accept_at', 'cond_at')} {INTERVALS}"
    if _points(report.summary.accept_at):
        yield _by_token(out, report, rounds, definition)
    yield _by_category("accept", out, report, rounds, definition)
    speed = metric_definitions("tau", "ms.round", "ms.baseline", "speedup", "tokens_per_second")
    rest = [
        _by_category("cond", out, report, rounds, definition),
        from_console_table(speed_table(report), f"speed by category: {out}", speed),
    ]
    yield Collapsible("cond@k and speed by category", rest)


def _by_token(out: str, report: Report, rounds: Sequence[AnswerRounds], definition: str) -> Part:
    """Draw both rates over k, with intervals."""
    lines, intervals = dict[str, list[tuple[int, float]]](), dict[str, list[Interval]]()
    for rate in ("accept", "cond"):
        lines[f"{rate}@k"] = points = _points(getattr(report.summary, f"{rate}_at"))
        intervals[f"{rate}@k"] = [_interval(rate, k, report, rounds) for k, _ in points]
    paint = curves(lines, "draft token k", "share", intervals, marks=True)
    return draw(f"acceptance: {out}", definition, paint)


def _points(rates: Sequence[float | None]) -> list[tuple[int, float]]:
    return [(k, rate) for k, rate in enumerate(rates, start=1) if rate is not None]


def _by_category(
    rate: str, out: str, report: Report, rounds: Sequence[AnswerRounds], definition: str
) -> Table:
    """Return a row for every category, and one for all prompts; `rate` is "accept" or "cond"."""
    categories = report.categories if len(report.categories) > 1 else {}
    groups = [(n, part, [r for r in rounds if r.category == n]) for n, part in categories.items()]
    rows = []
    for name, part, members in [*groups, ("all", report.summary, list(rounds))]:
        cells = [
            with_interval(value, _interval(rate, k, report, members))
            for k, value in enumerate(getattr(part, f"{rate}_at"), start=1)
        ]
        tau = with_interval(part.tau, part.tau_95)
        rows.append([name, str(part.prompts), str(part.rounds), tau, *cells])
    columns = [f"{rate}@{k}" for k in range(1, len(report.summary.accept_at) + 1)]
    head = ["prompts of", "n", "rounds", "tau (95 %)", *columns]
    return text_table(f"{rate}@k: {out}", head, rows, definition)


def _interval(rate: str, k: int, report: Report, rounds: Sequence[AnswerRounds]) -> Interval:
    terms = run_files.accepted_at_least(k, k - 1 if rate == "cond" else 0)
    return run_files.interval(report, rounds, terms)


class ContextBin(NamedTuple):
    """Rounds that began after `low` to `high` - 1 tokens, `mean_prefix` on average; their tau."""

    low: int
    high: int
    rounds: int
    mean_prefix: float
    tau: float
    interval: Interval


def context_parts(run: RunFiles) -> Iterator[Part]:
    """Yield tokens per round over the length of the text before it."""
    all_bins = ((out, list(_bins(report))) for out, report in run.reports.items())
    bins = {out: of_report for out, of_report in all_bins if of_report}
    if not bins:
        why = f"Not measured: no report has {MIN_ROUNDS} rounds in its outputs."
        yield Note(why, f"outrider eval run.dir={run.folder}")
        return
    definition = (
        "tau of the rounds that began after so many tokens, prompt included; bins double, those of "
        f"fewer than {MIN_ROUNDS} rounds are left out. {INTERVALS} The text differs from bin to "
        "bin as well as its length: answers end, and long ones are of other kinds."
    )
    lines = {out: [(b.mean_prefix, b.tau) for b in bs] for out, bs in bins.items()}
    intervals = {out: [b.interval for b in bs] for out, bs in bins.items()}
    rows = [
        [out, f"{b.low}-{b.high - 1}", str(b.rounds), with_interval(b.tau, b.interval)]
        for out, bs in bins.items()
        for b in bs
    ]
    paint = curves(lines, "tokens before the round", "tokens per round", intervals, marks=True)
    yield draw("tokens per round by context", definition, paint)
    head = ["report", "tokens before", "rounds", "tau (95 %)"]
    yield text_table("by context", head, rows, definition)


def _bins(report: Report) -> Iterator[ContextBin]:
    """Yield the bins 1-31, 32-63, 64-127, .. that have at least `MIN_ROUNDS` rounds."""
    rounds = run_files.answer_rounds(report)
    lengths = [length for answer in rounds for length in answer.prefix_lengths]
    low, high = 1, 32
    while low <= max(lengths, default=0):
        terms = run_files.emitted_after(low, high)
        inside = [length for length in lengths if low <= length < high]
        rate = run_files.ratio_of_sums(rounds, terms)
        if rate is not None and len(inside) >= MIN_ROUNDS:
            interval = run_files.interval(report, rounds, terms)
            yield ContextBin(low, high, len(inside), fmean(inside), rate, interval)
        low, high = high, 2 * high


def temperature_parts(run: RunFiles) -> Iterator[Part]:
    """Yield the policies that were measured at several temperatures."""
    policies = _by_policy(run)
    if not policies:
        command = f"outrider eval run.dir={run.folder} 'eval.grid=[chain@0,chain@0.5,chain@1]'"
        yield Note("Not measured: no policy was decoded at two temperatures.", command)
        return
    definition = (
        f"{metric_definitions('tau', 'tau_95', 'accept_at')} At temperature 0 both models use "
        "their top-1 tokens; above it the report's rule verifies (column: rule)."
    )
    rows = [
        [policy, f"{r.setting['temperature']:g}", str(r.setting.get("verify", "-")),
         with_interval(r.summary.tau, r.summary.tau_95),
         format_number(next(iter(r.summary.accept_at), None)),
         with_interval(r.summary.speedup, r.summary.speedup_95, "x")]
        for policy, reports in policies.items()
        for r in reports
    ]  # fmt: skip
    head = ["policy", "temperature", "rule", "tau (95 %)", "accept@1", "speedup (95 %)"]
    lines = {
        policy: [(float(r.setting["temperature"]), r.summary.tau or 0.0) for r in reports]
        for policy, reports in policies.items()
    }
    intervals = {p: [r.summary.tau_95 for r in reports] for p, reports in policies.items()}
    paint = curves(lines, "temperature", "tokens per round", intervals, marks=True)
    yield draw("tokens per round by temperature", definition, paint)
    yield text_table("by temperature", head, rows, definition)


def _by_policy(run: RunFiles) -> dict[str, list[Report]]:
    """Return the reports of each policy by temperature, if there are two temperatures."""
    policies: dict[str, list[Report]] = {}
    for report in sorted(run.reports.values(), key=lambda r: float(r.setting["temperature"])):
        if report.summary.tau is not None:
            policies.setdefault(describe_policy(report.setting), []).append(report)
    return {
        policy: reports
        for policy, reports in policies.items()
        if len({report.setting["temperature"] for report in reports}) > 1
    }
