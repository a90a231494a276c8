"""MTP modules, in the layouts of DeepSeek, Qwen3-Next and speculators."""

import re

import torch
from torch import Tensor

from outrider.eval.publish.check.core import Shapes
from outrider.eval.publish.check.layer import SelfFeeding, layer_shapes, norm, run_layer

ENDS = {
    "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj",
    "token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj",
    "final_layernorm": "norm", "shared_head.norm": "norm", "shared_head.head": "lm_head",
}  # fmt: skip
LAYERED = r"(model\.layers|mtp_layers|stages)\.(\d+)\.(?:block\.)?(.+)\.weight"
LONE = r"(mtp)\.()(?:layers\.0\.)?(.+)\.weight"  # Qwen3-Next's


class Mtp(SelfFeeding):
    """Modules in a chain, one for every depth; or one in a loop."""

    def called(self, key: str) -> str:
        match = re.fullmatch(LAYERED, key) or re.fullmatch(LONE, key)
        if match is None:
            return key
        behind = int(self.golden["target"]["layers"]) if match[1] == "model.layers" else 0
        return f"stages.{int(match[2] or 0) - behind}.{ENDS.get(match[3], match[3])}.weight"

    def prepare(self) -> None:
        self.layer, recipe = self.told_layer(), self.recipe
        self.chained = recipe["mode"] == "chained"
        self.normed_back = recipe["feed"] == "normed"
        self.state_first = self.native and recipe["order"] == "state_first"
        if self.native:
            count = self.depths if self.chained else 1
        else:
            count = int(self.config["num_nextn_predict_layers"])
        self.joints = tuple(f"stages.{k}.eh_proj.weight" for k in range(count))
        self.wanted = self.shapes(count)
        if self.form == "qwen3_next":
            self.shift_norms(1.0)

    def shapes(self, count: int) -> Shapes:
        out: Shapes = {}
        hidden = self.layer.hidden
        for p in (f"stages.{k}" for k in range(count)):
            out |= layer_shapes(p, self.layer, 1, "input_layernorm", "enorm", "hnorm", "norm")
            out[f"{p}.eh_proj.weight"] = (hidden, 2 * hidden)
            if self.form == "deepseek":
                size = (self.vocabulary(), hidden)
                out |= {f"{p}.embed_tokens.weight": size, f"{p}.lm_head.weight": size}
        return out

    def shift_norms(self, by: float) -> None:
        """Qwen3-Next stores the weight of a norm minus 1."""
        self.w = {k: v + by if v.ndim == 1 else v for k, v in self.w.items()}

    def stage(self, k: int, embedded: Tensor, states: Tensor) -> Tensor:
        p, w, s = f"stages.{k}", self.w, self.layer
        halves = [
            norm(embedded, w[f"{p}.enorm.weight"], s.eps),
            norm(states, w[f"{p}.hnorm.weight"], s.eps),
        ]
        joint = torch.cat(halves[::-1] if self.state_first else halves, dim=-1)
        x = joint @ w[f"{p}.eh_proj.weight"].T
        return run_layer(w, p, s, x, norm(x, w[f"{p}.input_layernorm.weight"], s.eps))

    def said(self, k: int, hidden: Tensor) -> Tensor:
        return self.borrowed(norm(hidden, self.w[f"stages.{k}.norm.weight"], self.layer.eps))

    def fed(self, k: int, hidden: Tensor) -> Tensor:
        if not self.normed_back:
            return hidden
        return norm(hidden, self.w[f"stages.{k}.norm.weight"], self.layer.eps)

    def run(self, embedded: Tensor, states: Tensor) -> Tensor:
        return self.stage(0, embedded, states)

    def feed(self, hidden: Tensor) -> Tensor:
        return self.fed(0, hidden)

    def head(self, hidden: Tensor) -> Tensor:
        return self.said(0, hidden)

    def logits(self) -> Tensor:
        if not self.chained:
            return super().logits()
        states, embedded = self.g["last"], self.g["embedded"]
        out = torch.empty_like(self.g["logits"])
        for k in range(self.depths):  # module k + 1 reads token x_{t+k+1} at row t
            states = states[: len(embedded) - k - 1]
            hidden = self.stage(k, embedded[k + 1 :], states)
            out[k] = self.said(k, hidden[self.rows])
            states = self.fed(k, hidden)
        return out
