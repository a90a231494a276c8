"""The drafters: one file each, located by name.

A file defines a frozen dataclass `Config`, a subclass of `DrafterConfig`, and one subclass of
`Drafter`, constructed as `cls(cfg, target, vocab, taps)`. A drafter that reads decoder layers of
the target also has a setting `taps` and a function `default_taps(layers)`. There is no registry,
and no configuration holds a path to a class: a downloaded config cannot name code to run.
"""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from outrider.conf.errors import ConfigError
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import ModelShape, TargetEnds
from outrider.models.target.target import Target, check_taps

HERE = Path(__file__).parent


def names() -> list[str]:
    """Return the names of all drafters, sorted."""
    return sorted(f.stem for f in HERE.glob("*.py") if not f.stem.startswith("_"))


def trained_names() -> list[str]:
    """Return the names of the drafters that have weights, sorted."""
    return [name for name in names() if drafter_class(name).is_trained]


def drafter_module(name: str) -> ModuleType:
    """Import a drafter's file; raise ConfigError if there is none."""
    if name not in names():
        raise ConfigError(
            "drafter", name, "There is no such drafter.", f"Choose one of: {', '.join(names())}."
        )
    return importlib.import_module(f"outrider.models.drafters.{name}")


def drafter_class(name: str) -> type[Drafter]:
    """Return the one subclass of `Drafter` that the file defines."""
    module = drafter_module(name)
    own = [v for v in vars(module).values() if getattr(v, "__module__", None) == module.__name__]
    classes = [value for value in own if isinstance(value, type) and issubclass(value, Drafter)]
    assert len(classes) == 1, f"{name}.py must define exactly one Drafter, not {classes}"
    return classes[0]


def resolve_taps(cfg: Any, layers: int) -> tuple[int, ...]:
    """Return the taps of a drafter: those of its settings, or its file's default.

    A `Config` with a method `tap_layers` computes them, and checks its settings.
    """
    if hasattr(cfg, "tap_layers"):
        return tuple(cfg.tap_layers(layers))
    if not hasattr(cfg, "taps"):
        return ()
    module = drafter_module(cfg.name)
    return tuple(module.default_taps(layers) if cfg.taps is None else cfg.taps)


def check(cfg: Any, shape: ModelShape) -> tuple[int, ...]:
    """Return the taps of a drafter for a target of this shape.

    Raises:
        ConfigError: settings that do not suit it.
    """
    taps = resolve_taps(cfg, shape.layers)
    check_taps(taps, shape.layers)
    drafter_class(cfg.name).check_settings(cfg, shape)
    return taps


def check_recurrent(name: str) -> None:
    """Raise ConfigError for a drafter that does not work on a target with recurrent layers."""
    if drafter_class(name).runs_target():
        why = (
            "It drafts with layers of the target and their rows, and this target has recurrent "
            "layers, whose states would have to follow the drafts."
        )
        fix = "Use another drafter: eagle3, mtp, medusa, draft_lm, ngram, ..."
        raise ConfigError("drafter", name, why, fix)


class TargetWithShape:
    """Embedding and head of a target, with another shape for the drafter's own layers."""

    def __init__(self, target: TargetEnds, shape: ModelShape) -> None:
        self.target, self._shape = target, shape
        self.embed, self.logits, self.logits_of = target.embed, target.logits, target.logits_of
        self.embedding_scale = target.embedding_scale

    def shape(self) -> ModelShape:
        return self._shape


def build(cfg: Any, target: Target, vocab: DraftVocab, shape: ModelShape | None = None) -> Drafter:
    """Build an untrained drafter for this target, and set the target's taps.

    `shape` is of the drafter's own layers, if it differs from the target's (imported drafters).

    Raises:
        ConfigError: the drafter or its settings do not suit the target.
    """
    taps = check(cfg, target.shape())
    if target.recurrent:
        check_recurrent(cfg.name)
    target.set_taps(taps)
    ends = target if shape in (None, target.shape()) else TargetWithShape(target, shape)
    return drafter_class(cfg.name)(cfg, ends, vocab, taps)


def custom_shape(drafter: Drafter) -> ModelShape | None:
    """Return the shape of the drafter's layers if it differs from the target's."""
    ends = getattr(drafter, "target", None)
    return ends.shape() if isinstance(ends, TargetWithShape) else None
