"""Console output of a report: verdict, tables, and the definitions of the metrics."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from outrider.conf.errors import ConfigError, RunError
from outrider.eval.metrics import METRICS, Summary
from outrider.eval.report import (
    ROUNDING,
    Report,
    above_tau,
    exact_in_a_word,
    format_number,
    headline,
    save,
)
from outrider.eval.report_auto import auto_lines
from outrider.models.drafters import drafter_class
from outrider.train import own_text
from outrider.train.manifest import read_training
from outrider.train.settings import read_saved_config

SHOWN_DEPTHS = 12  # draft tokens whose acceptance is printed; --explain prints all
NAMED = 5  # prompts left out that are named
DOCTOR = "outrider doctor target=..."


def narrow_table(names: Sequence[str], text: Sequence[str] = ()) -> Table:
    """Return a table without lines, for 80 columns; numbers on the right, `text` on the left."""
    columns = (Column(n, justify="left" if n in text else "right") for n in names)
    return Table(*columns, box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")


def explain(console: Console, definitions: Mapping[str, str]) -> None:
    """Print the definitions of what was printed before."""
    console.print()
    table = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for name, definition in definitions.items():
        table.add_row(name, definition, style="dim")
    console.print(table)


def show_and_save(
    report: Report, folder: Path, out: str, console: Console, in_full: bool = False
) -> None:
    """Write the files of a report, whose stem is `out`, and print it."""
    save(report, folder, out)
    show(report, console, next_step(report, folder.parent), in_full)
    files = f"report: {folder / out}.json (every number), .outputs.jsonl, .png"
    console.print(files, soft_wrap=True)


def show(report: Report, console: Console, advice: str = "", in_full: bool = False) -> None:
    """Print the verdict, then the tables: at most 15 lines of 80 columns.

    Args:
        in_full: also the categories, the shares of a round and the predicted speedups.
    """
    setting, total = report.setting, report.summary
    console.print(Text(report.verdict(), style=_style(report)))
    if advice:
        console.print(advice, soft_wrap=True)
    console.print(headline(setting), style="bold")
    if left_out := setting["left_out"]:
        names = ", ".join(left_out[:NAMED]) + (", ..." if len(left_out) > NAMED else "")
        message = f"{len(left_out)} left out, longer than the target's context: {names}"
        console.print(message, style="yellow")
    console.print(speed_table(report, in_full))
    console.print(_acceptance_table(total, len(total.accept_at) if in_full else SHOWN_DEPTHS))
    if in_full and "auto" in setting:
        console.print("Rounds that drafted fewer than k tokens, and plain ones, count as rejected.")
    if note := report.beyond_training():
        console.print(note, style="yellow")
    console.print(_time_table(total, in_full))
    if in_full and report.theory is not None:
        console.print(_theory_table(total, report.theory))
    if "auto" in setting:
        console.print(auto_lines(setting["auto"]), soft_wrap=True)
    if report.forecast is not None:
        predicted = f"{report.forecast:.2f} predicted by teacher forcing on this text"
        decoded = f"tau {format_number(total.tau)} at depth {setting['depth']}"
        console.print(f"{decoded}, {predicted}")


def next_step(report: Report, run: Path) -> str:
    """Return what to do after a measurement of a drafter of this run; "" if unknown."""
    if report.exceeds_rounding and report.setting["dtype"] in ROUNDING:
        return "Do not use it before the cause is known: measure with target.dtype=float32."
    if report.exceeds_rounding:
        return f"Do not use it: the answers are not the target's. Check it: {DOCTOR}"
    if "published" in report.setting or report.summary.speedup is None:
        return ""
    is_faster = (report.summary.speedup_95 or (0.0,))[0] > 1
    if "untrained" in report.setting and "auto" in report.setting and not is_faster:
        choices = report.setting["auto"]["choices"]
        share = choices.get("plain", 0) / max(1, sum(choices.values()))
        return f"Use another drafter= on this text: {100 * share:.0f} % of rounds are plain."
    if "untrained" in report.setting:
        use = "To use it: outrider chat with the same drafter and target."
        return use if is_faster else "To find a faster draft: the same command with decode.depth=2."
    if is_faster:
        return f"To use it: outrider chat, or outrider publish, run.dir={run}"
    return (
        _other_text(run)
        or f"To find a faster draft: {draft_search(report.setting['drafter'], run)}"
    )


def _other_text(run: Path) -> str:
    """Return what to do if the drafter was trained on text unlike the target's; "" if not known."""
    try:
        training, saved = read_training(run) or {}, read_saved_config(run)
    except (RunError, ConfigError):
        return ""
    held, own = training.get("held_out", {}), training.get("own_text", {})
    measured = "accept_length" in held and "accept_length" in own
    if not measured or not own_text.is_far(held, own):
        return ""
    name, path = (OmegaConf.select(saved, f"data.{key}") for key in ("name", "path"))
    return own_text.advice(str(name), path)


def draft_search(drafter: str, run: str | Path) -> str:
    """Return a command that shows whether another draft is faster: a plan, where there can be one.

    Args:
        drafter: its name.
    """
    if drafter_class(drafter).runs_target():
        return f"outrider eval run.dir={run} decode.depth=2"
    return f"outrider plan run.dir={run}"


def show_grid(reports: Mapping[str, Report], folder: Path, console: Console) -> None:
    """Print the verdict of the fastest of several reports, and a row for each."""
    best = max(reports, key=lambda name: reports[name].summary.speedup or 0.0)
    advice = next_step(reports[best], folder.parent)
    console.print(Text(f"{best}: {reports[best].verdict()}", style=_style(reports[best])))
    if advice:
        console.print(advice, soft_wrap=True)
    for name, report in reports.items():
        if report.exceeds_rounding and name != best:
            console.print(Text(f"{name}: {report.exactness()}", style=_style(report)))
        if name != best and (noise := above_tau(report.fields())):
            console.print(f"{name}: {noise}")
    numbers = "tau", "ms/round", "speedup", "95 %", "tokens/s", "plain"
    table = narrow_table(("decoding", *numbers, "exact"), ("decoding", "exact"))
    for name, report in reports.items():
        cells = _speed_cells(report.summary)
        table.add_row(
            name, *(cells[i] for i in (2, 3, 5, 6, 7, 8)), exact_in_a_word(report.fields())
        )
    console.print(table)
    files = f"reports: {folder}/NAME.json (every number), .outputs.jsonl, .png"
    console.print(files, soft_wrap=True)


def in_short(report: Report) -> str:
    total = report.summary
    return f"{format_number(total.speedup, 2, 'x')}, tau {format_number(total.tau)}"


def _style(report: Report) -> str:
    style = "yellow" if report.mismatches else "bold green"
    return "bold red" if report.exceeds_rounding else style


def explain_metrics(console: Console) -> None:
    explain(console, {m.name: f"{m.definition} [{m.unit}]" for m in METRICS})


def speed_table(report: Report, by_category: bool = True) -> Table:
    numbers = "n", "tokens", "tau", "ms/round", "ms/plain", "speedup", "95 %", "tokens/s", "plain"
    table = narrow_table(("prompts of", *numbers), ("prompts of",))
    if by_category and len(report.categories) > 1:
        for name, part in report.categories.items():
            table.add_row(name, *_speed_cells(part))
    table.add_row("all", *_speed_cells(report.summary), style="bold")
    return table


def _speed_cells(part: Summary) -> list[str]:
    spread = "-" if part.speedup_95 is None else "{:.2f}-{:.2f}".format(*part.speedup_95)
    times = part.ms["round"], part.ms["baseline"]
    rates = part.tokens_per_second, part.baseline_tokens_per_second
    ms, speeds = ([format_number(value, 1) for value in pair] for pair in (times, rates))
    counts = str(part.prompts), str(part.tokens), format_number(part.tau)
    return [*counts, *ms, format_number(part.speedup, 2, "x"), spread, *speeds]


def _acceptance_table(total: Summary, shown: int) -> Table:
    """Return the acceptance of the first `shown` draft tokens."""
    depth = len(total.accept_at)
    name = "draft token k" if depth <= shown else f"k, {shown} of {depth}"
    numbers = (str(k) for k in range(1, min(shown, depth) + 1))
    table = narrow_table((name, *numbers), (name,))
    table.add_row("accept@k", *(format_number(rate) for rate in total.accept_at[:shown]))
    table.add_row("cond@k", *(format_number(rate) for rate in total.cond_at[:shown]))
    return table


def _time_table(total: Summary, with_shares: bool) -> Table:
    parts = tuple(total.shares)
    table = narrow_table(("a round's time", *parts, "overhead"), ("a round's time",))
    shares = [*(total.shares[part] for part in parts), total.overhead]
    *of_parts, overhead = ("-" if share is None else f"{share:.1%}" for share in shares)
    table.add_row("ms", *(format_number(total.ms[part]) for part in parts), overhead)
    if with_shares:
        table.add_row("share", *of_parts, "")
    return table


def _theory_table(total: Summary, theory: dict[str, float | int | None]) -> Table:
    table = narrow_table(("speedup", "factor", "how"), ("speedup", "how"))
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
