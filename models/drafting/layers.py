"""Norm, rotary embedding, MLP, attention and decoder layer: the modules of drafters.

Legend: N rows, R rows of all prompts, G heads per key head, C head size, A key heads, L keys of a
prompt, M nodes of a branch, X input width, D layer width.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from outrider.models.cache.layer_rows import LayerRows
from outrider.models.drafting.branch_attention import QueryPlan
from outrider.models.interface import ModelShape


class Norm(nn.Module):
    """RMSNorm in float32, result in the input's dtype (arXiv:1910.07467)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*any D"]) -> Float[Tensor, "*any D"]:
        weight = self.weight
        if x.dtype == weight.dtype == torch.float32:  # no cast is needed
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return F.rms_norm(x.float(), weight.shape, weight.float(), self.eps).to(x.dtype)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": partial(F.gelu, approximate="tanh"),
}


class Mlp(nn.Module):
    """Gated MLP: down(act(gate(x)) * up(x))."""

    def __init__(self, dim: int, inner: int, activation: str = "silu") -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, inner, bias=False)
        self.up_proj = nn.Linear(dim, inner, bias=False)
        self.down_proj = nn.Linear(inner, dim, bias=False)
        self.act: Callable[[Tensor], Tensor] = ACTIVATIONS[activation]

    def forward(self, x: Float[Tensor, "*any D"]) -> Float[Tensor, "*any D"]:
        out: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return out


def apply_rotary(
    x: Float[Tensor, "*rows A C"], positions: Int[Tensor, "*rows"], theta: float
) -> Float[Tensor, "*rows A C"]:
    """Apply the rotary embedding to halves (arXiv:2104.09864; the layout of Llama checkpoints)."""
    half = x.shape[-1] // 2
    angle = positions[..., None, None] * rotary_frequencies(half, theta, x.device)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().split(half, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


@lru_cache(maxsize=16)
def rotary_frequencies(half: int, theta: float, device: torch.device) -> Float[Tensor, " half"]:
    """In radians per position."""
    with torch.inference_mode(False):  # the cache serves training too
        powers = torch.arange(half, device=device, dtype=torch.float32) / half
        return theta**-powers


class Attention(nn.Module):
    """Attention projections without bias; the input may be wider than the output."""

    def __init__(self, shape: ModelShape, width_factor: int = 1, qk_norm: bool = False) -> None:
        """The input has `width_factor` hidden sizes; `qk_norm` norms every head, as in Qwen3."""
        super().__init__()
        inner, size = width_factor * shape.hidden, shape.head_dim
        if shape.heads % shape.kv_heads or size % 2:
            why = f"{shape.heads} heads of {size} numbers cannot share {shape.kv_heads} key heads"
            raise ValueError(f"{why}, or are no pairs for the rotary embedding")
        self.q_proj = nn.Linear(inner, shape.heads * size, bias=False)
        self.k_proj = nn.Linear(inner, shape.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(inner, shape.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(shape.heads * size, shape.hidden, bias=False)
        self.q_norm = Norm(size, shape.eps) if qk_norm else nn.Identity()
        self.k_norm = Norm(size, shape.eps) if qk_norm else nn.Identity()
        self.heads, self.head_dim, self.theta = shape.heads, size, shape.rope_theta

    def query(
        self, x: Float[Tensor, "N X"], positions: Int[Tensor, " N"]
    ) -> Float[Tensor, "N AG C"]:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))
        return apply_rotary(q, positions, self.theta)

    def key_value(
        self, x: Float[Tensor, "N X"], positions: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N A C"], Float[Tensor, "N A C"]]:
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        value = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return apply_rotary(key, positions, self.theta), value

    def query_key_value(
        self, x: Float[Tensor, "N X"], positions: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N AG C"], Float[Tensor, "N A C"], Float[Tensor, "N A C"]]:
        """Return `query` and `key_value` of the same rows; one rotation covers queries and keys."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        rotated = apply_rotary(torch.cat([q, key], dim=-2), positions, self.theta)
        value = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotated[:, : self.heads], rotated[:, self.heads :], value


class AttentionLayer(nn.Module):
    """Attention that is added to the residual stream: a decoder layer without MLP.

    The caller passes both the residual and `x`, the input of the attention, which may differ.
    """

    def __init__(
        self,
        shape: ModelShape,
        width_factor: int = 1,
        input_norm: bool = True,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps) if input_norm else nn.Identity()
        self.self_attn = Attention(shape, width_factor, qk_norm)

    def finish(
        self, residual: Float[Tensor, "N D"], attended: Float[Tensor, "N AG C"]
    ) -> Float[Tensor, "N D"]:
        """Return the layer's output from its residual input and the output of its heads."""
        out: Tensor = residual + self.self_attn.o_proj(attended.flatten(-2))
        return out

    def unroll(
        self,
        residual: Float[Tensor, "BT D"],
        x: Float[Tensor, "BT X"],
        positions: Int[Tensor, " BT"],
        plan: QueryPlan,
        attend: Callable[..., Tensor],
    ) -> tuple[Float[Tensor, "N D"], Float[Tensor, "BT A C"], Float[Tensor, "BT A C"]]:
        """Return the outputs at the plan's rows, and keys and values of all rows, at depth 1."""
        key, value = self.self_attn.key_value(x, positions)
        if len(plan.rows) < len(x):
            residual, x, positions = (part[plan.rows] for part in (residual, x, positions))
        attended = attend(self.self_attn.query(x, positions), key, value, [], [], plan)
        return self.finish(residual, attended), key, value

    def decode(
        self,
        residual: Float[Tensor, "R D"],
        x: Float[Tensor, "R X"],
        positions: Int[Tensor, " R"],
        past: Sequence[LayerRows | None],
        masks: Sequence[Bool[Tensor, "_ _"] | None],
        counts: Sequence[int],
        *,
        drafted: bool = False,
        window: int | None = None,
        newest: slice | Int[Tensor, " B"] | None = None,
    ) -> tuple[Float[Tensor, "_ D"], list[LayerRows]]:
        """Return the outputs of new rows, and every prompt's keys and values with theirs appended.

        Args:
            past: keys and values of each prompt; None at its start.
            masks: for each prompt, its new rows over its last keys; None: no key is masked.
            counts: new rows of each prompt.
            drafted: the new rows are of draft tokens.
            window: verified rows that a row attends to at most; None: all.
            newest: compute the outputs of these rows only, one per prompt.
        """
        query, key, value = self.self_attn.query_key_value(x, positions)
        rows = append_rows(past, key, value, counts, drafted)
        if newest is not None:
            residual, query = residual[newest], query[newest]
            counts, masks = [1] * len(counts), [None] * len(counts)
        prompts = list(zip(query.split_with_sizes(counts), rows, masks, strict=True))
        if window is not None:
            prompts = [(q, *limit_rows(r, m, len(q), window, drafted)) for q, r, m in prompts]
        attended = torch.cat([attend_rows(*prompt) for prompt in prompts if len(prompt[0])])
        return self.finish(residual, attended), rows

    @property
    def activation_count(self) -> float:
        """Numbers per row saved for the backward pass, fitted (tests/test_memory_plan.py)."""
        attn = self.self_attn
        hidden, queries = attn.o_proj.out_features, attn.q_proj.out_features
        width, keys = attn.q_proj.in_features, attn.k_proj.out_features
        return 2.8 * hidden + width + 2.4 * queries + 2.0 * keys


class DecoderLayer(AttentionLayer):
    """Decoder layer: attention, then a gated MLP, each added to the residual stream."""

    def __init__(
        self,
        shape: ModelShape,
        width_factor: int = 1,
        input_norm: bool = True,
        qk_norm: bool = False,
    ) -> None:
        super().__init__(shape, width_factor, input_norm, qk_norm)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = Mlp(shape.hidden, shape.intermediate, shape.activation)

    def finish(
        self, residual: Float[Tensor, "N D"], attended: Float[Tensor, "N AG C"]
    ) -> Float[Tensor, "N D"]:
        residual = super().finish(residual, attended)
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out

    @property
    def activation_count(self) -> float:
        inner, hidden = self.mlp.gate_proj.out_features, self.self_attn.o_proj.out_features
        return super().activation_count + 3.0 * hidden + 3.9 * inner


def append_rows(
    past: Sequence[LayerRows | None],
    key: Float[Tensor, "R A C"],
    value: Float[Tensor, "R A C"],
    counts: Sequence[int],
    drafted: bool = False,
) -> list[LayerRows]:
    """Append new keys and values to those of every prompt."""
    out = list[LayerRows]()
    parts = (key.split_with_sizes(counts), value.split_with_sizes(counts))
    for rows, *new in zip(past, *parts, strict=True):
        rows = rows or LayerRows.empty_like(*new)
        out.append(rows.append_draft(*new) if drafted else rows.append(*new))
    return out


def limit_rows(
    rows: LayerRows, mask: Bool[Tensor, "N M"] | None, count: int, window: int, drafted: bool
) -> tuple[LayerRows, Bool[Tensor, "N _"] | None]:
    """Return the rows that `count` new rows attend to within a window, and their mask.

    A row of a draft token attends to the verified rows that its branch's root attends to.
    """
    if drafted or count == 1:
        return rows.last(window), mask
    rows = rows.last(window + count - 1)
    key = torch.arange(len(rows), device=rows.keys.rows.device)
    behind = key[len(rows) - count :, None] - key
    return rows, (behind >= 0) & (behind < window)


def attend_rows(
    q: Float[Tensor, "N AG C"], rows: LayerRows, mask: Bool[Tensor, "N M"] | None = None
) -> Float[Tensor, "N AG C"]:
    """Attend to all keys, except those of the last M that `mask` excludes."""
    bias = None
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
        bias = bias.masked_fill_(~mask, float("-inf"))
    return rows.attend(q, bias)


def init_linear_weights(module: nn.Module) -> None:
    """Draw every matrix at random so that outputs have the size of inputs; biases are 0."""
    for linear in (m for m in module.modules() if isinstance(m, nn.Linear)):
        nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)
