"""Training sections of a report page: curves, cost, configuration and provenance."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.conf.compose import flatten
from outrider.eval.compare import MB, shown_template
from outrider.eval.page.elements import Collapsible, Listing, Note, Part, Table, text_table
from outrider.eval.page.figures import curves, draw, stacked_bars
from outrider.eval.page.run_files import RunFiles
from outrider.train.metrics_log import METRICS

CURVES = (
    ("train", "objective", "training objective"),
    ("held", "loss", "held-out loss"),
    ("held", "agree", "held-out agreement"),
    ("held", "alpha", "held-out acceptance"),
    ("held", "accept_length", "held-out acceptance length"),
    ("own", "accept_length", "acceptance length on the target's own answers"),
    ("held_ema", "accept_length", "held-out acceptance length, averaged weights"),
    ("own_ema", "accept_length", "acceptance length on its own answers, averaged weights"),
)
COSTS = (  # quantity, field of training.json, format, unit
    ("parameters trained, millions", "parameters", ".2f", 1e6),
    ("steps", "steps", ".0f", 1),
    ("seconds", "seconds", ".1f", 1),
    ("seconds of initialisation", "start_seconds", ".1f", 1),
    ("tokens", "tokens", ".0f", 1),
    ("tokens per second", "tokens_per_second", ".0f", 1),
    ("peak memory, MB", "peak_memory_bytes", ".0f", MB),
    ("best step", "best_step", ".0f", 1),
)


HELD_OUT = {  # fields of training.json
    "held_out": "held-out text", "own_text": "the target's own answers to held-out prompts",
}  # fmt: skip


def logged_definitions(*lines: str) -> str:
    """Return the definitions of logged metrics, from `metrics_log.METRICS`."""
    known = [n for n in dict.fromkeys(line.partition("@")[0] for line in lines) if n in METRICS]
    metrics = ((name, METRICS[name]) for name in known)
    return " ".join(f"{name} [{m.unit}], {m.reduction}: {m.meaning}." for name, m in metrics)


def metric_series(
    log: Sequence[Mapping[str, Any]], kind: str, name: str
) -> dict[str, list[tuple[float, float]]]:
    """Return (step, value) of a metric and of its variants: `loss@1`, `loss@2`, .."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for line in log:
        for key, value in line.items() if line["kind"] == kind else ():
            matches = key == name or key.startswith((f"{name}@", f"{name}_"))
            if matches and isinstance(value, int | float):
                lines.setdefault(key, []).append((float(line["step"]), float(value)))
    return lines


def curve_parts(run: RunFiles) -> Iterator[Part]:
    """Yield loss and acceptance over steps."""
    for kind, name, title in CURVES:
        if lines := metric_series(run.log, kind, name):
            definition = logged_definitions(*lines)
            interval = "Every log line." if kind == "train" else "Every held-out evaluation."
            unit = METRICS[name].unit
            paint = curves(lines, "step", unit, marks=kind != "train", log=unit == "nats")
            yield draw(title, f"{definition} {interval}", paint)
    if not run.log:
        yield Note(f"{run.folder / 'metrics.jsonl'} is missing: no curves.")


def cost_parts(run: RunFiles) -> Iterator[Part]:
    """Yield the cost of training, and the best drafter's metrics on held-out text."""
    if run.training is None:
        why = "Training has not finished: training.json is missing."
        yield Note(why, "outrider train ... train.resume=auto")
        return
    rows = [[name, value] for name, value in _costs(run.training) if value is not None]
    definition = (
        "Of the whole run up to its last step. tokens: batch tokens, padding in; peak memory: of "
        "the process, target in (on a GPU of the allocator)."
    )
    yield text_table("cost", ["quantity", "value"], rows, definition)
    if phases := run.training.get("phases"):
        seconds = {name: [float(value)] for name, value in phases.items()}
        definition = "Seconds of training by phase; loading and report: of the last start."
        paint = stacked_bars(["training"], seconds, "seconds")
        yield draw("time by phase", definition, paint)
        cells = [[name, f"{value:.1f}"] for name, value in phases.items()]
        yield text_table("time by phase", ["phase", "seconds"], cells, definition)
    for name, text in HELD_OUT.items():
        if held := run.training.get(name):
            definition = logged_definitions(*held)
            rows = [[metric, f"{value:.3f}"] for metric, value in held.items()]
            depths = sum(metric.startswith("alpha@") for metric in held)
            best = f"best step ({run.training.get('best_step')}), drafts of {depths} tokens"
            table = text_table(text, ["metric", "value"], rows, definition)
            yield Collapsible(f"{text}, {best}", [table])


def _costs(training: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Yield quantities and their values, None where one is missing."""
    for quantity, name, form, unit in COSTS:
        value = training.get(name)
        yield quantity, None if value is None else format(value / unit, form)
    for name, value in training.get("budget", {}).items():
        yield f"budget: {name}", None if value is None else str(value)


def provenance_parts(run: RunFiles) -> Iterator[Part]:
    """Yield configuration, fingerprints, versions and machine."""
    if run.manifest is None:
        yield Note(f"{run.folder / 'manifest.json'} is missing: no provenance.")
    else:
        manifest = {k: v for k, v in run.manifest.items() if k not in ("config", "fingerprints")}
        if argv := manifest.get("argv"):
            manifest["argv"] = [Path(argv[0]).name, *argv[1:]]  # the program's path is private
        rows = [
            [name, " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)]
            for name, value in flatten(manifest)
        ]
        definition = "Written when the run started (manifest.json)."
        table = text_table("provenance", ["field", "value"], rows, definition)
        yield Collapsible("provenance of the run", [table])
    yield _fingerprints(run)
    yield Collapsible("configuration", [Listing("config.yaml", run.config)])


def _shown_hash(name: str, hashes: Mapping[str, Any]) -> str:
    digest = str(hashes.get(name, "-"))
    return shown_template(digest, 16) if name == "template" else digest[:16]


def _fingerprints(run: RunFiles) -> Table:
    hashes = {out: dict(report.setting["fingerprints"]) for out, report in run.reports.items()}
    if trained := (run.manifest or {}).get("fingerprints"):
        hashes = {"training": dict(trained), **hashes}
    names = dict.fromkeys(name for column in hashes.values() for name in column)
    rows = [[name, *(_shown_hash(name, column) for column in hashes.values())] for name in names]
    definition = (
        "Hashes, first 16 digits: target and drafter of their weights, template and prompts of "
        "their texts, tokenizer of its rules."
    )
    return text_table("fingerprints", ["of", *hashes], rows, definition)
