"""`BlockDrafter`, the base of drafters that guess a whole block of tokens in one pass.

A block begins at the anchor, the newest token. The target has not read it yet: at row t the anchor
is x_{t+1}, at position a = t + 1. Slot 0 embeds the anchor, every other slot the mask token:

    slot        0         1      2      3
    position    a         a+1    a+2    a+3
    embeds      x_a       MASK   MASK   MASK
    unshifted   -         x_a+1  x_a+2  x_a+3     depth d is slot d: S - 1 drafts  (DFlash)
    shifted     x_a+1     x_a+2  x_a+3  x_a+4     depth d is slot d - 1: S drafts  (DSpark)

The taps of every verified row are fused into its context state, `hidden_norm(fc(taps))`. Keys and
values of a layer are projections, with the same weights, of the context states and of the block;
queries come from the block only. A context state is the same in all layers and depends on no other
row, so that keys and values of a verified row are computed once and never change. What the block
computes is dropped after the round.

Training draws some rows as anchors in every step (`anchors`), from its seed; measuring takes every
row, in pieces.

Source: DFlash, arXiv:2602.06036, and its implementations (docs/drafters/dflash.md).

Legend: B prompts or rows of a batch, T tokens, R flattened rows, N anchors, S slots, K depths, D
width, A key heads, C head size, M nodes of a level, X input of the head, Y memory of a token.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from outrider.models.cache.layer_rows import LayerRows
from outrider.models.drafting import closed_form_init
from outrider.models.drafting.block import linear_fit
from outrider.models.drafting.block.attention import (
    ATTENTIONS,
    BlockPlan,
    attend_block,
    plan_blocks,
)
from outrider.models.drafting.block.config import check_block
from outrider.models.drafting.drafter import BatchDrafter, LevelIds, target_head_logits
from outrider.models.drafting.layers import (
    DecoderLayer,
    Norm,
    append_rows,
    init_linear_weights,
)
from outrider.models.drafting.self_feeding import (
    concat_prompts,
    gather_parents,
    maybe_checkpoint,
    transpose,
)
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import Guess, ModelShape, TargetEnds, Trace
from outrider.models.target.target import Target

PIECE_SLOTS = 4096  # computed at once while measuring, if every row is an anchor
Pairs = list[tuple[Float[Tensor, "R A C"], Float[Tensor, "R A C"]]]  # keys, values of each layer


@dataclass(frozen=True)
class BlockState:
    """Decoding state: the context's keys and values, then the block of this round.

    Attributes:
        rows: of each layer.
        position: rotary, of the anchor.
        slots: the block's states at depths 1 to K; None before `step`.
        logits: of these, before what the token of a node adds; None before `step`.
        hidden: the inputs of `head` at the nodes of the last level.
        memory: of these nodes, see `BlockDrafter.join`.
    """

    rows: tuple[LayerRows, ...]
    position: Int[Tensor, " 1"]
    slots: Float[Tensor, "K D"] | None = None
    logits: Float[Tensor, "K Vd"] | None = None
    hidden: Float[Tensor, "M X"] | None = None
    memory: Float[Tensor, "M Y"] | None = None


class BlockDrafter(BatchDrafter):
    """The backbone: fusion, layers, norm; the target's embedding and head."""

    fits_last_states = True
    tap_scale: Float[Tensor, " taps"]
    draw = 0  # seed of the anchors of this step

    def __init__(
        self, cfg: Any, target: TargetEnds, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.target, self.vocab, self.taps = target, vocab, taps
        shape = target.shape()
        if cfg.mask_token_id is None:
            cfg = replace(cfg, mask_token_id=shape.vocab - 1)
        self.cfg, self.max_depth, self.shape = cfg, cfg.max_depth, shape
        layer_shape = shape._replace(activation=cfg.activation)
        self.fc = nn.Linear(len(taps) * shape.hidden, shape.hidden, bias=False)
        self.register_buffer("tap_scale", torch.ones(len(taps)))
        self.hidden_norm = Norm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList(
            DecoderLayer(layer_shape, qk_norm=True) for _ in range(cfg.layers)
        )
        self.norm = Norm(shape.hidden, shape.eps)
        init_linear_weights(self)

    @classmethod
    def check_settings(cls, cfg: Any, shape: ModelShape) -> None:
        check_block("block_size", cfg.block_size, cfg.mask_token_id, shape)

    def head(self, hidden: Float[Tensor, "*rows X"]) -> Float[Tensor, "*rows Vd"]:
        return self.add_bias(self.slot_logits(hidden[..., : self.shape.hidden]), hidden)

    def slot_logits(self, slots: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows Vd"]:
        """Return the logits of slots alone."""
        normed: Tensor = self.norm(slots)
        return target_head_logits(self.target, self.vocab, normed)

    # ---- heads that read the tokens before; by default none ----

    def join(
        self, slots: Float[Tensor, "*rows D"], ids: Int[Tensor, "*rows"], memory: Tensor | None
    ) -> tuple[Float[Tensor, "*rows X"], Tensor | None]:
        """Return the input of `head`, which begins with the slot, and the memory of these tokens.

        Args:
            ids: the token before the predicted one: of the text in training, of the node in
                decoding; at depth 1 the anchor.
            memory: of the tokens before that one; None at depth 1.
        """
        return slots, memory

    def add_bias(
        self, logits: Float[Tensor, "*rows Vd"], hidden: Float[Tensor, "*rows X"]
    ) -> Float[Tensor, "*rows Vd"]:
        """Add to the logits of slots what the tokens before contribute."""
        return logits

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def context(self, trace: Trace) -> Float[Tensor, "R D"]:
        """Return the context state of every row."""
        out: Tensor = self.hidden_norm(self.fc(self.scaled_taps(trace)))
        return out

    def scaled_taps(self, trace: Trace) -> Float[Tensor, "R KH"]:
        """Return the input of `fc`."""
        taps = trace.taps.flatten(0, 1).to(self.fc.weight.dtype)
        each = taps.unflatten(-1, (len(self.taps), -1))
        scaled: Tensor = each * self.tap_scale[:, None].to(taps.dtype)
        return scaled.flatten(-2)

    def embed_block(self, anchors: Int[Tensor, " N"]) -> Float[Tensor, "N S D"]:
        """Return the inputs of the slots: the anchor token, then mask tokens."""
        ids = anchors.new_full((len(anchors), self.cfg.block_size), self.cfg.mask_token_id)
        ids[:, 0] = anchors
        embedded: Tensor = self.target.embed(ids).to(self.fc.weight.dtype)
        return embedded

    def drafted(self, slots: Float[Tensor, "N S D"]) -> Float[Tensor, "N K D"]:
        """Return the slots of depths 1 to K."""
        return slots if self.cfg.shifted else slots[:, 1:]

    # ---- initial weights ----

    @torch.no_grad()
    def initialise(self, target: Target, traces: Iterable[Trace]) -> str:
        """Scale taps to about unit size, and outputs to the size of the target's last states.

        With `init=linear`, then install a linear fit (`linear_fit.fit`).
        """
        traces = iter(traces)
        trace = next(traces)
        real = trace.document >= 0
        self.tap_scale.copy_(closed_form_init.tap_scale(trace.taps[real], len(self.taps)))
        self.norm.weight.copy_(trace.last[real].float().std(0))
        if self.cfg.init == "linear":
            self.silence_bias()
            return linear_fit.fit(self, target, chain([trace], traces))
        return "random weights, taps scaled to unit size"

    def silence_bias(self) -> None:
        """Set to zero what `add_bias` adds."""

    # ---- training ----

    def begin_step(self, step: int, done: float) -> None:
        self.draw = int(torch.randint(2**31, ()))

    def trained_mask(self, trace: Trace, depth: int) -> Bool[Tensor, "B T"]:
        """Return True at the anchors of this step, as far as their guess is supervised.

        In each row of the batch, a share of the rows whose next draft token is supervised is drawn.
        """
        mask, anchors = trace.supervised_mask(depth), trace.supervised_mask(1)
        if not self.training:
            return mask
        seed = (self.draw << 31) + int(trace.ids.sum()) % 2**31
        keys = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed))
        order = keys.to(mask.device).masked_fill(~anchors, 2.0).argsort(1).argsort(1)
        count = (self.cfg.anchors * anchors.sum(1, keepdim=True)).ceil()
        drawn: Tensor = mask & anchors & (order < count)
        return drawn

    def unroll(self, trace: Trace) -> Iterator[Guess]:
        masks = [self.trained_mask(trace, depth) for depth in range(1, self.cfg.depths + 1)]
        anchors = torch.nonzero(torch.stack(masks).any(0).flatten()).flatten()
        states, positions = self.context(trace), trace.positions.flatten()
        pairs = [layer.self_attn.key_value(states, positions) for layer in self.decoder_layers]
        pieces: Sequence[Tensor] = [anchors]
        if not self.training:  # equally many on every rank
            slots = trace.ids.numel() * self.cfg.block_size
            pieces = anchors.tensor_split(-(-slots // PIECE_SLOTS))
        hidden = torch.cat([self._run_blocks(trace, piece, pairs) for piece in pieces])
        memory = None
        for depth in range(1, self.cfg.depths + 1):
            ids = trace.tokens_ahead(depth).flatten()[anchors]
            joined, memory = self.join(hidden[:, depth - 1], ids, memory)
            yield Guess(depth, anchors, joined)

    def _run_blocks(
        self, trace: Trace, anchors: Int[Tensor, " N"], pairs: Pairs
    ) -> Float[Tensor, "N K D"]:
        """Run the blocks behind these rows, given every layer's context keys and values."""
        plans, positions = self.plan(trace, anchors)
        x = self.embed_block(trace.next_ids.flatten()[anchors]).flatten(0, 1)
        for layer, pair, plan in zip(self.decoder_layers, pairs, plans, strict=True):
            x = maybe_checkpoint(
                self.gradient_checkpointing, self._run_layer, layer, x, positions, pair, plan
            )
        return self.drafted(x.unflatten(0, (-1, self.cfg.block_size)))

    def plan(
        self, trace: Trace, anchors: Int[Tensor, " N"]
    ) -> tuple[list[BlockPlan], Int[Tensor, " NS"]]:
        """Return each layer's attention of the blocks behind these rows, and their positions."""
        cfg, slots = self.cfg, self.cfg.block_size
        windows = [cfg.window_of(i) for i in range(cfg.layers)]
        plans = {
            window: plan_blocks(
                anchors, trace.document, slots, self.shape.heads,
                causal=cfg.causal, window=window, window_from=cfg.window_from,
            )
            for window in set(windows)
        }  # fmt: skip
        first = trace.positions.flatten()[anchors, None] + 1
        positions = (first + torch.arange(slots, device=first.device)).flatten()
        return [plans[window] for window in windows], positions

    def _run_layer(
        self, layer: DecoderLayer, x: Tensor, positions: Tensor, context: tuple[Tensor, Tensor],
        plan: BlockPlan,
    ) -> Tensor:  # fmt: skip
        return layer.finish(x, self.attend(layer, x, positions, context, plan))

    def attend(
        self, layer: DecoderLayer, x: Float[Tensor, "NS D"], positions: Int[Tensor, " NS"],
        context: tuple[Tensor, Tensor], plan: BlockPlan,
    ) -> Float[Tensor, "NS AG C"]:  # fmt: skip
        """Return what a layer's heads read at the slots, given the context's keys and values."""
        q, key, value = layer.self_attn.query_key_value(layer.input_layernorm(x), positions)
        return ATTENTIONS[self.cfg.attention](q, *context, key, value, plan)

    def forward_count(self, depths: int) -> int:
        """Count every slot; a share of the rows starts a block, at most all of them."""
        slots: float = self.cfg.anchors * self.cfg.block_size
        return max(1, round(slots))

    def activation_count(self, depths: int) -> float:
        """Count slots and context; norms of queries and keys add a fifth to a layer (fitted)."""
        layers = 1.2 * sum(layer.activation_count for layer in self.decoder_layers)
        width, slots = self.shape.hidden, self.cfg.anchors * self.cfg.block_size
        return float(slots * (layers + width) + (1 + 2 * len(self.taps)) * width)

    # ---- decoding ----

    def absorb_batch(
        self, states: Sequence[BlockState | None], traces: Sequence[Trace]
    ) -> list[BlockState]:
        rows, counts = concat_prompts(traces), [trace.ids.shape[1] for trace in traces]
        context, positions = self.context(rows), rows.positions[0]
        layers = list[list[LayerRows]]()
        for i, layer in enumerate(self.decoder_layers):
            past = [state.rows[i] if state else None for state in states]
            layers.append(append_rows(past, *layer.self_attn.key_value(context, positions), counts))
        anchors = [trace.positions[0, -1:] + 1 for trace in traces]
        return [BlockState(*prompt) for prompt in zip(transpose(layers), anchors, strict=True)]

    def step_batch(
        self, states: Sequence[BlockState], depth: int, ids: LevelIds, parents: LevelIds
    ) -> tuple[Float[Tensor, "B N Vd"], list[BlockState]]:
        """Run the whole block at depth 1; deeper levels look its logits up.

        All nodes of a level have the same slot: only what their own tokens add differs.
        """
        if depth == 1:
            states = self.draft_block(states, ids[:, 0])
        logits = torch.stack([state.logits[depth - 1] for state in states])  # type: ignore[index]
        slots = torch.stack([state.slots[depth - 1] for state in states])  # type: ignore[index]
        past = [state.memory for state in states if state.memory is not None]
        above = gather_parents(past, parents) if past and depth > 1 else None
        logits, slots = (x[:, None].expand(-1, ids.shape[1], -1) for x in (logits, slots))
        hidden, memory = self.join(slots, ids, above)
        memories = [None] * len(states) if memory is None else memory.unbind()
        prompts = zip(states, hidden, memories, strict=True)
        new = [replace(state, hidden=h, memory=m) for state, h, m in prompts]
        return self.add_bias(logits, hidden), new

    def node_hidden(self, states: Sequence[BlockState]) -> Float[Tensor, "B N X"] | None:
        return torch.stack([state.hidden for state in states])  # type: ignore[misc]

    def draft_block(
        self, states: Sequence[BlockState], anchors: Int[Tensor, " B"]
    ) -> list[BlockState]:
        """Run the blocks of several prompts, and return their states with slots and logits."""
        cfg, size = self.cfg, self.cfg.block_size
        first = torch.cat([state.position for state in states])
        positions = first[:, None] + torch.arange(size, device=first.device)
        x, counts = self.embed_block(anchors).flatten(0, 1), [size] * len(states)
        for i, layer in enumerate(self.decoder_layers):
            q, key, value = layer.self_attn.query_key_value(
                layer.input_layernorm(x), positions.flatten()
            )
            rows = append_rows([state.rows[i] for state in states], key, value, counts, True)
            mask = cfg.causal, cfg.window_of(i), cfg.window_from
            parts = zip(q.split(size), rows, strict=True)
            x = layer.finish(x, torch.cat([attend_block(*part, *mask) for part in parts]))
        slots = self.drafted(x.unflatten(0, (-1, size)))
        logits = self.slot_logits(slots)
        blocks = zip(states, slots, logits, strict=True)
        return [replace(state, slots=s, logits=each) for state, s, each in blocks]
