"""The report of a measurement, its verdict and its files.

Three files per measurement in `<run.dir>/eval/`: `<out>.json` (every number, and what it was
measured on), `<out>.outputs.jsonl` (one line per prompt: the token ids of both engines, the origin
of each token, the rejected draft tokens, and the counts and seconds of `metrics.Record`) and
`<out>.png`. The json is written last, so it implies the others. Wherever tau is printed,
milliseconds per round and speedup are printed too.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from outrider.conf.files import write, write_json
from outrider.conf.json_shapes import RATE, number, read_object, read_rows, token
from outrider.conf.quantities import format_count
from outrider.eval.metrics import METRICS, ROUND_PARTS, Summary
from outrider.eval.report_auto import ANSWER, SUMMARY
from outrider.models.decode.rules.rule_table import COUPLED

# top-2 gaps of logits that rounding can bridge: about four units in the last place at 16 to 32
ROUNDING = {"bfloat16": 0.5, "float16": 0.0625}
FORMAT = "outrider-report-1"
MEASURE_AGAIN = "Measure that run again: outrider eval run.dir=..."
TIMES = ", ".join((*ROUND_PARTS, "other", "round", "draft_step", "baseline"))
PART = {  # of a `Summary`
    "prompts, tokens, rounds": int,
    "tau, alpha, tokens_per_second, baseline_tokens_per_second": RATE,
    "speedup, speedup_median, overhead": RATE, "tau_95, speedup_95": ([float, float], None),
    "accept_at, cond_at": [RATE], "ms": {TIMES: RATE, str: RATE},
    "shares": {", ".join((*ROUND_PARTS, "other")): RATE, str: RATE},
}  # fmt: skip
REPORT = PART | {  # `<out>.json`
    "format": FORMAT, "drafter, target, policy, dtype, device": str, "exact_note": str,
    "temperature": float, "depth, nodes, threads, max_new_tokens": int, "width?, seed?": int,
    "draft?, verify?": str, "lossy?": bool, "target_changed?": object,
    "trained_depths?": (int, None),
    "fingerprints": {"target, drafter, template, prompts": str},
    "exact": (bool, None), "forecast": RATE, "categories": {str: PART},
    "mismatches": [
        {"id": str, "position": int, "token, baseline_token": (int, None), "gap": number}
    ],
    "auto?": SUMMARY,
    "theory": ({"from_times, no_overhead, free_verify, iid, best_gamma": RATE}, None),
}  # fmt: skip
OUTPUT = {  # a line of `<out>.outputs.jsonl`
    "id, category, prompt": str, "prompt_ids, output_ids, accepted": [token],
    "origins?": [str], "rejected?": [(token, None)], "baseline_ids?": ([token], None),
    "dialogue?": str, "drafted?, room?": [token], "steps?": int,
    "auto?": ANSWER, "seconds?": {str: float}, "baseline_seconds?": ({str: float}, None),
}  # fmt: skip


class Mismatch(NamedTuple):
    """The first position where an answer differs from plain decoding."""

    id: str
    position: int  # index of the new token
    token: int | None  # of speculative decoding; None after its end
    baseline_token: int | None  # of plain decoding; None after its end
    gap: float  # difference of the target's two largest logits there


@dataclass(frozen=True)
class Report:
    """One measurement."""

    summary: Summary
    categories: dict[str, Summary]
    exact: bool | None  # every answer equals plain decoding; None if they are not comparable
    mismatches: list[Mismatch]
    theory: dict[str, float | int | None] | None  # `metrics.predicted_speedups`
    setting: dict[str, Any]  # how it was measured, as in the json (policy, temperature, dtype, ..)
    outputs: list[dict[str, Any]]  # lines of the outputs file
    forecast: float | None = None  # tau predicted by teacher forcing; None where not defined

    def fields(self) -> dict[str, Any]:
        """Return the content of `<out>.json`."""
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
    def exceeds_rounding(self) -> bool:
        """Whether some answer differs by more than rounding can explain."""
        gaps = [mismatch.gap for mismatch in self.mismatches]
        return exceeds_rounding(self.setting["dtype"], gaps)

    def exactness(self) -> str:
        """Describe `exact`."""
        count, wrong = self.summary.prompts, len(self.mismatches)
        if self.setting.get("lossy"):
            return f"LOSSY by choice ({self.setting.get('verify')}): not the target's distribution"
        if self.setting["temperature"] > 0 and self.setting.get("verify") != COUPLED:
            same = "with decode.verify=coupled they are the same"
            return f"not compared: sampled answers differ by chance ({same})"
        if self.exact is None:
            return "not compared: plain decoding was not run"
        if not wrong:
            whose = " of the changed target" if self.setting.get("target_changed") else ""
            answers = "the only answer equals" if count == 1 else f"all {count} answers equal"
            return f"{answers} plain decoding{whose}"
        largest = max(mismatch.gap for mismatch in self.mismatches)
        rounding = f"rounding in {self.setting['dtype']}"
        cause = "MORE THAN ROUNDING" if self.exceeds_rounding else rounding
        gap = f"largest top-2 gap there {largest:.3g} logits"
        return f"{wrong} of {count} answers differ from plain decoding: {cause}, {gap}"

    def beyond_training(self) -> str:
        """Return what drafts deeper than `drafter.depths` are accepted with; "" without any."""
        trained, rates = self.setting.get("trained_depths"), self.summary.cond_at
        if trained is None or not 0 < trained < len(rates):
            return ""
        if "auto" in self.setting:  # it drafts such depths only where they pay
            return ""
        deeper = ", ".join(format_number(rate) for rate in rates[trained:])
        return (
            f"decode.depth={len(rates)} exceeds drafter.depths={trained}: after accepted parents, "
            f"draft tokens {trained + 1} to {len(rates)} are accepted with {deeper}; "
            f"token {trained} with {format_number(rates[trained - 1])}"
        )

    def verdict(self) -> str:
        """Return one line: whether it is faster, by how much, and whether the text is the same."""
        total = self.summary
        if total.tau is None:
            return "Nothing was measured: no answer is longer than one token."
        cost = f"tau {total.tau:.2f} at {format_number(total.ms['round'], 1)} ms per round"
        if total.speedup is None:
            return f"{cost}; speedup unknown without a baseline. Exactness: {self.exactness()}."
        low, high = total.speedup_95 or (1.0, 1.0)
        result = "faster" if low > 1 else "slower" if high < 1 else "about as fast, within noise"
        result = result if total.speedup_95 else "without an interval, which needs more prompts"
        spread = f" (95 %: {low:.2f}-{high:.2f})" if total.speedup_95 else ""
        cost = f"{cost} against {format_number(total.ms['baseline'], 1)} ms per plain token"
        noise = " ".join(["", above_tau(self.fields())]).rstrip()
        exact = f"Exactness: {self.exactness()}."
        return f"{total.speedup:.2f}x{spread}, {result}: {cost}. {exact}{noise}"


def save(report: Report, folder: Path, out: str) -> None:
    """Write the files of a report, the json last."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in report.outputs)
    write(folder / f"{out}.outputs.jsonl", lines.encode())
    write(folder / f"{out}.png", plot(report))
    write_json(folder / f"{out}.json", report.fields())


def load(folder: Path, out: str) -> Report:
    """Read what `save` wrote; outputs are empty if their file is missing.

    Raises:
        CorruptFile: a file cannot be read, or is not a report of this format.
    """
    content, lines = read_fields(folder / f"{out}.json"), folder / f"{out}.outputs.jsonl"
    own = {f.name for f in (*fields(Summary), *fields(Report))} | {"format", "exact_note"}
    return Report(
        summary=_summary(content),
        categories={name: _summary(part) for name, part in content["categories"].items()},
        mismatches=[Mismatch(*map(row.get, Mismatch._fields)) for row in content["mismatches"]],
        setting={name: value for name, value in content.items() if name not in own},
        outputs=read_rows(lines, MEASURE_AGAIN, OUTPUT) if lines.is_file() else [],
        **{name: content[name] for name in ("exact", "theory", "forecast")},
    )


def read_fields(file: Path) -> dict[str, Any]:
    """Read `<out>.json`; a `CorruptFile` if it is not a report of this format."""
    return read_object(file, MEASURE_AGAIN, REPORT)


def _summary(content: dict[str, Any]) -> Summary:
    values = {f.name: content[f.name] for f in fields(Summary)}
    spans = {k: tuple(v) for k, v in values.items() if k.endswith("_95") and v is not None}
    return Summary(**{**values, **spans})


def exceeds_rounding(dtype: str, gaps: Sequence[float]) -> bool:
    """Return whether some top-2 gap of the mismatches is larger than rounding can explain."""
    limit = ROUNDING.get(dtype, 0.0)
    return any(limit == 0 or not gap <= limit for gap in gaps)


def exact_in_a_word(report: Mapping[str, Any]) -> str:
    """Return `yes`, `NO` or `rounding`; `lossy` or `-` for answers that are not compared."""
    if report["exact"] is None:
        return "lossy" if report.get("lossy") else "-"
    gaps = [mismatch["gap"] for mismatch in report["mismatches"]]
    wrong = "NO" if exceeds_rounding(report["dtype"], gaps) else "rounding"
    return "yes" if report["exact"] else wrong


def above_tau(report: Mapping[str, Any]) -> str:
    """Return a sentence on speedups above tau, all prompts or a category; "" if there is none.

    A round takes at least the time of a plain step, so no speedup is above tau.
    """
    parts = {**report["categories"], "all": report}
    names = [
        name
        for name, part in parts.items()
        if part["speedup"] is not None and part["tau"] is not None and part["speedup"] > part["tau"]
    ]
    where = "" if "all" in names or not names else f" in {', '.join(names)}"
    why = "is noise: a round takes at least a plain step."
    return f"Speedup above tau{where} {why}" if names else ""


def describe_policy(setting: dict[str, Any]) -> str:
    """Return `chain, depth 3` or `dynamic_tree, depth 4, width 4, nodes 8`, and a lossy rule.

    A confidence at which chains end is named, too.
    """
    names = ["depth"] if setting["policy"] == "chain" else ["depth", "nodes"]
    if setting.get("confidence"):
        names.append("confidence")
    if setting["policy"] in ("dynamic_tree", "opt_tree"):
        names.insert(1, "width")
    lossy = [f"LOSSY ({setting.get('verify')})"] if setting.get("lossy") else []
    sizes = [f"{name} {setting.get(name)}" for name in names]
    return ", ".join([setting["policy"], *sizes, *lossy])


def headline(setting: dict[str, Any]) -> str:
    """Return drafter, target, policy, sampling and hardware in one line."""
    temperature = setting["temperature"]
    sampling = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    threads = format_count(setting["threads"], "thread")
    hardware = f"{setting['dtype']}, {setting['device']}, {threads}, batch 1"
    models = f"{setting['drafter']} on {setting['target']}"
    return f"{models}: {describe_policy(setting)}, {sampling}, {hardware}"


def format_number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """Format a number; `-` for None."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def plot(report: Report) -> bytes:
    """Return a png: accept@k on the left, tokens per second of both engines on the right."""
    from matplotlib.figure import Figure

    total = report.summary
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    figure.suptitle(headline(report.setting), fontsize=9)
    left, right = figure.subplots(1, 2)
    rates = {str(k): rate for k, rate in enumerate(total.accept_at, 1) if rate is not None}
    left.bar_label(left.bar(list(rates), list(rates.values()), color="tab:blue"), fmt="%.2f")
    title = f"accept@k (tau {format_number(total.tau)})"
    left.set(title=title, xlabel="draft token k", ylim=(0, 1.1))
    speeds = {"plain": total.baseline_tokens_per_second, "speculative": total.tokens_per_second}
    measured = {name: value for name, value in speeds.items() if value is not None}
    colors = ["tab:gray", "tab:blue"][-len(measured) :]
    bars = right.bar(list(measured), list(measured.values()), color=colors)
    right.bar_label(bars, fmt="%.1f")
    speedup, cost = format_number(total.speedup, 2, "x"), format_number(total.ms["round"], 1)
    right.set(title=f"speedup {speedup}, {cost} ms/round", ylabel="tokens/s")
    right.margins(y=0.15)
    return png(figure)


def png(figure: Any) -> bytes:
    """Return a matplotlib figure as a png."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
