"""MTP modules at work: a chain of several, or a loop of one on its own output.

A stage is one module: the embedding of a token and a state, each normed, are joined to one vector,
a decoder layer follows, and a norm stands in front of the target's head. In a chain, stage k at
row t reads token x_{t+k} and stage k-1's output at the same row (stage 1: the target's last state),
and attends to its own keys of rows <= t. Which tokens are in what it sees, for row t = 2:

    stage 1    x1 x2 x3           rows 0..2 read the token after their own
    stage 2    x1 x2 x3 x4        rows 0..2 read the token after that, and stage 1's outputs

So with T true rows and x_T the newest token, stage k can run for good at T-k+1 rows only; at the
k-1 behind them it reads tokens that are only drafted. The lasting memory holds the former. Of
stage k-1 it keeps one output more than stage k has read, and the drafted tail is computed in the
round's own states, k-1 rows per node at depth k. So nothing is rolled back when drafts are
rejected, where the reference implementation crops all caches and computes those rows again.

The loop (FastMTP) is `models/self_feeding.py` with one stage; its deeper guesses stand at later rotary
positions, and only its own branch sees them.

Legend: B rows of a batch, T tokens, N nodes of a tree level, R rows that a node computes, P drafted
tokens of its path, A key heads, C head size, H hidden size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from outrider.models.activation_checkpointing import again
from outrider.models.drafter import Guess, Lender, Shape, Trace, borrowed_head
from outrider.models.layers import (
    Asking,
    Block,
    Norm,
    appended,
    asking,
    branch_attention,
    dense_attention,
    each_attention,
)
from outrider.models.self_feeding import Rows, SelfFeeding, by_prompt, causal, of_parents, spread
from outrider.models.vocab import DraftVocab


class Stage(nn.Module):
    """One module; its names are those of DeepSeek's checkpoints, the layer's under `block`."""

    def __init__(self, shape: Shape, order: str, feed: str, qk_norm: bool) -> None:
        """
        Args:
            order: "embedding_first" or "state_first", the halves of the joint's input.
            feed: "raw" or "normed", the state that the next depth is given.
        """
        super().__init__()
        hidden, eps = shape.hidden, shape.eps
        self.order, self.fed = order, feed
        self.enorm, self.hnorm = Norm(hidden, eps), Norm(hidden, eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.block = Block(shape, qk_norm=qk_norm)
        self.norm = Norm(hidden, eps)

    def pair(
        self, embedding: Float[Tensor, "N H"], state: Float[Tensor, "N H"]
    ) -> Float[Tensor, "N HH"]:
        halves = [self.enorm(embedding), self.hnorm(state)]
        return torch.cat(halves if self.order == "embedding_first" else halves[::-1], dim=-1)

    def join(
        self, embedding: Float[Tensor, "N H"], state: Float[Tensor, "N H"]
    ) -> tuple[Float[Tensor, "N H"], Float[Tensor, "N H"]]:
        """The residual input of the layer, and what its attention reads."""
        residual = self.eh_proj(self.pair(embedding, state))
        return residual, self.block.input_layernorm(residual)

    def feed(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]:
        """The state of the next depth."""
        return hidden if self.fed == "raw" else self.norm(hidden)

    def remember(
        self,
        read: Float[Tensor, "R H"],
        at: Int[Tensor, " R"],
        keys: Sequence[Float[Tensor, "_ A C"]],
        values: Sequence[Float[Tensor, "_ A C"]],
        counts: Sequence[int],
    ) -> tuple[Rows, Rows]:
        """Decoding: the keys and values of these rows behind those there are, for every prompt."""
        key, value = self.block.self_attn.key_value(read, at)
        return appended(keys, key, counts), appended(values, value, counts)

    def run(
        self,
        residual: Float[Tensor, "R H"],
        read: Float[Tensor, "R H"],
        at: Int[Tensor, " R"],
        keys: Sequence[Float[Tensor, "_ A C"]],
        values: Sequence[Float[Tensor, "_ A C"]],
        seen: Sequence[Bool[Tensor, "_ _"] | None],
        counts: Sequence[int],
    ) -> tuple[Float[Tensor, "R H"], Rows, Rows]:
        """Decoding: the layer's output, before the norm, and what `remember` says."""
        query, key, value = self.block.self_attn.query_key_value(read, at)
        grown = appended(keys, key, counts), appended(values, value, counts)
        return self.block.finish(residual, each_attention(query, *grown, seen, counts)), *grown


@dataclass(frozen=True)
class Memory:
    """What the decoder of a chain carries: per stage its true rows; per node its drafted ones."""

    keys: tuple[Float[Tensor, "_ A C"], ...]  # of each stage; stage k has k-1 rows fewer
    values: tuple[Float[Tensor, "_ A C"], ...]
    newest: tuple[Float[Tensor, "_ H"], ...]  # output at the last of them; none in short texts
    position: Int[Tensor, " 1"]  # rotary position of the newest true row
    path: Int[Tensor, "N P"]  # drafted tokens from the root to each node
    branch: Float[Tensor, "N R H"]  # outputs of the stage run last, at the rows drafts reach


class Chain:
    """Stages one behind the other, one for every depth."""

    recompute = False  # of the drafter, while it unrolls

    def __init__(
        self, stages: Sequence[Stage], target: Lender, vocab: DraftVocab, attention: str
    ) -> None:
        self.stages, self.target, self.vocab = stages, target, vocab
        self.attend = branch_attention if attention == "fast" else dense_attention

    @property
    def dtype(self) -> torch.dtype:
        return self.stages[0].eh_proj.weight.dtype

    def unroll(self, trace: Trace) -> Iterator[Guess]:
        """All rows ask in a stage that feeds another one; in the last, those that count."""
        heads = self.stages[0].block.self_attn.heads
        everyone = torch.ones_like(trace.answer)
        state, at = trace.last.flatten(0, 1).to(self.dtype), trace.positions.flatten()
        for depth, stage in enumerate(self.stages, start=1):
            wanted = trace.counts(depth) if depth == len(self.stages) else everyone
            plan = asking(wanted, trace.document, heads)
            ids = trace.ahead(depth).flatten()
            state = again(self.recompute, self._stage, stage, ids, state, at, plan)
            yield Guess(depth, spread(stage.norm(state), plan, wanted))
            state = stage.feed(state)

    def _stage(
        self,
        stage: Stage,
        ids: Int[Tensor, " BT"],
        state: Float[Tensor, "BT H"],
        at: Int[Tensor, " BT"],
        plan: Asking,
    ) -> Float[Tensor, "N H"]:
        """The output of the asking rows, before the norm."""
        residual, read = self._join(stage, ids, state)
        key, value = stage.block.self_attn.key_value(read, at)
        query = stage.block.self_attn.query(read[plan.rows], at[plan.rows])
        attended = self.attend(query, key, value, [], [], plan)
        return stage.block.finish(residual[plan.rows], attended)

    def _join(
        self, stage: Stage, ids: Int[Tensor, " N"], state: Float[Tensor, "N H"]
    ) -> tuple[Float[Tensor, "N H"], Float[Tensor, "N H"]]:
        return stage.join(self.target.embed(ids).to(state.dtype), state)

    def _logits(self, stage: Stage, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows Vd"]:
        return borrowed_head(self.target, self.vocab, stage.norm(hidden))

    # ---- decoding ----

    def absorb_all(
        self, memories: Sequence[Memory | None], traces: Sequence[Trace]
    ) -> list[Memory]:
        """Every stage goes on to the last row whose token is decided: one row less per stage."""
        device = traces[0].ids.device
        held = [memory or self._blank(device) for memory in memories]
        ids, places = [t.next_ids[0] for t in traces], [t.positions[0, -1:] for t in traces]
        totals = [len(m.keys[0]) + len(new) for m, new in zip(held, ids, strict=True)]
        keys, values = by_prompt(m.keys for m in held), by_prompt(m.values for m in held)
        newest = by_prompt(m.newest for m in held)
        states: Rows = tuple(trace.last[0].to(self.dtype) for trace in traces)
        for k, stage in enumerate(self.stages):
            due = [max(0, n - k) - len(known) for n, known in zip(totals, keys[k], strict=True)]
            if not any(due):
                break  # the texts are too short for this stage and those behind it
            at = torch.cat([_up_to(place - k, n) for place, n in zip(places, due, strict=True)])
            tokens = torch.cat([new[len(new) - n :] for new, n in zip(ids, due, strict=True)])
            given = torch.cat([state[:n] for state, n in zip(states, due, strict=True)])
            residual, read = self._join(stage, tokens, given)
            if k and stage is self.stages[-1]:  # no stage reads its outputs, and no guess is made
                keys[k], values[k] = stage.remember(read, at, keys[k], values[k], due)
                break
            masks = [causal(n, device) for n in due]
            out, keys[k], values[k] = stage.run(residual, read, at, keys[k], values[k], masks, due)
            states = appended(newest[k], out, due)
            newest[k] = tuple(state[-1:] for state in states)
            states = tuple(stage.feed(state) for state in states)
        lasting = zip(by_prompt(keys), by_prompt(values), by_prompt(newest), places, strict=True)
        blank = held[0].path[:1, :0], held[0].branch[:1, :0]
        return [Memory(*rows, *blank) for rows in lasting]

    def _blank(self, device: torch.device) -> Memory:
        attn = self.stages[0].block.self_attn
        hidden = self.stages[0].eh_proj.out_features
        heads = attn.k_proj.out_features // attn.size
        row = torch.zeros(0, heads, attn.size, dtype=self.dtype, device=device)
        state = torch.zeros(1, 0, hidden, dtype=self.dtype, device=device)
        rows, path = (row,) * len(self.stages), torch.zeros(1, 0, dtype=torch.long, device=device)
        return Memory(
            rows, rows, (state[0],) * len(self.stages), path.new_full((1,), -1), path, state
        )

    def step_all(
        self,
        memories: Sequence[Memory],
        depth: int,
        ids: Int[Tensor, "B N"],
        parents: Int[Tensor, "B N"],
    ) -> tuple[Float[Tensor, "B N Vd"], list[Memory]]:
        """Stage `depth` at the rows that drafted tokens have brought within its reach.

        Its states there are the output that was waiting and, of the node's own path, those of the
        step before; its tokens are the path's last ones.
        """
        if depth == 1:
            newest = torch.stack([memory.newest[0] for memory in memories])
            return self._logits(self.stages[0], newest), list(memories)
        before, stage, nodes = self.stages[depth - 2], self.stages[depth - 1], ids.shape[1]
        paths = torch.cat([of_parents([m.path for m in memories], parents), ids[..., None]], dim=2)
        states = [
            torch.cat([m.newest[depth - 2].expand(nodes, -1, -1), m.branch[above]], dim=1)
            for m, above in zip(memories, parents, strict=True)
        ]
        lengths = [state.shape[1] for state in states]  # a short text has no output waiting
        counts = [nodes * n for n in lengths]
        at = [_up_to(m.position, n).repeat(nodes) for m, n in zip(memories, lengths, strict=True)]
        tokens = [path[:, -n:].flatten() for path, n in zip(paths, lengths, strict=True)]
        fed = before.feed(torch.cat([state.flatten(0, 1) for state in states]))
        residual, read = self._join(stage, torch.cat(tokens), fed)
        rows = [m.keys[depth - 1] for m in memories], [m.values[depth - 1] for m in memories]
        masks = {n: _paths(nodes, n, ids.device) for n in set(lengths)}
        seen = [masks[n] for n in lengths]
        out, *_ = stage.run(residual, read, torch.cat(at), *rows, seen, counts)
        branches = [x.unflatten(0, (nodes, -1)) for x in out.split_with_sizes(counts)]
        logits = self._logits(stage, torch.stack([branch[:, -1] for branch in branches]))
        grown = zip(memories, paths, branches, strict=True)
        return logits, [replace(m, path=path, branch=branch) for m, path, branch in grown]


def _up_to(place: Int[Tensor, " 1"], count: int) -> Int[Tensor, " count"]:
    """The last `count` positions, `place` the last of them."""
    return torch.arange(1 - count, 1, device=place.device) + place


def _paths(nodes: int, length: int, device: torch.device) -> Bool[Tensor, "NR NR"] | None:
    """Every node has rows of its own, of which each sees those in front of it."""
    if nodes == 1:
        return causal(length, device)
    one = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    out: Tensor = torch.block_diag(*[one] * nodes)
    return out


class Loop(SelfFeeding):
    """One stage at every depth: true states first, then its own."""

    def __init__(
        self, stage: Stage, target: Lender, vocab: DraftVocab, depths: int, attention: str
    ) -> None:
        super().__init__()
        self.stage, self.target, self.vocab = stage, target, vocab
        self.depths, self.attention = depths, attention

    @property
    def blocks(self) -> list[Block]:
        return [self.stage.block]

    def start(self, trace: Trace) -> Float[Tensor, "BT H"]:
        return trace.last.flatten(0, 1).to(self.stage.eh_proj.weight.dtype)

    def join(
        self, embedding: Float[Tensor, "N H"], state: Float[Tensor, "N H"]
    ) -> tuple[Float[Tensor, "N H"], Float[Tensor, "N H"]]:
        return self.stage.join(embedding, state)

    def feed(self, hidden: Float[Tensor, "N H"]) -> Float[Tensor, "N H"]:
        return self.stage.feed(hidden)

    def head(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows Vd"]:
        return borrowed_head(self.target, self.vocab, self.stage.norm(hidden))
