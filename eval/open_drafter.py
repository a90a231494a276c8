"""Which drafter `outrider eval` measures: a run's own, or a published one of any format."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from outrider.conf.errors import RunError
from outrider.conf.files import sha256_of
from outrider.eval.hub import WANTED, fetch
from outrider.models import formats
from outrider.models.drafter import Drafter
from outrider.models.formats import native
from outrider.models.target import Target
from outrider.train.settings import Config


class Opened(NamedTuple):
    """A drafter that is to be measured.

    Attributes:
        config: with the drafter's own settings.
        about: what the report says of a published one: its place, format, and files with hashes.
        said: the same for people; "" of a run's own.
    """

    drafter: Drafter
    config: Config
    about: dict[str, Any]
    said: str = ""


def find_drafter(config: Config) -> Path:
    """Its folder, before any model is loaded.

    Raises:
        RunError: the run has no drafter yet; or the published one is nowhere to be had.
    """
    if config.eval.drafter is not None:
        return fetch(config.eval.drafter)
    folder = Path(config.run.dir)
    if not (folder / "drafter").is_dir():
        message = f"{folder} holds no drafter/: its training has not finished."
        raise RunError(message, "Finish it (train.resume=auto continues), or give another run.dir.")
    return folder / "drafter"


def open_drafter(folder: Path, config: Config, target: Target) -> Opened:
    """
    Raises:
        RunError: it cannot be read, or was made for another target.
    """
    if config.eval.drafter is None:
        drafter, _ = native.load(folder, target)
        return Opened(drafter, config, {})
    drafter, cfg = formats.load(folder, target)
    files = sorted(file for pattern in WANTED for file in folder.glob(pattern))
    about: dict[str, Any] = {
        "drafter": config.eval.drafter,
        "format": formats.recognise(folder).words[0],
        "files": {file.name: sha256_of(file) for file in files},
    }
    hashes = ", ".join(f"{name} {sha256[:12]}" for name, sha256 in about["files"].items())
    said = f"drafter: {about['drafter']}, format {about['format']}: {hashes}"
    return Opened(drafter, replace(config, drafter=cfg), {"published": about}, said)
