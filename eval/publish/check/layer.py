"""A decoder layer, and drafters that go on from their own output through one."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.eval.publish.check.core import Family, Shapes, Weights


class Layer(NamedTuple):
    """Sizes of the decoder layers of a drafter."""

    hidden: int
    inner: int
    heads: int
    kv: int
    size: int
    eps: float
    theta: float
    act: str
    qk_norm: bool


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def turn(x: Tensor, theta: float) -> Tensor:
    """Rotary positions 0, 1, ..; x is [N, heads, size], pairs are half a head apart."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None, None] * theta ** -(torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def layer_shapes(p: str, s: Layer, wide: int = 1, *norms: str) -> Shapes:
    out: Shapes = {
        f"{p}.self_attn.q_proj.weight": (s.heads * s.size, wide * s.hidden),
        f"{p}.self_attn.k_proj.weight": (s.kv * s.size, wide * s.hidden),
        f"{p}.self_attn.v_proj.weight": (s.kv * s.size, wide * s.hidden),
        f"{p}.self_attn.o_proj.weight": (s.hidden, s.heads * s.size),
        f"{p}.mlp.gate_proj.weight": (s.inner, s.hidden),
        f"{p}.mlp.up_proj.weight": (s.inner, s.hidden),
        f"{p}.mlp.down_proj.weight": (s.hidden, s.inner),
    }
    out |= {f"{p}.{name}.weight": (s.hidden,) for name in ("post_attention_layernorm", *norms)}
    if s.qk_norm:
        out |= {f"{p}.self_attn.{x}_norm.weight": (s.size,) for x in "qk"}
    return out


def run_layer(w: Weights, p: str, s: Layer, residual: Tensor, read: Tensor) -> Tensor:
    """A decoder layer over N rows, each of which sees those in front of it; [N, H]."""
    q, k, v = (
        (read @ w[f"{p}.self_attn.{x}_proj.weight"].T).unflatten(-1, (-1, s.size)) for x in "qkv"
    )
    if s.qk_norm:
        q = norm(q, w[f"{p}.self_attn.q_norm.weight"], s.eps)
        k = norm(k, w[f"{p}.self_attn.k_norm.weight"], s.eps)
    group = s.heads // s.kv
    q, k = turn(q, s.theta), turn(k, s.theta).repeat_interleave(group, dim=1)
    scores = torch.einsum("nhc,mhc->hnm", q, k) * s.size**-0.5
    past = torch.ones(len(read), len(read), dtype=torch.bool).tril()
    weights = scores.masked_fill(~past, -math.inf).softmax(-1)
    mixed = torch.einsum("hnm,mhc->nhc", weights, v.repeat_interleave(group, dim=1)).flatten(1)
    x = residual + mixed @ w[f"{p}.self_attn.o_proj.weight"].T
    read = norm(x, w[f"{p}.post_attention_layernorm.weight"], s.eps)
    gate, up = (read @ w[f"{p}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    act = F.silu(gate) if s.act in ("silu", "swish") else F.gelu(gate, approximate="tanh")
    return x + (act * up) @ w[f"{p}.mlp.down_proj.weight"].T


class SelfFeeding(Family):
    """Drafters that go on from their own output: EAGLE, HASS, EAGLE-3, FastMTP's loop."""

    deeper = ": another state is fed back"

    def told_layer(self) -> Layer:
        """The sizes that config.json says."""
        if self.native:
            s, recipe = self.config.get("shape") or self.config["target"], self.recipe
            return Layer(
                s["hidden"], s["intermediate"], s["heads"], s["kv_heads"],
                recipe.get("head_dim") or s["head_dim"], s["eps"], s["rope_theta"],
                s["activation"], bool(recipe.get("qk_norm")),
            )  # fmt: skip
        b = self.body
        rope = b.get("rope_parameters") or b
        return Layer(
            b["hidden_size"], b["intermediate_size"], b["num_attention_heads"],
            b["num_key_value_heads"], b["head_dim"], b["rms_norm_eps"], rope["rope_theta"],
            b["hidden_act"], b["model_type"] == "qwen3",
        )  # fmt: skip

    def start(self) -> Tensor:
        """The state of every row of the text, from what the target says there; [T, H]."""
        return self.g["last"]

    def run(self, embedded: Tensor, states: Tensor) -> Tensor:
        """The last layer's output at N rows."""
        raise NotImplementedError

    def feed(self, hidden: Tensor) -> Tensor:
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        return self.borrowed(hidden)

    def logits(self) -> Tensor:
        start, embedded = self.start(), self.g["embedded"]
        out = torch.empty_like(self.g["logits"])
        for i, row in enumerate(self.rows):
            states = start[: row + 1]
            for depth in range(self.depths):
                hidden = self.run(embedded[1 : row + 2 + depth], states)[-1:]
                out[depth, i] = self.head(hidden)[0]
                states = torch.cat([states, self.feed(hidden)])
        return out
