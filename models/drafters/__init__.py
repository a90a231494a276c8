"""The drafters: one file each, located by name.

A file defines a frozen dataclass `Config`, a subclass of `DrafterConfig`, and one subclass of
`Drafter`, constructed as `cls(cfg, target, vocab, taps)`. A drafter that reads decoder layers of
the target also has a setting `taps` and a function `default_taps(layers)`. No configuration holds a
path to a class: a downloaded config cannot name code to run. A plugin, which the user names,
registers its own in `DRAFTERS`.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from outrider.conf.compose import add_choice, remove_choice
from outrider.conf.errors import ConfigError
from outrider.conf.plugins import OWN_PART, Registry
from outrider.conf.schema import DrafterSettings
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import ModelShape, TargetEnds
from outrider.models.target.target import Target, check_taps

HERE = Path(__file__).parent


OWN_NAMES = sorted(f.stem for f in HERE.glob("*.py") if not f.stem.startswith("_"))


class DrafterKind(NamedTuple):
    """A drafter of a plugin.

    Attributes:
        drafter: constructed as `drafter(cfg, target, vocab, taps)`.
        config: its settings, a frozen dataclass whose defaults `drafter=NAME` takes.
        default_taps: taps for a number of decoder layers, where its setting `taps` is None.
    """

    drafter: type[Drafter]
    config: type[DrafterSettings]
    default_taps: Callable[[int], Sequence[int]] | None = None


DRAFTERS: Registry[DrafterKind] = Registry(
    "drafter", DrafterKind, {}, taken=OWN_NAMES,
    on_add=lambda name, kind: add_choice("drafter", kind.config(name=name)),
    on_remove=partial(remove_choice, "drafter"),
)  # fmt: skip


def names() -> list[str]:
    """Return the names of all drafters, sorted."""
    return sorted([*OWN_NAMES, *DRAFTERS])


def trained_names() -> list[str]:
    """Return the names of the drafters that have weights, sorted."""
    return [name for name in names() if drafter_class(name).is_trained]


def complete_names() -> list[str]:
    """Return the names of the drafters that need no settings: they are made of no other ones."""
    return [name for name in names() if not drafter_class(name).is_composite]


def drafter_module(name: str) -> ModuleType:
    """Import the file of one of Outrider's drafters; raise ConfigError if there is none."""
    if name not in OWN_NAMES:
        fix = f"Choose one of: {', '.join(names())}. {OWN_PART}"
        raise ConfigError("drafter", name, "There is no such drafter.", fix)
    return importlib.import_module(f"outrider.models.drafters.{name}")


def config_class(name: str) -> type[DrafterSettings]:
    """Return the `Config` of a drafter; raise ConfigError if there is none."""
    if name in DRAFTERS:
        return DRAFTERS[name].config
    schema = drafter_module(name).Config
    assert isinstance(schema, type), f"drafters/{name}.py defines Config as a dataclass"
    return schema


def drafter_class(name: str) -> type[Drafter]:
    """Return the class of a drafter: the one subclass of `Drafter` that a file defines."""
    if name in DRAFTERS:
        return DRAFTERS[name].drafter
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
    if cfg.taps is not None:
        return tuple(cfg.taps)
    kind: Any = DRAFTERS[cfg.name] if cfg.name in DRAFTERS else drafter_module(cfg.name)
    return tuple(kind.default_taps(layers))


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
