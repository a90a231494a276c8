"""One file per drafter, found by its name.

A file holds a frozen dataclass `Config` whose first field is `name`, one subclass of `Drafter`
built as `cls(cfg, shape, vocab, taps, embed)`, and `default_taps(layers)`. There is no table to
extend and no path to a class in any configuration: a downloaded config cannot name code to run.
"""

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from outrider.models.base import Drafter
from outrider.models.target import Target
from outrider.models.vocab import DraftVocab
from outrider.train.errors import ConfigError

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


def build(cfg: Any, target: Target, vocab: DraftVocab) -> Drafter:
    """An untrained drafter for this target; sets the target's taps.

    Args:
        cfg: the `Config` of the drafter's file.
        vocab: the tokens it can propose.
    """
    room = module(cfg.name)
    kinds = [
        kind
        for kind in vars(room).values()
        if isinstance(kind, type) and issubclass(kind, Drafter) and kind.__module__ == room.__name__
    ]
    assert len(kinds) == 1, f"{cfg.name}.py must define exactly one Drafter, found {kinds}"
    taps = tuple(cfg.taps) if cfg.taps is not None else room.default_taps(target.depth)
    target.set_taps(taps)
    drafter: Drafter = kinds[0](cfg, target.shape(), vocab, taps, target.embed)
    return drafter
