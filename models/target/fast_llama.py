"""Forward of Llama-like models with half the number of operations, for decoding.

The time of a decoding step of a small model is proportional to its number of operations; here a
decoder layer takes 25. The weights are transformers' own, and its forward is the reference:
`target_check` compares the two on every load. Other families run their own modules.

    x += o(attention(rope(q), rope(k), v))   with q, k, v of norm(x)
    x += down(silu(gate) * up)               with gate, up of norm(x)

Legend: A query heads, N key heads, C head size, X inputs and Y outputs of linear maps.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from outrider.models.small_matmul import linear
from outrider.models.target.layer_parts import WHOLE, Part

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPES = ("default", "linear", "llama3", "yarn")  # with constant frequencies
ATTENTION_ATTRIBUTES = ("head_dim", "scaling")
BODY_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
PARTS = {
    "": {"input_layernorm", "post_attention_layernorm", "self_attn", "mlp"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}


class FastLlama(nn.Module):
    """Forward of the decoder layers of a model for which `supports` is true, with its weights."""

    def __init__(self, model: Any, decoder: Any, fuse: bool) -> None:
        """
        Args:
            decoder: the module of the model that holds the layers, for which `supports` is true.
            fuse: concatenate weights that have the same input, and make the model's parameters
                views of the result. Only for a model whose weights never change.
        """
        super().__init__()
        config = model.config.get_text_config(decoder=True)
        self._embed = [model.get_input_embeddings()]  # in a list, so that it is no submodule
        self._rotary = [decoder.rotary_emb]
        self._norm = _Norm(decoder.norm)
        self._layers = [_Layer(layer, fuse) for layer in decoder.layers]
        self._layer_types = list(getattr(config, "layer_types", None) or [])

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"],
        masks: Any,
        cache: Any,
        taps: Sequence[int],
        part: Part = WHOLE,
    ) -> tuple[list[Float[Tensor, "B T H"]], Float[Tensor, "B T H"]]:
        """Return the outputs of the tapped layers, and of the last norm or the end of the part.

        Args:
            masks: additive [B, 1, T, S], or a dict of them by layer type.
            cache: written through `attend`; the caller calls `reserve` and `commit`.
        """
        x = F.embedding(ids, self._embed[0].weight) if part.hidden is None else part.hidden
        rotary = self._cos_sin(positions, x.dtype)
        outputs = {}
        for i, layer in [*enumerate(self._layers)][part.first : part.stop]:
            if i not in part.skip_attention:
                mask = masks[self._layer_types[i]] if isinstance(masks, dict) else masks
                x = layer.attend(x, rotary, mask, cache, i)
            if i not in part.skip_mlp:
                x = layer.transform(x)
            outputs[i] = x
        return [outputs[tap] for tap in taps], self._norm.run(x) if part.stop is None else x

    def final_norm(self, hidden: Float[Tensor, "B T H"]) -> Float[Tensor, "B T H"]:
        """Apply the last norm."""
        return self._norm.run(hidden)

    def _cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines, and sines signed for swapped halves: [B, T, 1, C] each."""
        module = self._rotary[0]
        angle = positions[..., None, None].float() * module.inv_freq
        cos, sin = angle.cos(), angle.sin()
        cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        if module.attention_scaling != 1:
            cos, sin = cos * module.attention_scaling, sin * module.attention_scaling
        return cos.to(dtype), sin.to(dtype)


class _Norm:
    """RMSNorm with the rounding of transformers."""

    def __init__(self, norm: Any) -> None:
        self.module, self.eps = norm, float(norm.variance_epsilon)
        self.size = tuple(norm.weight.shape)

    def run(self, x: Tensor) -> Tensor:
        weight = self.module.weight
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.size, weight, self.eps)
        out: Tensor = weight * F.rms_norm(x, self.size, None, self.eps)
        return out


class _FusedLinear:
    """Linear maps of one input; their outputs are concatenated."""

    def __init__(self, maps: Sequence[nn.Linear], fuse: bool) -> None:
        self.maps, self.weight = maps, _fuse([each.weight for each in maps]) if fuse else None
        self.bias = _fuse([each.bias for each in maps]) if fuse else None

    def run(self, x: Float[Tensor, "*rows X"]) -> Float[Tensor, "*rows Y"]:
        if self.weight is not None:
            return linear(x, self.weight, self.bias)
        return torch.cat([linear(x, each.weight, each.bias) for each in self.maps], dim=-1)


def _fuse(parameters: Sequence[Any]) -> Tensor | None:
    """Concatenate parameters, and make them views of the result."""
    if parameters[0] is None:  # no biases
        return None
    out = torch.cat([each.data for each in parameters])
    for each, rows in zip(parameters, out.split([len(p) for p in parameters]), strict=True):
        each.data = rows
    return out


class _Layer:
    def __init__(self, layer: Any, fuse: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.input_norm = _Norm(layer.input_layernorm)
        self.mlp_norm = _Norm(layer.post_attention_layernorm)
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.size = int(attention.head_dim)
        self.heads, self.key_heads, _ = (p.out_features // self.size for p in projections)
        self.qkv = _FusedLinear(projections, fuse)
        self.gate_up = _FusedLinear([mlp.gate_proj, mlp.up_proj], fuse)
        self.qk_norms = None
        if hasattr(attention, "q_norm"):
            self.qk_norms = _Norm(attention.q_norm), _Norm(attention.k_norm)
        self.o_proj, self.down_proj = attention.o_proj, mlp.down_proj
        self.scale = float(attention.scaling)

    def attend(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor, cache: Any, index: int
    ) -> Tensor:
        """Add the attention sublayer."""
        batch, count, _ = x.shape
        all_heads = self.qkv.run(self.input_norm.run(x)).view(batch, count, -1, self.size)
        query, key = self._rotate(all_heads, rotary)
        value = all_heads[:, :, self.heads + self.key_heads :].transpose(1, 2)
        attended = cache.attend(query, key, value, index, mask, self.scale)
        attended = attended.transpose(1, 2).reshape(batch, count, -1)
        return x + linear(attended, self.o_proj.weight, self.o_proj.bias)

    def transform(self, x: Tensor) -> Tensor:
        """Add the MLP sublayer."""
        gate, up = self.gate_up.run(self.mlp_norm.run(x)).chunk(2, dim=-1)
        return x + linear(F.silu(gate) * up, self.down_proj.weight, self.down_proj.bias)

    def _rotate(self, heads: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys in one operation: [B, A, T, C] and [B, N, T, C]."""
        if self.qk_norms is None:
            both = heads[:, :, : self.heads + self.key_heads]
        else:
            query, key, _ = heads.split([self.heads, self.key_heads, self.key_heads], dim=2)
            both = torch.cat([self.qk_norms[0].run(query), self.qk_norms[1].run(key)], dim=2)
        (cos, sin), half = rotary, self.size // 2
        swapped = torch.cat([both[..., half:], both[..., :half]], dim=-1)
        rotated = (both * cos + swapped * sin).transpose(1, 2)
        return rotated[:, : self.heads], rotated[:, self.heads :]


def supports(model: Any, decoder: Any) -> bool:
    """Return whether the model's decoder has the supported structure and is on one device."""
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in FAMILIES
        and rope.get("rope_type", "default") in ROPES
        and getattr(config, "hidden_act", None) == "silu"
        and {name for name, _ in decoder.named_children()} == BODY_PARTS
        and len({parameter.device for parameter in model.parameters()}) == 1
        and all(_has_known_parts(layer) for layer in decoder.layers)
        and all(hasattr(x.self_attn, name) for x in decoder.layers for name in ATTENTION_ATTRIBUTES)
        and all(hasattr(decoder.rotary_emb, name) for name in ("inv_freq", "attention_scaling"))
    )


def _has_known_parts(layer: nn.Module) -> bool:
    """Return whether a layer has the known parts, none quantised, sharded or wrapped."""
    for path, expected in PARTS.items():
        names = {name for name, _ in layer.get_submodule(path).named_children()}
        if names - ({"q_norm", "k_norm"} if path == "self_attn" else set()) != expected:
            return False
    maps = [module for name, module in layer.named_modules() if name.endswith("_proj")]
    return all(type(m) is nn.Linear and type(m.weight.data) is Tensor for m in maps)
