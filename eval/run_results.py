"""Results of runs that a comparison reads: training, reports, settings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from outrider.conf.errors import RunError
from outrider.eval.report import read_fields
from outrider.train.manifest import read_manifest, read_training

STUDY = "study.db"  # in a search folder (eval/search_results.py)


class RunResults(NamedTuple):
    """A run.

    Attributes:
        training: `training.json`; None while it trains.
        reports: by name.
        own: predicted acceptance on text of the target's own; {} if it was not measured.
        settings: those of the run that are known.
        name: its folder, with as many folders above it as tell the runs of a comparison apart.
    """

    folder: Path
    training: dict[str, Any] | None
    reports: dict[str, dict[str, Any]]
    own: dict[str, float]
    settings: dict[str, Any]
    name: str

    @property
    def drafter(self) -> str:
        """The drafter's name."""
        return str(next(iter(self.reports.values()))["drafter"])

    @property
    def lr(self) -> str:
        """The learning rate, as text; "-" if it is not known."""
        rate = (self.settings.get("train") or {}).get("lr")
        return f"{rate:g}" if isinstance(rate, float | int) else "-"

    @property
    def target(self) -> str:
        """The fingerprint of the target's weights."""
        return str(next(iter(self.reports.values()))["fingerprints"]["target"])

    @property
    def depths(self) -> int | None:
        """The number of depths of predicted acceptance; None if it was not measured."""
        held_out = self.own or (self.training or {}).get("held_out", {})
        return sum(name.startswith("alpha@") for name in held_out) or None


def load_runs(paths: Sequence[Path]) -> tuple[list[RunResults], list[RunError], list[Path]]:
    """Return runs with reports, an error for each run without, and search folders.

    Raises:
        RunError: there is nothing to compare, a path does not exist, or a report is damaged.
    """
    runs, without, searches = list[RunResults](), list[RunError](), list[Path]()
    for path in paths:
        if (path / STUDY).is_file():
            searches.append(path)
        elif list((path / "eval").glob("*.json")):
            runs.append(read_results(path))
        elif path.is_dir():
            without.append(_no_report(path))
        else:
            raise _no_report(path)
    if not runs and not searches:
        raise without[0]
    names = distinct_names([run.folder for run in runs])
    runs = [run._replace(name=name) for run, name in zip(runs, names, strict=True)]
    return runs, without, searches


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return the last parts of every folder, as many as tell folders of one name apart."""
    parts = [folder.absolute().parts for folder in folders]
    out = list[str]()
    for own in parts:
        others = [other for other in parts if other != own]
        count = 1
        while count < len(own) and any(other[-count:] == own[-count:] for other in others):
            count += 1
        out.append("/".join(own[-count:]))
    return out


def all_reports(runs: Sequence[RunResults]) -> dict[str, dict[str, Any]]:
    """Return all reports by run folder and, where a run has several, report name."""
    return {
        str(run.folder) if len(run.reports) == 1 else f"{run.folder} {name}": report
        for run in runs
        for name, report in run.reports.items()
    }


def read_results(run: Path) -> RunResults:
    reports = {file.stem: read_fields(file) for file in sorted((run / "eval").glob("*.json"))}
    manifest, training = read_manifest(run) or {}, read_training(run)
    settings = manifest.get("config", {})
    own = _own_metrics(manifest, training)
    return RunResults(run, training, reports, own, settings, run.absolute().name)


def _own_metrics(manifest: dict[str, Any], training: dict[str, Any] | None) -> dict[str, float]:
    """Return the metrics on the target's own text: of self-generated text, the held-out ones."""
    if training is None or "own_text" in training:
        return dict((training or {}).get("own_text", {}))
    data = manifest.get("data")
    generated = isinstance(data, dict) and data.get("source") == "self" and "given" not in data
    return dict(training.get("held_out", {})) if generated else {}


def _no_report(run: Path) -> RunError:
    measured = sorted(str(f.parents[1]) for f in run.parent.glob("*/eval/*.json"))
    beside = f"Runs with a report beside it: {', '.join(dict.fromkeys(measured)) or 'none'}."
    if not run.is_dir():
        return RunError(f"{run} does not exist.", beside)
    message = f"{run} has no report yet (eval/*.json)."
    return RunError(message, f"{beside} Measure one with: outrider eval run.dir={run}")
