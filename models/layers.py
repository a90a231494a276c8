"""Norm, rotary embedding, MLP and the unroll's attention: the parts drafters are built from.

The unroll's attention. At depth 1 every row t makes a key from true target states. At depth d the
row continues its own branch: it sees the depth-1 keys of its document up to its own row, and the
keys its own branch made at depths 2..d, nothing else. That is what the decoder sees when d - 1
drafted tokens follow a true prefix. With four rows, row 2 at depth 3 sees the columns marked x:

    depth-1 keys    0 1 2 3     depth-2 keys    0 1 2 3     depth-3 keys    0 1 2 3
                    x x x .                     . . x .                     . . x .

`dense_attention` says so with one explicit mask. `branch_attention` is the same function computed
block by block, softmax recomputed in the backward pass, so that no T x T matrix is kept: the
depth-1 block and the branch's diagonal are merged by log-sum-exp (as FlashAttention merges its
blocks, arXiv:2205.14135; used for training-time test by NeMo Automodel). Only rows that some depth
supervises ask a question; the others lend their keys.

Legend: B rows of a batch, T tokens, N asking rows, G heads per key head, C head size, A key heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from outrider.models.drafter import Shape
from outrider.models.small_matmul import lent_attention

SCORES_CPU = 2**19  # scores held at once: about 2 MB in float32, a core's cache
SCORES_GPU = 2**26


class Norm(nn.Module):
    """RMSNorm in float32, result in the input's dtype (arXiv:1910.07467)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*any D"]) -> Float[Tensor, "*any D"]:
        weight = self.weight
        if x.dtype == weight.dtype == torch.float32:  # nothing to turn into anything else
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return F.rms_norm(x.float(), weight.shape, weight.float(), self.eps).to(x.dtype)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": _gelu_tanh}


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


def rotate(
    x: Float[Tensor, "*rows A C"], positions: Int[Tensor, "*rows"], theta: float
) -> Float[Tensor, "*rows A C"]:
    """Rotary embedding, halves convention (arXiv:2104.09864; the layout of Llama checkpoints)."""
    half = x.shape[-1] // 2
    angle = positions[..., None, None] * _frequencies(half, theta, x.device)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().split(half, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


@lru_cache(maxsize=16)
def _frequencies(half: int, theta: float, device: torch.device) -> Float[Tensor, " half"]:
    """Turns per position of the rotary pairs, in radians."""
    with torch.inference_mode(False):  # they serve training too, whoever asks first
        powers = torch.arange(half, device=device, dtype=torch.float32) / half
        return theta**-powers


class Attention(nn.Module):
    """Projections of an attention without bias; its input may be wider than its output."""

    def __init__(self, shape: Shape, wide: int = 1, qk_norm: bool = False) -> None:
        """
        Args:
            wide: width of the input, in hidden sizes.
            qk_norm: a norm over every head's query and key (Qwen3's bodies have it).
        """
        super().__init__()
        inner, size = wide * shape.hidden, shape.head_dim
        self.q_proj = nn.Linear(inner, shape.heads * size, bias=False)
        self.k_proj = nn.Linear(inner, shape.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(inner, shape.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(shape.heads * size, shape.hidden, bias=False)
        self.q_norm = Norm(size, shape.eps) if qk_norm else nn.Identity()
        self.k_norm = Norm(size, shape.eps) if qk_norm else nn.Identity()
        self.heads, self.size, self.theta = shape.heads, size, shape.rope_theta

    def query(
        self, x: Float[Tensor, "N X"], positions: Int[Tensor, " N"]
    ) -> Float[Tensor, "N AG C"]:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.size)))
        return rotate(q, positions, self.theta)

    def key_value(
        self, x: Float[Tensor, "N X"], positions: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N A C"], Float[Tensor, "N A C"]]:
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.size)))
        value = self.v_proj(x).unflatten(-1, (-1, self.size))
        return rotate(key, positions, self.theta), value

    def query_key_value(
        self, x: Float[Tensor, "N X"], positions: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N AG C"], Float[Tensor, "N A C"], Float[Tensor, "N A C"]]:
        """Both at once, for rows that ask and lend: queries and keys are turned together."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.size)))
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.size)))
        turned = rotate(torch.cat([q, key], dim=-2), positions, self.theta)
        value = self.v_proj(x).unflatten(-1, (-1, self.size))
        return turned[:, : self.heads], turned[:, self.heads :], value


class Block(nn.Module):
    """A decoder layer: attention, then a gated MLP, each added to the residual stream.

    What attention reads and what the residual is need not be the same; the caller holds both.
    """

    def __init__(
        self, shape: Shape, wide: int = 1, input_norm: bool = True, qk_norm: bool = False
    ) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps) if input_norm else nn.Identity()
        self.self_attn = Attention(shape, wide, qk_norm)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = Mlp(shape.hidden, shape.intermediate, shape.activation)

    def finish(
        self, residual: Float[Tensor, "N D"], attended: Float[Tensor, "N AG C"]
    ) -> Float[Tensor, "N D"]:
        """The layer's output, from its residual input and what its heads gathered."""
        residual = residual + self.self_attn.o_proj(attended.flatten(-2))
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out

    @property
    def kept(self) -> float:
        """Numbers per row that wait for the backward pass, about (tests/test_memory_plan.py)."""
        attn, inner = self.self_attn, self.mlp.gate_proj.out_features
        hidden, asked = attn.o_proj.out_features, attn.q_proj.out_features
        read, lent = attn.q_proj.in_features, attn.k_proj.out_features
        return 5.8 * hidden + read + 3.9 * inner + 2.4 * asked + 2.0 * lent


def grouped_attention(
    q: Float[Tensor, "N AG C"],
    keys: Float[Tensor, "L A C"],
    values: Float[Tensor, "L A C"],
    seen: Bool[Tensor, "N M"] | None = None,
) -> Float[Tensor, "N AG C"]:
    """Decoding: attention over all keys but, of the last M, only those that `seen` allows."""
    mask = None
    if seen is not None:
        mask = F.pad(seen, (len(keys) - seen.shape[1], 0), value=True)[None, None]
    q, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))
    return lent_attention(q, keys, values, mask)[0].transpose(0, 1)


def each_attention(
    q: Float[Tensor, "R AG C"],
    keys: Sequence[Float[Tensor, "_ A C"]],
    values: Sequence[Float[Tensor, "_ A C"]],
    seen: Sequence[Bool[Tensor, "_ _"] | None],
    counts: Sequence[int],
) -> Float[Tensor, "R AG C"]:
    """Decoding: `grouped_attention` of every prompt over its own keys; prompts lie flat in `q`."""
    prompts = zip(q.split_with_sizes(counts), keys, values, seen, strict=True)
    return torch.cat([grouped_attention(*prompt) for prompt in prompts if len(prompt[0])])


def appended(
    old: Sequence[Float[Tensor, "_ *row"]], new: Float[Tensor, "R *row"], counts: Sequence[int]
) -> tuple[Float[Tensor, "_ *row"], ...]:
    """Decoding: the new rows of every prompt behind its old ones, in one copy for all.

    The results are views of that copy, which lives as long as one of them.
    """
    parts = [part for pair in zip(old, new.split_with_sizes(counts), strict=True) for part in pair]
    lengths = [len(rows) + count for rows, count in zip(old, counts, strict=True)]
    return tuple(torch.cat(parts).split_with_sizes(lengths))


def random_weights(module: nn.Module) -> None:
    """Every matrix at random, so that it hands on the size of what it is given."""
    for linear in (m for m in module.modules() if isinstance(m, nn.Linear)):
        nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)


@dataclass(frozen=True)
class Asking:
    """Which rows ask at every depth, and what each block of them can see.

    Attributes:
        rows: indices into the B*T flattened rows, ascending.
        first: for each, the flattened index of the first row of its document.
        blocks: (start, stop, low, high): asking rows start..stop look at keys low..high.
    """

    rows: Int[Tensor, " N"]
    first: Int[Tensor, " N"]
    blocks: list[tuple[int, int, int, int]]


def asking(
    wanted: Bool[Tensor, "B T"], document: Int[Tensor, "B T"], heads: int, budget: int | None = None
) -> Asking:
    """Plan the attention of the rows where `wanted` is True.

    A block never holds more than `budget` scores (its rows x its keys x heads), so memory does not
    grow with T. Documents are runs of equal ids within a row of the batch.
    """
    budget = budget or (SCORES_GPU if wanted.is_cuda else SCORES_CPU)
    starts = torch.ones_like(wanted)
    starts[:, 1:] = document[:, 1:] != document[:, :-1]
    index = torch.arange(wanted.numel(), device=wanted.device).view_as(document)
    first = torch.where(starts, index, 0).flatten().cummax(0).values
    rows = torch.nonzero(wanted.flatten()).flatten()
    first = first[rows]
    return Asking(rows, first, _blocks(rows.tolist(), first.tolist(), max(1, budget // heads)))


def _blocks(rows: list[int], first: list[int], budget: int) -> list[tuple[int, int, int, int]]:
    blocks: list[tuple[int, int, int, int]] = []
    start = 0
    for i, row in enumerate(rows):
        low = first[start]  # documents are contiguous: the first asker of a block looks back most
        if i > start and (i + 1 - start) * (row + 1 - low) > budget:
            blocks.append((start, i, low, rows[i - 1] + 1))
            start = i
    if rows:
        blocks.append((start, len(rows), first[start], rows[-1] + 1))
    return blocks


def dense_attention(
    q: Float[Tensor, "N AG C"],
    key: Float[Tensor, "BT A C"],
    value: Float[Tensor, "BT A C"],
    own_keys: Sequence[Float[Tensor, "N A C"]],
    own_values: Sequence[Float[Tensor, "N A C"]],
    plan: Asking,
) -> Float[Tensor, "N AG C"]:
    """The slow, obvious reference: all keys side by side under one explicit mask."""
    count, groups = len(plan.rows), q.shape[1] // key.shape[1]
    column = torch.arange(key.shape[0], device=q.device)
    seen = (column >= plan.first[:, None]) & (column <= plan.rows[:, None])
    mask = torch.cat([seen] + [torch.eye(count, device=q.device).bool()] * len(own_keys), dim=1)
    keys = torch.cat([key, *own_keys]).repeat_interleave(groups, dim=1)
    values = torch.cat([value, *own_values]).repeat_interleave(groups, dim=1)
    scores = torch.einsum("nhc,mhc->hnm", q.float(), keys.float()) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hnm,mhc->nhc", weights, values.float()).to(q.dtype)


def branch_attention(
    q: Float[Tensor, "N AG C"],
    key: Float[Tensor, "BT A C"],
    value: Float[Tensor, "BT A C"],
    own_keys: Sequence[Float[Tensor, "N A C"]],
    own_values: Sequence[Float[Tensor, "N A C"]],
    plan: Asking,
) -> Float[Tensor, "N AG C"]:
    """The same as `dense_attention`, block by block, nothing quadratic kept for the backward."""
    out: Tensor = _Branch.apply(  # type: ignore[no-untyped-call]
        q, key, value, plan, len(own_keys), *own_keys, *own_values
    )
    return out


def _scores(q: Tensor, key: Tensor, plan: Asking, block: tuple[int, int, int, int]) -> Tensor:
    """Scores of one block, [A, G*n, keys] in float32; -inf where a row may not look."""
    start, stop, low, high = block
    heads, size = key.shape[1], q.shape[-1]
    asked = q[start:stop].view(stop - start, heads, -1, size).permute(1, 2, 0, 3)
    groups = asked.shape[1]
    flat = asked.reshape(heads, groups * (stop - start), size)
    scores: Tensor = torch.matmul(flat, key[low:high].permute(1, 2, 0)).float() * size**-0.5
    column = torch.arange(low, high, device=q.device)
    rows, first = plan.rows[start:stop, None], plan.first[start:stop, None]
    hidden = (column > rows) | (column < first)
    scores.view(heads, groups, stop - start, -1).masked_fill_(hidden, float("-inf"))
    return scores


def _grouped(x: Tensor, heads: int) -> Tensor:
    """[N, A*G, C] -> [N, A, G, C]; N may be 0."""
    return x.view(len(x), heads, x.shape[1] // heads, x.shape[2])


def _split(x: Tensor, heads: int) -> Tensor:
    """[N, A*G, C] -> [A, G*N, C], the layout of `_scores`."""
    count, _, size = x.shape
    return x.view(count, heads, -1, size).permute(1, 2, 0, 3).reshape(heads, -1, size)


def _join(x: Tensor, count: int) -> Tensor:
    """[A, G*N, C] -> [N, A*G, C]."""
    heads, _, size = x.shape
    return x.view(heads, -1, count, size).permute(2, 0, 1, 3).reshape(count, -1, size)


class _Branch(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, q: Tensor, key: Tensor, value: Tensor, plan: Asking, depths: int, *own: Tensor
    ) -> Tensor:
        heads, size = key.shape[1], q.shape[-1]
        grouped = _grouped(q, heads).float()
        own_scores = [
            (grouped * k[:, :, None].float()).sum(-1) * size**-0.5 for k in own[:depths]
        ]  # each [N, A, G]
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        total = torch.empty(grouped.shape[:-1], dtype=torch.float32, device=q.device)
        for block in plan.blocks:
            start, stop, low, high = block
            scores = _scores(q, key, plan, block)
            lse = torch.logsumexp(scores, -1)
            weights = scores.sub_(lse[..., None]).exp_().to(value.dtype)
            out[start:stop] = _join(
                torch.matmul(weights, value[low:high].transpose(0, 1)).float(), stop - start
            )
            total[start:stop] = lse.view(heads, -1, stop - start).permute(2, 0, 1)
        lse = torch.stack([total, *own_scores]).logsumexp(0)
        merged = out.view_as(grouped).mul_((total - lse).exp()[..., None])
        for score, v in zip(own_scores, own[depths:], strict=True):
            merged += (score - lse).exp()[..., None] * v[:, :, None].float()
        result = merged.view(q.shape).to(q.dtype)
        ctx.save_for_backward(q, key, value, result, lse, *own)
        ctx.plan, ctx.depths = plan, depths
        return result

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        """Gradients of a softmax known by its output and log-sum-exp: dS = P * (dP - <dO, O>)."""
        q, key, value, result, lse, *own = ctx.saved_tensors
        heads, size = key.shape[1], q.shape[-1]
        scale = size**-0.5
        grouped, g = _grouped(q, heads), _grouped(grad, heads)
        delta = (grad.float() * result.float()).sum(-1).view(lse.shape)
        dq = torch.zeros(grouped.shape, dtype=torch.float32, device=q.device)
        dkey = torch.zeros(key.shape, dtype=torch.float32, device=q.device)
        dvalue = torch.zeros_like(dkey)
        for block in ctx.plan.blocks:
            start, stop, low, high = block
            n = stop - start
            row = lse[start:stop].permute(1, 2, 0).reshape(heads, -1, 1)
            weights = _scores(q, key, ctx.plan, block).sub_(row).exp_()
            dout = _split(grad[start:stop].to(value.dtype), heads)
            dvalue[low:high] += torch.matmul(weights.to(value.dtype).mT, dout).transpose(0, 1)
            dscore = torch.matmul(dout, value[low:high].permute(1, 2, 0)).float()
            dscore.sub_(delta[start:stop].permute(1, 2, 0).reshape(heads, -1, 1)).mul_(weights)
            dscore = dscore.mul_(scale).to(q.dtype)
            dq[start:stop] = _join(
                torch.matmul(dscore, key[low:high].transpose(0, 1)).float(), n
            ).view(n, heads, -1, size)
            asked = _split(q[start:stop], heads)
            dkey[low:high] += torch.matmul(dscore.mT, asked).transpose(0, 1)
        dkeys, dvalues = [], []
        for k, v in zip(own[: ctx.depths], own[ctx.depths :], strict=True):
            score = (grouped.float() * k[:, :, None].float()).sum(-1) * scale
            weight = (score - lse).exp()
            dscore = weight * ((g.float() * v[:, :, None].float()).sum(-1) - delta) * scale
            dq += dscore[..., None] * k[:, :, None].float()
            dkeys.append((dscore[..., None] * grouped.float()).sum(2).to(k.dtype))
            dvalues.append((weight[..., None] * g.float()).sum(2).to(v.dtype))
        return (
            dq.view(q.shape).to(q.dtype), dkey.to(key.dtype), dvalue.to(value.dtype), None, None,
            *dkeys, *dvalues,
        )  # fmt: skip
