"""The drafter that `outrider eval` measures: a run's own, or a published one of any format."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from outrider.conf.errors import RunError
from outrider.conf.files import sha256_of
from outrider.conf.schema import Config
from outrider.eval.hub import DRAFTER_FILES, fetch
from outrider.models import formats
from outrider.models.drafter import Drafter
from outrider.models.formats import native
from outrider.models.target import Target


class OpenedDrafter(NamedTuple):
    """A drafter to measure.

    Attributes:
        config: the configuration with the drafter's own settings.
        about: fields of the report about a published drafter: source, format, hashes of its files.
        summary: the same as one line for the console; "" for a run's own drafter.
    """

    drafter: Drafter
    config: Config
    about: dict[str, Any]
    summary: str = ""


def find_drafter(config: Config) -> Path:
    """Return the drafter's folder, before any model is loaded.

    Raises:
        RunError: the run has no drafter yet, or the published one cannot be found.
    """
    if config.eval.drafter is not None:
        return fetch(config.eval.drafter)
    folder = Path(config.run.dir)
    if not (folder / "drafter").is_dir():
        message = f"{folder} holds no drafter/: its training has not finished."
        raise RunError(message, "Finish it (train.resume=auto continues), or use another run.dir.")
    return folder / "drafter"


def open_drafter(folder: Path, config: Config, target: Target) -> OpenedDrafter:
    """Load the drafter for decoding.

    Raises:
        RunError: it cannot be read, or was made for another target.
    """
    if config.eval.drafter is None:
        drafter, _ = native.load(folder, target)
        return OpenedDrafter(drafter, config, {})
    drafter, cfg = formats.load(folder, target)
    files = sorted(file for pattern in DRAFTER_FILES for file in folder.glob(pattern))
    about: dict[str, Any] = {
        "drafter": config.eval.drafter,
        "format": formats.recognise(folder).names[0],
        "files": {file.name: sha256_of(file) for file in files},
    }
    hashes = ", ".join(f"{name} {sha256[:12]}" for name, sha256 in about["files"].items())
    summary = f"drafter: {about['drafter']}, format {about['format']}: {hashes}"
    return OpenedDrafter(drafter, replace(config, drafter=cfg), {"published": about}, summary)
