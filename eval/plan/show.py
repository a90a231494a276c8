"""A plan as people look at it: the best drafts, the whole surface as a table and as a picture."""

import io
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.conf.files import write, write_json
from outrider.eval.console_tables import add_numbers, narrow
from outrider.eval.plan.surface import Plan, Row

SIDE_BY_SIDE = 6  # settings in one table of the surface: what 80 columns have room for
Place = tuple[int, int]  # batch and context


def print_plan(console: Console, plan: Plan) -> None:
    """The best drafts, the speedup of every draft in every setting, and the assumptions."""
    console.print(_best(plan))
    for places in _in_parts([row[:2] for row in plan.recommended]):
        console.print(_surface(plan, places))
    for sentence in plan.warnings:
        console.print(f"- {sentence}", style="yellow", highlight=False)
    for sentence in plan.assumptions:
        console.print(f"- {sentence}", style="dim", highlight=False)


def _best(plan: Plan) -> Table:
    """Of every setting the best draft, then the best of the other kind, chain or tree."""
    table = narrow(f"plan: {plan.name}; the best draft of each setting, then the best other kind")
    add_numbers(table, "batch", "con-\ntext")
    table.add_column("draft", no_wrap=True)
    add_numbers(table, "tau", "draft\nms", "verify\nms", "round\nms", "plain\nms")
    add_numbers(table, "speed\nup", "tokens\nper s")
    for best in plan.recommended:
        here = [row for row in plan.rows if row[:2] == best[:2]]
        table.add_row(*_cells(best), style="bold")
        for trees in (False, True):
            rows = [row for row in here if row.depth and (row.width > 1) == trees]
            if rows and (other := max(rows, key=lambda row: row.speedup)) != best:
                table.add_row(*_cells(other))
        table.add_section()
    return table


def _cells(row: Row) -> list[str]:
    times = (row.draft_ms, row.verify_ms, row.round_ms, row.plain_ms)
    return [
        str(row.batch), str(row.context), row.shape, f"{row.tau:.2f}",
        *map(_short, times), f"{row.speedup:.2f}x", f"{row.tokens_per_second:,.0f}",
    ]  # fmt: skip


def _short(ms: float) -> str:
    """Three digits, or all in front of the point."""
    return f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"


def _surface(plan: Plan, places: Sequence[Place]) -> Table:
    """A line for every draft, a column for every setting; the best of a column is marked."""
    table = narrow("\nspeedup of every draft by batch and context, the best marked *")
    table.add_column("draft", no_wrap=True)
    add_numbers(table, "tau", *(f" {batch}\n {context}" for batch, context in places))
    best = {row[:2]: row.key for row in plan.recommended}
    found = {(row[:2], row.key): row for row in plan.rows}
    for row in plan.rows:
        if row.depth == 0 or row[:2] != plan.rows[0][:2]:
            continue
        cells = [
            f"{'*' if best[place] == row.key else ''}{found[place, row.key].speedup:.2f}"
            for place in places
        ]
        table.add_row(row.shape, f"{row.tau:.2f}", *cells)
    return table


def _in_parts(places: Sequence[Place]) -> Iterator[Sequence[Place]]:
    for start in range(0, len(places), SIDE_BY_SIDE):
        yield places[start : start + SIDE_BY_SIDE]


# ---- files ----


def write_plan(
    folder: Path, plan: Plan, out: str = "plan", checks: Sequence[dict[str, Any]] = ()
) -> None:
    """`<out>.png`, then `<out>.json`: where the json is, the picture is too.

    Args:
        checks: what decoding made of some rows.

    Raises:
        RunError: the disk is full or the folder cannot be written.
    """
    write(folder / f"{out}.png", picture(plan))
    write_json(folder / f"{out}.json", {**plan.fields(), "checks": list(checks)})


def picture(plan: Plan) -> bytes:
    """A png of the surface: a panel for every batch and context, speedup over drafted nodes.

    A colour for every depth, a line for every width; the best draft has a ring.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    batches = sorted({row.batch for row in plan.rows})
    contexts = sorted({row.context for row in plan.rows})
    wide, high = len(batches), len(contexts)
    figure = Figure(figsize=(2.6 * wide + 2.2, 2.2 * high + 0.7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"speedup over drafted nodes: {plan.name}", fontsize=9)
    panels = figure.subplots(high, wide, squeeze=False, sharex=True, sharey=True)
    best = {row[:2]: row for row in plan.recommended}
    for panel, (context, batch) in zip(panels.flat, product(contexts, batches), strict=True):
        rows = [row for row in plan.rows if row[:2] == (batch, context) and row.depth]
        _draw(panel, rows, best[batch, context])
        panel.set_title(f"batch {batch}, context {context}", fontsize=8)
        panel.tick_params(labelsize=7)
    lines = panels[0, 0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside right upper", fontsize=7)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _draw(panel: Any, rows: Sequence[Row], best: Row) -> None:
    depths, widths = sorted({row.depth for row in rows}), sorted({row.width for row in rows})
    styles = dict(zip(widths, ("-", "--", ":", "-.") * len(widths), strict=False))
    chains = [row for row in rows if row.width == 1]
    panel.plot(
        [row.nodes for row in chains], [row.speedup for row in chains],
        color="black", marker="o", ms=3, lw=1, label="chain",
    )  # fmt: skip
    for colour, depth in enumerate(depths):
        for width in widths[1:] if widths[0] == 1 else widths:
            line = [row for row in rows if (row.depth, row.width) == (depth, width)]
            if line:
                panel.plot(
                    [row.nodes for row in line], [row.speedup for row in line], styles[width],
                    color=f"C{colour}", marker=".", ms=4, lw=1, label=f"tree {depth}x{width}",
                )  # fmt: skip
    panel.axhline(1.0, color="tab:gray", lw=0.8)
    if best.depth:
        panel.plot([best.nodes], [best.speedup], "o", ms=9, mfc="none", mec="tab:red")
