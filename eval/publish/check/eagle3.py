"""EAGLE-3, in the formats of SGLang, vLLM and speculators."""

import re
from collections.abc import Callable

import torch
from torch import Tensor

from outrider.eval.publish.check.core import Shapes, Wrong
from outrider.eval.publish.check.layer import SelfFeeding, layer_shapes, norm, run_layer

TAPS = "eagle_aux_hidden_state_layer_ids"


class Eagle3(SelfFeeding):
    """Layers over fused layers of the target, with a head of their own."""

    own_head = True
    joints = tuple(f"layers.0.self_attn.{x}_proj.weight" for x in "qkv")

    def called(self, key: str) -> str:
        if self.native:
            key = re.sub(r"^layers\.(\d+)\.", lambda m: f"layers.{int(m[1]) + 1}.", key)
        if self.form == "sglang":
            key = re.sub(r"^(layers\.[1-9]\d*)\.hidden_norm", r"\1.input_layernorm", key)
        return re.sub(r"^midlayer\.", "layers.0.", key)

    def prepare(self) -> None:
        config, recipe, native = self.config, self.recipe, self.native
        self.layer, self.taps = self.told_layer(), self.told_taps()
        self.count = recipe["layers"] if native else self.body["num_hidden_layers"]
        self.fc_norm = bool((recipe if native else config).get("fc_norm"))
        self.normed_back = bool(config.get("norm_output")) or (
            native and recipe["feedback"] == "normed"
        )
        self.normed_residual = bool(config.get("norm_before_residual")) or (
            native and recipe["residual"] == "normed"
        )
        self.wanted = self.shapes()

    def told_taps(self) -> list[int]:
        """Decoder layers whose outputs are read, however the format numbers them."""
        config, form = self.config, self.form
        if form == "native":
            told = config["taps"]
        elif form == "sglang":
            told = config["eagle_config"][TAPS]
        else:
            told = [number - 1 for number in config[TAPS]]
        if told != self.golden["taps"]:
            why = f"config.json has it read the outputs of layers {told}"
            raise Wrong(f"{why}, and it reads {self.golden['taps']}: a tap is shifted")
        return list(told)

    def shapes(self) -> Shapes:
        hidden, taps = self.layer.hidden, len(self.taps)
        drafted = int(self.config["draft_vocab_size"])
        out = layer_shapes("layers.0", self.layer, 2, "input_layernorm", "hidden_norm")
        for i in range(1, self.count):
            out |= layer_shapes(f"layers.{i}", self.layer, 1, "input_layernorm")
        out |= {"fc.weight": (hidden, taps * hidden), "norm.weight": (hidden,)}
        out |= {f"fc_norm.{i}.weight": (hidden,) for i in range(taps if self.fc_norm else 0)}
        out["lm_head.weight"] = (drafted, hidden)
        if drafted < self.vocabulary():
            out |= {"d2t": (drafted,), "t2d": (self.vocabulary(),)}
        if self.form == "speculators":
            out["embed_tokens.weight"] = (self.vocabulary(), hidden)
        return out | ({"tap_scale": (taps,)} if self.native else {})

    def start(self) -> Tensor:
        taps = [self.g[f"tap.{tap}"] for tap in self.taps]
        if self.fc_norm:
            taps = [
                norm(x, self.w[f"fc_norm.{i}.weight"], self.layer.eps) for i, x in enumerate(taps)
            ]
        elif self.native:
            taps = [x * scale for x, scale in zip(taps, self.w["tap_scale"], strict=True)]
        return torch.cat(taps, dim=-1) @ self.w["fc.weight"].T

    def run(self, embedded: Tensor, states: Tensor) -> Tensor:
        w, s = self.w, self.layer
        normed = norm(states, w["layers.0.hidden_norm.weight"], s.eps)
        read = torch.cat([norm(embedded, w["layers.0.input_layernorm.weight"], s.eps), normed], -1)
        x = run_layer(w, "layers.0", s, normed if self.normed_residual else states, read)
        for i in range(1, self.count):
            x = run_layer(
                w, f"layers.{i}", s, x, norm(x, w[f"layers.{i}.input_layernorm.weight"], s.eps)
            )
        return x

    def feed(self, hidden: Tensor) -> Tensor:
        if not self.normed_back:
            return hidden
        return norm(hidden, self.w["norm.weight"], self.layer.eps)

    def head(self, hidden: Tensor) -> Tensor:
        matrix = self.w["lm_head.weight"]
        rows = matrix[self.columns(len(matrix))]
        return norm(hidden, self.w["norm.weight"], self.layer.eps) @ rows.T

    def suspects(self) -> list[tuple[str, Callable[[], None]]]:
        return [*super().suspects(), ("fc reads the taps in the opposite order", self.turn_taps)]

    def turn_taps(self) -> None:
        parts = self.w["fc.weight"].chunk(len(self.taps), dim=1)
        self.w["fc.weight"] = torch.cat(parts[::-1], dim=1)
