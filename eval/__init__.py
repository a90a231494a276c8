"""What a drafter is worth: decoding, metrics, theory and the report."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.eval.decoder import Chat as Chat
    from outrider.eval.decoder import Decoder as Decoder
    from outrider.eval.decoder import Result as Result

__all__ = ["Chat", "Decoder", "Result"]


def __getattr__(name: str) -> Any:
    """`from outrider.eval import Decoder`, loaded only when it is asked for."""
    if name not in __all__:
        raise AttributeError(f"outrider.eval has no {name}")
    from outrider.eval import decoder

    return getattr(decoder, name)
