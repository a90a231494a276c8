"""What a page says of training: curves, cost, time by phase, configuration, where things came from.

All of it is in `metrics.jsonl`, `training.json`, `manifest.json` and `config.yaml`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.conf.compose import flat
from outrider.eval.compare import MB
from outrider.eval.page.elements import Fold, Listing, Note, Part, Section, Table, table
from outrider.eval.page.figures import curves, draw, stacks
from outrider.eval.page.run_files import Run
from outrider.train.metrics_log import METRICS

CURVES = (
    ("train", "objective", "training objective"),
    ("held", "loss", "held-out loss"),
    ("held", "agree", "held-out agreement"),
    ("held", "alpha", "held-out acceptance"),
    ("held", "accept_length", "held-out acceptance length"),
)
CONTINUE = "outrider train ... train.resume=auto"


def defined(name: str) -> str:
    """A logged metric in the words of `tracking.METRICS`."""
    metric = METRICS[name]
    return f"{name} [{metric.unit}], {metric.reduction}: {metric.meaning}."


def series(
    log: Sequence[Mapping[str, Any]], kind: str, name: str
) -> dict[str, list[tuple[float, float]]]:
    """(step, value) of a metric and of all that is named after it: `loss@1`, `loss@2`, .."""
    found: dict[str, list[tuple[float, float]]] = {}
    for line in log:
        for key, value in line.items() if line.get("kind") == kind else ():
            same = key == name or key.startswith((f"{name}@", f"{name}_"))
            if same and isinstance(value, int | float):
                found.setdefault(key, []).append((float(line.get("step", 0)), float(value)))
    return found


def curves_of(run: Run) -> Section:
    """Loss and acceptance over steps."""
    parts: list[Part] = []
    for kind, name, title in CURVES:
        if lines := series(run.log, kind, name):
            said = " ".join(defined(n) for n in dict.fromkeys(x.partition("@")[0] for x in lines))
            where = "Every log line." if kind == "train" else "Every held-out evaluation."
            unit, log = METRICS[name].unit, METRICS[name].unit == "nats"
            paint = curves(lines, "step", unit, marks=kind == "held", log=log)
            parts.append(draw(title, f"{said} {where}", paint))
    if not run.log:
        parts.append(Note(f"{run.folder / 'metrics.jsonl'} is not there: no curves."))
    return Section("curves", "Loss and acceptance in training", parts)


def cost_of(run: Run) -> Section:
    """What training took, and what the best drafter says of held-out text."""
    if run.training is None:
        why = "Training has not finished: training.json is not there."
        return Section("cost", "Cost of training", [Note(why, CONTINUE)])
    rows = [[name, value] for name, value in _costs(run.training) if value is not None]
    about = (
        "Of the whole run up to its last step. tokens: batch tokens, padding in; peak memory: of "
        "the process, target in (a GPU's: its allocator); joules: where counters can be read."
    )
    parts: list[Part] = [table("cost", ["what", "value"], rows, about)]
    phases = run.training.get("phases") or {}
    if phases:
        seconds = {name: [float(value)] for name, value in phases.items()}
        told = "Seconds of training by phase (training.json); loading and report: the last start's."
        parts.append(draw("time by phase", told, stacks(["training"], seconds, "seconds")))
        cells = [[name, f"{value:.1f}"] for name, value in phases.items()]
        parts.append(table("time by phase", ["phase", "seconds"], cells, told))
    held = run.training.get("held_out", {})
    names = dict.fromkeys(name.partition("@")[0] for name in held)
    meant = " ".join(defined(name) for name in names if name in METRICS)
    rows = [[name, f"{value:.3f}"] for name, value in held.items()]
    if rows:
        title = f"held-out text, best step ({run.training.get('best_step')})"
        parts.append(Fold(title, [table("held out", ["metric", "value"], rows, meant)]))
    return Section("cost", "Cost of training", parts)


def _costs(account: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    def said(name: str, form: str, unit: float = 1.0) -> str | None:
        value = account.get(name)
        return None if value is None else format(value / unit, form)

    yield "parameters trained, millions", said("parameters", ".2f", 1e6)
    yield "steps", said("steps", ".0f")
    yield "seconds", said("seconds", ".1f")
    yield "seconds for first weights", said("start_seconds", ".1f")
    yield "tokens", said("tokens", ".0f")
    yield "tokens per second", said("tokens_per_second", ".0f")
    yield "peak memory, MB", said("peak_memory_bytes", ".0f", MB)
    yield "joules", said("joules", ".0f")
    yield "best step", said("best_step", ".0f")
    for name, value in (account.get("budget") or {}).items():
        yield f"budget: {name}", None if value is None else str(value)


def origin_of(run: Run) -> Section:
    """Configuration, fingerprints, versions, machine."""
    parts: list[Part] = []
    if run.manifest is None:
        parts.append(Note(f"{run.folder / 'manifest.json'} is not there: no provenance of it."))
    else:
        about = {k: v for k, v in run.manifest.items() if k not in ("config", "fingerprints")}
        if program := about.get("argv", [])[:1]:  # by its name: a path tells of the machine
            about["argv"] = [Path(program[0]).name, *about["argv"][1:]]
        rows = [[name, _plain(value)] for name, value in flat(about)]
        told = "What the run wrote down of itself when it was started (manifest.json)."
        parts.append(Fold("origin of the run", [table("origin", ["what", "value"], rows, told)]))
    parts.append(_fingerprints(run))
    parts.append(Fold("configuration", [Listing("config.yaml", run.config)]))
    return Section("origin", "Configuration and fingerprints", parts)


def _fingerprints(run: Run) -> Table:
    found = {out: dict(report.setting["fingerprints"]) for out, report in run.reports.items()}
    trained = dict((run.manifest or {}).get("fingerprints") or {})
    if trained:
        found = {"training": trained, **found}
    names = dict.fromkeys(name for marks in found.values() for name in marks)
    rows = [[name, *(str(marks.get(name, "-"))[:16] for marks in found.values())] for name in names]
    told = (
        "Hashes, first 16 digits: target and drafter of their weights, template and prompts of "
        "their texts, tokenizer of its rules. Equal hashes, equal things."
    )
    return table("fingerprints", ["of", *found], rows, told)


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return str(value)
