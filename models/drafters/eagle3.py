"""EAGLE-3: one decoder layer over fused target features, trained as it will be used.

Source: Li et al. 2025, "EAGLE-3", arXiv:2503.01840, and its reference code. At row t, depth 1, the
layer reads the embedding of x_{t+1} and g_t = fc(low, middle, high features of row t); deeper it
reads its own un-normed output ("training-time test", `models/self_feeding.py`). Gradients flow through
all depths. What the field added since are switches: a norm on every tap (`fc_norm`), the normed
state fed back (`feedback=normed`, EAGLE-3.1) or taken as the residual (`residual=normed`, vLLM's
speculators), more layers, query and key norms, another head size.

Differs: the weight of a row follows the *predicted* token (the reference lags by two); heads and
losses run over supervised rows only; taps are divided by their typical size (`tap_scale`), so that
one learning rate suits every target, and by a power of two, so that `fc` takes it up without a
rounding when it is published; training starts from the best linear drafter (`models/closed_form_init.py`;
measured in docs/log.md).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import torch
from jaxtyping import Float
from torch import Tensor, nn

from outrider.models import closed_form_init as fit
from outrider.models.drafter import Lender, Recipe, Shape, Trace
from outrider.models.layers import Block, Norm, random_weights
from outrider.models.self_feeding import SelfFeeding
from outrider.models.target import Target, default_taps
from outrider.models.vocab import DraftVocab

__all__ = ["Config", "Eagle3", "default_taps"]

LOOK_ROWS = 8192  # rows that the constant direction of the layer's input is found from
SELF_SCORE = 10.0  # attention score of a row with itself at the start; random scores are about 1
SLOWEST = 0.2  # radians per row: rotary pairs that turn faster tell neighbours apart
CONTENT = 0.3  # what is left of the random part of the keys


@dataclass(frozen=True)
class Config(Recipe):
    """Settings of an EAGLE-3 drafter; conf/drafter/eagle3.yaml says what each means."""

    name: str = "eagle3"
    draft_vocab_size: int | None = 8192
    taps: tuple[int, ...] | None = None
    layers: int = 1
    head_dim: int | None = None
    qk_norm: bool = False
    fc_norm: bool = False
    feedback: str = "raw"
    residual: str = "raw"
    init: str = "linear"
    attention: str = "fast"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.taps is not None and not 0 < len(self.taps) == len(set(self.taps)):
            raise ValueError(f"taps = {list(self.taps)}: needs one or more layers, each once")
        if self.layers < 1:
            raise ValueError(f"layers = {self.layers}: needs at least one")
        if self.head_dim is not None and (self.head_dim < 2 or self.head_dim % 2):
            raise ValueError(f"head_dim = {self.head_dim}: rotary pairs need an even size")
        self.choose("feedback", "raw", "normed")
        self.choose("residual", "raw", "normed")
        self.choose("init", "linear", "random")
        if self.residual == "normed" and self.init == "linear":
            raise ValueError(
                f"init = {self.init}: the regression is about the bare state; use random with "
                "residual=normed"
            )
        self.choose("attention", "fast", "reference")


class First(Block):
    """The first layer: reads [norm(embedding); norm(state)]; the bare state is the residual."""

    def __init__(self, shape: Shape, qk_norm: bool) -> None:
        super().__init__(shape, wide=2, qk_norm=qk_norm)
        self.hidden_norm = Norm(shape.hidden, shape.eps)

    def wide(
        self, embedding: Float[Tensor, "N H"], state: Float[Tensor, "N D"]
    ) -> Float[Tensor, "N DD"]:
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(state)], dim=-1)


class Eagle3(SelfFeeding):
    """The drafter: fusion, decoder layers, norm and its own head."""

    tap_scale: Float[Tensor, " K"]

    def __init__(
        self, cfg: Config, target: Lender, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.cfg, self.target, self.vocab, self.taps = cfg, target, vocab, taps
        self.depths, self.attention = cfg.depths, cfg.attention
        shape = target.shape()
        self.shape = shape._replace(head_dim=cfg.head_dim or shape.head_dim)
        hidden, eps = shape.hidden, shape.eps
        self.fc = nn.Linear(len(taps) * hidden, hidden, bias=False)
        self.register_buffer("tap_scale", torch.ones(len(taps)))
        self.fc_norm = nn.ModuleList(Norm(hidden, eps) for _ in taps if cfg.fc_norm)
        self.midlayer = First(self.shape, cfg.qk_norm)
        self.layers = nn.ModuleList(
            Block(self.shape, qk_norm=cfg.qk_norm) for _ in range(cfg.layers - 1)
        )
        self.norm = Norm(hidden, eps)
        self.lm_head = nn.Linear(hidden, len(vocab), bias=False)
        random_weights(self)

    @property
    def blocks(self) -> list[Block]:
        return [self.midlayer, *self.layers]

    def start(self, trace: Trace) -> Float[Tensor, "BT D"]:
        return self.fuse(trace.taps.flatten(0, 1).to(self.fc.weight.dtype))

    def fuse(self, taps: Float[Tensor, "N KH"]) -> Float[Tensor, "N D"]:
        out: Tensor = self.fc(self._evened(taps))
        return out

    def join(
        self, embedding: Float[Tensor, "N H"], state: Float[Tensor, "N D"]
    ) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N DD"]]:
        read = self.midlayer.wide(embedding, state)
        return (state if self.cfg.residual == "raw" else read[:, embedding.shape[1] :]), read

    def feed(self, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        return hidden if self.cfg.feedback == "raw" else self.norm(hidden)

    def head(self, hidden: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows Vd"]:
        out: Tensor = self.lm_head(self.norm(hidden))
        return out

    def _evened(self, taps: Float[Tensor, "N KH"]) -> Float[Tensor, "N KH"]:
        """Taps of one size: each divided by its typical one, or each row's own (`fc_norm`)."""
        each = taps.unflatten(-1, (len(self.taps), -1))
        if self.cfg.fc_norm:
            return torch.cat(
                [n(tap) for n, tap in zip(self.fc_norm, each.unbind(1), strict=True)], -1
            )
        scaled: Tensor = each * self.tap_scale[:, None].to(taps.dtype)
        return scaled.flatten(-2)

    # ---- first weights ----

    @torch.no_grad()
    def initialise(self, target: Target, traces: Iterable[Trace]) -> str:
        """Taps of about unit size; then, unless `init=random`, the best linear drafter there is.

        A regression of the target's next state on the taps and on the embedding of x_{t+1} gives
        `fc` its first half and the attention its second: the first query head of each group looks
        at its own row and carries the embedding over. All else adds nothing yet and is learned.
        """
        traces = iter(traces)
        first = next(traces)
        self._scale_taps(first)
        if self.cfg.init == "random":
            return "random weights, taps scaled to unit size"
        moments, some = fit.Moments(), list[Trace]()
        for trace in chain([first], traces):
            if moments.count < LOOK_ROWS and trace.counts(1).any():
                some.append(trace)
            moments.add(*self._known(target, trace))
            if moments.count >= fit.ROWS * len(moments.xx):
                break
        if not some:
            return "random weights, taps scaled to unit size: no answer to fit to"
        self._place(moments)
        wide = torch.cat([self._wide(trace)[trace.counts(1).flatten()] for trace in some])
        self._look_at_self(fit.constant(wide.float()))
        self._place_head(target, moments.spread, some[0])
        return f"linear fit to {moments.count:,} states of {target.name}, and its head"

    def _scale_taps(self, trace: Trace) -> None:
        taps = trace.taps[trace.document >= 0].float().unflatten(-1, (len(self.taps), -1))
        sizes = taps.pow(2).mean(-1).sqrt().median(0).values
        self.tap_scale.copy_(torch.exp2(-sizes.clamp(min=1e-6).log2().round()))

    def _wide(self, trace: Trace) -> Float[Tensor, "BT DD"]:
        return self._input(trace.ahead(1).flatten(), self.start(trace))[1]

    def _known(self, target: Target, trace: Trace) -> tuple[Tensor, Tensor]:
        """Of every row that counts at depth 1: what is known there, and the state to guess."""
        rows = torch.nonzero(trace.counts(1).flatten()).flatten()
        taps = self._evened(trace.taps.flatten(0, 1)[rows].float())
        embedded = self.target.embed(trace.next_ids.flatten()[rows]).float()
        known = torch.cat([taps, self.midlayer.input_layernorm(embedded)], dim=-1)
        return known, trace.last.flatten(0, 1)[rows + 1].float()

    def _place(self, moments: fit.Moments) -> None:
        """The regression: taps into `fc`, the embedding through values and outputs."""
        attn, hidden = self.midlayer.self_attn, self.shape.hidden
        inputs, outputs = self.fc.in_features, self._self_heads()
        weight = moments.ridge()
        self.fc.weight.copy_(weight[:, :inputs])
        of_embedding = moments.covariance[inputs:, inputs:]
        out, into = fit.reduced(weight[:, inputs:], of_embedding, len(outputs) * attn.size)
        attn.v_proj.weight[: len(into), :hidden] = into
        attn.v_proj.weight[: len(into), hidden:] = 0
        attn.o_proj.weight.zero_()
        for i, head in enumerate(outputs):
            columns = slice(head * attn.size, (head + 1) * attn.size)
            part = out[:, i * attn.size : (i + 1) * attn.size]
            attn.o_proj.weight[:, columns][:, : part.shape[1]] = part
        for block in self.blocks:
            block.mlp.down_proj.weight.zero_()
        for block in self.blocks[1:]:
            block.self_attn.o_proj.weight.zero_()

    def _self_heads(self) -> list[int]:
        """Query heads that start out looking at their own row: one per key head, or half of all."""
        keys, group = self.shape.kv_heads, self.shape.heads // self.shape.kv_heads
        return [i * group for i in range(keys if group > 1 else max(1, keys // 2))]

    def _look_at_self(self, one: Float[Tensor, " DD"]) -> None:
        """Equal queries and keys on the fast rotary pairs: the score falls off with distance.

        Args:
            one: direction of the layer's input along which every row is about 1.
        """
        attn, size = self.midlayer.self_attn, self.shape.head_dim
        half = size // 2
        turns = self.shape.rope_theta ** -(torch.arange(half) / half)
        fast = int((turns >= SLOWEST).sum())
        peak = one.new_zeros(size)
        peak[:fast] = (SELF_SCORE * size**0.5 / fast) ** 0.5
        for head in range(self.shape.kv_heads):
            rows = slice(head * size, (head + 1) * size)
            attn.k_proj.weight[rows] = CONTENT * attn.k_proj.weight[rows] + torch.outer(peak, one)
        for head in self._self_heads():
            attn.q_proj.weight[head * size : (head + 1) * size] = torch.outer(peak, one)

    def _place_head(self, target: Target, spread: Float[Tensor, " H"], trace: Trace) -> None:
        """The target's own rows; the norm undoes the outputs' unit, as sharp as pays."""
        rows = trace.counts(1).flatten()
        guess = next(self.unroll(trace))
        self.lm_head.weight.copy_(target.head_weight[self.vocab.kept])
        self.norm.weight.copy_(spread)
        chosen = torch.nonzero(rows).flatten()[: fit.SHARP_ROWS]
        teacher = target.logits(trace.last.flatten(0, 1)[chosen + 1])[:, self.vocab.kept]
        logits = self.head(guess.hidden.flatten(0, 1)[chosen])
        self.norm.weight.mul_(fit.sharpness(logits.float(), teacher.float().softmax(-1)))
