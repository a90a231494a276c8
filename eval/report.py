"""The report of a measurement: tables for people, json for scripts, runs side by side.

Three files per measurement in `<run.dir>/eval/`: `<out>.json` (every number, and what it was
measured on), `<out>.outputs.jsonl` (one line per prompt: the token ids of both engines, who
proposed each token, which guesses were rejected) and `<out>.png`. The json is written last, so that
where it is, the others are.

An acceptance length says nothing about speed alone: wherever tau is printed, the milliseconds per
round and the speedup stand beside it.
"""

import io
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.conf.errors import Damaged
from outrider.conf.files import read_json, read_lines, write, write_json
from outrider.eval.metrics import METRICS, Summary
from outrider.models.decode.rules import COUPLED

# top-2 gaps of logits that rounding can bridge: about four units in the last place at 16 to 32
ROUNDING = {"bfloat16": 0.5, "float16": 0.0625}
FORMAT = "outrider-report-1"
OF_AN_ANSWER = ("id", "category", "prompt", "prompt_ids", "output_ids", "accepted")
AGAIN = "Measure that run again: outrider eval run.dir=..."


class Mismatch(NamedTuple):
    """The first place where an answer differs from plain decoding.

    Attributes:
        position: index of the new token.
        token: what speculation wrote there; None behind its end.
        baseline_token: what plain decoding wrote there; None behind its end.
        gap: the target's lead of its first over its second choice there, in logits.
    """

    id: str
    position: int
    token: int | None
    baseline_token: int | None
    gap: float


@dataclass(frozen=True)
class Report:
    """One measurement.

    Attributes:
        summary: over all prompts.
        categories: the same for each category.
        exact: whether every greedy answer equals plain decoding; None where that is no question.
        theory: what `metrics.predict` says.
        setting: how it was measured; part of the json as it is (policy, temperature, dtype, ...).
        outputs: the lines of the outputs file.
        forecast: tau that training's measure foresees on the text decoded here; None where it has
            none (trees, warped sampling, deeper than the unroll).
    """

    summary: Summary
    categories: dict[str, Summary]
    exact: bool | None
    mismatches: list[Mismatch]
    theory: dict[str, float | int | None] | None
    setting: dict[str, Any]
    outputs: list[dict[str, Any]]
    forecast: float | None = None

    def fields(self) -> dict[str, Any]:
        """The content of `<out>.json`."""
        return {
            "format": FORMAT,
            **asdict(self.summary),
            **self.setting,
            "exact": self.exact,
            "exact_note": self.exactness(),
            "mismatches": [mismatch._asdict() for mismatch in self.mismatches],
            "theory": self.theory,
            "forecast": self.forecast,
            "categories": {name: asdict(part) for name, part in self.categories.items()},
            "definitions": {m.name: f"{m.definition} [{m.unit}]" for m in METRICS},
        }

    @property
    def broken(self) -> bool:
        """Some answer differs by more than rounding can explain."""
        limit = ROUNDING.get(self.setting["dtype"], 0.0)
        return any(mismatch.gap > limit or limit == 0 for mismatch in self.mismatches)

    def exactness(self) -> str:
        """`exact` in words."""
        count, wrong = self.summary.prompts, len(self.mismatches)
        if self.setting.get("lossy"):
            return f"LOSSY by choice ({self.setting['verify']}): not the target's distribution"
        if self.setting["temperature"] > 0 and self.setting.get("verify") != COUPLED:
            return (
                "not compared: sampled answers differ by chance (their law is under test; with "
                "decode.verify=coupled they are the same)"
            )
        if self.exact is None:
            return "not compared: plain decoding was not run"
        if not wrong:
            whose = " of the changed target" if self.setting.get("target_changed") else ""
            return f"all {count} answers equal plain decoding{whose}"
        largest = max(mismatch.gap for mismatch in self.mismatches)
        cause = "MORE THAN ROUNDING" if self.broken else f"rounding in {self.setting['dtype']}"
        gap = f"largest top-2 gap there {largest:.3g} logits"
        return f"{wrong} of {count} answers differ from plain decoding: {cause}, {gap}"

    def verdict(self) -> str:
        """One line: is it faster, by how much, and is it the same text."""
        total = self.summary
        if total.tau is None:
            return "Nothing was measured: no answer is longer than one token."
        cost = f"tau {total.tau:.2f} at {total.ms['round']:.1f} ms per round"
        if total.speedup is None:
            return f"{cost}; speedup unknown without a baseline. Exactness: {self.exactness()}."
        low, high = total.speedup_95 or (total.speedup, total.speedup)
        sure = "faster" if low > 1 else "slower" if high < 1 else "about as fast, within the noise"
        spread = f" (95 %: {low:.2f}-{high:.2f})" if total.speedup_95 else ""
        cost = f"{cost} against {total.ms['baseline']:.1f} ms per plain token"
        return f"{total.speedup:.2f}x{spread}, {sure}: {cost}. Exactness: {self.exactness()}."


def publish(report: Report, folder: Path, out: str, console: Console, legend: bool = True) -> None:
    """Print the report and write its files.

    Args:
        folder: `<run.dir>/eval`.
        out: stem of the files.
        legend: print what each metric means, too.
    """
    show(report, console, legend)
    save(report, folder, out)
    console.print(f"report: {folder / out}.json, .outputs.jsonl, .png", highlight=False)


def save(report: Report, folder: Path, out: str) -> None:
    """
    Raises:
        RunError: the disk is full or the folder cannot be written.
    """
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in report.outputs)
    write(folder / f"{out}.outputs.jsonl", lines.encode())
    write(folder / f"{out}.png", picture(report))
    write_json(folder / f"{out}.json", report.fields())


def load(folder: Path, out: str) -> Report:
    """What `save` wrote. Without the file of outputs there are none.

    Raises:
        Damaged: a file cannot be read, or is not a report of this format.
    """
    file, lines = folder / f"{out}.json", folder / f"{out}.outputs.jsonl"
    content = read_json(file, AGAIN)
    if content.get("format") != FORMAT:
        raise Damaged(f"{file} is not a report of this format ({FORMAT}).", AGAIN)
    outputs = read_lines(lines, AGAIN) if lines.is_file() else []
    for number, row in enumerate(outputs, start=1):
        if lacking := [name for name in OF_AN_ANSWER if name not in row]:
            raise Damaged(f"{lines}: line {number} lacks {', '.join(lacking)}.", AGAIN)
    try:
        return _report(content, outputs)
    except (AttributeError, KeyError, TypeError) as error:
        raise Damaged(f"{file} lacks what a report has: {error}", AGAIN) from None


def _report(content: dict[str, Any], outputs: list[dict[str, Any]]) -> Report:
    """The inverse of `Report.fields`."""
    own = {f.name for f in (*fields(Summary), *fields(Report))} | {"format", "exact_note"}
    return Report(
        summary=_summary(content),
        categories={name: _summary(part) for name, part in content["categories"].items()},
        exact=content["exact"],
        mismatches=[Mismatch(**found) for found in content["mismatches"]],
        theory=content["theory"],
        setting={name: value for name, value in content.items() if name not in own},
        outputs=outputs,
        forecast=content["forecast"],
    )


def _summary(content: dict[str, Any]) -> Summary:
    values = {f.name: content[f.name] for f in fields(Summary)}
    spans = {k: tuple(v) for k, v in values.items() if k.endswith("_95") and v is not None}
    return Summary(**{**values, **spans})


def show(report: Report, console: Console, legend: bool = True) -> None:
    """Tables, legend, verdict."""
    setting, total = report.setting, report.summary
    console.print(_headline(setting), style="bold", highlight=False)
    console.print(speed_table(report))
    console.print(_acceptance_table(total))
    console.print(_time_table(total))
    if report.theory is not None:
        console.print(_theory_table(total, report.theory))
    if report.forecast is not None:
        foreseen = f"tau {number(total.tau)}, foreseen from this text by the measure of training"
        console.print(f"{foreseen}: {report.forecast:.2f}", highlight=False)
    if legend:
        console.print(_legend())
    if setting["left_out"]:
        names = ", ".join(setting["left_out"])
        console.print(f"left out, longer than the target reads: {names}", style="yellow")
    style = "bold red" if report.broken else "yellow" if report.mismatches else "bold green"
    console.print(Text(report.verdict(), style=style))


def describe_policy(setting: dict[str, Any]) -> str:
    """`chain, depth 3`, or `dynamic_tree, depth 4, width 4, nodes 8`; a lossy rule by its name."""
    grows = setting["policy"] in ("dynamic_tree", "opt_tree")
    names = ["depth"] if setting["policy"] == "chain" else ["depth", "nodes"]
    if grows:
        names.insert(1, "width")
    lossy = [f"LOSSY ({setting['verify']})"] if setting.get("lossy") else []
    return ", ".join([setting["policy"], *(f"{name} {setting[name]}" for name in names), *lossy])


def _headline(setting: dict[str, Any]) -> str:
    drawn = "greedy" if setting["temperature"] == 0 else f"temperature {setting['temperature']:g}"
    where = f"{setting['dtype']}, {setting['device']}, {setting['threads']} thread(s), batch 1"
    how = f"{describe_policy(setting)}, {drawn}, {where}"
    return f"{setting['drafter']} on {setting['target']}: {how}"


def speed_table(report: Report) -> Table:
    table = Table("prompts of", "n", "tokens", "tau", "ms/round", "ms/plain", "speedup", "95 %")
    for name in ("tokens/s", "plain tokens/s"):
        table.add_column(name)
    for column in table.columns[1:]:
        column.justify = "right"
    parts = report.categories if len(report.categories) > 1 else {}
    for name, part in parts.items():
        table.add_row(name, *_speed_cells(part))
    table.add_section()
    table.add_row("all", *_speed_cells(report.summary), style="bold")
    return table


def _speed_cells(part: Summary) -> list[str]:
    spread = "-" if part.speedup_95 is None else "{:.2f}-{:.2f}".format(*part.speedup_95)
    return [
        str(part.prompts),
        str(part.tokens),
        number(part.tau),
        number(part.ms["round"], 1),
        number(part.ms["baseline"], 1),
        number(part.speedup, 2, "x"),
        spread,
        number(part.tokens_per_second, 1),
        number(part.baseline_tokens_per_second, 1),
    ]


def _acceptance_table(total: Summary) -> Table:
    table = Table("drafted token k", *(str(k) for k, _ in enumerate(total.accept_at, start=1)))
    table.add_row("accept@k", *(number(rate) for rate in total.accept_at))
    table.add_row("cond@k", *(number(rate) for rate in total.cond_at))
    return table


def _time_table(total: Summary) -> Table:
    parts = tuple(total.shares)
    table = Table("a round's time", *parts, "overhead")
    table.add_row("ms", *(number(total.ms[part]) for part in parts), "")
    shares = [*(total.shares[part] for part in parts), total.overhead]
    table.add_row("share", *("-" if share is None else f"{share:.1%}" for share in shares))
    return table


def _theory_table(total: Summary, theory: dict[str, float | int | None]) -> Table:
    """Measured beside predicted; the first two agree, the next say where time is lost."""
    table = Table("speedup", "factor", "how")
    step, alpha = number(total.ms["draft_step"]), number(total.alpha)
    rows = [
        ("measured", total.speedup, "both engines, same prompts, same process"),
        ("from times", theory["from_times"], "tau x plain step / round, from the times above"),
        ("without overhead", theory["no_overhead"], "verify, commit and other at no cost"),
        ("free verification", theory["free_verify"], "moreover a forward at a plain step's cost"),
    ]
    if theory["iid"] is not None:
        how = f"Leviathan et al.: alpha {alpha} at every depth, {step} ms per draft step"
        rows.append(("formula", theory["iid"], how))
    for name, value, how in rows:
        table.add_row(name, number(value, 2, "x"), how)
    if (best := theory["best_gamma"]) is not None:
        deepest = best == len(total.accept_at)
        how = "longest that was measured" if deepest else "predicted best chain length"
        table.add_row("best gamma", str(best), how)
    return table


def _legend() -> Table:
    table = Table("metric", "unit", "definition", box=None, style="dim", header_style="dim")
    for metric in METRICS:
        table.add_row(metric.name, metric.unit, metric.definition, style="dim")
    return table


def number(value: int | float | None, digits: int = 2, unit: str = "") -> str:
    """A cell: `-` for None."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def picture(report: Report) -> bytes:
    """A png: accept@k on the left, tokens per second of both engines on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    total = report.summary
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_headline(report.setting), fontsize=9)
    left, right = figure.subplots(1, 2)
    depths = [str(k) for k, _ in enumerate(total.accept_at, start=1)]
    left.bar_label(left.bar(depths, total.accept_at, color="tab:blue"), fmt="%.2f")
    left.set(title=f"accept@k (tau {number(total.tau)})", xlabel="drafted token k", ylim=(0, 1.1))
    speeds = {"plain": total.baseline_tokens_per_second, "speculative": total.tokens_per_second}
    known = {name: value for name, value in speeds.items() if value is not None}
    colors = ["tab:gray", "tab:blue"][-len(known) :]
    bars = right.bar(list(known), list(known.values()), color=colors)
    right.bar_label(bars, fmt="%.1f")
    title = f"speedup {number(total.speedup, 2, 'x')}, {number(total.ms['round'], 1)} ms/round"
    right.set(title=title, ylabel="tokens/s")
    right.margins(y=0.15)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
