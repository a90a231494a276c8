"""MTP modules, run as a chain (one per depth) or as a loop (one module on its own output).

A module joins the normed embedding of a token and a normed state to one vector, and applies a
decoder layer; a norm precedes the target's head. In a chain, stage k at row t reads token x_{t+k}
and stage k-1's output at the same row (stage 1: the target's last state), and attends to its own
keys of rows <= t. The tokens that row t = 2 depends on:

    stage 1    x1 x2 x3           rows 0..2 read the token after their own
    stage 2    x1 x2 x3 x4        rows 0..2 read the token after that, and stage 1's outputs

With T true rows and newest token x_T, stage k can therefore run on T-k+1 rows once; at the k-1
rows after them it reads draft tokens. The decoding state keeps keys of the former, and of stage k-1
one output more than stage k has read. The rows of draft tokens, k-1 per node at depth k, belong to
the round, so nothing is rolled back when drafts are rejected.

The loop (FastMTP) is `models/drafting/self_feeding.py` with one module.

Legend: B rows of a batch, T tokens, N nodes of a tree level, R rows that a node computes, P draft
tokens of its path, A key heads, C head size, H hidden size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from outrider.models.cache.attention_masks import causal_mask
from outrider.models.cache.layer_rows import LayerRows
from outrider.models.drafting.branch_attention import ATTENTIONS, QueryPlan, plan_queries
from outrider.models.drafting.drafter import LevelIds, target_head_logits
from outrider.models.drafting.layers import DecoderLayer, Norm, append_rows
from outrider.models.drafting.self_feeding import (
    Rows,
    SelfFeeding,
    gather_parents,
    maybe_checkpoint,
    transpose,
)
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import Guess, ModelShape, TargetEnds, Trace


class MtpModule(nn.Module):
    """One module, with the parameter names of DeepSeek's checkpoints; the layer is `block`."""

    def __init__(self, shape: ModelShape, order: str, feed: str, qk_norm: bool) -> None:
        """
        Args:
            order: "embedding_first" or "state_first", the halves of the input of `eh_proj`.
            feed: "raw" or "normed", the output that the next depth reads.
        """
        super().__init__()
        hidden, eps = shape.hidden, shape.eps
        self.order, self.feed = order, feed
        self.enorm, self.hnorm = Norm(hidden, eps), Norm(hidden, eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.block = DecoderLayer(shape, qk_norm=qk_norm)
        self.norm = Norm(hidden, eps)

    def concat_inputs(
        self, embedding: Float[Tensor, "N H"], state: Float[Tensor, "N H"]
    ) -> Float[Tensor, "N HH"]:
        halves = [self.enorm(embedding), self.hnorm(state)]
        return torch.cat(halves if self.order == "embedding_first" else halves[::-1], dim=-1)

    def layer_inputs(
        self, embedding: Float[Tensor, "N H"], state: Float[Tensor, "N H"]
    ) -> tuple[Float[Tensor, "N H"], Float[Tensor, "N H"]]:
        residual = self.eh_proj(self.concat_inputs(embedding, state))
        return residual, self.block.input_layernorm(residual)

    def next_state(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]:
        return hidden if self.feed == "raw" else self.norm(hidden)


@dataclass(frozen=True)
class MtpChainState:
    """Decoding state of a chain: true rows of each stage, and draft rows of each node."""

    rows: tuple[LayerRows, ...]  # stage k has k-1 rows fewer than stage 1
    newest: tuple[Float[Tensor, "_ H"], ...]  # each stage's last output; no row in short texts
    position: Int[Tensor, " 1"]  # rotary, of the newest true row
    path: Int[Tensor, "N P"]  # draft tokens from the root to each node
    branch: Float[Tensor, "N R H"]  # of the stage that ran last, at the rows of draft tokens


class MtpChain:
    """One stage per depth; each reads the outputs of the one before."""

    gradient_checkpointing = False

    def __init__(
        self, stages: Sequence[MtpModule], target: TargetEnds, vocab: DraftVocab, attention: str
    ) -> None:
        self.stages, self.target, self.vocab = stages, target, vocab
        self.attend = ATTENTIONS[attention]

    @property
    def dtype(self) -> torch.dtype:
        return self.stages[0].eh_proj.weight.dtype

    def unroll(self, trace: Trace) -> Iterator[Guess]:
        """Run every stage; the last one only at supervised rows."""
        heads = self.stages[0].block.self_attn.heads
        state, positions = trace.last.flatten(0, 1).to(self.dtype), trace.positions.flatten()
        for depth, stage in enumerate(self.stages, start=1):
            last = depth == len(self.stages)
            queries = trace.supervised_mask(depth) if last else torch.ones_like(trace.answer)
            plan = plan_queries(queries, trace.document, heads)
            ids = trace.tokens_ahead(depth).flatten()
            state = maybe_checkpoint(
                self.gradient_checkpointing, self._run_stage, stage, ids, state, positions, plan
            )
            yield Guess(depth, plan.rows, stage.norm(state))
            state = stage.next_state(state)

    def _run_stage(
        self,
        stage: MtpModule,
        ids: Int[Tensor, " BT"],
        state: Float[Tensor, "BT H"],
        positions: Int[Tensor, " BT"],
        plan: QueryPlan,
    ) -> Float[Tensor, "N H"]:
        residual, x = self._embed(stage, ids, state)
        return stage.block.unroll(residual, x, positions, plan, self.attend)[0]

    def _embed(
        self, stage: MtpModule, ids: Int[Tensor, " N"], state: Float[Tensor, "N H"]
    ) -> tuple[Float[Tensor, "N H"], Float[Tensor, "N H"]]:
        return stage.layer_inputs(self.target.embed(ids).to(state.dtype), state)

    def absorb_batch(
        self, states: Sequence[MtpChainState | None], traces: Sequence[Trace]
    ) -> list[MtpChainState]:
        """Run every stage up to the last row whose token is decided: one row less per stage."""
        device = traces[0].ids.device
        old = [state or self._empty_state(device) for state in states]
        ids, ends = [t.next_ids[0] for t in traces], [t.positions[0, -1:] for t in traces]
        totals = [len(state.rows[0]) + len(new) for state, new in zip(old, ids, strict=True)]
        layers = [list(rows) for rows in transpose(state.rows for state in old)]
        newest = transpose(state.newest for state in old)
        inputs: Rows = tuple(trace.last[0].to(self.dtype) for trace in traces)
        for k, stage in enumerate(self.stages):
            counts = [max(0, n - k) - len(past) for n, past in zip(totals, layers[k], strict=True)]
            if not any(counts):
                break  # the texts are too short for this stage and those after it
            at = torch.cat([_positions(end - k, n) for end, n in zip(ends, counts, strict=True)])
            tokens = torch.cat([new[len(new) - n :] for new, n in zip(ids, counts, strict=True)])
            state = torch.cat([rows[:n] for rows, n in zip(inputs, counts, strict=True)])
            residual, x = self._embed(stage, tokens, state)
            if k and stage is self.stages[-1]:  # only its keys and values are needed
                key, value = stage.block.self_attn.key_value(x, at)
                layers[k] = append_rows(layers[k], key, value, counts)
                break
            masks = [causal_mask(count, device) for count in counts]
            out, layers[k] = stage.block.decode(residual, x, at, layers[k], masks, counts)
            new = out.split_with_sizes(counts)
            outputs = [torch.cat(pair) for pair in zip(newest[k], new, strict=True)]
            newest[k] = tuple(rows[-1:] for rows in outputs)
            inputs = tuple(stage.next_state(rows) for rows in outputs)
        no_path, no_branch = old[0].path[:1, :0], old[0].branch[:1, :0]
        prompts = zip(transpose(layers), transpose(newest), ends, strict=True)
        return [MtpChainState(rows, n, end, no_path, no_branch) for rows, n, end in prompts]

    def _empty_state(self, device: torch.device) -> MtpChainState:
        attn, count = self.stages[0].block.self_attn, len(self.stages)
        hidden = self.stages[0].eh_proj.out_features
        heads = attn.k_proj.out_features // attn.head_dim
        row = torch.zeros(0, heads, attn.head_dim, dtype=self.dtype, device=device)
        branch = torch.zeros(1, 0, hidden, dtype=self.dtype, device=device)
        path = torch.zeros(1, 0, dtype=torch.long, device=device)
        rows, position = LayerRows.empty_like(row, row), path.new_full((1,), -1)
        return MtpChainState((rows,) * count, (branch[0],) * count, position, path, branch)

    def step_batch(
        self, states: Sequence[MtpChainState], depth: int, ids: LevelIds, parents: LevelIds
    ) -> tuple[Float[Tensor, "B N Vd"], list[MtpChainState]]:
        """Run stage `depth` at the rows whose input token is a draft token.

        Their states are the stored output of the stage before and those of the previous step.
        """
        if depth == 1:
            newest = torch.stack([state.newest[0] for state in states])
            normed = self.stages[0].norm(newest)
            return target_head_logits(self.target, self.vocab, normed), list(states)
        before, stage, nodes = self.stages[depth - 2], self.stages[depth - 1], ids.shape[1]
        above = gather_parents([state.path for state in states], parents)
        paths = torch.cat([above, ids[..., None]], dim=2)
        inputs = [
            torch.cat([s.newest[depth - 2].expand(nodes, -1, -1), s.branch[parent]], dim=1)
            for s, parent in zip(states, parents, strict=True)
        ]
        lengths = [rows.shape[1] for rows in inputs]  # a short text has no stored output
        counts = [nodes * n for n in lengths]
        at = [_positions(s.position, n).repeat(nodes) for s, n in zip(states, lengths, strict=True)]
        tokens = torch.cat([p[:, -n:].flatten() for p, n in zip(paths, lengths, strict=True)])
        fed = before.next_state(torch.cat([rows.flatten(0, 1) for rows in inputs]))
        residual, x = self._embed(stage, tokens, fed)
        past = [state.rows[depth - 1] for state in states]
        masks = {n: _node_masks(nodes, n, ids.device) for n in set(lengths)}
        out, _ = stage.block.decode(
            residual, x, torch.cat(at), past, [masks[n] for n in lengths], counts, drafted=True
        )
        branches = [rows.unflatten(0, (nodes, -1)) for rows in out.split_with_sizes(counts)]
        normed = stage.norm(torch.stack([branch[:, -1] for branch in branches]))
        logits = target_head_logits(self.target, self.vocab, normed)
        prompts = zip(states, paths, branches, strict=True)
        return logits, [replace(s, path=path, branch=branch) for s, path, branch in prompts]


def _positions(last: Int[Tensor, " 1"], count: int) -> Int[Tensor, " count"]:
    """Return `count` consecutive positions that end with `last`."""
    return torch.arange(1 - count, 1, device=last.device) + last


def _node_masks(nodes: int, length: int, device: torch.device) -> Bool[Tensor, "NR NR"] | None:
    """Return a causal mask for the rows of each node; nodes do not attend to each other."""
    if nodes == 1:
        return causal_mask(length, device)
    one = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    out: Tensor = torch.block_diag(*[one] * nodes)
    return out


class MtpLoop(SelfFeeding):
    """One module at every depth: it reads true states first, then its own."""

    def __init__(
        self, stage: MtpModule, target: TargetEnds, vocab: DraftVocab, depths: int, attention: str
    ) -> None:
        super().__init__()
        self.stage, self.target, self.vocab = stage, target, vocab
        self.depths, self.attention = depths, attention

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        return [self.stage.block]

    def initial_state(self, trace: Trace) -> Float[Tensor, "BT H"]:
        return trace.last.flatten(0, 1).to(self.stage.eh_proj.weight.dtype)

    def layer_inputs(
        self, embedding: Float[Tensor, "N H"], state: Float[Tensor, "N H"]
    ) -> tuple[Float[Tensor, "N H"], Float[Tensor, "N H"]]:
        return self.stage.layer_inputs(embedding, state)

    def next_state(self, hidden: Float[Tensor, "N H"]) -> Float[Tensor, "N H"]:
        return self.stage.next_state(hidden)

    def head(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows Vd"]:
        return target_head_logits(self.target, self.vocab, self.stage.norm(hidden))
