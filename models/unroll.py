"""Drafters that feed on their own states: one unroll and one decoder for the EAGLE family.

At depth 1 a row starts from what the target said there. At depth d it goes on from its own output
of depth d - 1 and the next token of the text, so that training sees what decoding will see: true
target states up to row t, then d - 1 states of the drafter's own making.

    depth   token embedded   state                         rotary position   predicts
    1       x_{t+1}          start(row t)                  t                 x_{t+2}
    2       x_{t+2}          feed(output of depth 1)       t + 1             x_{t+3}

Each layer keeps the keys of depth 1 for every row, and of deeper ones for the own branch alone; a
stack of layers does so layer by layer (`layers.py` draws the mask).

FastMTP's loop of one module (`chain.py`) is of this kind too.

Source: training-time test (EAGLE-3, arXiv:2503.01840). Cut between the depths (`feed` detaches) it
is the context alignment of HASS (arXiv:2408.15766), in a frame that moves with the row.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.models.base import Drafter, Guess, Lender, Trace
from outrider.models.layers import (
    Asking,
    Block,
    asking,
    branch_attention,
    dense_attention,
    grouped_attention,
)


@dataclass(frozen=True)
class Memory:
    """What the decoder carries: lasting keys of true rows, and the branch grown in this round."""

    keys: tuple[Float[Tensor, "L A C"], ...]  # of each layer
    values: tuple[Float[Tensor, "L A C"], ...]
    hidden: Float[Tensor, "N D"]  # the last layer's output at the newest rows
    position: int  # rotary position of the newest true row
    seen: Bool[Tensor, "N M"]  # which nodes of the branch each newest row descends from


class SelfFeeding(Drafter):
    """A subclass says how a row starts, what its layers read, and what is fed back."""

    target: Lender
    depths: int  # of the unroll
    attention: str = "fast"  # or "reference", the dense mask

    @property
    def blocks(self) -> list[Block]:
        """The decoder layers, first to last."""
        raise NotImplementedError

    def start(self, trace: Trace) -> Float[Tensor, "BT D"]:
        """The state of every row at depth 1, from what the target said there."""
        raise NotImplementedError

    def join(
        self, embedding: Float[Tensor, "N H"], state: Float[Tensor, "N D"]
    ) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N X"]]:
        """The residual input of the first layer, and what its attention reads."""
        raise NotImplementedError

    def feed(self, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """The state of the next depth, from the last layer's output at this one."""
        return hidden

    # ---- training ----

    def unroll(self, trace: Trace) -> Iterator[Guess]:
        wanted = torch.stack([trace.counts(d) for d in range(1, self.depths + 1)]).any(0)
        plan = asking(wanted, trace.document, self.blocks[0].self_attn.heads)
        hidden, keys, values = self._first(trace, plan)
        own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.blocks]
        yield Guess(1, spread(hidden, plan, wanted))
        positions = trace.positions.flatten()[plan.rows]
        for depth in range(2, self.depths + 1):
            ids, at = trace.ahead(depth).flatten()[plan.rows], positions + depth - 1
            residual, read = self._input(ids, self.feed(hidden))
            for i, block in enumerate(self.blocks):
                read = read if i == 0 else block.input_layernorm(residual)
                own[i].append(block.self_attn.key_value(read, at))
                query = block.self_attn.query(read, at)
                attended = self._attend(query, keys[i], values[i], own[i], plan)
                residual = block.finish(residual, attended)
            hidden = residual
            yield Guess(depth, spread(hidden, plan, wanted))

    def _first(self, trace: Trace, plan: Asking) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Depth 1: outputs of the asking rows, and every layer's keys and values of all rows."""
        positions, keys, values = trace.positions.flatten(), list[Tensor](), list[Tensor]()
        residual, read = self._input(trace.ahead(1).flatten(), self.start(trace))
        for i, block in enumerate(self.blocks):
            read = read if i == 0 else block.input_layernorm(residual)
            key, value = block.self_attn.key_value(read, positions)
            keys.append(key)
            values.append(value)
            if block is self.blocks[-1]:  # all that is left to find is asked by few rows
                asks = plan
                residual, read, at = residual[plan.rows], read[plan.rows], positions[plan.rows]
            else:
                everyone = torch.ones_like(trace.answer)
                asks, at = asking(everyone, trace.document, block.self_attn.heads), positions
            attended = self._attend(block.self_attn.query(read, at), key, value, [], asks)
            residual = block.finish(residual, attended)
        return residual, keys, values

    def _attend(
        self, q: Tensor, key: Tensor, value: Tensor, own: list[tuple[Tensor, Tensor]], plan: Asking
    ) -> Float[Tensor, "N AG C"]:
        attend = branch_attention if self.attention == "fast" else dense_attention
        return attend(q, key, value, [k for k, _ in own], [v for _, v in own], plan)

    def _input(self, ids: Int[Tensor, " N"], state: Float[Tensor, "N D"]) -> tuple[Tensor, Tensor]:
        return self.join(self.target.embed(ids).to(state.dtype), state)

    # ---- decoding ----

    def absorb(self, state: Memory | None, trace: Trace) -> Memory:
        residual, read = self._input(trace.next_ids[0], self.start(trace))
        positions, keys, values = trace.positions[0], list[Tensor](), list[Tensor]()
        count = len(positions)
        causal = torch.ones(count, count, dtype=torch.bool, device=positions.device).tril()
        for i, block in enumerate(self.blocks):
            read = read if i == 0 else block.input_layernorm(residual)
            key, value = block.self_attn.key_value(read, positions)
            if state is not None:
                key, value = torch.cat([state.keys[i], key]), torch.cat([state.values[i], value])
            keys.append(key)
            values.append(value)
            last = block is self.blocks[-1]  # where only the newest row is of use
            rows = slice(-1, None) if last else slice(None)
            query = block.self_attn.query(read[rows], positions[rows])
            attended = grouped_attention(query, key, value, None if last else causal)
            residual = block.finish(residual[rows], attended)
        nobody = torch.zeros(1, 0, dtype=torch.bool, device=residual.device)
        return Memory(tuple(keys), tuple(values), residual, int(positions[-1]), nobody)

    def step(
        self, state: Memory, depth: int, ids: Int[Tensor, " N"], parents: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N Vd"], Memory]:
        if depth == 1:
            return self.head(state.hidden), state
        residual, read = self._input(ids, self.feed(state.hidden[parents]))
        at = torch.full_like(ids, state.position + depth - 1)
        myself = torch.eye(len(ids), dtype=torch.bool, device=ids.device)
        seen = torch.cat([state.seen[parents], myself], dim=1)
        keys, values = list[Tensor](), list[Tensor]()
        for i, block in enumerate(self.blocks):
            read = read if i == 0 else block.input_layernorm(residual)
            key, value = block.self_attn.key_value(read, at)
            keys.append(torch.cat([state.keys[i], key]))
            values.append(torch.cat([state.values[i], value]))
            query = block.self_attn.query(read, at)
            residual = block.finish(residual, grouped_attention(query, keys[i], values[i], seen))
        memory = replace(state, keys=tuple(keys), values=tuple(values), hidden=residual, seen=seen)
        return self.head(residual), memory


def spread(
    state: Float[Tensor, "N D"], plan: Asking, wanted: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T D"]:
    """Back to [B, T, D]; rows that no depth supervises stay zero."""
    out = state.new_zeros(wanted.numel(), state.shape[-1])
    return out.index_copy(0, plan.rows, state).view(*wanted.shape, -1)
