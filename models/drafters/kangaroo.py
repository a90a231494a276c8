"""Kangaroo: an adapter over an early exit of the frozen target.

Source: Liu et al. 2024, "Kangaroo", arXiv:2404.18911, and its reference code
(github.com/Equationliu/Kangaroo). The first E layers of the target, one attention layer without MLP
and the target's head draft; verification runs the other layers of the target only.

    e_t = output of layer E-1 after x_0..x_t
    g_t = norm(e_t + attention(norm(e_0), .., norm(e_t)))     logits head(g_t) predict x_{t+1}

So the guess of depth d at row t is g_{t+d}, and all depths are one function of the text:

    row t      0   1   2   3   4
    adapter    g0  g1  g2  g3  g4
    depth 1    g1  g2  g3  g4  .
    depth 2    g2  g3  g4  .   .

Drafting stops after a token of low probability (`decode.confidence`), which is still verified.

Differs (docs/drafters/kangaroo.md): trees and batches; any rotary base; the first norm weights are
fitted; the adapter reads verified tokens again instead of keeping its rows of accepted drafts.

Legend: B prompts, T tokens, N nodes of a level.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from outrider.models.cache.kv_cache import KVCache
from outrider.models.cache.layer_rows import LayerRows
from outrider.models.cache.split_cache import SplitCache
from outrider.models.drafting.branch_attention import branch_attention, plan_queries
from outrider.models.drafting.drafter import LevelIds, target_head_logits
from outrider.models.drafting.early_exit import EarlyExit, EarlyExitConfig
from outrider.models.drafting.layers import AttentionLayer, Norm, append_rows, init_linear_weights
from outrider.models.drafting.self_feeding import concat_prompts, maybe_checkpoint
from outrider.models.drafting.target_drafting import TargetDraftState, level_positions
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import Guess, Trace, shifted_guesses
from outrider.models.target.target import Target

FIT_BATCHES = 4  # of training rows, to which the norm is fitted


@dataclass(frozen=True)
class Config(EarlyExitConfig):
    """Settings of a Kangaroo adapter; conf/drafter/kangaroo.yaml describes each."""

    name: str = "kangaroo"
    depth_weights: str = "first"


@dataclass(frozen=True)
class KangarooState(TargetDraftState):
    """Decoding state, with the keys and values of the adapter."""

    rows: LayerRows


class Kangaroo(EarlyExit):
    """One attention layer and a norm between an early exit and the target's head."""

    def __init__(
        self, cfg: Config, target: Target, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.cfg, self.target, self.vocab, self.taps = cfg, target, vocab, taps
        shape = target.shape()
        self.set_exit(cfg.exit_layer, shape.layers)
        self.layers = nn.ModuleList([AttentionLayer(shape)])
        self.norm = Norm(shape.hidden, shape.eps)
        init_linear_weights(self)

    @property
    def layer(self) -> AttentionLayer:
        layer = self.layers[0]
        assert isinstance(layer, AttentionLayer)
        return layer

    @torch.no_grad()
    def initialise(self, target: Target, traces: Iterable[Trace]) -> str:
        """Fit the weight of the norm to the target's last states, each number separately."""
        products = squares = torch.zeros_like(self.norm.weight)
        for trace in islice(traces, FIT_BATCHES):
            rows, last = trace.supervised_rows(0), trace.last.flatten(0, 1)
            normed = self._adapt(trace) / self.norm.weight
            products = products + (normed * last[rows].to(normed.dtype)).sum(0)
            squares = squares + normed.square().sum(0)
        if not bool((squares > 0).all()):
            return "random weights"
        self.norm.weight.copy_(products / squares)
        return f"random attention; the norm is fitted to states of {target.name}"

    def head(self, hidden: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows Vd"]:
        return target_head_logits(self.target, self.vocab, hidden)

    # ---- training ----

    def unroll(self, trace: Trace) -> Iterator[Guess]:
        rows = trace.supervised_rows(0)
        states = maybe_checkpoint(self.gradient_checkpointing, self._adapt, trace)
        yield from shifted_guesses(rows, states, self.cfg.depths)

    def _adapt(self, trace: Trace) -> Float[Tensor, "N D"]:
        """Return the adapter's state of every row that predicts an answer token."""
        exits = trace.taps.flatten(0, 1).to(self.norm.weight.dtype)
        queries = trace.supervised_mask(0)
        plan = plan_queries(queries, trace.document, self.layer.self_attn.heads)
        x, positions = self.layer.input_layernorm(exits), trace.positions.flatten()
        out, _, _ = self.layer.unroll(exits, x, positions, plan, branch_attention)
        normed: Tensor = self.norm(out)
        return normed

    def forward_count(self, depths: int) -> int:
        return 1

    def activation_count(self, depths: int) -> float:
        return self.layer.activation_count + float(self.target.shape().hidden)

    # ---- decoding ----

    def after_verification(
        self, target: Target, cache: KVCache | SplitCache, state: Any
    ) -> KangarooState:
        none = TargetDraftState.without_drafts(target, cache)
        if state is None:
            attn, weight = self.layer.self_attn, self.norm.weight
            row = weight.new_zeros(0, attn.k_proj.out_features // attn.head_dim, attn.head_dim)
            return KangarooState(**vars(none), rows=LayerRows.empty_like(row, row))
        after: KangarooState = replace(state, **vars(none))
        return after

    def absorb_batch(
        self, states: Sequence[Any], traces: Sequence[Trace]
    ) -> list[TargetDraftState]:
        """Append the adapter's keys and values of verified rows, from their exit states."""
        rows, counts = concat_prompts(traces), [trace.ids.shape[1] for trace in traces]
        x = self.layer.input_layernorm(rows.taps[0].to(self.norm.weight.dtype))
        key, value = self.layer.self_attn.key_value(x, rows.positions[0])
        appended = append_rows([state.rows for state in states], key, value, counts)
        return [replace(state, rows=new) for state, new in zip(states, appended, strict=True)]

    def step_batch(
        self, states: Sequence[Any], depth: int, ids: LevelIds, parents: LevelIds
    ) -> tuple[Float[Tensor, "B N Vd"], list[TargetDraftState]]:
        exits, level = self.run_level(states, depth, ids, parents)
        exits = exits.flatten(0, 1).to(self.norm.weight.dtype)
        positions = level_positions(states, depth, ids).flatten()
        masks = [state.ancestors for state in level]
        past, counts = [state.rows for state in states], [ids.shape[1]] * len(ids)
        x = self.layer.input_layernorm(exits)
        out, rows = self.layer.decode(exits, x, positions, past, masks, counts, drafted=True)
        pairs: Iterable[tuple[Any, LayerRows]] = zip(level, rows, strict=True)
        after = [replace(state, rows=new) for state, new in pairs]
        return self.head(self.norm(out)).unflatten(0, ids.shape), after
