"""Sections of a report page on plans and on the calibration of the drafter's confidence."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.eval.page.elements import Collapsible, Note, Part, text_table
from outrider.eval.page.figures import curves, draw, heatmap, points
from outrider.eval.page.run_files import RunFiles
from outrider.eval.report_tables import draft_search

COLUMNS = ("batch", "context", "shape", "tau", "draft_ms", "verify_ms", "round_ms", "plain_ms")
DEFINITION = (
    "Predicted: tokens per round (tau) times a plain step, over draft, verification and overhead "
    "of a round (eval/plan/surface.py)."
)


def plan_parts(run: RunFiles) -> Iterator[Part]:
    """Yield predicted speedups over drafts, batches and contexts, and their checks."""
    if not run.plans:
        yield Note("There is no plan.", draft_search(run.drafter, run.folder))
    for name, plan in run.plans.items():
        yield from _surface(name, plan)
        if plan.get("checks"):
            yield from _checks(name, plan["checks"])
        yield from map(Note, plan.get("warnings", []))
        rows = [[text] for text in plan["assumptions"]]
        table = text_table("assumptions", ["assumption"], rows, DEFINITION)
        yield Collapsible(f"assumptions: {name}", [table])


def _surface(name: str, plan: Mapping[str, Any]) -> Iterator[Part]:
    rows = plan["rows"]
    batches = sorted({row["batch"] for row in rows})
    depths = sorted({row["depth"] for row in rows if row["depth"]})
    speedups = [float(row["speedup"]) for row in rows if row["depth"]]
    limits = min(speedups, default=0.0), max(speedups, default=1.0)
    source = f"{name}, {plan['machine']}"
    for context in sorted({row["context"] for row in rows}):
        same_context = [row for row in rows if row["context"] == context]
        best: dict[tuple[int, int], float] = {}
        for row in same_context:
            cell = row["batch"], row["depth"]
            best[cell] = max(float(row["speedup"]), best.get(cell, 0.0))
        values = [[best.get((batch, depth)) for depth in depths] for batch in batches]
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


def _checks(name: str, checks: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
    title = f"predicted and measured: {name}"
    definition = "Settings of the plan that were decoded too, interleaved with plain decoding."
    pairs = {"settings": [(float(c["speedup_predicted"]), float(c["speedup"])) for c in checks]}
    paint = points(pairs, "predicted speedup", "measured speedup", diagonal=True)
    yield draw(title, f"{definition} Dotted: where both are equal.", paint)
    head = ["draft", "batch", "context", "tau predicted", "tau", "speedup predicted", "speedup"]
    keys = ("shape", "batch", "context", "tau_predicted", "tau", "speedup_predicted", "speedup")
    rows = [[*(_format(check[key]) for key in keys), f"{check['error']:+.1%}"] for check in checks]
    yield text_table(title, [*head, "error"], rows, definition)


def _format(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def calibration_parts(run: RunFiles) -> Iterator[Part]:
    """Yield the drafter's accuracy over its confidence, and its error at every depth."""
    command = f"outrider report run.dir={run.folder} report.measure=true"
    if run.calibration is None:
        yield Note("Not measured.", command)
        return
    measured = {report.setting["fingerprints"]["drafter"] for report in run.reports.values()}
    if run.calibration["drafter"] not in measured:
        yield Note("It was measured on another drafter than the reports.", command)
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
    if lines:
        paint = curves(lines, "confidence", "accuracy", marks=True, diagonal=True)
        yield draw("accuracy over confidence", definition, paint)
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
