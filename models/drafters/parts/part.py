"""A drafter inside another one: its settings, their checks and its construction.

A mapping describes it: the settings of any drafter, {name: ngram, n: 4}; or the folder of a trained
one, {path: FOLDER}, or of its run.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from outrider.conf.errors import ConfigError
from outrider.conf.fields import from_dict
from outrider.models import drafters, formats
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import ModelShape
from outrider.models.target.target import Target


def any_drafter(kind: type[Drafter]) -> str:
    """Return no reason to refuse a drafter."""
    return ""


class Part(NamedTuple):
    """The place of a drafter inside another one.

    Attributes:
        key: of its settings, for messages: drafter.inner.
        fix: what to use instead of a drafter that cannot be there.
        refusal: why a class cannot be there; "": it can. One that runs its target never can.
    """

    key: str
    fix: str
    refusal: Callable[[type[Drafter]], str] = any_drafter

    def parse(self, values: dict[str, Any]) -> Any:
        """Return the `Config` of the drafter that `values` name.

        Raises:
            ConfigError: there is no such drafter, it cannot be there, or a setting is wrong.
        """
        with self._named_inside():
            schema = drafters.config_class(values["name"])
        self._refuse(drafters.drafter_class(values["name"]), values["name"])
        with self._named_inside():
            return from_dict(schema, values, "drafter")

    def check(self, values: dict[str, Any], shape: ModelShape) -> None:
        """Raise an error if the settings, or the folder, do not suit a target of this shape."""
        if "name" in values:
            cfg = self.parse(values)
            with self._named_inside():
                drafters.check(cfg, shape)
        elif folder_of(values["path"]).is_dir():
            formats.recognise(folder_of(values["path"]))
        else:
            why = "There is no such folder."
            fix = f"Paths start at the current folder, {Path.cwd()}."
            raise ConfigError(f"{self.key}.path", values["path"], why, fix)

    def build(self, values: dict[str, Any], target: Target) -> tuple[Drafter, dict[str, Any]]:
        """Build the drafter for a target, whose taps are set, or load it.

        Returns:
            The drafter, frozen and in eval mode, and its complete settings, in which a folder is
            replaced by what it holds.

        Raises:
            ConfigError: the settings are wrong, or the drafter cannot be there.
            RunError: the folder is damaged, or was made for another target.
        """
        if "name" in values:
            cfg = self.parse(values)
            with self._named_inside():
                drafter = drafters.build(cfg, target, _vocab(cfg, target))
        else:
            drafter, cfg = formats.load(folder_of(values["path"]), target)
            self._refuse(type(drafter), cfg.name)
            target.set_taps(drafter.taps)
        cfg = getattr(drafter, "cfg", cfg)
        size = None if drafter.vocab.is_full else len(drafter.vocab)
        settings = {**dataclasses.asdict(cfg), "draft_vocab_size": size}
        drafter.to(target.device, target.dtype).eval().requires_grad_(False)
        return drafter, json.loads(json.dumps(settings))

    def _refuse(self, kind: type[Drafter], name: str) -> None:
        why = self.refusal(kind)
        if kind.runs_target():
            why = "It runs its target itself, which a drafter inside another one cannot do."
        if why:
            raise ConfigError(f"{self.key}.name", name, why, self.fix)

    @contextmanager
    def _named_inside(self) -> Iterator[None]:
        """Turn the key of a `ConfigError`, drafter.n, into that of the part's setting."""
        try:
            yield
        except ConfigError as error:
            key = self.key + error.key.removeprefix("drafter")
            fix = error.fix.replace("drafter.", f"{self.key}.")
            raise ConfigError(key, error.value, error.why, fix) from None


def without_weights(kind: type[Drafter]) -> str:
    """Return why a drafter is no trained one; "": it is."""
    return "" if kind.is_trained else "It has no weights of its own."


TRAINED_FIX = "Give the folder of a trained drafter, or of its run."


def trained_part(key: str) -> Part:
    """Return the place of a trained drafter."""
    return Part(key, TRAINED_FIX, without_weights)


def trained_settings(value: Any, part: Part) -> dict[str, Any]:
    """Return {path: FOLDER} or the settings of a trained drafter, from a folder or such a mapping.

    Raises:
        ConfigError: it is neither, or names a drafter without its weights.
    """
    if isinstance(value, str):
        if value in drafters.names() and not Path(value).is_dir():
            why = without_weights(drafters.drafter_class(value))
            why = why or "It is the name of a drafter, whose weights are in the folder of its run."
            raise ConfigError(part.key, value, why, part.fix)
        return {"path": value}
    named = isinstance(value, dict) and isinstance(value.get("name"), str)
    folder = isinstance(value, dict) and set(value) == {"path"} and isinstance(value["path"], str)
    if not named and not folder:
        why = "It is neither a folder nor the settings of a drafter."
        raise ConfigError(part.key, value, why, part.fix)
    if named:
        part.parse(value)
    return dict(value)


def folder_of(path: str) -> Path:
    """Return the folder of a drafter, or of a run's drafter."""
    folder = Path(path).expanduser()
    return folder / "drafter" if (folder / "drafter").is_dir() else folder


def _vocab(cfg: Any, target: Target) -> DraftVocab:
    """Return the draft vocabulary; a checkpoint overwrites which tokens a reduced one has."""
    with torch.device("cpu"):  # also where a checkpoint is read: its values are checked
        no_counts = torch.zeros(target.vocab_size, dtype=torch.long)
        return DraftVocab.from_counts(no_counts, cfg.draft_vocab_size or target.vocab_size)
