"""The drafter that `outrider eval` measures: a run's own, or a published one of any format."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.conf.errors import RunError
from outrider.conf.files import sha256_of
from outrider.conf.schema import Config, UntrainedConfig
from outrider.conf.searched import SearchedConfig
from outrider.data.target_fit import load_fitting_target
from outrider.eval.calibration_file import attach_calibration
from outrider.eval.hub import DRAFTER_FILES, fetch
from outrider.models import drafters, formats
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.formats import native
from outrider.models.target import process
from outrider.models.target.load import LoadedTarget
from outrider.models.target.target import Target


def require_single_process(verb: str) -> None:
    """Raise a RunError if several processes run this verb."""
    if process.world_size() > 1:
        message = f"{verb} was started by {process.world_size()} processes; it runs in one."
        raise RunError(message, f"Use: outrider {verb} run.dir=...")


def find_drafter(config: Config) -> Path | None:
    """Return the drafter's folder, before any model is loaded; None for one without weights.

    Raises:
        RunError: the run has no drafter yet, or the published one cannot be found.
    """
    if config.eval.drafter is not None:
        return published_folder(config.eval.drafter)
    if isinstance(config.drafter, UntrainedConfig):
        return None
    return drafter_folder(Path(config.run.dir))


def published_folder(name: str) -> Path:
    """Return the folder of a published drafter, downloaded if `name` is a hub id.

    Raises:
        RunError: it cannot be found, or is a run.
    """
    folder = fetch(name)
    if not (folder / "config.json").is_file() and (folder / "drafter").is_dir():
        message = f"{folder} is a run, not a drafter."
        fix = f"Give {folder / 'drafter'}, or run.dir={folder} (in Python, Decoder.from_run)."
        raise RunError(message, fix)
    return folder


def drafter_folder(run: Path) -> Path:
    """Return the folder of a run's own drafter; without one, raise a RunError."""
    if not (run / "drafter").is_dir():
        message = f"{run} has no drafter/: its training has not finished."
        raise RunError(message, "Finish it (train.resume=auto continues), or use another run.dir.")
    return run / "drafter"


def load_run_models(config: Config) -> tuple[LoadedTarget, Drafter]:
    """Load a run's target and drafter, with the drafter's taps and changes of the target."""
    folder = drafter_folder(Path(config.run.dir))
    process.set_threads()
    loaded = load_fitting_target(config)
    drafter, _ = native.load(folder, loaded.target)
    drafter.patch_target(loaded.target)
    loaded.target.set_taps(drafter.taps)
    return loaded, drafter


def build_untrained(cfg: UntrainedConfig, target: Target) -> Drafter:
    """Build a drafter without weights."""
    return drafters.build(cfg, target, DraftVocab.identity(target.vocab_size)).to(target.device)


def describe_untrained(cfg: UntrainedConfig) -> dict[str, Any]:
    """Return the fields of a report about a drafter without weights: what a search has found."""
    return {"untrained": True, **(cfg.found_settings() if isinstance(cfg, SearchedConfig) else {})}


def open_drafter(
    folder: Path | None, config: Config, target: Target, console: Console
) -> tuple[Drafter, Config, dict[str, Any]]:
    """Load the drafter for decoding.

    Returns:
        The drafter, the configuration with its own settings, and fields of the report: of a
        published one its source, format and hashes of its files; see also `describe_untrained`.

    Raises:
        RunError: it cannot be read, or was made for another target.
    """
    if folder is None:
        assert isinstance(config.drafter, UntrainedConfig), "see find_drafter"
        fields = describe_untrained(config.drafter)
        if found := [f"{name} {value}" for name, value in fields.items() if name != "untrained"]:
            console.print(f"drafter: {config.drafter.name}, {', '.join(found)}", highlight=False)
        return build_untrained(config.drafter, target), config, fields
    if config.eval.drafter is None:
        drafter, _ = native.load(folder, target)
        attach_calibration(drafter, folder)
        return drafter, config, {}
    drafter, cfg = formats.load(folder, target)
    attach_calibration(drafter, folder)
    files = sorted(file for pattern in DRAFTER_FILES for file in folder.glob(pattern))
    about: dict[str, Any] = {
        "drafter": config.eval.drafter,
        "format": formats.recognise(folder).names[0],
        "files": {file.name: sha256_of(file) for file in files},
    }
    hashes = ", ".join(f"{name} {sha256[:12]}" for name, sha256 in about["files"].items())
    summary = f"drafter: {about['drafter']}, format {about['format']}: {hashes}"
    console.print(summary)
    return drafter, replace(config, drafter=cfg), {"published": about}
