"""What a page says of acceptance: by drafted token and category, by context, by temperature.

Rates are the reports'; intervals of accept@k and cond@k, and all that depends on the context, come
from the rounds in their outputs.
"""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from outrider.eval.compare import shape
from outrider.eval.page import run_files as folder
from outrider.eval.page.elements import (
    Fold,
    Note,
    Part,
    Section,
    Table,
    meanings,
    of_console,
    table,
)
from outrider.eval.page.figures import Paint, Span, curves, draw
from outrider.eval.page.run_files import Rounds, Run
from outrider.eval.page.speed import nothing, with_span
from outrider.eval.report import Report, describe_policy, number, speed_table

FEWEST = 20  # rounds behind a number of the context's figure
SPAN = (
    "Intervals: 95 %, bootstrap over dialogues; too narrow where there are a handful of them, none "
    "of a single one, or where some draws of them have no such round."
)
WITHOUT = "has no file of outputs, so no intervals and nothing by context."


def acceptance_of(run: Run) -> Section:
    """accept@k and cond@k of every report, for all prompts and by category."""
    parts: list[Part] = [_side_by_side(run)] if len(run.reports) > 1 else []
    for i, (out, report) in enumerate(run.reports.items()):
        about = list(_of_report(run, out, report))
        parts += about if i == 0 else [Fold(f"{out}: {_how(report)}", about)]
    return Section("acceptance", "Acceptance", parts or nothing(run))


def _of_report(run: Run, out: str, report: Report) -> Iterator[Part]:
    rounds = folder.rounds_of(report)
    if not rounds:
        yield Note(f"{out} {WITHOUT}", f"outrider eval run.dir={run.folder} eval.out={out}")
    told = f"{meanings('accept_at', 'cond_at')} {SPAN}"
    if report.summary.accept_at:
        yield _by_token(out, report, rounds, told)
    yield _by_category(f"accept@k: {out}", report, rounds, False, told)
    meant = meanings("tau", "ms.round", "ms.baseline", "speedup", "tokens_per_second")
    rest = [
        _by_category(f"cond@k: {out}", report, rounds, True, told),
        of_console(speed_table(report), f"speed by category: {out}", meant),
    ]
    yield Fold("cond@k and speed by category", rest)


def _by_token(out: str, report: Report, rounds: Sequence[Rounds], told: str) -> Part:
    """Both rates over k, with intervals."""
    lines: dict[str, list[tuple[float, float]]] = {}
    spans: dict[str, list[Span]] = {}
    for name, given in (("accept@k", False), ("cond@k", True)):
        rates = report.summary.cond_at if given else report.summary.accept_at
        found = [(k, rate) for k, rate in enumerate(rates, start=1) if rate is not None]
        lines[name] = [(float(k), rate) for k, rate in found]
        spans[name] = [_interval(report, rounds, k, given) for k, _ in found]
    paint = curves(lines, "drafted token k", "share", spans, marks=True)
    return draw(f"acceptance: {out}", told, paint)


def _side_by_side(run: Run) -> Part:
    lines = {
        out: [(float(k), rate) for k, rate in enumerate(r.summary.accept_at, start=1)]
        for out, r in run.reports.items()
        if r.summary.accept_at
    }
    paint = curves(lines, "drafted token k", "accept@k", marks=True)
    return draw("accept@k of every report", meanings("accept_at"), paint)


def _by_category(
    title: str, report: Report, rounds: Sequence[Rounds], given: bool, told: str
) -> Table:
    """A line for every category, and one for all prompts."""
    named = report.categories if len(report.categories) > 1 else {}
    groups = [(n, part, [one for one in rounds if one.category == n]) for n, part in named.items()]
    rows = []
    for name, part, of in [*groups, ("all", report.summary, list(rounds))]:
        rates = enumerate(part.cond_at if given else part.accept_at, start=1)
        cells = [with_span(rate, _interval(report, of, k, given)) for k, rate in rates]
        tau = with_span(part.tau, part.tau_95)
        rows.append([name, str(part.prompts), str(part.rounds), tau, *cells])
    deepest = len(report.summary.accept_at)
    rate = "cond" if given else "accept"
    columns = [f"{rate}@{k}" for k in range(1, deepest + 1)]
    return table(title, ["prompts of", "n", "rounds", "tau (95 %)", *columns], rows, told)


def _interval(report: Report, rounds: Sequence[Rounds], k: int, given: bool) -> Span:
    if not rounds:
        return None
    return folder.interval(report, rounds, folder.accepted_first(k, k - 1 if given else 0))


class Bin(NamedTuple):
    """Rounds that began behind low..high-1 tokens, `behind` on average; their tau."""

    low: int
    high: int
    rounds: int
    behind: float
    tau: float
    span: Span


def contexts_of(run: Run) -> Section:
    """Tokens per round behind more and more text."""
    found = {out: list(_bins(report)) for out, report in run.reports.items()}
    found = {out: bins for out, bins in found.items() if bins}
    title = "Acceptance against context length"
    if not found:
        why = f"Not measured: no report has {FEWEST} rounds in its outputs."
        return Section("context", title, [Note(why, f"outrider eval run.dir={run.folder}")])
    told = (
        "tau of the rounds that began behind so many tokens, those of the prompt in; bins double, "
        f"those of fewer than {FEWEST} rounds are left out. {SPAN} The text differs from bin to "
        "bin as well as its length: answers end, and long ones are of other kinds."
    )
    lines = {out: [(b.behind, b.tau) for b in bins] for out, bins in found.items()}
    spans = {out: [b.span for b in bins] for out, bins in found.items()}
    rows = [
        [out, f"{b.low}-{b.high - 1}", str(b.rounds), with_span(b.tau, b.span)]
        for out, bins in found.items()
        for b in bins
    ]
    paint = curves(lines, "tokens in front of the round", "tokens per round", spans, marks=True)
    head = ["report", "tokens in front", "rounds", "tau (95 %)"]
    shown = draw("tokens per round by context", told, paint)
    return Section("context", title, [shown, table("by context", head, rows, told)])


def _bins(report: Report) -> Iterator[Bin]:
    """1-31, 32-63, 64-127, .. as far as there is text, where there are rounds enough."""
    rounds = folder.rounds_of(report)
    longest = max((at for one in rounds for at in one.behind), default=0)
    low, high = 1, 32
    while low <= longest:
        terms = folder.emitted_behind(low, high)
        here = [at for one in rounds for at in one.behind if low <= at < high]
        rate = folder.share(rounds, terms)
        if rate is not None and len(here) >= FEWEST:
            span = folder.interval(report, rounds, terms)
            yield Bin(low, high, len(here), fmean(here), rate, span)
        low, high = high, 2 * high


def temperatures_of(run: Run) -> Section:
    """Policies that were measured at several temperatures."""
    title = "Acceptance against temperature"
    found = _by_policy(run)
    if not found:
        command = f"outrider eval run.dir={run.folder} 'eval.grid=[chain@0,chain@0.5,chain@1]'"
        note = Note("Not measured: no policy was decoded at two temperatures.", command)
        return Section("temperature", title, [note])
    told = (
        f"{meanings('tau', 'tau_95', 'accept_at')} At temperature 0 both models say their "
        "favourites; above it the report's rule verifies (column: rule)."
    )
    rows = [
        [policy, f"{r.setting['temperature']:g}", str(r.setting.get("verify", "-")),
         with_span(r.summary.tau, r.summary.tau_95), number(next(iter(r.summary.accept_at), None)),
         with_span(r.summary.speedup, r.summary.speedup_95, "x")]
        for policy, reports in found.items()
        for r in reports
    ]  # fmt: skip
    head = ["policy", "temperature", "rule", "tau (95 %)", "accept@1", "speedup (95 %)"]
    shown = draw("tokens per round by temperature", told, _over_temperature(found))
    return Section("temperature", title, [shown, table("by temperature", head, rows, told)])


def _by_policy(run: Run) -> dict[str, list[Report]]:
    """Reports that drafted alike, in the order of temperature, where there are two of them."""
    found: dict[str, list[Report]] = {}
    for report in sorted(run.reports.values(), key=lambda r: float(r.setting["temperature"])):
        if report.summary.tau is not None:
            found.setdefault(describe_policy(report.setting), []).append(report)
    return {
        policy: reports
        for policy, reports in found.items()
        if len({report.setting["temperature"] for report in reports}) > 1
    }


def _over_temperature(found: dict[str, list[Report]]) -> Paint:
    lines = {
        policy: [(float(r.setting["temperature"]), r.summary.tau or 0.0) for r in reports]
        for policy, reports in found.items()
    }
    spans = {policy: [r.summary.tau_95 for r in reports] for policy, reports in found.items()}
    return curves(lines, "temperature", "tokens per round", spans, marks=True)


def _how(report: Report) -> str:
    return f"{shape(report.setting)}, {report.summary.prompts} prompts"
