"""EAGLE-3: one decoder layer over fused target features, trained as it will be used.

Source: Li et al. 2025, "EAGLE-3", arXiv:2503.01840, and its reference code. At row t, depth 1, the
layer reads the embedding of x_{t+1} and g_t = fc(low, middle, high features of row t). At depth d
it reads the embedding of x_{t+d} and its own un-normed output of depth d - 1 ("training-time
test"): tokens are the text's, states are the drafter's own, and gradients flow through all depths.

    depth   token embedded   state              rotary position   predicts
    1       x_{t+1}          g_t                t                 x_{t+2}
    2       x_{t+2}          output of depth 1  t + 1             x_{t+3}

Differs: the weight of a row follows the *predicted* token (the reference lags by two); heads and
losses run over supervised rows only; taps are divided by their typical size (`tap_scale`, folded
into `fc` on export), so that one learning rate suits every target; training starts from the best
linear drafter (`models/fit.py`; measured in docs/log.md).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from outrider.models import fit
from outrider.models.base import Drafter, Embed, Guess, Shape, Trace
from outrider.models.layers import (
    Asking,
    Mlp,
    Norm,
    asking,
    branch_attention,
    dense_attention,
    rotate,
)
from outrider.models.target import Target
from outrider.models.vocab import DraftVocab

FIT_ROWS = 64  # rows of the first regression per input feature
LOOK_ROWS = 8192  # rows that the constant direction of the layer's input is found from
SHARP_ROWS = 512  # rows that the scale of the first logits is found from
SELF_SCORE = 10.0  # attention score of a row with itself at the start; random scores are about 1
SLOWEST = 0.2  # radians per row: rotary pairs that turn faster tell neighbours apart
CONTENT = 0.3  # what is left of the random part of the keys


@dataclass(frozen=True)
class Config:
    """Settings of an EAGLE-3 drafter; conf/drafter/eagle3.yaml says what each means."""

    name: str = "eagle3"
    depths: int = 4
    taps: tuple[int, ...] | None = None
    draft_vocab_size: int | None = 8192
    decay: float = 0.8
    init: str = "linear"
    attention: str = "fast"
    renormalise: bool = True
    normalise: str = "rows"

    def __post_init__(self) -> None:
        if self.depths < 1:
            raise ValueError(f"depths = {self.depths}: needs at least one depth")
        if self.taps is not None and not 0 < len(self.taps) == len(set(self.taps)):
            raise ValueError(f"taps = {list(self.taps)}: needs one or more layers, each once")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise ValueError(
                f"draft_vocab_size = {self.draft_vocab_size}: needs at least one token"
            )
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay = {self.decay}: a weight is in (0, 1]")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} = {getattr(self, name)}: use {' or '.join(allowed)}")


CHOICES = {
    "init": ("linear", "random"),
    "attention": ("fast", "reference"),
    "normalise": ("rows", "tokens"),
}


def usual_taps(layers: int) -> tuple[int, ...]:
    """Low, middle and high: the outputs of layers 1, n//2-1, n-4 (inputs of 2, n//2, n-3)."""
    return (1, layers // 2 - 1, layers - 4)


def default_taps(layers: int) -> tuple[int, ...]:
    """The usual taps where the target is deep enough for three distinct ones.

    A target too shallow for three distinct ones gives those that exist: n = 2 -> (0, 1).
    """
    wanted = usual_taps(layers)
    if len(set(wanted)) == 3 and min(wanted) >= 0 and list(wanted) == sorted(wanted):
        return wanted
    return tuple(sorted({0, (layers - 1) // 2, max(layers - 2, min(1, layers - 1))}))


class Attention(nn.Module):
    """Projections of the attention: the input is twice as wide as the output."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        wide, size = 2 * shape.hidden, shape.head_dim
        self.q_proj = nn.Linear(wide, shape.heads * size, bias=False)
        self.k_proj = nn.Linear(wide, shape.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(wide, shape.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(shape.heads * size, shape.hidden, bias=False)
        self.size, self.theta = size, shape.rope_theta

    def query(self, x: Tensor, positions: Tensor) -> Float[Tensor, "N AG C"]:
        return rotate(self.q_proj(x).unflatten(-1, (-1, self.size)), positions, self.theta)

    def key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        key = rotate(self.k_proj(x).unflatten(-1, (-1, self.size)), positions, self.theta)
        return key, self.v_proj(x).unflatten(-1, (-1, self.size))


class Layer(nn.Module):
    """The decoder layer: attention over [norm(embedding); norm(state)], then a gated MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.hidden_norm = Norm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = Mlp(shape.hidden, shape.intermediate, shape.activation)

    def wide(self, embedding: Tensor, state: Tensor) -> Float[Tensor, "*any DD"]:
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(state)], dim=-1)

    def finish(self, state: Tensor, attended: Tensor) -> Float[Tensor, "N D"]:
        """Residual around the attention (the un-normed state), then around the MLP."""
        state = state + self.self_attn.o_proj(attended.flatten(-2))
        out: Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return out


@dataclass(frozen=True)
class Memory:
    """What the decoder carries: lasting keys of true rows, and the branch grown in this round."""

    keys: Float[Tensor, "L A C"]
    values: Float[Tensor, "L A C"]
    hidden: Float[Tensor, "N D"]  # un-normed output of the newest rows
    position: int  # rotary position of the newest true row
    seen: Bool[Tensor, "N M"]  # which nodes of the branch each newest row descends from


class Eagle3(Drafter):
    """The drafter: fusion, one decoder layer, norm and its own head."""

    tap_scale: Float[Tensor, " K"]

    def __init__(
        self, cfg: Config, shape: Shape, vocab: DraftVocab, taps: tuple[int, ...], embed: Embed
    ) -> None:
        super().__init__()
        self.cfg, self.shape, self.taps, self.embed = cfg, shape, taps, embed
        self.fc = nn.Linear(len(taps) * shape.hidden, shape.hidden, bias=False)
        self.register_buffer("tap_scale", torch.ones(len(taps)))
        self.midlayer = Layer(shape)
        self.norm = Norm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, len(vocab), bias=False)
        self.vocab = vocab
        for linear in (m for m in self.modules() if isinstance(m, nn.Linear)):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    @torch.no_grad()
    def initialise(self, target: Target, traces: Iterable[Trace]) -> str:
        """Taps of unit size; then, unless `init=random`, the best linear drafter there is.

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
            if moments.count >= FIT_ROWS * len(moments.xx):
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
        self.tap_scale.copy_(1 / sizes.clamp(min=1e-6))

    def _wide(self, trace: Trace) -> Float[Tensor, "BT DD"]:
        state = self.fuse(trace.taps.flatten(0, 1).to(self.fc.weight.dtype))
        return self.midlayer.wide(self.embed(trace.ahead(1).flatten()).to(state.dtype), state)

    def _known(self, target: Target, trace: Trace) -> tuple[Tensor, Tensor]:
        """Of every row that counts at depth 1: what is known there, and the state to guess."""
        rows = torch.nonzero(trace.counts(1).flatten()).flatten()
        taps = self._scaled(trace.taps.flatten(0, 1)[rows].float())
        embedded = self.embed(trace.next_ids.flatten()[rows]).float()
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
        self.midlayer.mlp.down_proj.weight.zero_()

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
        chosen = torch.nonzero(rows).flatten()[:SHARP_ROWS]
        teacher = target.logits(trace.last.flatten(0, 1)[chosen + 1])[:, self.vocab.kept]
        logits = self.head(guess.hidden.flatten(0, 1)[chosen])
        self.norm.weight.mul_(fit.sharpness(logits.float(), teacher.float().softmax(-1)))

    def head(self, hidden: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows Vd"]:
        out: Tensor = self.lm_head(self.norm(hidden))
        return out

    def fuse(self, taps: Float[Tensor, "*rows KH"]) -> Float[Tensor, "*rows D"]:
        out: Tensor = self.fc(self._scaled(taps))
        return out

    def _scaled(self, taps: Float[Tensor, "*rows KH"]) -> Float[Tensor, "*rows KH"]:
        each = taps.unflatten(-1, (len(self.taps), -1))
        scaled: Tensor = each * self.tap_scale[:, None].to(taps.dtype)
        return scaled.flatten(-2)

    def unroll(self, trace: Trace) -> Iterator[Guess]:
        layer, attn = self.midlayer, self.midlayer.self_attn
        attend = branch_attention if self.cfg.attention == "fast" else dense_attention
        depths = range(1, self.cfg.depths + 1)
        wanted = torch.stack([trace.counts(d) for d in depths]).any(0)
        plan = asking(wanted, trace.document, self.shape.heads)
        rows, positions = plan.rows, trace.positions.flatten()
        state = self.fuse(trace.taps.flatten(0, 1).to(self.fc.weight.dtype))
        wide = layer.wide(self.embed(trace.ahead(1).flatten()).to(state.dtype), state)
        key, value = attn.key_value(wide, positions)
        state, wide = state[rows], wide[rows]
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        for depth in depths:
            at = positions[rows] + depth - 1
            if depth > 1:
                embedded = self.embed(trace.ahead(depth).flatten()[rows]).to(state.dtype)
                wide = layer.wide(embedded, state)
                own_key, own_value = attn.key_value(wide, at)
                own_keys.append(own_key)
                own_values.append(own_value)
            attended = attend(attn.query(wide, at), key, value, own_keys, own_values, plan)
            state = layer.finish(state, attended)
            yield Guess(depth, _spread(state, plan, wanted))

    def absorb(self, state: Memory | None, trace: Trace) -> Memory:
        layer, attn = self.midlayer, self.midlayer.self_attn
        fused = self.fuse(trace.taps[0].to(self.fc.weight.dtype))
        wide = layer.wide(self.embed(trace.next_ids[0]).to(fused.dtype), fused)
        positions = trace.positions[0]
        keys, values = attn.key_value(wide, positions)
        if state is not None:
            keys, values = torch.cat([state.keys, keys]), torch.cat([state.values, values])
        attended = _attend(attn.query(wide[-1:], positions[-1:]), keys, values, None)
        hidden = layer.finish(fused[-1:], attended)
        nobody = torch.zeros(1, 0, dtype=torch.bool, device=hidden.device)
        return Memory(keys, values, hidden, int(positions[-1]), nobody)

    def step(
        self, state: Memory, depth: int, ids: Int[Tensor, " N"], parents: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N Vd"], Memory]:
        if depth == 1:
            return self.head(state.hidden), state
        layer, attn = self.midlayer, self.midlayer.self_attn
        hidden = state.hidden[parents]
        wide = layer.wide(self.embed(ids).to(hidden.dtype), hidden)
        at = torch.full_like(ids, state.position + depth - 1)
        key, value = attn.key_value(wide, at)
        keys, values = torch.cat([state.keys, key]), torch.cat([state.values, value])
        myself = torch.eye(len(ids), dtype=torch.bool, device=ids.device)
        seen = torch.cat([state.seen[parents], myself], dim=1)
        hidden = layer.finish(hidden, _attend(attn.query(wide, at), keys, values, seen))
        return self.head(hidden), replace(state, keys=keys, values=values, hidden=hidden, seen=seen)


def _attend(
    q: Float[Tensor, "N AG C"],
    keys: Float[Tensor, "L A C"],
    values: Float[Tensor, "L A C"],
    seen: Bool[Tensor, "N M"] | None,
) -> Float[Tensor, "N AG C"]:
    """Attention over all lasting keys and, of the last M keys, those that `seen` allows."""
    mask = None
    if seen is not None:
        mask = F.pad(seen, (len(keys) - seen.shape[1], 0), value=True)
    q, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def _spread(
    state: Float[Tensor, "N D"], plan: Asking, wanted: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T D"]:
    """Back to [B, T, D]; rows that no depth supervises stay zero."""
    out = state.new_zeros(wanted.numel(), state.shape[-1])
    return out.index_copy(0, plan.rows, state).view(*wanted.shape, -1)
