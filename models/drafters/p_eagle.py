"""P-EAGLE: EAGLE-3's layers, which guess all depths in one pass.

Source: P-EAGLE, arXiv:2602.01469, and its implementations (speculators, SpecForge). Depth 1 is
EAGLE-3's: row t reads the embedding of x_{t+1} and the fused taps. A deeper depth reads a mask
token and `mask_hidden`, a learned vector in place of the taps (before `fc`), at the next positions:

    depth   embeds     features       position   attends to
    1       x_{t+1}    taps of row t  t          rows of depth 1 up to t
    2       MASK       mask_hidden    t + 1      the same, and itself
    3       MASK       mask_hidden    t + 2      the same, depth 2, and itself

Training drops depths at random (conditional drop-out): of the rows that have depth d - 1, a share
has depth d, so that at depth d max(keep^(d-1), keep_floor) of the rows are left.

All nodes of a tree level have the same children. Differs (docs/drafters/p_eagle.md): the embedding
is the target's, frozen; the loss is divided per depth.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from outrider.conf.fields import COUNT0, DEPTHS, option
from outrider.models.drafters import eagle3
from outrider.models.drafters.eagle3 import Eagle3, default_taps
from outrider.models.drafting.block.attention import (
    ATTENTIONS,
    BlockPlan,
    attend_block,
    plan_blocks,
)
from outrider.models.drafting.block.backbone import BlockState
from outrider.models.drafting.block.config import check_block
from outrider.models.drafting.drafter import LevelIds
from outrider.models.drafting.layers import append_rows
from outrider.models.drafting.self_feeding import Pairs, maybe_checkpoint
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import Guess, ModelShape, TargetEnds, Trace
from outrider.models.target.target import Target

__all__ = ["Config", "PEagle", "default_taps"]


@dataclass(frozen=True)
class Config(eagle3.Config):
    """Settings of a P-EAGLE drafter; conf/drafter/p_eagle.yaml describes each."""

    name: str = "p_eagle"
    depth_weights: str = "normalised:0.7"
    layers: int = option(2, "", DEPTHS)
    keep: float = option(0.7, "", "(0, 1]")
    keep_floor: float = option(0.2, "", "[0, 1]")
    mask_token_id: int | None = option(None, "", COUNT0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.feedback != "raw":
            raise ValueError(f"feedback = {self.feedback}: no state is fed back; use raw")

    @property
    def max_depth(self) -> int:
        return self.depths


class PEagle(Eagle3):
    """EAGLE-3's network, and the vector that stands for unknown taps."""

    cfg: Config
    draw = 0  # seed of the dropped depths of this step

    def __init__(
        self, cfg: Config, target: TargetEnds, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        if cfg.mask_token_id is None:
            cfg = replace(cfg, mask_token_id=target.shape().vocab - 1)
        super().__init__(cfg, target, vocab, taps)
        self.max_depth = cfg.max_depth
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.in_features))

    @classmethod
    def check_settings(cls, cfg: Any, shape: ModelShape) -> None:
        check_block("depths", cfg.depths, cfg.mask_token_id, shape)

    @torch.no_grad()
    def initialise(self, target: Target, traces: Iterable[Trace]) -> str:
        """Fit depth 1 as EAGLE-3; unknown taps start as the mean of some."""
        traces = iter(traces)
        first = next(traces)
        self.mask_hidden.copy_(first.taps[first.document >= 0].float().mean(0).expand(1, 1, -1))
        rest = (trace for part in ([first], traces) for trace in part)
        return super().initialise(target, rest)

    def mask_inputs(self, count: int) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N DD"]]:
        """Return the residual and the attention input of the first layer at mask rows."""
        ids = torch.tensor([self.cfg.mask_token_id], device=self.mask_hidden.device)
        state = self.fc(self._normalise_taps(self.mask_hidden[0]))
        residual, x = self._embed(ids, state)
        return residual.expand(count, -1), x.expand(count, -1)

    # ---- training ----

    def begin_step(self, step: int, done: float) -> None:
        self.draw = int(torch.randint(2**31, ()))

    def trained_mask(self, trace: Trace, depth: int) -> Bool[Tensor, "B T"]:
        """Return True at the supervised rows that keep this depth in this step."""
        mask = trace.supervised_mask(1)
        if not self.training:
            return trace.supervised_mask(depth)
        seed = (self.draw << 31) + int(trace.ids.sum()) % 2**31
        keys = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed))
        keys, rows = keys.to(mask.device), int(mask.sum())
        for deeper in range(2, depth + 1):
            mask = mask & trace.supervised_mask(deeper)
            share = max(self.cfg.keep ** (deeper - 1), self.cfg.keep_floor)
            order = keys.masked_fill(~mask, 2.0).flatten().argsort().argsort().view_as(mask)
            mask = mask & (order < round(share * rows))
        return mask

    def unroll(self, trace: Trace) -> Iterator[Guess]:
        masks = [self.trained_mask(trace, depth).flatten() for depth in range(1, self.depths + 1)]
        queries = torch.stack(masks).any(0)
        plan = self._plan(queries.view_as(trace.answer), trace)
        hidden, first = maybe_checkpoint(
            self.gradient_checkpointing, self._unroll_first, trace, plan
        )
        yield Guess(1, plan.rows, hidden)
        # the deepest depth of every row, whose earlier depths are computed too
        deepest = torch.stack([mask * depth for depth, mask in enumerate(masks, start=1)]).amax(0)
        states, rows = [list[Tensor]() for _ in masks], [list[Tensor]() for _ in masks]
        for depth in range(2, self.depths + 1):
            anchors = torch.nonzero(deepest == depth).flatten()
            slots = maybe_checkpoint(
                self.gradient_checkpointing, self._run_masks, trace, anchors, depth - 1, first
            )
            for i in range(1, depth):
                states[i].append(slots[:, i - 1])
                rows[i].append(anchors)
        for i in range(1, self.depths):
            at, order = torch.cat(rows[i]).sort()
            yield Guess(i + 1, at, torch.cat(states[i])[order])

    def _run_masks(
        self, trace: Trace, anchors: Int[Tensor, " N"], count: int, first: Pairs
    ) -> Float[Tensor, "N S D"]:
        """Run `count` mask rows behind these rows, given the keys and values of depth 1."""
        heads = self.decoder_layers[0].self_attn.heads
        plan = plan_blocks(anchors, trace.document, count, heads, causal=True, window=self.window)
        start = trace.positions.flatten()[anchors, None] + 1
        positions = (start + torch.arange(count, device=start.device)).flatten()
        residual, x = self.mask_inputs(len(positions))
        for i, layer in enumerate(self.decoder_layers):
            x = x if i == 0 else layer.input_layernorm(residual)
            residual = self._attend_masks(layer, residual, x, positions, first[i], plan)
        slots: Tensor = residual.unflatten(0, (-1, count))
        return slots

    def _attend_masks(
        self, layer: Any, residual: Tensor, x: Tensor, positions: Tensor,
        context: tuple[Tensor, Tensor], plan: BlockPlan,
    ) -> Tensor:  # fmt: skip
        q, key, value = layer.self_attn.query_key_value(x, positions)
        attended = ATTENTIONS[self.attention](q, *context, key, value, plan)
        out: Tensor = layer.finish(residual, attended)
        return out

    def activation_count(self, depths: int) -> float:
        """Count the share of the rows that keeps each depth."""
        shares = [max(self.cfg.keep**d, self.cfg.keep_floor) for d in range(1, depths)]
        one = super().activation_count(1)
        return one + sum(shares) * (super().activation_count(2) - one)

    # ---- decoding ----

    def step_batch(  # type: ignore[override]  # its states hold logits in place of a branch
        self, states: Sequence[Any], depth: int, ids: LevelIds, parents: LevelIds
    ) -> tuple[Float[Tensor, "B N Vd"], list[BlockState]]:
        """Run all mask rows at depth 1; deeper levels look their logits up."""
        if depth == 1:
            states = self._draft(states)
        logits = torch.stack([state.logits[depth - 1] for state in states])
        return logits[:, None].expand(-1, ids.shape[1], -1), list(states)

    def _draft(self, states: Sequence[Any]) -> list[BlockState]:
        """Return the logits of every depth; the first is of the newest true row."""
        count = self.depths - 1
        first = torch.cat([state.position for state in states])[:, None] + 1
        positions = (first + torch.arange(count, device=first.device)).flatten()
        residual, x = self.mask_inputs(len(positions))
        for i, layer in enumerate(self.decoder_layers if count else []):
            x = x if i == 0 else layer.input_layernorm(residual)
            q, key, value = layer.self_attn.query_key_value(x, positions)
            past, counts = [state.rows[i] for state in states], [count] * len(states)
            rows = append_rows(past, key, value, counts, drafted=True)
            parts = zip(q.split(count), rows, strict=True)
            attended = [attend_block(*part, True, self.window, "slot") for part in parts]
            residual = layer.finish(residual, torch.cat(attended))
        newest = torch.stack([state.hidden for state in states])
        hidden = torch.cat([newest, residual.view(len(states), count, self.shape.hidden)], dim=1)
        prompts = zip(states, hidden, self.head(hidden), strict=True)
        return [BlockState(s.rows, s.position, h, logits) for s, h, logits in prompts]
