"""Training attention of blocks: over the context before their anchors, and inside each block.

A block of S slots starts at its anchor, the token that follows context row t. Its queries attend to
the context rows of the document up to t, and to the slots of the same block. With six context
rows, blocks of two slots after rows 1 and 4 attend to the columns marked x:

               context rows  0 1 2 3 4 5     first block  0 1     second block  0 1
    first      slot 0        x x . . . .                  x x                   . .
               slot 1        x x . . . .                  x x                   . .
    second     slot 0        x x x x x .                  . .                   x x
               slot 1        x x x x x .                  . .                   x x

Inside a block attention is bidirectional, as drawn, or causal. A window bounds the context from
below, in one of two published ways (a = t + 1 is the anchor's position, k the slot, w the window):

    slot      positions above a + k - w, as in Hugging Face's sliding windows and SpecForge
    anchor    positions from a - w on, the same for all slots (speculators)

`dense_attention` is the reference, with one explicit mask. `block_attention` processes the context
in pieces, recomputes its softmax in the backward pass, saves nothing quadratic in the text, and
merges context and block by log-sum-exp (as FlashAttention, arXiv:2205.14135).

Source: DFlash, arXiv:2602.06036, and its implementations.

Legend: N blocks of S slots, Q = N * S queries, R context rows, G query heads per key head, A key
heads, C head size.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.models.cache.layer_rows import LayerRows
from outrider.models.drafting.branch_attention import (
    SCORES_CPU,
    SCORES_GPU,
    QueryPlan,
    by_key_head,
    by_row,
    cut_blocks,
    group_heads,
    masked_attention,
    masked_scores,
)
from outrider.models.drafting.layers import attend_rows

WINDOWS = ("slot", "anchor")
Queries = Float[Tensor, "Q AG C"]  # and outputs
Context = Float[Tensor, "R A C"]  # keys or values
Own = Float[Tensor, "Q A C"]  # keys or values of the slots


@dataclass(frozen=True)
class BlockPlan:
    """The blocks of one pass.

    Attributes:
        slots: S, of every block.
        context: for each query the context rows that it attends to, in pieces of bounded memory.
        causal: a slot attends to the slots up to itself; else to the whole block.
    """

    slots: int
    context: QueryPlan
    causal: bool

    def own_mask(self) -> Bool[Tensor, "S S"]:
        return block_mask(self.slots, self.causal, self.context.rows.device)


def block_mask(slots: int, causal: bool, device: torch.device) -> Bool[Tensor, "S S"]:
    """Return which slots of its block a slot attends to."""
    every = torch.ones(slots, slots, dtype=torch.bool, device=device)
    return every.tril() if causal else every


def plan_blocks(
    anchors: Int[Tensor, " N"],
    document: Int[Tensor, "B T"],
    slots: int,
    heads: int,
    *,
    causal: bool = False,
    window: int | None = None,
    window_from: str = "slot",
    budget: int | None = None,
) -> BlockPlan:
    """Plan the attention of blocks behind these context rows, indices into the B*T flattened rows.

    Args:
        anchors: the last context row of each block, ascending.
        budget: scores held at once; None: what suits the device.
    """
    budget = budget or (SCORES_GPU if anchors.is_cuda else SCORES_CPU)
    starts = torch.ones_like(document, dtype=torch.bool)
    starts[:, 1:] = document[:, 1:] != document[:, :-1]
    index = torch.arange(document.numel(), device=document.device).view_as(document)
    first = torch.where(starts, index, 0).flatten().cummax(0).values[anchors]
    first = first[:, None].expand(-1, slots)
    if window is not None:
        first = torch.maximum(first, first_in_window(anchors + 1, slots, window, window_from))
    low = first[:, 0].tolist() if len(anchors) else []
    pieces = cut_blocks(anchors.tolist(), low, max(1, budget // (heads * slots)))
    pieces = [(start * slots, stop * slots, begin, end) for start, stop, begin, end in pieces]
    rows = anchors.repeat_interleave(slots)
    return BlockPlan(slots, QueryPlan(rows, first.flatten(), pieces), causal)


def first_in_window(
    anchor: Int[Tensor, " N"], slots: int, window: int, window_from: str
) -> Int[Tensor, "N S"]:
    """Return the first position that each slot of these anchors attends to."""
    first = anchor[:, None] - window
    if window_from == "anchor":
        return first.expand(-1, slots)
    return first + 1 + torch.arange(slots, device=anchor.device)


def dense_attention(
    q: Queries, key: Context, value: Context, own_key: Own, own_value: Own, plan: BlockPlan
) -> Queries:
    """Attend to context and all slots under one explicit mask: the slow reference."""
    rows, first = plan.context.rows[:, None], plan.context.document_start[:, None]
    column = torch.arange(len(key), device=q.device)
    blocks = torch.eye(len(q) // plan.slots, device=q.device, dtype=torch.uint8)
    own = torch.kron(blocks, plan.own_mask().to(torch.uint8)).bool()
    mask = torch.cat([(column >= first) & (column <= rows), own], dim=1)
    return masked_attention(q, torch.cat([key, own_key]), torch.cat([value, own_value]), mask)


def block_attention(
    q: Queries, key: Context, value: Context, own_key: Own, own_value: Own, plan: BlockPlan
) -> Queries:
    """Compute `dense_attention`; memory grows with queries and keys, not with their product."""
    out, total = _ContextAttention.apply(q, key, value, plan.context)  # type: ignore[no-untyped-call]
    scores = torch.einsum(
        "nsagc,nmac->nagsm", _by_block(q, key.shape[1], plan), _by_block(own_key, None, plan)
    ).float()
    scores = scores * q.shape[-1] ** -0.5
    if plan.causal:
        scores = scores.masked_fill(~plan.own_mask(), float("-inf"))
    total = total.unflatten(0, (-1, plan.slots)).permute(0, 2, 3, 1)  # [N, A, G, S]
    lse = torch.logaddexp(total, scores.logsumexp(-1))
    weights = (scores - lse[..., None]).exp().to(own_value.dtype)
    own = torch.einsum("nagsm,nmac->nsagc", weights, _by_block(own_value, None, plan))
    share = (total - lse).exp().permute(0, 3, 1, 2).flatten(0, 1)
    merged: Tensor = out * share[..., None] + own.flatten(0, 1).float()
    return merged.flatten(1, 2).to(q.dtype)


def attend_block(
    q: Float[Tensor, "S AG C"],
    rows: LayerRows,
    causal: bool,
    window: int | None,
    window_from: str,
) -> Float[Tensor, "S AG C"]:
    """Attend, in decoding, to the context and the block, which is the branch of `rows`."""
    slots, mask = len(q), None
    if window is not None:
        rows = rows.last(window)
        anchor = torch.tensor([len(rows)], device=q.device)
        first = first_in_window(anchor, slots, window, window_from)[0]
        context = torch.arange(len(rows), device=q.device) >= first[:, None]
        mask = torch.cat([context, block_mask(slots, causal, q.device)], dim=1)
    elif causal:
        mask = block_mask(slots, True, q.device)
    return attend_rows(q, rows, mask)


ATTENTIONS = {"fast": block_attention, "reference": dense_attention}


def _by_block(x: Tensor, heads: int | None, plan: BlockPlan) -> Tensor:
    """[Q, AG, C] -> [N, S, A, G, C]; without `heads`, [Q, A, C] -> [N, S, A, C]."""
    x = x if heads is None else group_heads(x, heads)
    return x.view(len(x) // plan.slots, plan.slots, *x.shape[1:])


class _ContextAttention(torch.autograd.Function):
    """Attention to the context alone, [Q, A, G, C], and its log-sum-exp [Q, A, G], in float32.

    A query that sees no context row has the output 0 and the log-sum-exp -inf.
    """

    @staticmethod
    def forward(ctx, q: Tensor, key: Tensor, value: Tensor, plan: QueryPlan):  # type: ignore[no-untyped-def]
        heads = key.shape[1]
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        total = out.new_full((len(q), heads, q.shape[1] // heads), float("-inf"))
        for block in plan.blocks:
            start, stop, low, high = block
            scores = masked_scores(q, key, plan, block)
            lse = scores.logsumexp(-1)
            weights = scores.sub_(_finite(lse)[..., None]).exp_().to(value.dtype)
            attended = torch.matmul(weights, value[low:high].transpose(0, 1)).float()
            out[start:stop] = by_row(attended, stop - start)
            total[start:stop] = lse.view(heads, -1, stop - start).permute(2, 0, 1)
        out = group_heads(out, heads)
        ctx.save_for_backward(q, key, value, out, total)
        ctx.plan = plan
        return out, total

    @staticmethod
    def backward(ctx, grad: Tensor, grad_total: Tensor):  # type: ignore[no-untyped-def]
        """Gradients by output and log-sum-exp: dS = P * (dP - <dO, O> + dlse)."""
        q, key, value, out, total = ctx.saved_tensors
        heads, size = key.shape[1], q.shape[-1]
        scale = size**-0.5
        offset = grad_total.float() - (grad.float() * out).sum(-1)  # [Q, A, G]
        dq = torch.zeros(out.shape, dtype=torch.float32, device=q.device)
        dkey = torch.zeros(key.shape, dtype=torch.float32, device=q.device)
        dvalue = torch.zeros_like(dkey)
        flat_grad = grad.reshape(q.shape).to(value.dtype)
        for block in ctx.plan.blocks:
            start, stop, low, high = block
            spans = (x[start:stop].permute(1, 2, 0) for x in (total, offset))
            row, add = (span.reshape(heads, -1, 1) for span in spans)
            weights = masked_scores(q, key, ctx.plan, block).sub_(_finite(row)).exp_()
            dout = by_key_head(flat_grad[start:stop], heads)
            dvalue[low:high] += torch.matmul(weights.to(value.dtype).mT, dout).transpose(0, 1)
            dscore = torch.matmul(dout, value[low:high].permute(1, 2, 0)).float()
            dscore = dscore.add_(add).mul_(weights).mul_(scale).to(q.dtype)
            dblock = torch.matmul(dscore, key[low:high].transpose(0, 1)).float()
            dq[start:stop] = by_row(dblock, stop - start).view(stop - start, heads, -1, size)
            query = by_key_head(q[start:stop], heads)
            dkey[low:high] += torch.matmul(dscore.mT, query).transpose(0, 1)
        return dq.view(q.shape).to(q.dtype), dkey.to(key.dtype), dvalue.to(value.dtype), None


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse.isneginf(), 0.0)
