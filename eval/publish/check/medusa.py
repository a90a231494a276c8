"""Medusa heads, in the formats of their authors and vLLM."""

import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.eval.publish.check.core import Family, Shapes, Wrong


class Medusa(Family):
    """A head per depth, on the target's last state and on nothing else."""

    def called(self, key: str) -> str:
        if self.form == "medusa":
            key = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", key)
            key = re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", key)
        return key

    def prepare(self) -> None:
        config, form = self.config, self.form
        own, bias, count = self.recipe["own_heads"], True, self.depths
        if form == "vllm":
            self.layers, own = config["num_hidden_layers"], not config["original_lm_head"]
            count, bias = config["num_heads"], config["medusa_fc_bias"]
            drafted = config["truncated_vocab_size"]
        elif form == "native":
            self.layers, drafted = self.recipe["res_layers"], config["draft_vocab_size"]
        else:
            self.layers, drafted = config["medusa_num_layers"], config["vocab_size"]
            count = config["medusa_num_heads"]
        hidden = self.g["last"].shape[1]
        if count != self.depths:
            raise Wrong(f"config.json says {count} heads, and it has {self.depths}")
        self.wanted = self.shapes(hidden, drafted, bias, own)
        self.optional |= {key for key in self.w if key.startswith("adapters.")}

    def shapes(self, hidden: int, drafted: int, bias: bool, own: bool) -> Shapes:
        out: Shapes = {}
        for head in range(self.depths):
            for p in (f"blocks.{head}.layers.{n}" for n in range(self.layers)):
                out[f"{p}.weight"] = (hidden, hidden)
                if bias:
                    out[f"{p}.bias"] = (hidden,)
            if own:
                out[f"lm_heads.{head}.weight"] = (drafted, hidden)
        if self.form == "vllm":
            if not own:
                out["lm_head.weight"] = (drafted, hidden)
            if drafted < self.vocabulary():
                out["token_map"] = (drafted,)
        return out

    def logits(self) -> Tensor:
        said = []
        for head in range(self.depths):
            x = self.g["last"][self.rows]
            for n in range(self.layers):
                p = f"blocks.{head}.layers.{n}"
                bias = self.w.get(f"{p}.bias", torch.zeros(()))
                x = x + F.silu(x @ self.w[f"{p}.weight"].T + bias)
            said.append(self.speak(head, x))
        return torch.stack(said)

    def speak(self, head: int, x: Tensor) -> Tensor:
        matrix = self.w.get(f"lm_heads.{head}.weight")
        if matrix is None:
            return self.borrowed(x)
        return x @ matrix[self.columns(len(matrix))].T

    def suspects(self) -> list[tuple[str, Callable[[], None]]]:
        return []
