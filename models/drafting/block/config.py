"""Settings of every block drafter."""

from dataclasses import dataclass

from outrider.conf.automatic import adjust
from outrider.conf.errors import ConfigError
from outrider.conf.fields import COUNT, COUNT0, DEPTHS, option
from outrider.conf.schema import DrafterConfig
from outrider.models.drafting.block.attention import WINDOWS
from outrider.models.interface import ModelShape


def spread_taps(layers: int, count: int = 5) -> tuple[int, ...]:
    """Return the taps of DFlash's code: outputs of layers evenly spaced from 1 to n - 3.

    36 layers -> (1, 9, 17, 25, 33). A shallow target has fewer: 4 layers -> (0, 1, 2).
    """
    if layers < count + 3:
        return tuple(range(max(1, layers - 1)))
    step = (layers - 4) / (count - 1)
    return tuple(round(1 + i * step) for i in range(count))


def check_block(setting: str, length: int, token: int | None, shape: ModelShape) -> None:
    """Raise ConfigError if the target has no room for a block, or not the token that fills it.

    Args:
        setting: of the drafter that has the length.
    """
    if length >= shape.max_positions:
        why = f"The target reads {shape.max_positions} positions, and the block needs a context."
        raise ConfigError(f"drafter.{setting}", length, why, "Use fewer.")
    if token is not None and token >= shape.vocab:
        why = f"The target has tokens 0 to {shape.vocab - 1}."
        fix = "Use a token that no text contains, or null: the last one."
        raise ConfigError("drafter.mask_token_id", token, why, fix)


@dataclass(frozen=True)
class BlockConfig(DrafterConfig):
    """Settings of every block drafter; the yaml of each describes them."""

    depths: int = option(7, "", DEPTHS)
    block_size: int = option(8, "", "[1, 1025]")
    shifted: bool = False
    causal: bool = False
    taps: tuple[int, ...] | None = None
    layers: int = option(2, "", DEPTHS)
    window: int | None = option(None, "", COUNT)
    window_layers: tuple[int, ...] | None = None
    window_from: str = "slot"
    mask_token_id: int | None = option(None, "", COUNT0)
    anchors: float = option(0.5, "", "(0, 1]")
    activation: str = "silu"
    init: str = "linear"
    warm_start: str | None = None
    attention: str = "fast"

    def __post_init__(self) -> None:
        super().__post_init__()
        unused = 0 if self.shifted else 1  # slots that predict nothing
        if self.block_size == unused:
            why = "its only slot is the newest token's, which drafts nothing"
            raise ValueError(f"block_size = 1: {why}; use block_size=2 or more")
        if self.depths + unused != self.block_size and not (
            adjust(self, "block_size", self.depths + unused)
            or adjust(self, "depths", self.block_size - unused)
        ):
            kind = "shifted" if self.shifted else "unshifted"
            why = f"a block of {self.block_size} slots drafts {self.block_size - unused} tokens"
            fix = f"use block_size={self.depths + unused}, or depths={self.block_size - unused}"
            raise ValueError(f"depths = {self.depths}: {kind}, {why}; {fix}")
        if self.taps is not None and not 0 < len(self.taps) == len(set(self.taps)):
            raise ValueError(f"taps = {list(self.taps)}: needs one or more layers, each once")
        if self.window is not None and self.window < self.block_size:
            why = f"a block of {self.block_size} slots would not see itself; use a larger window"
            raise ValueError(f"window = {self.window}: {why}")
        self._check_window_layers()
        self.require_choice("window_from", *WINDOWS)
        self.require_choice("activation", "silu", "gelu")
        self.require_choice("init", "linear", "random")
        if self.warm_start is not None:
            adjust(self, "init", "random")  # its weights come first

    def _check_window_layers(self) -> None:
        chosen = self.window_layers
        if chosen is None:
            return
        if self.window is None:
            raise ValueError(f"window_layers = {list(chosen)}: set drafter.window, their window")
        if (
            not chosen
            or sorted(set(chosen)) != list(chosen)
            or not set(chosen) < {*range(self.layers)}
        ):
            why = f"layers of 0 to {self.layers - 1} in ascending order, not all of them"
            raise ValueError(f"window_layers = {list(chosen)}: {why}; use null for all")

    def window_of(self, layer: int) -> int | None:
        """Return the window of a layer; None: all rows."""
        return self.window if self.window_layers is None or layer in self.window_layers else None

    @property
    def max_depth(self) -> int:
        return self.depths
