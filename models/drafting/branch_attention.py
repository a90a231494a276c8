"""Training attention of a drafter: over the keys of depth 1 and the row's own branch.

At depth 1 every row t makes a key from true target states. At depth d the row continues its own
branch: it attends to the depth-1 keys of its document up to its own row, and to the keys that its
own branch made at depths 2..d. The decoder attends to the same keys when d - 1 draft tokens follow
a true prefix. With four rows, row 2 at depth 3 attends to the columns marked x:

    depth-1 keys    0 1 2 3     depth-2 keys    0 1 2 3     depth-3 keys    0 1 2 3
                    x x x .                     . . x .                     . . x .

`dense_attention` is the reference, with one explicit mask. `branch_attention` computes it in
blocks, recomputes the softmax in the backward pass and saves no T x T matrix. It merges the depth-1
block and the branch's diagonal by log-sum-exp (as FlashAttention merges its blocks,
arXiv:2205.14135; used for training-time test by NeMo Automodel). Only rows that some depth
supervises query; the other rows provide keys.

Legend: B rows of a batch, T tokens, N query rows, G query heads per key head, C head size, A key
heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

SCORES_CPU = 2**19  # scores held at once: about 2 MB in float32, a core's cache
SCORES_GPU = 2**26
Queries = Float[Tensor, "N AG C"]  # and outputs
Keys = Float[Tensor, "BT A C"]  # or values, of depth 1
OwnKeys = Sequence[Float[Tensor, "N A C"]]  # or values, of the branch at every later depth
Block = tuple[int, int, int, int]  # start, stop, low, high


@dataclass(frozen=True)
class QueryPlan:
    """The rows that query at every depth, split into blocks of bounded memory."""

    rows: Int[Tensor, " N"]  # indices into the B*T flattened rows, ascending
    document_start: Int[Tensor, " N"]  # index of the first row of each one's document, or window
    blocks: list[Block]  # query rows start..stop attend to keys low..high


def plan_queries(
    queries: Bool[Tensor, "B T"],
    document: Int[Tensor, "B T"],
    heads: int,
    budget: int | None = None,
    window: int | None = None,
) -> QueryPlan:
    """Plan the attention of the rows where `queries` is True.

    A block holds at most `budget` scores (its rows x its keys x heads), so memory does not grow
    with T. Documents are runs of equal ids within a row of the batch. With a window, a row attends
    to that many keys of depth 1 at most, its own included.
    """
    budget = budget or (SCORES_GPU if queries.is_cuda else SCORES_CPU)
    starts = torch.ones_like(queries)
    starts[:, 1:] = document[:, 1:] != document[:, :-1]
    index = torch.arange(queries.numel(), device=queries.device).view_as(document)
    first = torch.where(starts, index, 0).flatten().cummax(0).values
    rows = torch.nonzero(queries.flatten()).flatten()
    first = first[rows] if window is None else torch.maximum(first[rows], rows - window + 1)
    blocks = cut_blocks(rows.tolist(), first.tolist(), max(1, budget // heads))
    return QueryPlan(rows, first, blocks)


def cut_blocks(rows: list[int], first: list[int], budget: int) -> list[Block]:
    blocks, start = list[Block](), 0
    for i, row in enumerate(rows):
        low = first[start]  # the first row of a block reaches back furthest
        if i > start and (i + 1 - start) * (row + 1 - low) > budget:
            blocks.append((start, i, low, rows[i - 1] + 1))
            start = i
    if rows:
        blocks.append((start, len(rows), first[start], rows[-1] + 1))
    return blocks


def dense_attention(
    q: Queries, key: Keys, value: Keys, own_keys: OwnKeys, own_values: OwnKeys, plan: QueryPlan
) -> Queries:
    """Attend to all keys, concatenated, under one explicit mask: the slow reference."""
    count, column = len(plan.rows), torch.arange(key.shape[0], device=q.device)
    prefix = (column >= plan.document_start[:, None]) & (column <= plan.rows[:, None])
    mask = torch.cat([prefix] + [torch.eye(count, device=q.device).bool()] * len(own_keys), dim=1)
    return masked_attention(q, torch.cat([key, *own_keys]), torch.cat([value, *own_values]), mask)


def masked_attention(
    q: Queries,
    keys: Float[Tensor, "M A C"],
    values: Float[Tensor, "M A C"],
    mask: Bool[Tensor, "N M"],
) -> Queries:
    """Attend to the keys that the mask shows to each query; scores and weights in float32."""
    groups = q.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(groups, dim=1) for part in (keys, values))
    scores = torch.einsum("nhc,mhc->hnm", q.float(), keys.float()) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hnm,mhc->nhc", weights, values.float()).to(q.dtype)


def branch_attention(
    q: Queries, key: Keys, value: Keys, own_keys: OwnKeys, own_values: OwnKeys, plan: QueryPlan
) -> Queries:
    """Compute `dense_attention` in blocks; nothing quadratic is saved for the backward pass."""
    out: Tensor = _BranchAttention.apply(  # type: ignore[no-untyped-call]
        q, key, value, plan, len(own_keys), *own_keys, *own_values
    )
    return out


ATTENTIONS = {"fast": branch_attention, "reference": dense_attention}


def masked_scores(q: Tensor, key: Tensor, plan: QueryPlan, block: Block) -> Tensor:
    """Return the scores of one block, [A, G*n, keys] in float32; -inf where masked."""
    start, stop, low, high = block
    heads, size = key.shape[1], q.shape[-1]
    flat = by_key_head(q[start:stop], heads)
    scores: Tensor = torch.matmul(flat, key[low:high].permute(1, 2, 0)).float() * size**-0.5
    column = torch.arange(low, high, device=q.device)
    rows, first = plan.rows[start:stop, None], plan.document_start[start:stop, None]
    masked = (column > rows) | (column < first)
    scores.view(heads, -1, stop - start, high - low).masked_fill_(masked, float("-inf"))
    return scores


def group_heads(x: Tensor, heads: int) -> Tensor:
    """[N, A*G, C] -> [N, A, G, C]; N may be 0."""
    return x.view(len(x), heads, x.shape[1] // heads, x.shape[2])


def by_key_head(x: Tensor, heads: int) -> Tensor:
    """[N, A*G, C] -> [A, G*N, C], the layout of `masked_scores`."""
    count, _, size = x.shape
    return x.view(count, heads, -1, size).permute(1, 2, 0, 3).reshape(heads, -1, size)


def by_row(x: Tensor, count: int) -> Tensor:
    """[A, G*N, C] -> [N, A*G, C]."""
    heads, _, size = x.shape
    return x.view(heads, -1, count, size).permute(2, 0, 1, 3).reshape(count, -1, size)


class _BranchAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, q: Tensor, key: Tensor, value: Tensor, plan: QueryPlan, depths: int, *own: Tensor
    ) -> Tensor:
        heads, size = key.shape[1], q.shape[-1]
        grouped = group_heads(q, heads).float()
        # each [N, A, G]
        own_scores = [(grouped * k[:, :, None].float()).sum(-1) * size**-0.5 for k in own[:depths]]
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        total = torch.empty(grouped.shape[:-1], dtype=torch.float32, device=q.device)
        for block in plan.blocks:
            start, stop, low, high = block
            scores = masked_scores(q, key, plan, block)
            lse = torch.logsumexp(scores, -1)
            weights = scores.sub_(lse[..., None]).exp_().to(value.dtype)
            attended = torch.matmul(weights, value[low:high].transpose(0, 1)).float()
            out[start:stop] = by_row(attended, stop - start)
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
        delta = (grad.float() * result.float()).sum(-1).view(lse.shape)
        dq = torch.zeros(group_heads(q, heads).shape, dtype=torch.float32, device=q.device)
        dkey = torch.zeros(key.shape, dtype=torch.float32, device=q.device)
        dvalue = torch.zeros_like(dkey)
        for block in ctx.plan.blocks:
            start, stop, low, high = block
            n = stop - start
            row = lse[start:stop].permute(1, 2, 0).reshape(heads, -1, 1)
            weights = masked_scores(q, key, ctx.plan, block).sub_(row).exp_()
            dout = by_key_head(grad[start:stop].to(value.dtype), heads)
            dvalue[low:high] += torch.matmul(weights.to(value.dtype).mT, dout).transpose(0, 1)
            dscore = torch.matmul(dout, value[low:high].permute(1, 2, 0)).float()
            dscore.sub_(delta[start:stop].permute(1, 2, 0).reshape(heads, -1, 1)).mul_(weights)
            dscore = dscore.mul_(scale).to(q.dtype)
            dblock = torch.matmul(dscore, key[low:high].transpose(0, 1)).float()
            dq[start:stop] = by_row(dblock, n).view(n, heads, -1, size)
            query = by_key_head(q[start:stop], heads)
            dkey[low:high] += torch.matmul(dscore.mT, query).transpose(0, 1)
        grouped, g = group_heads(q, heads).float(), group_heads(grad, heads).float()
        dkeys, dvalues = [], []
        for k, v in zip(own[: ctx.depths], own[ctx.depths :], strict=True):
            score = (grouped * k[:, :, None].float()).sum(-1) * scale
            weight = (score - lse).exp()
            dscore = weight * ((g * v[:, :, None].float()).sum(-1) - delta) * scale
            dq += dscore[..., None] * k[:, :, None].float()
            dkeys.append((dscore[..., None] * grouped).sum(2).to(k.dtype))
            dvalues.append((weight[..., None] * g).sum(2).to(v.dtype))
        return (
            dq.view(q.shape).to(q.dtype), dkey.to(key.dtype), dvalue.to(value.dtype), None, None,
            *dkeys, *dvalues,
        )  # fmt: skip
