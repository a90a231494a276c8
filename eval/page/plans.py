"""What a page says of plans and of the drafter's own confidence.

Plans lie in `<run.dir>/plan/`, the calibration in `<run.dir>/calibration.json`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.eval.page.elements import Fold, Note, Part, Section, table
from outrider.eval.page.figures import curves, draw, heat, points
from outrider.eval.page.run_files import Run

COLUMNS = ("batch", "context", "shape", "tau", "draft_ms", "verify_ms", "round_ms", "plain_ms")
MEANT = (
    "Foreseen: tokens per round (tau) times a plain step, over draft, verification and overhead of "
    "a round (eval/plan/surface.py)."
)


def plans_of(run: Run) -> Section:
    """The surface of speedup over drafts, batches and contexts, and whether it came true."""
    parts: list[Part] = []
    for name, plan in run.plans.items():
        parts += _surface(name, plan)
        if plan.get("checks"):
            parts += _checks(name, plan["checks"])
        parts += [Note(text) for text in plan.get("warnings", [])]
        said = [[text] for text in plan["assumptions"]]
        parts.append(Fold(f"assumptions: {name}", [table("assumptions", ["of it"], said, MEANT)]))
    if not parts:
        parts.append(Note("No plan was made.", f"outrider plan run.dir={run.folder}"))
    return Section("plan", "Speedup surface", parts)


def _surface(name: str, plan: Mapping[str, Any]) -> Iterator[Part]:
    rows = plan["rows"]
    batches = sorted({row["batch"] for row in rows})
    depths = sorted({row["depth"] for row in rows if row["depth"]})
    drafted = [float(row["speedup"]) for row in rows if row["depth"]]
    ends = min(drafted, default=0.0), max(drafted, default=1.0)
    where = f"{name}, {plan['machine']}"
    for context in sorted({row["context"] for row in rows}):
        here = [row for row in rows if row["context"] == context]
        values = [[_best(here, batch, depth) for depth in depths] for batch in batches]
        paint = heat(values, ("levels drafted", depths), ("prompts at once", batches), ends)
        told = f"{MEANT} Each field: the fastest chain or tree of that many levels. Plan: {where}."
        yield draw(f"speedup foreseen behind {context} tokens", told, paint)
    told = f"The fastest draft of every batch and context. {MEANT}"
    cells = [
        [*(_said(row[column]) for column in COLUMNS), f"{row['speedup']:.2f}x"]
        for row in plan["recommended"]
    ]
    head = [column.replace("_", " ") for column in COLUMNS]
    yield table(f"recommended: {where}", [*head, "speedup"], cells, told)


def _best(rows: Sequence[Mapping[str, Any]], batch: int, depth: int) -> float | None:
    found = [float(r["speedup"]) for r in rows if r["batch"] == batch and r["depth"] == depth]
    return max(found, default=None)


def _checks(name: str, checks: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
    told = "Settings of the plan that were decoded too, beside plain decoding in the same minutes."
    pairs = {"settings": [(float(c["speedup_foreseen"]), float(c["speedup"])) for c in checks]}
    paint = points(pairs, "speedup foreseen", "speedup decoded", diagonal=True)
    yield draw(f"foreseen against decoded: {name}", f"{told} Dotted: where both are equal.", paint)
    head = ["draft", "batch", "context", "tau foreseen", "tau", "speedup foreseen", "speedup"]
    keys = ("shape", "batch", "context", "tau_foreseen", "tau", "speedup_foreseen", "speedup")
    rows = [[*(_said(check[key]) for key in keys), f"{check['off']:+.1%}"] for check in checks]
    yield table(f"foreseen against decoded: {name}", [*head, "off"], rows, told)


def _said(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def calibration_of(run: Run) -> Section:
    """How sure the drafter is against how often it is right."""
    title = "Calibration of the drafter's confidence"
    if run.calibration is None:
        command = f"outrider report run.dir={run.folder} report.measure=true"
        return Section("calibration", title, [Note("Not measured.", command)])
    depths = run.calibration["depths"]
    told = (
        "By ten bins of confidence, the softmax chance that the drafter gives its own favourite: "
        "how often that is the target's favourite, on the target's greedy answers in the report "
        f"{run.calibration['report']} (eval/calibration.py). Dotted: calibrated."
    )
    lines = {
        f"depth {found['depth']}": [(float(b["confidence"]), float(b["right"])) for b in part]
        for found in depths
        if (part := found["bins"])
    }
    parts: list[Part] = [_stale(run)] if _stale_drafter(run) else []
    if lines:
        paint = curves(lines, "confidence", "share that was right", marks=True, diagonal=True)
        parts.append(draw("confidence against truth", told, paint))
    parts += _calibrated(depths, told)
    return Section("calibration", title, parts)


def _calibrated(depths: Sequence[Mapping[str, Any]], told: str) -> Iterator[Part]:
    """The error of every depth, and the bins that the figure draws."""
    head = ["depth", "guesses", "calibration error"]
    rows = [[str(d["depth"]), str(d["guesses"]), f"{d['error']:.3f}"] for d in depths]
    error = "Error: mean distance of confidence and share that was right, weighted by guesses."
    yield table("calibration by depth", head, rows, error)
    bins = [
        [str(d["depth"]), f"{b['from']:.1f}", str(b["guesses"]), f"{b['confidence']:.3f}",
         f"{b['right']:.3f}"]
        for d in depths
        for b in d["bins"]
    ]  # fmt: skip
    head = ["depth", "bin from", "guesses", "mean confidence", "share right"]
    yield Fold("bins", [table("bins of confidence", head, bins, told)])


def _stale_drafter(run: Run) -> bool:
    known = {report.setting["fingerprints"]["drafter"] for report in run.reports.values()}
    return run.calibration is not None and run.calibration["drafter"] not in known


def _stale(run: Run) -> Note:
    command = f"outrider report run.dir={run.folder} report.measure=true"
    return Note("It was measured on another drafter than the reports.", command)
