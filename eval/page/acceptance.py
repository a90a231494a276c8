"""Acceptance sections of a report page: by draft token and category, by context, by temperature.

Rates are those of the reports; intervals of accept@k and cond@k, and everything that depends on
the context, are computed from the rounds in the outputs.
"""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from outrider.eval.compare import decoding_label
from outrider.eval.page import run_files
from outrider.eval.page.elements import (
    Collapsible,
    Note,
    Part,
    Section,
    Table,
    from_console_table,
    metric_definitions,
    text_table,
)
from outrider.eval.page.figures import DrawFn, Interval, curves, draw
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


def acceptance_section(run: RunFiles) -> Section:
    """Return accept@k and cond@k of every report, for all prompts and by category."""
    parts: list[Part] = [_side_by_side(run)] if len(run.reports) > 1 else []
    for i, (out, report) in enumerate(run.reports.items()):
        details = list(_report_parts(run, out, report))
        title = f"{out}: {decoding_label(report.setting)}, {report.summary.prompts} prompts"
        parts += details if i == 0 else [Collapsible(title, details)]
    return Section("acceptance", "Acceptance", parts or no_report_note(run))


def _report_parts(run: RunFiles, out: str, report: Report) -> Iterator[Part]:
    rounds = run_files.answer_rounds(report)
    if not rounds:
        yield Note(f"{out} {NO_OUTPUTS}", f"outrider eval run.dir={run.folder} eval.out={out}")
    definition = f"{metric_definitions('accept_at', 'cond_at')} {INTERVALS}"
    if report.summary.accept_at:
        yield _by_token(out, report, rounds, definition)
    yield _by_category(f"accept@k: {out}", report, rounds, False, definition)
    speed = metric_definitions("tau", "ms.round", "ms.baseline", "speedup", "tokens_per_second")
    rest = [
        _by_category(f"cond@k: {out}", report, rounds, True, definition),
        from_console_table(speed_table(report), f"speed by category: {out}", speed),
    ]
    yield Collapsible("cond@k and speed by category", rest)


def _by_token(out: str, report: Report, rounds: Sequence[AnswerRounds], definition: str) -> Part:
    """Draw both rates over k, with intervals."""
    lines: dict[str, list[tuple[float, float]]] = {}
    intervals: dict[str, list[Interval]] = {}
    for name, conditional in (("accept@k", False), ("cond@k", True)):
        rates = report.summary.cond_at if conditional else report.summary.accept_at
        points = [(k, rate) for k, rate in enumerate(rates, start=1) if rate is not None]
        lines[name] = [(float(k), rate) for k, rate in points]
        intervals[name] = [_interval(report, rounds, k, conditional) for k, _ in points]
    paint = curves(lines, "draft token k", "share", intervals, marks=True)
    return draw(f"acceptance: {out}", definition, paint)


def _side_by_side(run: RunFiles) -> Part:
    lines = {
        out: [(float(k), rate) for k, rate in enumerate(r.summary.accept_at, start=1)]
        for out, r in run.reports.items()
        if r.summary.accept_at
    }
    paint = curves(lines, "draft token k", "accept@k", marks=True)
    return draw("accept@k of every report", metric_definitions("accept_at"), paint)


def _by_category(
    title: str,
    report: Report,
    rounds: Sequence[AnswerRounds],
    conditional: bool,
    definition: str,
) -> Table:
    """Return a row for every category, and one for all prompts."""
    categories = report.categories if len(report.categories) > 1 else {}
    groups = [(n, part, [r for r in rounds if r.category == n]) for n, part in categories.items()]
    rows = []
    for name, part, members in [*groups, ("all", report.summary, list(rounds))]:
        rates = enumerate(part.cond_at if conditional else part.accept_at, start=1)
        cells = [
            with_interval(rate, _interval(report, members, k, conditional)) for k, rate in rates
        ]
        tau = with_interval(part.tau, part.tau_95)
        rows.append([name, str(part.prompts), str(part.rounds), tau, *cells])
    deepest = len(report.summary.accept_at)
    rate_name = "cond" if conditional else "accept"
    columns = [f"{rate_name}@{k}" for k in range(1, deepest + 1)]
    head = ["prompts of", "n", "rounds", "tau (95 %)", *columns]
    return text_table(title, head, rows, definition)


def _interval(
    report: Report, rounds: Sequence[AnswerRounds], k: int, conditional: bool
) -> Interval:
    if not rounds:
        return None
    terms = run_files.accepted_at_least(k, k - 1 if conditional else 0)
    return run_files.interval(report, rounds, terms)


class ContextBin(NamedTuple):
    """Rounds that began after low..high-1 tokens, `mean_prefix` on average; their tau."""

    low: int
    high: int
    rounds: int
    mean_prefix: float
    tau: float
    interval: Interval


def context_section(run: RunFiles) -> Section:
    """Return tokens per round over the length of the text before it."""
    bins = {out: list(_bins(report)) for out, report in run.reports.items()}
    bins = {out: report_bins for out, report_bins in bins.items() if report_bins}
    title = "Acceptance by context length"
    if not bins:
        why = f"Not measured: no report has {MIN_ROUNDS} rounds in its outputs."
        return Section("context", title, [Note(why, f"outrider eval run.dir={run.folder}")])
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
    head = ["report", "tokens before", "rounds", "tau (95 %)"]
    figure = draw("tokens per round by context", definition, paint)
    return Section("context", title, [figure, text_table("by context", head, rows, definition)])


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


def temperature_section(run: RunFiles) -> Section:
    """Return the policies that were measured at several temperatures."""
    title = "Acceptance by temperature"
    policies = _by_policy(run)
    if not policies:
        command = f"outrider eval run.dir={run.folder} 'eval.grid=[chain@0,chain@0.5,chain@1]'"
        note = Note("Not measured: no policy was decoded at two temperatures.", command)
        return Section("temperature", title, [note])
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
    figure = draw("tokens per round by temperature", definition, _over_temperature(policies))
    table = text_table("by temperature", head, rows, definition)
    return Section("temperature", title, [figure, table])


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


def _over_temperature(policies: dict[str, list[Report]]) -> DrawFn:
    lines = {
        policy: [(float(r.setting["temperature"]), r.summary.tau or 0.0) for r in reports]
        for policy, reports in policies.items()
    }
    intervals = {p: [r.summary.tau_95 for r in reports] for p, reports in policies.items()}
    return curves(lines, "temperature", "tokens per round", intervals, marks=True)
