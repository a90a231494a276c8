"""Draft & Verify: the target drafts for itself without some of its sublayers.

Source: Zhang et al. 2023, "Draft & Verify", arXiv:2309.08168, and its reference code
(github.com/dilab-zju/self-speculative-decoding). A draft token runs through all layers but the
attention and MLP sublayers of two lists, which add nothing to the residual stream:

    x += attention(norm(x))    unless the layer is in skip_attention
    x += mlp(norm(x))          unless the layer is in skip_mlp

Draft tokens attend to the exact rows of the committed text in the target's own cache.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.conf.searched import SearchedConfig
from outrider.models.cache.kv_cache import KVCache
from outrider.models.drafting.drafter import TargetInput
from outrider.models.drafting.target_drafting import TargetDrafter
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import ModelShape, TargetEnds
from outrider.models.target.layer_parts import Part
from outrider.models.target.target import Target


@dataclass(frozen=True)
class Config(SearchedConfig):
    """Settings of Draft & Verify; conf/drafter/draft_verify.yaml describes each."""

    name: str = "draft_verify"

    confidence: ClassVar[float | Literal["adaptive"]] = "adaptive"


class DraftVerify(TargetDrafter):
    """The target without the sublayers of two lists."""

    is_trained = False

    def __init__(
        self, cfg: Config, target: TargetEnds, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__()
        vocab.require_full()
        self.cfg, self.vocab, self.taps = cfg, vocab, taps
        self.part = Part(
            skip_attention=frozenset(cfg.skip_attention), skip_mlp=frozenset(cfg.skip_mlp)
        )

    @classmethod
    def check_settings(cls, cfg: Config, shape: ModelShape) -> None:
        for key in ("skip_attention", "skip_mlp"):
            _check_layers(f"drafter.{key}", getattr(cfg, key), shape.layers)
        if len({*cfg.skip_attention}) == len({*cfg.skip_mlp}) == shape.layers:
            why = f"All {shape.layers} layers are skipped: a draft would not depend on its context."
            fix = "Leave a layer out of skip_attention or skip_mlp."
            raise ConfigError("drafter.skip_attention", [*cfg.skip_attention], why, fix)

    def draft_forward(
        self, target: Target, cache: KVCache, new: TargetInput
    ) -> Float[Tensor, "B N H"]:
        """Return the target's last states without the skipped sublayers."""
        return target.forward(new.ids, new.positions, new.visible, cache, part=self.part).last


def _check_layers(key: str, skipped: tuple[int, ...], layers: int) -> None:
    """Raise ConfigError for a layer that the target does not have."""
    for i, layer in enumerate(skipped):
        if not 0 <= layer < layers:
            why = f"The target has decoder layers 0..{layers - 1}."
            raise ConfigError(f"{key}[{i}]", layer, why, "Leave it out.")
