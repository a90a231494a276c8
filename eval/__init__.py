"""What a drafter is worth: decoding, metrics, theory and the report."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.eval.decoder import Chat as Chat
    from outrider.eval.decoder import Decoder as Decoder
    from outrider.eval.decoder import Piece as Piece
    from outrider.eval.decoder import Result as Result
    from outrider.models.decode.dynamic_tree import DynamicTree as DynamicTree
    from outrider.models.decode.policy import Chain as Chain
    from outrider.models.decode.rules import judge as judge
    from outrider.models.decode.static_tree import StaticTree as StaticTree

__all__ = ["Chain", "Chat", "Decoder", "DynamicTree", "Piece", "Result", "StaticTree", "judge"]
PLACES = {
    "Chain": "decode.policy", "DynamicTree": "decode.dynamic", "StaticTree": "decode.static",
    "judge": "decode.rules",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """`from outrider.eval import Decoder`, loaded only when it is asked for."""
    if name not in __all__:
        raise AttributeError(f"outrider.eval has no {name}")
    return getattr(import_module(f"outrider.eval.{PLACES.get(name, 'decoder')}"), name)
