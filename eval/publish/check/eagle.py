"""EAGLE and HASS, in the formats of their authors, SGLang and vLLM."""

import torch
from torch import Tensor

from outrider.eval.publish.check.layer import SelfFeeding, layer_shapes, run_layer


class Eagle(SelfFeeding):
    """One layer over fc([embedding; state]); HASS too."""

    joints = ("fc.weight",)

    def prepare(self) -> None:
        self.layer = self.told_layer()
        hidden = self.layer.hidden
        self.wanted = layer_shapes("layers.0", self.layer) | {"fc.weight": (hidden, 2 * hidden)}
        said = self.config.get("bias") or self.config.get("eagle_fc_bias")
        if said or self.form == "sglang" or (self.native and self.recipe["bias"]):
            self.wanted["fc.bias"] = (hidden,)
        if not self.native:
            self.wanted["embed_tokens.weight"] = (self.vocabulary(), hidden)

    def run(self, embedded: Tensor, states: Tensor) -> Tensor:
        x = torch.cat([embedded, states], dim=-1) @ self.w["fc.weight"].T
        x = x + self.w.get("fc.bias", torch.zeros(()))
        return run_layer(self.w, "layers.0", self.layer, x, x)
