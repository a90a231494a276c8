"""Training sections of a report page: curves, cost, configuration and provenance.

They are read from `metrics.jsonl`, `training.json`, `manifest.json` and `config.yaml`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.conf.compose import flatten
from outrider.eval.compare import MB
from outrider.eval.page.elements import Collapsible, Listing, Note, Part, Section, Table, text_table
from outrider.eval.page.figures import curves, draw, stacked_bars
from outrider.eval.page.run_files import RunFiles
from outrider.train.metrics_log import METRICS

CURVES = (
    ("train", "objective", "training objective"),
    ("held", "loss", "held-out loss"),
    ("held", "agree", "held-out agreement"),
    ("held", "alpha", "held-out acceptance"),
    ("held", "accept_length", "held-out acceptance length"),
)
CONTINUE = "outrider train ... train.resume=auto"


def logged_definition(name: str) -> str:
    """Return the definition of a logged metric, from `metrics_log.METRICS`."""
    metric = METRICS[name]
    return f"{name} [{metric.unit}], {metric.reduction}: {metric.meaning}."


def metric_series(
    log: Sequence[Mapping[str, Any]], kind: str, name: str
) -> dict[str, list[tuple[float, float]]]:
    """Return (step, value) of a metric and of its variants: `loss@1`, `loss@2`, .."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for line in log:
        for key, value in line.items() if line.get("kind") == kind else ():
            matches = key == name or key.startswith((f"{name}@", f"{name}_"))
            if matches and isinstance(value, int | float):
                lines.setdefault(key, []).append((float(line.get("step", 0)), float(value)))
    return lines


def curves_section(run: RunFiles) -> Section:
    """Return loss and acceptance over steps."""
    parts: list[Part] = []
    for kind, name, title in CURVES:
        if lines := metric_series(run.log, kind, name):
            names = dict.fromkeys(line.partition("@")[0] for line in lines)
            definition = " ".join(map(logged_definition, names))
            interval = "Every log line." if kind == "train" else "Every held-out evaluation."
            unit, log = METRICS[name].unit, METRICS[name].unit == "nats"
            paint = curves(lines, "step", unit, marks=kind == "held", log=log)
            parts.append(draw(title, f"{definition} {interval}", paint))
    if not run.log:
        parts.append(Note(f"{run.folder / 'metrics.jsonl'} is missing: no curves."))
    return Section("curves", "Loss and acceptance in training", parts)


def cost_section(run: RunFiles) -> Section:
    """Return the cost of training, and the best drafter's metrics on held-out text."""
    if run.training is None:
        why = "Training has not finished: training.json is missing."
        return Section("cost", "Cost of training", [Note(why, CONTINUE)])
    rows = [[name, value] for name, value in _costs(run.training) if value is not None]
    definition = (
        "Of the whole run up to its last step. tokens: batch tokens, padding in; peak memory: of "
        "the process, target in (on a GPU of the allocator)."
    )
    parts: list[Part] = [text_table("cost", ["quantity", "value"], rows, definition)]
    phases = run.training.get("phases") or {}
    if phases:
        seconds = {name: [float(value)] for name, value in phases.items()}
        definition = "Seconds of training by phase; loading and report: of the last start."
        paint = stacked_bars(["training"], seconds, "seconds")
        parts.append(draw("time by phase", definition, paint))
        cells = [[name, f"{value:.1f}"] for name, value in phases.items()]
        parts.append(text_table("time by phase", ["phase", "seconds"], cells, definition))
    held = run.training.get("held_out", {})
    names = dict.fromkeys(name.partition("@")[0] for name in held)
    definition = " ".join(logged_definition(name) for name in names if name in METRICS)
    rows = [[name, f"{value:.3f}"] for name, value in held.items()]
    if rows:
        title = f"held-out text, best step ({run.training.get('best_step')})"
        parts.append(
            Collapsible(title, [text_table("held out", ["metric", "value"], rows, definition)])
        )
    return Section("cost", "Cost of training", parts)


def _costs(training: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    def formatted(name: str, form: str, unit: float = 1.0) -> str | None:
        value = training.get(name)
        return None if value is None else format(value / unit, form)

    yield "parameters trained, millions", formatted("parameters", ".2f", 1e6)
    yield "steps", formatted("steps", ".0f")
    yield "seconds", formatted("seconds", ".1f")
    yield "seconds for first weights", formatted("start_seconds", ".1f")
    yield "tokens", formatted("tokens", ".0f")
    yield "tokens per second", formatted("tokens_per_second", ".0f")
    yield "peak memory, MB", formatted("peak_memory_bytes", ".0f", MB)
    yield "best step", formatted("best_step", ".0f")
    for name, value in (training.get("budget") or {}).items():
        yield f"budget: {name}", None if value is None else str(value)


def provenance_section(run: RunFiles) -> Section:
    """Return configuration, fingerprints, versions and machine."""
    parts: list[Part] = []
    if run.manifest is None:
        parts.append(Note(f"{run.folder / 'manifest.json'} is missing: no provenance."))
    else:
        manifest = {k: v for k, v in run.manifest.items() if k not in ("config", "fingerprints")}
        if program := manifest.get("argv", [])[:1]:  # without its path, which is private
            manifest["argv"] = [Path(program[0]).name, *manifest["argv"][1:]]
        rows = [[name, _plain(value)] for name, value in flatten(manifest)]
        definition = "Written when the run started (manifest.json)."
        table = text_table("provenance", ["field", "value"], rows, definition)
        parts.append(Collapsible("provenance of the run", [table]))
    parts.append(_fingerprints(run))
    parts.append(Collapsible("configuration", [Listing("config.yaml", run.config)]))
    return Section("origin", "Configuration and fingerprints", parts)


def _fingerprints(run: RunFiles) -> Table:
    hashes = {out: dict(report.setting["fingerprints"]) for out, report in run.reports.items()}
    trained = dict((run.manifest or {}).get("fingerprints") or {})
    if trained:
        hashes = {"training": trained, **hashes}
    names = dict.fromkeys(name for column in hashes.values() for name in column)
    rows = [
        [name, *(str(column.get(name, "-"))[:16] for column in hashes.values())] for name in names
    ]
    definition = (
        "Hashes, first 16 digits: target and drafter of their weights, template and prompts of "
        "their texts, tokenizer of its rules."
    )
    return text_table("fingerprints", ["of", *hashes], rows, definition)


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return str(value)
