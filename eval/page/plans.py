"""Sections of a report page on plans and on the calibration of the drafter's confidence.

Plans are read from `<run.dir>/plan/`, the calibration from `<run.dir>/calibration.json`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.eval.page.elements import Collapsible, Note, Part, Section, text_table
from outrider.eval.page.figures import curves, draw, heatmap, points
from outrider.eval.page.run_files import RunFiles

COLUMNS = ("batch", "context", "shape", "tau", "draft_ms", "verify_ms", "round_ms", "plain_ms")
DEFINITION = (
    "Predicted: tokens per round (tau) times a plain step, over draft, verification and overhead "
    "of a round (eval/plan/surface.py)."
)


def plan_section(run: RunFiles) -> Section:
    """Return predicted speedups over drafts, batches and contexts, and their checks."""
    parts: list[Part] = []
    for name, plan in run.plans.items():
        parts += _surface(name, plan)
        if plan.get("checks"):
            parts += _checks(name, plan["checks"])
        parts += [Note(text) for text in plan.get("warnings", [])]
        rows = [[text] for text in plan["assumptions"]]
        table = text_table("assumptions", ["assumption"], rows, DEFINITION)
        parts.append(Collapsible(f"assumptions: {name}", [table]))
    if not parts:
        parts.append(Note("There is no plan.", f"outrider plan run.dir={run.folder}"))
    return Section("plan", "Predicted speedup", parts)


def _surface(name: str, plan: Mapping[str, Any]) -> Iterator[Part]:
    rows = plan["rows"]
    batches = sorted({row["batch"] for row in rows})
    depths = sorted({row["depth"] for row in rows if row["depth"]})
    speedups = [float(row["speedup"]) for row in rows if row["depth"]]
    limits = min(speedups, default=0.0), max(speedups, default=1.0)
    source = f"{name}, {plan['machine']}"
    for context in sorted({row["context"] for row in rows}):
        same_context = [row for row in rows if row["context"] == context]
        values = [[_best(same_context, batch, depth) for depth in depths] for batch in batches]
        paint = heatmap(values, ("depth", depths), ("batch", batches), limits)
        note = f"Each cell: the fastest chain or tree of that depth. Plan: {source}."
        yield draw(f"predicted speedup at context {context}", f"{DEFINITION} {note}", paint)
    cells = [
        [*(_format(row[column]) for column in COLUMNS), f"{row['speedup']:.2f}x"]
        for row in plan["recommended"]
    ]
    head = [column.replace("_", " ") for column in COLUMNS]
    definition = f"The fastest draft of every batch and context. {DEFINITION}"
    yield text_table(f"recommended: {source}", [*head, "speedup"], cells, definition)


def _best(rows: Sequence[Mapping[str, Any]], batch: int, depth: int) -> float | None:
    speedups = [float(r["speedup"]) for r in rows if (r["batch"], r["depth"]) == (batch, depth)]
    return max(speedups, default=None)


def _checks(name: str, checks: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
    title = f"predicted and measured: {name}"
    definition = "Settings of the plan that were decoded too, interleaved with plain decoding."
    pairs = {"settings": [(float(c["speedup_foreseen"]), float(c["speedup"])) for c in checks]}
    paint = points(pairs, "predicted speedup", "measured speedup", diagonal=True)
    yield draw(title, f"{definition} Dotted: where both are equal.", paint)
    head = ["draft", "batch", "context", "tau predicted", "tau", "speedup predicted", "speedup"]
    keys = ("shape", "batch", "context", "tau_foreseen", "tau", "speedup_foreseen", "speedup")
    rows = [[*(_format(check[key]) for key in keys), f"{check['off']:+.1%}"] for check in checks]
    yield text_table(title, [*head, "error"], rows, definition)


def _format(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def calibration_section(run: RunFiles) -> Section:
    """Return the drafter's accuracy over its confidence."""
    title = "Calibration of the drafter's confidence"
    if run.calibration is None:
        command = f"outrider report run.dir={run.folder} report.measure=true"
        return Section("calibration", title, [Note("Not measured.", command)])
    depths = run.calibration["depths"]
    definition = (
        "By ten bins of confidence, the drafter's top-1 softmax probability: how often its top-1 "
        "token equals the target's, on the target's greedy answers in the report "
        f"{run.calibration['report']} (eval/calibration.py). Dotted: calibrated."
    )
    lines = {
        f"depth {d['depth']}": [(float(b["confidence"]), float(b["right"])) for b in d["bins"]]
        for d in depths
        if d["bins"]
    }
    parts: list[Part] = [_stale_note(run)] if _is_stale(run) else []
    if lines:
        paint = curves(lines, "confidence", "accuracy", marks=True, diagonal=True)
        parts.append(draw("accuracy over confidence", definition, paint))
    parts += _calibration_tables(depths, definition)
    return Section("calibration", title, parts)


def _calibration_tables(depths: Sequence[Mapping[str, Any]], definition: str) -> Iterator[Part]:
    """Yield the error of every depth, and the bins of the figure."""
    head = ["depth", "guesses", "calibration error"]
    rows = [[str(d["depth"]), str(d["guesses"]), f"{d['error']:.3f}"] for d in depths]
    error = "Error: mean distance between confidence and accuracy, weighted by guesses."
    yield text_table("calibration by depth", head, rows, error)
    bins = [
        [str(d["depth"]), f"{b['from']:.1f}", str(b["guesses"]), f"{b['confidence']:.3f}",
         f"{b['right']:.3f}"]
        for d in depths
        for b in d["bins"]
    ]  # fmt: skip
    head = ["depth", "bin from", "guesses", "mean confidence", "accuracy"]
    yield Collapsible("bins", [text_table("bins of confidence", head, bins, definition)])


def _is_stale(run: RunFiles) -> bool:
    measured = {report.setting["fingerprints"]["drafter"] for report in run.reports.values()}
    return run.calibration is not None and run.calibration["drafter"] not in measured


def _stale_note(run: RunFiles) -> Note:
    command = f"outrider report run.dir={run.folder} report.measure=true"
    return Note("It was measured on another drafter than the reports.", command)
