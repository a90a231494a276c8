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

The loop (FastMTP) is `models/unroll.py` with one stage; its deeper guesses stand at later rotary
positions, and only its own branch sees them.

Legend: B rows of a batch, T tokens, N nodes of a tree level, R rows that a node computes, P drafted
tokens of its path, A key heads, C head size, H hidden size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from outrider.models.base import Guess, Lender, Shape, Trace, borrowed_head
from outrider.models.layers import (
    Block,
    Norm,
    asking,
    branch_attention,
    dense_attention,
    grouped_attention,
)
from outrider.models.unroll import SelfFeeding, spread
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
        read: Float[Tensor, "N H"],
        at: Int[Tensor, " N"],
        keys: Float[Tensor, "L A C"],
        values: Float[Tensor, "L A C"],
    ) -> tuple[Float[Tensor, "LN A C"], Float[Tensor, "LN A C"]]:
        """Decoding: the keys and values of these rows behind those there are."""
        key, value = self.block.self_attn.key_value(read, at)
        return torch.cat([keys, key]), torch.cat([values, value])

    def run(
        self,
        residual: Float[Tensor, "N H"],
        read: Float[Tensor, "N H"],
        at: Int[Tensor, " N"],
        keys: Float[Tensor, "L A C"],
        values: Float[Tensor, "L A C"],
        seen: Bool[Tensor, "N M"],
    ) -> Float[Tensor, "N H"]:
        """Decoding: the layer's output, before the norm."""
        query = self.block.self_attn.query(read, at)
        return self.block.finish(residual, grouped_attention(query, keys, values, seen))


@dataclass(frozen=True)
class Memory:
    """What the decoder of a chain carries: per stage its true rows; per node its drafted ones."""

    keys: tuple[Float[Tensor, "_ A C"], ...]  # of each stage; stage k has k-1 rows fewer
    values: tuple[Float[Tensor, "_ A C"], ...]
    newest: tuple[Float[Tensor, "_ H"], ...]  # output at the last of them; none in short texts
    position: int  # rotary position of the newest true row
    path: Int[Tensor, "N P"]  # drafted tokens from the root to each node
    branch: Float[Tensor, "N R H"]  # outputs of the stage run last, at the rows drafts reach


class Chain:
    """Stages one behind the other, one for every depth."""

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
            residual, read = self._join(stage, trace.ahead(depth).flatten(), state)
            key, value = stage.block.self_attn.key_value(read, at)
            query = stage.block.self_attn.query(read[plan.rows], at[plan.rows])
            attended = self.attend(query, key, value, [], [], plan)
            state = stage.block.finish(residual[plan.rows], attended)
            yield Guess(depth, spread(stage.norm(state), plan, wanted))
            state = stage.feed(state)

    def _join(
        self, stage: Stage, ids: Int[Tensor, " N"], state: Float[Tensor, "N H"]
    ) -> tuple[Float[Tensor, "N H"], Float[Tensor, "N H"]]:
        return stage.join(self.target.embed(ids).to(state.dtype), state)

    def _logits(self, stage: Stage, hidden: Float[Tensor, "N H"]) -> Float[Tensor, "N Vd"]:
        return borrowed_head(self.target, self.vocab, stage.norm(hidden))

    # ---- decoding ----

    def absorb(self, memory: Memory | None, trace: Trace) -> Memory:
        """Every stage goes on to the last row whose token is decided: one row less per stage."""
        memory = memory or self._blank(trace.last.device)
        keys, values, newest = list(memory.keys), list(memory.values), list(memory.newest)
        ids, state = trace.next_ids[0], trace.last[0].to(self.dtype)
        total, position = len(keys[0]) + len(ids), int(trace.positions[0, -1])
        for k, stage in enumerate(self.stages):
            due = max(0, total - k) - len(keys[k])
            if not due:
                break  # the text is too short for this stage and those behind it
            at = torch.arange(1 - due, 1, device=ids.device) + position - k
            residual, read = self._join(stage, ids[len(ids) - due :], state[:due])
            keys[k], values[k] = stage.remember(read, at, keys[k], values[k])
            if k and stage is self.stages[-1]:
                break  # no stage reads its outputs, and no guess is made from them
            out = stage.run(residual, read, at, keys[k], values[k], _causal(due, ids.device))
            state = torch.cat([newest[k], out])
            newest[k], state = state[-1:], stage.feed(state)
        held = (tuple(keys), tuple(values), tuple(newest))
        return Memory(*held, position, memory.path[:1, :0], memory.branch[:1, :0])

    def _blank(self, device: torch.device) -> Memory:
        attn = self.stages[0].block.self_attn
        hidden = self.stages[0].eh_proj.out_features
        heads = attn.k_proj.out_features // attn.size
        row = torch.zeros(0, heads, attn.size, dtype=self.dtype, device=device)
        state = torch.zeros(1, 0, hidden, dtype=self.dtype, device=device)
        rows, path = (row,) * len(self.stages), torch.zeros(1, 0, dtype=torch.long, device=device)
        return Memory(rows, rows, (state[0],) * len(self.stages), -1, path, state)

    def step(
        self, memory: Memory, depth: int, ids: Int[Tensor, " N"], parents: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N Vd"], Memory]:
        """Stage `depth` at the rows that drafted tokens have brought within its reach.

        Its states there are the output that was waiting and, of the node's own path, those of the
        step before; its tokens are the path's last ones.
        """
        if depth == 1:
            return self._logits(self.stages[0], memory.newest[0]), memory
        before, stage = self.stages[depth - 2], self.stages[depth - 1]
        path = torch.cat([memory.path[parents], ids[:, None]], dim=1)
        waiting = memory.newest[depth - 2].expand(len(ids), -1, -1)
        state = before.feed(torch.cat([waiting, memory.branch[parents]], dim=1))
        count = state.shape[1]
        at = memory.position + torch.arange(1 - count, 1, device=ids.device).repeat(len(ids))
        residual, read = self._join(stage, path[:, -count:].flatten(), state.flatten(0, 1))
        keys, values = stage.remember(read, at, memory.keys[depth - 1], memory.values[depth - 1])
        seen = torch.block_diag(*[_causal(count, ids.device)] * len(ids))
        out = stage.run(residual, read, at, keys, values, seen).unflatten(0, (len(ids), count))
        return self._logits(stage, out[:, -1]), replace(memory, path=path, branch=out)


def _causal(count: int, device: torch.device) -> Bool[Tensor, "count count"]:
    return torch.ones(count, count, dtype=torch.bool, device=device).tril()


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
