"""Evaluation of drafters: decoding, metrics, theory and reports."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.eval.decoder import Chat as Chat
    from outrider.eval.decoder import Decoder as Decoder
    from outrider.eval.decoder import Piece as Piece
    from outrider.eval.decoder import Result as Result
    from outrider.models.decode.dynamic_tree import DynamicTree as DynamicTree
    from outrider.models.decode.policy import Chain as Chain
    from outrider.models.decode.rules.rule_table import bind_rule as bind_rule
    from outrider.models.decode.static_tree import StaticTree as StaticTree

__all__ = ["Chain", "Chat", "Decoder", "DynamicTree", "Piece", "Result", "StaticTree", "bind_rule"]
MODULES = {
    "Chain": "models.decode.policy",
    "DynamicTree": "models.decode.dynamic_tree",
    "StaticTree": "models.decode.static_tree",
    "bind_rule": "models.decode.rules.rule_table",
}


def __getattr__(name: str) -> Any:
    """`from outrider.eval import Decoder`, imported on first access."""
    if name == "judge":
        warnings.warn("judge is now called bind_rule", FutureWarning, stacklevel=2)
        name = "bind_rule"
    if name not in __all__:
        raise AttributeError(f"outrider.eval has no {name}")
    return getattr(import_module(f"outrider.{MODULES.get(name, 'eval.decoder')}"), name)
