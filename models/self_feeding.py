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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from outrider.models.activation_checkpointing import again
from outrider.models.drafter import BatchDrafter, Guess, Lender, Trace
from outrider.models.layers import (
    Asking,
    Block,
    appended,
    asking,
    branch_attention,
    dense_attention,
    each_attention,
)

Rows = tuple[Float[Tensor, "_ *row"], ...]  # of each prompt, or of each layer of one


@dataclass(frozen=True)
class Memory:
    """What the decoder carries: lasting keys of true rows, and the branch grown in this round."""

    keys: tuple[Float[Tensor, "L A C"], ...]  # of each layer
    values: tuple[Float[Tensor, "L A C"], ...]
    hidden: Float[Tensor, "N D"]  # the last layer's output at the newest rows
    position: Int[Tensor, " 1"]  # rotary position of the newest true row
    seen: Bool[Tensor, "N M"]  # which nodes of the branch each newest row descends from


class SelfFeeding(BatchDrafter):
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
        hidden, keys, values = again(self.recompute, self._first, trace, plan)
        own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.blocks]
        yield Guess(1, spread(hidden, plan, wanted))
        positions = trace.positions.flatten()[plan.rows]
        for depth in range(2, self.depths + 1):
            ids, at = trace.ahead(depth).flatten()[plan.rows], positions + depth - 1
            before = [tuple(mine) for mine in own]
            hidden, made = again(
                self.recompute, self._deeper, hidden, ids, at, keys, values, before, plan
            )
            for mine, pair in zip(own, made, strict=True):
                mine.append(pair)
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

    def _deeper(
        self,
        hidden: Float[Tensor, "N D"],
        ids: Int[Tensor, " N"],
        at: Int[Tensor, " N"],
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        own: Sequence[Sequence[tuple[Tensor, Tensor]]],
        plan: Asking,
    ) -> tuple[Float[Tensor, "N D"], list[tuple[Tensor, Tensor]]]:
        """The next depth: outputs of the asking rows, and every layer's keys and values of them.

        Args:
            own: of each layer, the keys and values of the depths from 2 on.
        """
        made = list[tuple[Tensor, Tensor]]()
        residual, read = self._input(ids, self.feed(hidden))
        for i, block in enumerate(self.blocks):
            read = read if i == 0 else block.input_layernorm(residual)
            made.append(block.self_attn.key_value(read, at))
            query = block.self_attn.query(read, at)
            attended = self._attend(query, keys[i], values[i], [*own[i], made[i]], plan)
            residual = block.finish(residual, attended)
        return residual, made

    def _attend(
        self, q: Tensor, key: Tensor, value: Tensor, own: list[tuple[Tensor, Tensor]], plan: Asking
    ) -> Float[Tensor, "N AG C"]:
        attend = branch_attention if self.attention == "fast" else dense_attention
        return attend(q, key, value, [k for k, _ in own], [v for _, v in own], plan)

    def _input(self, ids: Int[Tensor, " N"], state: Float[Tensor, "N D"]) -> tuple[Tensor, Tensor]:
        return self.join(self.target.embed(ids).to(state.dtype), state)

    def kept(self, depths: int) -> float:
        hidden = self.target.shape().hidden
        return depths * sum(block.kept for block in self.blocks) + (1 + 2 * len(self.taps)) * hidden

    # ---- decoding ----

    def absorb_all(self, states: Sequence[Memory | None], traces: Sequence[Trace]) -> list[Memory]:
        rows, counts = beside(traces), [trace.ids.shape[1] for trace in traces]
        residual, read = self._input(rows.next_ids[0], self.start(rows))
        at, keys, values = rows.positions[0], list[Rows](), list[Rows]()
        newest = _newest(counts, at.device)
        for i, block in enumerate(self.blocks):
            read = read if i == 0 else block.input_layernorm(residual)
            query, key, value = block.self_attn.query_key_value(read, at)
            keys.append(appended([s.keys[i] if s else key[:0] for s in states], key, counts))
            values.append(appended([s.values[i] if s else key[:0] for s in states], value, counts))
            if block is self.blocks[-1]:  # where only the newest rows are of use
                residual, query, at = residual[newest], query[newest], at[newest]
                counts = [1] * len(counts)
            masks = [causal(count, at.device) for count in counts]
            attended = each_attention(query, keys[i], values[i], masks, counts)
            residual = block.finish(residual, attended)
        nobody = torch.zeros(1, 0, dtype=torch.bool, device=at.device)
        lasting = by_prompt(keys), by_prompt(values)
        prompts = zip(*lasting, residual.split(1), at.split(1), strict=True)
        return [Memory(*prompt, nobody) for prompt in prompts]

    def step_all(
        self,
        states: Sequence[Memory],
        depth: int,
        ids: Int[Tensor, "B N"],
        parents: Int[Tensor, "B N"],
    ) -> tuple[Float[Tensor, "B N Vd"], list[Memory]]:
        if depth == 1:
            return self.head(torch.stack([state.hidden for state in states])), list(states)
        hidden = of_parents([state.hidden for state in states], parents).flatten(0, 1)
        residual, read = self._input(ids.flatten(), self.feed(hidden))
        places = [state.position for state in states]
        at = (torch.stack(places) + (depth - 1)).expand_as(ids).flatten()
        seen = descent(of_parents([state.seen for state in states], parents))
        hides = seen.shape[2] >= depth  # a chain hides nothing
        masks = [mask if hides else None for mask in seen.unbind()]
        counts, keys, values = [ids.shape[1]] * len(ids), list[Rows](), list[Rows]()
        for i, block in enumerate(self.blocks):
            read = read if i == 0 else block.input_layernorm(residual)
            query, key, value = block.self_attn.query_key_value(read, at)
            keys.append(appended([state.keys[i] for state in states], key, counts))
            values.append(appended([state.values[i] for state in states], value, counts))
            attended = each_attention(query, keys[i], values[i], masks, counts)
            residual = block.finish(residual, attended)
        hidden = residual.unflatten(0, ids.shape)
        rows = by_prompt(keys), by_prompt(values)
        prompts = zip(*rows, hidden.unbind(), places, seen.unbind(), strict=True)
        return self.head(hidden), [Memory(*prompt) for prompt in prompts]


def by_prompt(rows: Iterable[Rows]) -> list[Rows]:
    """Rows of each layer, for every prompt, to rows of each prompt, for every layer; or back."""
    return list(zip(*rows, strict=True))


def of_parents(
    rows: Sequence[Shaped[Tensor, "M X"]], parents: Int[Tensor, "B N"]
) -> Shaped[Tensor, "B N X"]:
    """What every node's parent has, of every prompt's rows of the level above."""
    above = torch.stack(list(rows))
    if above.shape[1] == 1:
        return above.expand(-1, parents.shape[1], -1)
    return above.take_along_dim(parents[..., None], dim=1)


def descent(seen: Bool[Tensor, "B N M"]) -> Bool[Tensor, "B N MN"]:
    """What a level sees of the branch: what its parents saw, and every node itself."""
    count = seen.shape[1]
    if count == 1:
        return F.pad(seen, (0, 1), value=True)
    myself = torch.eye(count, dtype=torch.bool, device=seen.device)
    return torch.cat([seen, myself.expand(len(seen), -1, -1)], dim=2)


def beside(traces: Sequence[Trace]) -> Trace:
    """Rows of several prompts (B = 1 each), one prompt behind the other."""
    if len(traces) == 1:
        return traces[0]
    names = [field.name for field in fields(Trace) if getattr(traces[0], field.name) is not None]
    joined: dict[str, Any] = {n: torch.cat([getattr(t, n) for t in traces], dim=1) for n in names}
    return Trace(**joined)


def _newest(counts: list[int], device: torch.device) -> slice | Int[Tensor, " B"]:
    """Where the last row of every prompt lies."""
    if len(counts) == 1:
        return slice(-1, None)
    return torch.tensor(counts, device=device).cumsum(0) - 1


def causal(count: int, device: torch.device) -> Bool[Tensor, "count count"] | None:
    """Which new rows see which; None: a single one hides nothing."""
    if count == 1:
        return None
    return torch.ones(count, count, dtype=torch.bool, device=device).tril()


def spread(
    state: Float[Tensor, "N D"], plan: Asking, wanted: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T D"]:
    """Back to [B, T, D]; rows that no depth supervises stay zero."""
    out = state.new_zeros(wanted.numel(), state.shape[-1])
    return out.index_copy(0, plan.rows, state).view(*wanted.shape, -1)
