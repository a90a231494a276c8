"""The forward of a Llama-shaped model in half of the operations, for decoding.

A decoding step of a small model is as long as its list of operations, and transformers' modules
make a long one: casts, masks, wrappers, one projection at a time. Here a decoder layer is 25 calls.
The weights stay transformers' own, which remains the reference: `Target.check` compares the two on
every load, and a family that is not known to be of this shape is run by its own modules.

    x += o(attention(rope(q), rope(k), v))   with q, k, v of norm(x)
    x += down(silu(gate) * up)               with gate, up of norm(x)

Legend: A query heads, N key heads, C their size, X inputs and Y outputs of linear maps.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from outrider.models.small_matmul import lent_attention, linear

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPES = ("default", "linear", "llama3", "yarn")  # whose frequencies do not change with the text
ATTENTION = ("head_dim", "scaling")
PARTS = {
    "": {"input_layernorm", "post_attention_layernorm", "self_attn", "mlp"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}


class Lean(nn.Module):
    """Runs a model's decoder layers; owns none of its weights."""

    def __init__(self, model: Any, layers: nn.ModuleList, fuse: bool) -> None:
        """
        Args:
            layers: the decoder layers of `model`, for which `suits` is true.
            fuse: lay weights that read the same rows side by side in memory, and turn the model's
                own parameters into views of it. For a model whose weights nobody changes.
        """
        super().__init__()
        config = model.config.get_text_config(decoder=True)
        self._embed = [model.get_input_embeddings()]  # in lists: they are not our submodules
        self._rotary = [model.base_model.rotary_emb]
        self._norm = _Norm(model.base_model.norm)
        self._layers = [_Layer(layer, config, fuse) for layer in layers]
        self._kinds = list(getattr(config, "layer_types", None) or [])

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"],
        masks: Any,
        cache: Any,
        taps: Sequence[int],
    ) -> tuple[list[Float[Tensor, "B T H"]], Float[Tensor, "B T H"]]:
        """Outputs of the tapped layers, and the last norm's.

        Args:
            masks: additive [B, 1, T, S], or a dict of them by kind of layer.
            cache: written through `update`; the caller reserves and commits.
        """
        x = F.embedding(ids, self._embed[0].weight)
        turn = self._turn(positions, x.dtype)
        outputs = []
        for i, layer in enumerate(self._layers):
            mask = masks[self._kinds[i]] if isinstance(masks, dict) else masks
            x = layer.run(x, turn, mask, cache, i)
            outputs.append(x)
        return [outputs[tap] for tap in taps], self._norm.run(x)

    def _turn(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines, and sines signed for the swapped halves: [B, T, 1, C] each."""
        rotary = self._rotary[0]
        angle = positions[..., None, None].float() * rotary.inv_freq
        cos, sin = angle.cos(), angle.sin()
        both = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        if rotary.attention_scaling != 1:
            both = both[0] * rotary.attention_scaling, both[1] * rotary.attention_scaling
        return both[0].to(dtype), both[1].to(dtype)


class _Norm:
    """RMSNorm, rounded where transformers rounds."""

    def __init__(self, norm: Any) -> None:
        self.module, self.eps = norm, float(norm.variance_epsilon)
        self.size = tuple(norm.weight.shape)

    def run(self, x: Tensor) -> Tensor:
        weight = self.module.weight
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.size, weight, self.eps)
        out: Tensor = weight * F.rms_norm(x, self.size, None, self.eps)
        return out


class _Together:
    """Linear maps of one input, their outputs side by side."""

    def __init__(self, maps: Sequence[nn.Linear], fuse: bool) -> None:
        self.maps = tuple(maps)
        self.whole = _one_block(maps) if fuse else None

    def run(self, x: Float[Tensor, "*rows X"]) -> Float[Tensor, "*rows Y"]:
        if self.whole is not None:
            return linear(x, *self.whole)
        return torch.cat([linear(x, each.weight, each.bias) for each in self.maps], dim=-1)


def _one_block(maps: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weights of all maps in one block of memory, of which the maps' own become views."""
    sizes = [each.out_features for each in maps]
    weight = torch.cat([each.weight.data for each in maps])
    for each, rows in zip(maps, weight.split(sizes), strict=True):
        each.weight.data = rows
    if maps[0].bias is None:
        return weight, None
    bias = torch.cat([each.bias.data for each in maps])
    for each, part in zip(maps, bias.split(sizes), strict=True):
        each.bias.data = part
    return weight, bias


class _Layer:
    def __init__(self, layer: Any, config: Any, fuse: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.before = _Norm(layer.input_layernorm)
        self.after = _Norm(layer.post_attention_layernorm)
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.size = int(attention.head_dim)
        self.heads, self.lent, _ = (p.out_features // self.size for p in projections)
        self.ask = _Together(projections, fuse)
        self.open = _Together([mlp.gate_proj, mlp.up_proj], fuse)
        self.norms = None
        if hasattr(attention, "q_norm"):
            self.norms = _Norm(attention.q_norm), _Norm(attention.k_norm)
        self.gather, self.close = attention.o_proj, mlp.down_proj
        self.scale = float(attention.scaling)

    def run(
        self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor, cache: Any, index: int
    ) -> Tensor:
        batch, count, _ = x.shape
        all_heads = self.ask.run(self.before.run(x)).view(batch, count, -1, self.size)
        query, key = self._turned(all_heads, turn)
        value = all_heads[:, :, self.heads + self.lent :].transpose(1, 2)
        keys, values = cache.update(key, value, index)
        seen = lent_attention(query, keys, values, mask, self.scale)
        seen = seen.transpose(1, 2).reshape(batch, count, -1)
        x = x + linear(seen, self.gather.weight, self.gather.bias)
        gate, up = self.open.run(self.after.run(x)).chunk(2, dim=-1)
        return x + linear(F.silu(gate) * up, self.close.weight, self.close.bias)

    def _turned(self, heads: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Queries and keys at their positions, turned together: [B, A, T, C] and [B, N, T, C]."""
        if self.norms is None:
            both = heads[:, :, : self.heads + self.lent]
        else:
            query, key, _ = heads.split([self.heads, self.lent, self.lent], dim=2)
            both = torch.cat([self.norms[0].run(query), self.norms[1].run(key)], dim=2)
        (cos, sin), half = turn, self.size // 2
        swapped = torch.cat([both[..., half:], both[..., :half]], dim=-1)
        turned = (both * cos + swapped * sin).transpose(1, 2)
        return turned[:, : self.heads], turned[:, self.heads :]


def suits(model: Any, layers: nn.ModuleList) -> bool:
    """Whether this is a model of the shape above, whole and on one device."""
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    body = model.base_model
    return (
        config.model_type in FAMILIES
        and rope.get("rope_type", "default") in ROPES
        and getattr(config, "hidden_act", None) == "silu"
        and {name for name, _ in body.named_children()}
        == {"embed_tokens", "layers", "norm", "rotary_emb"}
        and len({parameter.device for parameter in model.parameters()}) == 1
        and all(_plain(layer) for layer in layers)
        and all(hasattr(layer.self_attn, name) for layer in layers for name in ATTENTION)
        and all(hasattr(body.rotary_emb, name) for name in ("inv_freq", "attention_scaling"))
    )


def _plain(layer: nn.Module) -> bool:
    """A decoder layer of the known parts, its linear maps neither packed, shared nor wrapped."""
    for place, wanted in PARTS.items():
        part = layer.get_submodule(place)
        names = {name for name, _ in part.named_children()}
        if place == "self_attn":
            names -= {"q_norm", "k_norm"}
        if names != wanted:
            return False
    maps = [module for name, module in layer.named_modules() if name.endswith("_proj")]
    return all(type(m) is nn.Linear and type(m.weight.data) is Tensor for m in maps)
