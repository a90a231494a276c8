"""Console output of a report: verdict, tables, and the definitions of the metrics."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from outrider.eval.metrics import METRICS, Summary
from outrider.eval.report import Report, format_number, headline, save


def narrow_table(title: str, names: Sequence[str], text: Sequence[str] = ()) -> Table:
    """Return a table without padding, for 80 columns; numbers on the right, `text` on the left."""
    style = {"title_justify": "left", "box": box.SIMPLE_HEAD, "padding": 0, "show_edge": False}
    columns = (Column(n, justify="left" if n in text else "right", no_wrap=True) for n in names)
    return Table(*columns, title=title, **style)  # type: ignore[arg-type]


def show_and_save(report: Report, folder: Path, out: str, console: Console) -> None:
    """Print the report and write its files, whose stem is `out`."""
    show(report, console)
    save(report, folder, out)
    console.print(f"report: {folder / out}.json, .outputs.jsonl, .png", highlight=False)


def show(report: Report, console: Console) -> None:
    setting, total = report.setting, report.summary
    style = "yellow" if report.mismatches else "bold green"
    style = "bold red" if report.exceeds_rounding else style
    console.print(Text(report.verdict(), style=style))
    console.print(headline(setting), style="bold", highlight=False)
    if setting["left_out"]:
        names = ", ".join(setting["left_out"])
        console.print(f"left out, longer than the target's context: {names}", style="yellow")
    console.print(speed_table(report))
    console.print(_acceptance_table(total))
    console.print(_time_table(total))
    if report.theory is not None:
        console.print(_theory_table(total, report.theory))
    if report.forecast is not None:
        predicted = f"{report.forecast:.2f} predicted by teacher forcing on this text"
        console.print(f"tau {format_number(total.tau)}, {predicted}", highlight=False)


def explain_metrics(console: Console) -> None:
    table = Table("metric", "unit", "definition", box=None, style="dim", header_style="dim")
    for metric in METRICS:
        table.add_row(metric.name, metric.unit, metric.definition, style="dim")
    console.print(table)


def speed_table(report: Report) -> Table:
    names = "n", "tokens", "tau", "ms/round", "ms/plain", "speedup", "95 %", "tokens/s"
    numbers = (Column(name, justify="right") for name in (*names, "plain tokens/s"))
    table = Table("prompts of", *numbers)
    if len(report.categories) > 1:
        for name, part in report.categories.items():
            table.add_row(name, *_speed_cells(part))
    table.add_section()
    table.add_row("all", *_speed_cells(report.summary), style="bold")
    return table


def _speed_cells(part: Summary) -> list[str]:
    spread = "-" if part.speedup_95 is None else "{:.2f}-{:.2f}".format(*part.speedup_95)
    times = part.ms["round"], part.ms["baseline"]
    rates = part.tokens_per_second, part.baseline_tokens_per_second
    ms, speeds = ([format_number(value, 1) for value in pair] for pair in (times, rates))
    counts = str(part.prompts), str(part.tokens), format_number(part.tau)
    return [*counts, *ms, format_number(part.speedup, 2, "x"), spread, *speeds]


def _acceptance_table(total: Summary) -> Table:
    table = Table("draft token k", *(str(k) for k, _ in enumerate(total.accept_at, start=1)))
    table.add_row("accept@k", *(format_number(rate) for rate in total.accept_at))
    table.add_row("cond@k", *(format_number(rate) for rate in total.cond_at))
    return table


def _time_table(total: Summary) -> Table:
    parts = tuple(total.shares)
    table = Table("a round's time", *parts, "overhead")
    table.add_row("ms", *(format_number(total.ms[part]) for part in parts), "")
    shares = [*(total.shares[part] for part in parts), total.overhead]
    table.add_row("share", *("-" if share is None else f"{share:.1%}" for share in shares))
    return table


def _theory_table(total: Summary, theory: dict[str, float | int | None]) -> Table:
    table = Table("speedup", "factor", "how")
    step, alpha = format_number(total.ms["draft_step"]), format_number(total.alpha)
    rows = [
        ("measured", total.speedup, "both engines, same prompts, same process"),
        ("from times", theory["from_times"], "tau x plain step / round, from the times above"),
        ("without overhead", theory["no_overhead"], "verify, commit and other at no cost"),
        ("free verification", theory["free_verify"], "and a forward at the cost of a plain step"),
    ]
    if theory["iid"] is not None:
        how = f"Leviathan et al.: alpha {alpha} at every depth, {step} ms per draft step"
        rows.append(("formula", theory["iid"], how))
    for name, value, how in rows:
        table.add_row(name, format_number(value, 2, "x"), how)
    if (best := theory["best_gamma"]) is not None:
        deepest = best == len(total.accept_at)
        how = "longest measured" if deepest else "predicted best chain length"
        table.add_row("best gamma", str(best), how)
    return table
