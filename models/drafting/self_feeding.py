"""`SelfFeeding`, the base of drafters that read their own states: the EAGLE family and FastMTP.

Training has the inputs of decoding: at depth 1 a row starts from the target's state, at depth d it
continues from its own output of depth d - 1 and the next token of the text.

    depth   token embedded   state                               rotary position   predicts
    1       x_{t+1}          initial_state(row t)                t                 x_{t+2}
    2       x_{t+2}          next_state(output of depth 1)       t + 1             x_{t+3}

Each decoder layer keeps the keys of depth 1 of every row, and deeper keys of the row's own branch
only (`branch_attention.py` draws the mask).

Source: training-time test (EAGLE-3, arXiv:2503.01840). If `next_state` detaches, it is the context
alignment of HASS (arXiv:2408.15766), in a frame that moves with the row.

Legend: B rows of a batch, T tokens, N query rows or nodes of a tree level, L true rows of a prompt,
M nodes of a branch, A key heads, C head size, D layer width, H hidden size, X attention input.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from outrider.models.cache.attention_masks import causal_mask, extend_ancestor_mask
from outrider.models.cache.layer_rows import LayerRows
from outrider.models.drafting.branch_attention import ATTENTIONS, QueryPlan, plan_queries
from outrider.models.drafting.drafter import BatchDrafter, LevelIds
from outrider.models.drafting.layers import DecoderLayer
from outrider.models.interface import Guess, TargetEnds, Trace

Rows = tuple[Float[Tensor, "_ *row"], ...]  # one tensor per prompt, or per layer of one prompt
Pairs = list[tuple[Float[Tensor, "_ A C"], Float[Tensor, "_ A C"]]]  # keys, values of each layer
T = TypeVar("T")


def maybe_checkpoint(enabled: bool, function: Callable[..., T], *inputs: Any) -> T:
    """Return `function(*inputs)`; if enabled, save only its inputs and recompute it in backward.

    Source: Chen et al. 2016, arXiv:1604.06174; PyTorch's non-reentrant variant, which recomputes
    with the same random numbers.
    """
    if not (enabled and torch.is_grad_enabled()):
        return function(*inputs)
    out: T = checkpoint(function, *inputs, use_reentrant=False)
    return out


@dataclass(frozen=True)
class SelfFeedingState:
    """Decoding state: keys and values of true rows, then of the branch drafted in this round."""

    rows: tuple[LayerRows, ...]  # of each layer
    hidden: Float[Tensor, "N D"]  # the last layer's output at the newest rows
    position: Int[Tensor, " 1"]  # rotary, of the newest true row
    ancestors: Bool[Tensor, "N M"]  # the nodes of the branch that each newest row descends from


class SelfFeeding(BatchDrafter):
    """A drafter whose states feed the next depth.

    A subclass implements `decoder_layers`, `initial_state`, `layer_inputs` and `head`, and may
    override `next_state`.
    """

    target: TargetEnds
    depths: int  # of the unroll
    attention: str = "fast"  # or "reference", the dense mask
    window: int | None = None  # keys of depth 1 that a row attends to at most; None: all

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        raise NotImplementedError

    def initial_state(self, trace: Trace) -> Float[Tensor, "BT D"]:
        """Return the state of every row at depth 1."""
        raise NotImplementedError

    def layer_inputs(
        self, embedding: Float[Tensor, "N H"], state: Float[Tensor, "N D"]
    ) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N X"]]:
        """Return the residual input of the first layer and the input of its attention."""
        raise NotImplementedError

    def next_state(self, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """Return the state of the next depth from the last layer's output."""
        return hidden

    def unroll(self, trace: Trace) -> Iterator[Guess]:
        masks = [self.trained_mask(trace, depth) for depth in range(1, self.depths + 1)]
        plan = self._plan(torch.stack(masks).any(0), trace)
        hidden, first = maybe_checkpoint(
            self.gradient_checkpointing, self._unroll_first, trace, plan
        )
        yield Guess(1, plan.rows, hidden)
        positions, branch = trace.positions.flatten()[plan.rows], list[Pairs]()
        for depth in range(2, self.depths + 1):
            ids = trace.tokens_ahead(depth).flatten()[plan.rows]
            hidden, new = maybe_checkpoint(
                self.gradient_checkpointing, self._unroll_next,
                hidden, ids, positions + depth - 1, first, tuple(branch), plan,
            )  # fmt: skip
            branch.append(new)
            yield Guess(depth, plan.rows, hidden)

    def _plan(self, queries: Bool[Tensor, "B T"], trace: Trace) -> QueryPlan:
        heads = self.decoder_layers[0].self_attn.heads
        return plan_queries(queries, trace.document, heads, window=self.window)

    def _unroll_first(self, trace: Trace, plan: QueryPlan) -> tuple[Float[Tensor, "N D"], Pairs]:
        """Run depth 1: outputs of the query rows, and every layer's keys and values of all rows."""
        positions, pairs = trace.positions.flatten(), Pairs()
        residual, x = self._embed(trace.tokens_ahead(1).flatten(), self.initial_state(trace))
        for i, layer in enumerate(self.decoder_layers):
            x = x if i == 0 else layer.input_layernorm(residual)
            layer_plan = plan
            if layer is not self.decoder_layers[-1]:  # the next layer needs every row
                every_row = torch.ones_like(trace.answer)
                layer_plan = self._plan(every_row, trace)
            attend = ATTENTIONS[self.attention]
            residual, key, value = layer.unroll(residual, x, positions, layer_plan, attend)
            pairs.append((key, value))
        return residual, pairs

    def _unroll_next(
        self,
        hidden: Float[Tensor, "N D"],
        ids: Int[Tensor, " N"],
        positions: Int[Tensor, " N"],
        first: Pairs,
        branch: Sequence[Pairs],
        plan: QueryPlan,
    ) -> tuple[Float[Tensor, "N D"], Pairs]:
        """Run a deeper depth, with the keys and values of all earlier depths."""
        new, attend = Pairs(), ATTENTIONS[self.attention]
        residual, x = self._embed(ids, self.next_state(hidden))
        for i, layer in enumerate(self.decoder_layers):
            x = x if i == 0 else layer.input_layernorm(residual)
            new.append(layer.self_attn.key_value(x, positions))
            own_keys, own_values = zip(*(pairs[i] for pairs in (*branch, new)), strict=True)
            query = layer.self_attn.query(x, positions)
            attended = attend(query, *first[i], own_keys, own_values, plan)
            residual = layer.finish(residual, attended)
        return residual, new

    def _embed(self, ids: Int[Tensor, " N"], state: Float[Tensor, "N D"]) -> tuple[Tensor, Tensor]:
        return self.layer_inputs(self.target.embed(ids).to(state.dtype), state)

    def activation_count(self, depths: int) -> float:
        hidden = self.target.shape().hidden
        layers = sum(layer.activation_count for layer in self.decoder_layers)
        return depths * layers + (1 + 2 * len(self.taps)) * hidden

    def absorb_batch(
        self, states: Sequence[SelfFeedingState | None], traces: Sequence[Trace]
    ) -> list[SelfFeedingState]:
        rows, counts = concat_prompts(traces), [trace.ids.shape[1] for trace in traces]
        positions, only_newest = rows.positions[0], len(self.decoder_layers) == 1
        masks = [None if only_newest else causal_mask(n, positions.device) for n in counts]
        newest: slice | Int[Tensor, " B"] = slice(-1, None)
        if len(counts) > 1:
            newest = torch.tensor(counts, device=positions.device).cumsum(0) - 1
        hidden, layers = self._decode(
            rows.next_ids[0], self.initial_state(rows), positions, states, masks, counts,
            newest=newest,
        )  # fmt: skip
        no_ancestors = torch.zeros(1, 0, dtype=torch.bool, device=positions.device)
        prompts = zip(layers, hidden.split(1), positions[newest].split(1), strict=True)
        return [SelfFeedingState(*prompt, no_ancestors) for prompt in prompts]

    def step_batch(
        self, states: Sequence[SelfFeedingState], depth: int, ids: LevelIds, parents: LevelIds
    ) -> tuple[Float[Tensor, "B N Vd"], list[SelfFeedingState]]:
        if depth == 1:
            return self.head(torch.stack([state.hidden for state in states])), list(states)
        above = gather_parents([state.hidden for state in states], parents).flatten(0, 1)
        roots = [state.position for state in states]
        positions = (torch.stack(roots) + (depth - 1)).expand_as(ids).flatten()
        ancestors = gather_parents([state.ancestors for state in states], parents)
        ancestors = extend_ancestor_mask(ancestors)
        is_chain = ancestors.shape[2] < depth  # then no key is masked
        masks = [None if is_chain else mask for mask in ancestors.unbind()]
        hidden, layers = self._decode(
            ids.flatten(), self.next_state(above), positions, states, masks,
            [ids.shape[1]] * len(ids), drafted=True,
        )  # fmt: skip
        hidden = hidden.unflatten(0, ids.shape)
        prompts = zip(layers, hidden.unbind(), roots, ancestors.unbind(), strict=True)
        return self.head(hidden), [SelfFeedingState(*prompt) for prompt in prompts]

    def _decode(
        self,
        ids: Int[Tensor, " R"],
        state: Float[Tensor, "R D"],
        positions: Int[Tensor, " R"],
        states: Sequence[SelfFeedingState | None],
        masks: Sequence[Bool[Tensor, "_ _"] | None],
        counts: Sequence[int],
        drafted: bool = False,
        newest: slice | Int[Tensor, " B"] | None = None,
    ) -> tuple[Float[Tensor, "_ D"], list[tuple[LayerRows, ...]]]:
        """Run all layers on the new rows of all prompts, and return each prompt's keys and values.

        Outputs are those of the `newest` rows, by default of all.
        """
        layers = list[list[LayerRows]]()
        residual, x = self._embed(ids, state)
        for i, layer in enumerate(self.decoder_layers):
            x = x if i == 0 else layer.input_layernorm(residual)
            past = [state.rows[i] if state else None for state in states]
            residual, rows = layer.decode(
                residual, x, positions, past, masks, counts, drafted=drafted, window=self.window,
                newest=newest if layer is self.decoder_layers[-1] else None,
            )  # fmt: skip
            layers.append(rows)
        return residual, transpose(layers)


def transpose(rows: Iterable[Sequence[T]]) -> list[tuple[T, ...]]:
    """Turn one sequence per layer, over prompts, into one per prompt, over layers; or back."""
    return list(zip(*rows, strict=True))


def gather_parents(
    rows: Sequence[Shaped[Tensor, "M X"]], parents: LevelIds
) -> Shaped[Tensor, "B N X"]:
    """Return the row of every node's parent, from each prompt's rows of the level above."""
    above = torch.stack(list(rows))
    if above.shape[1] == 1:
        return above.expand(-1, parents.shape[1], -1)
    return above.take_along_dim(parents[..., None], dim=1)


def concat_prompts(traces: Sequence[Trace]) -> Trace:
    """Concatenate the rows of several prompts (B = 1 each)."""
    if len(traces) == 1:
        return traces[0]
    names = [field.name for field in fields(Trace) if getattr(traces[0], field.name) is not None]
    joined: dict[str, Any] = {n: torch.cat([getattr(t, n) for t in traces], dim=1) for n in names}
    return Trace(**joined)
