"""One file per drafter, found by its name.

A file holds a frozen dataclass `Config`, a `Recipe` with the drafter's own settings behind it, and
one subclass of `Drafter` built as `cls(cfg, target, vocab, taps)`. One that reads decoder layers of
the target has a setting `taps` and a function `default_taps(layers)` too. There is no table to
extend and no path to a class in any configuration: a downloaded config cannot name code to run.
"""

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from outrider.conf.errors import ConfigError
from outrider.models.drafter import Drafter, Lender, Shape
from outrider.models.target import Target
from outrider.models.vocab import DraftVocab

HERE = Path(__file__).parent


def names() -> list[str]:
    """All drafters there are, sorted."""
    return sorted(f.stem for f in HERE.glob("*.py") if not f.stem.startswith("_"))


def module(name: str) -> ModuleType:
    """
    Raises:
        ConfigError: no such drafter; the message lists those that exist.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name not in names():
        raise ConfigError(
            "drafter", name, "There is no such drafter.", f"Choose one of: {', '.join(names())}."
        )
    return importlib.import_module(f"outrider.models.drafters.{name}")


def kind(name: str) -> type[Drafter]:
    """The one subclass of `Drafter` that the file defines."""
    room = module(name)
    found = [
        kind
        for kind in vars(room).values()
        if isinstance(kind, type) and issubclass(kind, Drafter) and kind.__module__ == room.__name__
    ]
    assert len(found) == 1, f"{name}.py must define exactly one Drafter, found {found}"
    return found[0]


def taps_of(cfg: Any, layers: int) -> tuple[int, ...]:
    """The target's layers that a drafter reads: those of its settings, or its file's default."""
    if not hasattr(cfg, "taps"):
        return ()
    if cfg.taps is not None:
        return tuple(cfg.taps)
    default: tuple[int, ...] = module(cfg.name).default_taps(layers)
    return default


class Reshaped:
    """A target's ends, for a drafter whose layers have another shape than the target's."""

    def __init__(self, target: Lender, shape: Shape) -> None:
        self.target, self._shape = target, shape
        self.embed, self.logits, self.logits_of = target.embed, target.logits, target.logits_of

    def shape(self) -> Shape:
        return self._shape


def build(cfg: Any, target: Target, vocab: DraftVocab, shape: Shape | None = None) -> Drafter:
    """An untrained drafter for this target; sets the target's taps.

    Args:
        cfg: the `Config` of the drafter's file.
        vocab: the tokens it can propose.
        shape: of its own layers, where it came from elsewhere with another one than the target's.
    """
    taps = taps_of(cfg, target.depth)
    target.set_taps(taps)
    same = shape is None or shape == target.shape()
    lender = target if shape is None or same else Reshaped(target, shape)
    return kind(cfg.name)(cfg, lender, vocab, taps)


def own_shape(drafter: Drafter) -> Shape | None:
    """That of its layers, where it is not the target's."""
    lender = getattr(drafter, "target", None)
    return lender.shape() if isinstance(lender, Reshaped) else None
