"""Tables, picture and files of a plan."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.conf.files import write, write_json
from outrider.conf.json_shapes import read_object
from outrider.eval.plan.surface import FORMAT, Plan, PlanRow
from outrider.eval.report import png
from outrider.eval.report_tables import explain, narrow_table

MOST_SETTINGS = 6  # rows that are printed without --explain
MOST_WARNINGS = 1
TOLERANCE = 0.10  # relative error of a prediction that is printed in green
DEFINITIONS = {
    "tau": "tokens per round on the target's own answers; a plain step emits one",
    "draft, verify": "ms of a round in the drafter, and in the target's forward over the draft",
    "round, plain": "ms of a whole round, and of a step of plain decoding",
    "speedup": "tau * plain / round",
    "tokens per s": "of all prompts of the batch",
    "context": "cached tokens of every prompt before the round",
    "error": "of the predicted speedup, relative to the measured one",
}
TIMES = "draft_ms, verify_ms, round_ms, plain_ms"
ROW = {"batch, context, depth, width, nodes": int, f"tau, speedup, {TIMES}": float, "shape": str}
OLD_NAMES = {  # of a check, in plans of earlier versions
    "tau_foreseen": "tau_predicted", "speedup_foreseen": "speedup_predicted", "off": "error",
}  # fmt: skip
CHECK = tuple(
    {"shape": str, "batch, context": int, f"tau, speedup, {', '.join(names)}": float}
    for names in (OLD_NAMES.values(), OLD_NAMES)
)
PLAN = {  # `<out>.json`
    "format": FORMAT, "machine": str, "assumptions": [str], "warnings?": [str],
    "rows, recommended": [ROW], "checks?": [CHECK],
}  # fmt: skip


def print_plan(
    console: Console,
    plan: Plan,
    checks: Sequence["Check"] = (),
    words: str = "",
    in_full: bool = False,
    shared: int = 0,
) -> None:
    """Print the best draft of each setting in at most 15 lines.

    Args:
        words: of the command line, for the command that decodes with the best draft.
        in_full: every draft, check, definition and assumption, too.
        shared: the longest text in which decode=auto decides with the same times.
    """
    verdict, command = _verdict(plan, words, shared)
    console.print(verdict, style="bold")
    if command:
        console.print(command, style="bold", soft_wrap=True)
    if checks:
        console.print(_verdict_of_checks(checks), soft_wrap=True)
    if any(row.speedup > row.tau for row in plan.recommended):
        noise = "Speedups above tau are noise: a round takes at least a plain step."
        console.print(noise, style="red")
    for sentence in plan.warnings if in_full else plan.warnings[:MOST_WARNINGS]:
        console.print(f"- {sentence}", style="yellow")
    if not in_full:
        rows = plan.recommended
        rows = rows if len(rows) <= MOST_SETTINGS else rows[: MOST_SETTINGS - 1]
        console.print(_best_table(plan, rows))
        if (others := len(plan.recommended) - len(rows)) > 0:
            console.print(f"{others} more settings: --explain")
        return
    console.print("\nthe best draft of each setting, then the best of the other kind")
    console.print(_best_table(plan, list(_with_other_kind(plan))))
    console.print("\nspeedup of every draft by batch and context, the best marked *")
    console.print(_surface_table(plan))
    if checks:
        console.print("\npredicted and measured, same prompts")
        console.print(check_table(checks))
    explain(console, DEFINITIONS)
    for sentence in plan.assumptions:
        console.print(f"- {sentence}", style="dim")


def _verdict(plan: Plan, words: str, shared: int) -> tuple[str, str]:
    """Return the best draft of the first setting with its speedup, and how to decode with it."""
    also = f" decode=auto decides with these times, up to {shared:,} tokens." if shared else ""
    best = plan.recommended[0]
    setting = f"at batch {best.batch}, context {best.context}, on {plan.name}"
    if not best.depth:
        return f"No draft is faster than plain decoding {setting}.{also}", ""
    shape = f"decode=static_tree decode.width={best.width} decode.nodes={best.nodes}"
    shape = "decode=chain" if best.width == 1 else shape
    speed = f"{best.speedup:.2f}x predicted, tau {best.tau:.2f}"
    command = f"outrider eval {words} {shape} decode.depth={best.depth}"
    return f"Fastest {setting}: {best.label}, {speed}.{also}", f"Measure it: {command}"


def _verdict_of_checks(checks: Sequence["Check"]) -> Text:
    """Return the range of the errors of the predictions."""
    errors = [check.error for check in checks]
    low, high = (f"{100 * error:+.1f}" for error in (min(errors), max(errors)))
    text = f"Checked by decoding {len(checks)} other settings: speedups off by {low} to {high} %."
    wrong = sum(abs(error) > TOLERANCE for error in errors)
    if not wrong:
        return Text(text, style="green")
    advice = f"More than {TOLERANCE:.0%} in {wrong} of them: repeat it on a quiet machine."
    return Text(f"{text}\n{advice}", style="red")


def _with_other_kind(plan: Plan) -> Iterator[PlanRow]:
    """Yield the best draft of each setting, then its best chain and its best tree, if others."""
    for best in plan.recommended:
        yield best
        for trees in (False, True):
            rows = [
                r for r in plan.rows if r[:2] == best[:2] and r.depth and (r.width > 1) == trees
            ]
            if rows and (other := max(rows, key=lambda row: row.speedup)) != best:
                yield other


def _best_table(plan: Plan, rows: Sequence[PlanRow]) -> Table:
    times = "draft\nms", "verify\nms", "round\nms", "plain\nms"
    head = "batch", "con-\ntext", "draft", "tau", *times, "speed\nup", "tokens\nper s"
    table = narrow_table(head, ("draft",))
    for row in rows:
        table.add_row(*_cells(row), style="bold" if row in plan.recommended else "")
    return table


def _cells(row: PlanRow) -> list[str]:
    times = (row.draft_ms, row.verify_ms, row.round_ms, row.plain_ms)
    return [
        str(row.batch), str(row.context), row.label, f"{row.tau:.2f}",
        *map(_short, times), f"{row.speedup:.2f}x", f"{row.tokens_per_second:,.0f}",
    ]  # fmt: skip


def _short(ms: float) -> str:
    """Format to three digits, or to a whole number."""
    return f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"


def _surface_table(plan: Plan) -> Table:
    """Return a row for every draft, a column for every setting; the best of a column is marked."""
    settings = [row[:2] for row in plan.recommended]
    head = "draft", "tau", *(f" {batch}\n {context}" for batch, context in settings)
    table = narrow_table(head, ("draft",))
    best = {row[:2]: row.key for row in plan.recommended}
    rows = {(row[:2], row.key): row for row in plan.rows}
    for row in plan.rows:
        if row.depth == 0 or row[:2] != plan.rows[0][:2]:
            continue
        cells = [
            f"{'*' if best[setting] == row.key else ''}{rows[setting, row.key].speedup:.2f}"
            for setting in settings
        ]
        table.add_row(row.label, f"{row.tau:.2f}", *cells)
    return table


# ---- checks ----


@dataclass(frozen=True)
class Check:
    """A prediction and the measurement by decoding."""

    row: PlanRow
    tau: float
    speedup: float

    @property
    def error(self) -> float:
        """Relative error of the predicted speedup."""
        return self.row.speedup / self.speedup - 1

    def fields(self) -> dict[str, float | str | int]:
        row = self.row
        return {
            "shape": row.label, "batch": row.batch, "context": row.context,
            "tau_predicted": row.tau, "tau": self.tau,
            "speedup_predicted": row.speedup, "speedup": self.speedup, "error": self.error,
        }  # fmt: skip


def check_table(checks: Sequence[Check]) -> Table:
    columns = "    tau\npredicted", " tau", "  speedup\npredicted", " speedup", "error"
    table = narrow_table(("draft", "batch", *columns), ("draft",))
    for check in checks:
        colour = "green" if abs(check.error) <= TOLERANCE else "red"
        row, error = check.row, Text(f"{100 * check.error:+.1f} %", colour)
        taus = f"{row.tau:.2f}", f"{check.tau:.2f}"
        speedups = f"{row.speedup:.2f}x", f"{check.speedup:.2f}x"
        table.add_row(row.label, str(row.batch), *taus, *speedups, error)
    return table


# ---- files ----


def write_plan(
    folder: Path, plan: Plan, out: str = "plan", checks: Sequence[dict[str, Any]] = ()
) -> None:
    """Write `<out>.png`, then `<out>.json`, so that the picture exists if the json does."""
    write(folder / f"{out}.png", plot(plan))
    write_json(folder / f"{out}.json", {**plan.fields(), "checks": list(checks)})


def read_plan(file: Path) -> dict[str, Any]:
    """Read `<out>.json`; a `CorruptFile` if it is not a plan of this format."""
    plan = read_object(file, f"Run again: outrider plan run.dir={file.parents[1]}", PLAN)
    checks = plan.get("checks", [])
    return plan | {"checks": [{OLD_NAMES.get(k, k): v for k, v in c.items()} for c in checks]}


def plot(plan: Plan) -> bytes:
    """Return a png of the surface: per batch and context a panel of speedup over draft tokens.

    A colour per depth, a line per width; a ring marks the best draft.
    """
    from matplotlib.figure import Figure

    batches = sorted({row.batch for row in plan.rows})
    contexts = sorted({row.context for row in plan.rows})
    wide, high = len(batches), len(contexts)
    figure = Figure(figsize=(2.6 * wide + 2.2, 2.2 * high + 0.7), layout="constrained")
    figure.suptitle(f"speedup over draft tokens: {plan.name}", fontsize=9)
    panels = figure.subplots(high, wide, squeeze=False, sharex=True, sharey=True)
    best = {row[:2]: row for row in plan.recommended}
    for panel, (context, batch) in zip(panels.flat, product(contexts, batches), strict=True):
        rows = [row for row in plan.rows if row[:2] == (batch, context) and row.depth]
        _draw(panel, rows, best[batch, context])
        panel.set_title(f"batch {batch}, context {context}", fontsize=8)
        panel.tick_params(labelsize=7)
    lines = panels[0, 0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside right upper", fontsize=7)
    return png(figure)


def _points(rows: Sequence[PlanRow]) -> tuple[list[int], list[float]]:
    return [row.nodes for row in rows], [row.speedup for row in rows]


def _draw(panel: Any, rows: Sequence[PlanRow], best: PlanRow) -> None:
    depths, widths = sorted({row.depth for row in rows}), sorted({row.width for row in rows})
    styles = dict(zip(widths, ("-", "--", ":", "-.") * len(widths), strict=False))
    chains = [row for row in rows if row.width == 1]
    panel.plot(*_points(chains), color="black", marker="o", ms=3, lw=1, label="chain")
    for colour, depth in enumerate(depths):
        for width in widths[1:] if widths[0] == 1 else widths:
            line = [row for row in rows if (row.depth, row.width) == (depth, width)]
            if line:
                style = {"color": f"C{colour}", "marker": ".", "ms": 4, "lw": 1}
                label = f"tree {depth}x{width}"
                panel.plot(*_points(line), styles[width], **style, label=label)
    panel.axhline(1.0, color="tab:gray", lw=0.8)
    if best.depth:
        panel.plot([best.nodes], [best.speedup], "o", ms=9, mfc="none", mec="tab:red")
