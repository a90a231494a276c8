"""EAGLE-3: one decoder layer over fused target features, trained on its own states.

Source: Li et al. 2025, "EAGLE-3", arXiv:2503.01840, and its reference code. At row t, depth 1, the
layer reads the embedding of x_{t+1} and g_t = fc(low, middle, high features of row t); at deeper
depths it reads its own un-normed output ("training-time test", `self_feeding.py`). Gradients
flow through all depths. Settings select later variants: EAGLE-3.1 (arXiv:2605.09992) norms every
tap (`fc_norm=each`) and feeds back the normed state (`feedback=normed`); speculators norms all taps
of a row together (`fc_norm=joint`) and adds to the normed state (`residual=normed`); more layers,
query and key norms, another head size.

Differs (docs/drafters/eagle3.md): the weight of a row follows the *predicted* token; taps are
divided by their typical size, a power of two, so that exporting merges it into `fc` exactly
(`tap_scale`), or into the joint norm's weight; training starts from the best linear drafter
(`models/drafting/closed_form_init.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from outrider.conf.automatic import adjust
from outrider.conf.fields import COUNT, DEPTHS, option
from outrider.conf.schema import DrafterConfig
from outrider.models.drafting import closed_form_init
from outrider.models.drafting.layers import DecoderLayer, Norm, init_linear_weights
from outrider.models.drafting.self_feeding import SelfFeeding
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import ModelShape, TargetEnds, Trace
from outrider.models.target.target import Target

BIAS_ROWS = 8192  # rows from which the constant direction of the layer's input is estimated
SELF_SCORE = 10.0  # initial attention score of a row with itself; random scores are about 1
MIN_ROTATION = 0.2  # radians per row: faster rotary pairs distinguish neighbours
KEY_SCALE = 0.3  # on the random part of the initial keys


def eagle3_taps(layers: int) -> tuple[int, int, int]:
    """Return the reference's taps: outputs of layers 1, n//2-1, n-4 (inputs of 2, n//2, n-3)."""
    return (1, layers // 2 - 1, layers - 4)


def default_taps(layers: int) -> tuple[int, ...]:
    """Return `eagle3_taps`, or the low, middle and high layers that exist in a shallower target.

    n = 2 -> (0, 1).
    """
    taps = eagle3_taps(layers)
    if 0 <= taps[0] < taps[1] < taps[2]:
        return taps
    return tuple(sorted({0, (layers - 1) // 2, max(layers - 2, min(1, layers - 1))}))


def spread_taps(layers: int) -> tuple[int, ...]:
    """Return `default_taps` with at most an eighth of the layers above the high one.

    n = 8 -> (1, 3, 6) rather than (1, 3, 4); from 24 layers on they are `eagle3_taps`.
    """
    taps = default_taps(layers)
    high = min(layers - 2, layers - 1 - round(layers / 8))  # engines do not expose the last one
    return (*taps[:-1], max(high, taps[-1])) if len(taps) == 3 else taps


@dataclass(frozen=True)
class Config(DrafterConfig):
    """Settings of an EAGLE-3 drafter; conf/drafter/eagle3.yaml describes each."""

    name: str = "eagle3"
    draft_vocab_size: int | None = option(8192, "", COUNT)
    taps: tuple[int, ...] | str | None = None
    layers: int = option(1, "", DEPTHS)
    head_dim: int | None = option(None, "", "[2, 65536]")
    window: int | None = option(None, "", COUNT)
    qk_norm: bool = False
    activation: str = "silu"
    fc_norm: str | bool = "none"
    feedback: str = "raw"
    residual: str = "raw"
    init: str = "linear"
    attention: str = "fast"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.fc_norm, bool):  # of earlier versions
            object.__setattr__(self, "fc_norm", "each" if self.fc_norm else "none")
        self.require_choice("fc_norm", "none", "each", "joint")
        if isinstance(self.taps, str):
            self.require_choice("taps", "spread")
        elif self.taps is not None and not 0 < len(self.taps) == len(set(self.taps)):
            raise ValueError(f"taps = {list(self.taps)}: needs one or more layers, each once")
        if self.head_dim is not None and self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim}: rotary pairs need an even size")
        self.require_choice("activation", "silu", "gelu")
        self.require_choice("feedback", "raw", "normed")
        self.require_choice("residual", "raw", "normed")
        self.require_choice("init", "linear", "random")
        if self.residual == "normed" and self.init == "linear":
            adjust(self, "init", "random")  # the regression assumes the un-normed state
        self.require_choice("attention", "fast", "reference")

    def tap_layers(self, layers: int) -> tuple[int, ...]:
        """Return the layers whose outputs are read, of a target with this many."""
        if isinstance(self.taps, str):
            return spread_taps(layers)
        return default_taps(layers) if self.taps is None else self.taps


class InputLayer(DecoderLayer):
    """First layer: reads [norm(embedding); norm(state)]; the un-normed state is the residual."""

    def __init__(self, shape: ModelShape, qk_norm: bool) -> None:
        super().__init__(shape, width_factor=2, qk_norm=qk_norm)
        self.hidden_norm = Norm(shape.hidden, shape.eps)

    def concat_inputs(
        self, embedding: Float[Tensor, "N H"], state: Float[Tensor, "N D"]
    ) -> Float[Tensor, "N DD"]:
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(state)], dim=-1)


class Eagle3(SelfFeeding):
    """The drafter: fusion, decoder layers, norm and its own head."""

    tap_scale: Float[Tensor, " K"]

    def __init__(
        self, cfg: Config, target: TargetEnds, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.cfg, self.target, self.vocab, self.taps = cfg, target, vocab, taps
        self.depths, self.attention, self.window = cfg.depths, cfg.attention, cfg.window
        shape = target.shape()
        head_dim = cfg.head_dim or shape.head_dim
        self.shape = shape._replace(head_dim=head_dim, activation=cfg.activation)
        hidden, eps = shape.hidden, shape.eps
        self.fc = nn.Linear(len(taps) * hidden, hidden, bias=False)
        self.register_buffer("tap_scale", torch.ones(len(taps)))
        self.fc_norm = nn.ModuleList(Norm(hidden, eps) for _ in taps if cfg.fc_norm == "each")
        joint = cfg.fc_norm == "joint"
        self.input_norm = Norm(len(taps) * hidden, eps) if joint else nn.Identity()
        self.midlayer = InputLayer(self.shape, cfg.qk_norm)
        self.layers = nn.ModuleList(
            DecoderLayer(self.shape, qk_norm=cfg.qk_norm) for _ in range(cfg.layers - 1)
        )
        self.norm = Norm(hidden, eps)
        self.lm_head = nn.Linear(hidden, len(vocab), bias=False)
        init_linear_weights(self)

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        return [self.midlayer, *self.layers]

    def initial_state(self, trace: Trace) -> Float[Tensor, "BT D"]:
        taps = trace.taps.flatten(0, 1).to(self.fc.weight.dtype)
        out: Tensor = self.fc(self._normalise_taps(taps))
        return out

    def layer_inputs(
        self, embedding: Float[Tensor, "N H"], state: Float[Tensor, "N D"]
    ) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N DD"]]:
        read = self.midlayer.concat_inputs(embedding, state)
        return (state if self.cfg.residual == "raw" else read[:, embedding.shape[1] :]), read

    def next_state(self, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        return hidden if self.cfg.feedback == "raw" else self.norm(hidden)

    def head(self, hidden: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows Vd"]:
        out: Tensor = self.lm_head(self.norm(hidden))
        return out

    def _normalise_taps(self, taps: Float[Tensor, "N KH"]) -> Float[Tensor, "N KH"]:
        """Norm each tap or all of them (`fc_norm`), or scale each by its typical size."""
        if self.cfg.fc_norm == "joint":
            out: Tensor = self.input_norm(taps)
            return out
        each = taps.unflatten(-1, (len(self.taps), -1))
        if self.cfg.fc_norm == "each":
            pairs = zip(self.fc_norm, each.unbind(1), strict=True)
            return torch.cat([norm(tap) for norm, tap in pairs], -1)
        scaled: Tensor = each * self.tap_scale[:, None].to(taps.dtype)
        return scaled.flatten(-2)

    # ---- initial weights ----

    @torch.no_grad()
    def initialise(self, target: Target, traces: Iterable[Trace]) -> str:
        """Scale taps to about unit size; then, unless `init=random`, install a linear fit.

        The target's next state is regressed on the taps (`fc`) and on the embedding of x_{t+1}: the
        first query head of each group attends to its own row and adds it. Every other output
        projection starts at zero.
        """
        traces = iter(traces)
        first = next(traces)
        self._fit_tap_scale(first)
        if self.cfg.init == "random":
            return "random weights, taps scaled to unit size"
        moments, samples = closed_form_init.RegressionMoments(), list[Trace]()
        for trace in chain([first], traces):
            if moments.count < BIAS_ROWS and trace.supervised_mask(1).any():
                samples.append(trace)
            moments.add(*self._regression_pairs(trace))
            if moments.count >= closed_form_init.ROWS_PER_FEATURE * len(moments.xx):
                break
        if not samples:
            return "random weights, taps scaled to unit size: no answer to fit to"
        self._install_fit(moments)
        inputs = torch.cat([self._attention_inputs(trace) for trace in samples])
        self._attend_to_self(closed_form_init.bias_direction(inputs.float()))
        self._init_head(target, moments.output_std, samples[0])
        return f"linear fit to {moments.count:,} states of {target.name}, and its head"

    def _fit_tap_scale(self, trace: Trace) -> None:
        """Bring the inputs of `fc` to about unit size, each tap by a power of two.

        A joint norm divides a row by the size of all its taps, which leaves small taps small: its
        weight holds the scales. Norms of each tap need none.
        """
        taps = trace.taps[trace.document >= 0].float()
        if self.cfg.fc_norm == "joint":
            taps = F.rms_norm(taps, taps.shape[-1:], eps=self.shape.eps)
        scale = closed_form_init.tap_scale(taps, len(self.taps))
        if self.cfg.fc_norm == "joint":
            weight = self.input_norm.get_parameter("weight")
            weight.copy_(scale.repeat_interleave(self.shape.hidden))
        elif self.cfg.fc_norm == "none":
            self.tap_scale.copy_(scale)

    def _attention_inputs(self, trace: Trace) -> Float[Tensor, "N DD"]:
        """Return the first layer's attention inputs at the rows supervised at depth 1."""
        x = self._embed(trace.tokens_ahead(1).flatten(), self.initial_state(trace))[1]
        return x[trace.supervised_rows(1)]

    def _regression_pairs(self, trace: Trace) -> tuple[Float[Tensor, "N F"], Float[Tensor, "N H"]]:
        """Return inputs and the target's next state, at the rows supervised at depth 1."""
        rows = trace.supervised_rows(1)
        taps = self._normalise_taps(trace.taps.flatten(0, 1)[rows].float())
        embedded = self.target.embed(trace.next_ids.flatten()[rows]).float()
        inputs = torch.cat([taps, self.midlayer.input_layernorm(embedded)], dim=-1)
        return inputs, trace.last.flatten(0, 1)[rows + 1].float()

    def _install_fit(self, moments: closed_form_init.RegressionMoments) -> None:
        """Copy the regression: taps to `fc`, the embedding to value and output projections."""
        attn, hidden = self.midlayer.self_attn, self.shape.hidden
        inputs, outputs = self.fc.in_features, self._self_heads()
        weight = moments.ridge()
        self.fc.weight.copy_(weight[:, :inputs])
        embedding_covariance = moments.covariance[inputs:, inputs:]
        out, into = closed_form_init.low_rank(
            weight[:, inputs:], embedding_covariance, len(outputs) * attn.head_dim
        )
        attn.v_proj.weight[: len(into), :hidden] = into
        attn.v_proj.weight[: len(into), hidden:] = 0
        attn.o_proj.weight.zero_()
        for i, head in enumerate(outputs):
            columns = slice(head * attn.head_dim, (head + 1) * attn.head_dim)
            part = out[:, i * attn.head_dim : (i + 1) * attn.head_dim]
            attn.o_proj.weight[:, columns][:, : part.shape[1]] = part
        for block in self.decoder_layers:
            block.mlp.down_proj.weight.zero_()
        for block in self.decoder_layers[1:]:
            block.self_attn.o_proj.weight.zero_()

    def _self_heads(self) -> list[int]:
        """Return the query heads that first attend to their own row: one per key head, or half."""
        keys, group = self.shape.kv_heads, self.shape.heads // self.shape.kv_heads
        return [i * group for i in range(keys if group > 1 else max(1, keys // 2))]

    def _attend_to_self(self, one: Float[Tensor, " DD"]) -> None:
        """Set queries and keys equal on the fast rotary pairs, so that scores fall with distance.

        Args:
            one: direction of the layer's input on which every row has a value of about 1.
        """
        attn, size = self.midlayer.self_attn, self.shape.head_dim
        half = size // 2
        rotations = self.shape.rope_theta ** -(torch.arange(half) / half)
        fast = int((rotations >= MIN_ROTATION).sum())
        peak = one.new_zeros(size)
        peak[:fast] = (SELF_SCORE * size**0.5 / fast) ** 0.5
        for head in range(self.shape.kv_heads):
            rows = slice(head * size, (head + 1) * size)
            attn.k_proj.weight[rows] = KEY_SCALE * attn.k_proj.weight[rows] + torch.outer(peak, one)
        for head in self._self_heads():
            attn.q_proj.weight[head * size : (head + 1) * size] = torch.outer(peak, one)

    def _init_head(self, target: Target, output_std: Float[Tensor, " H"], trace: Trace) -> None:
        """Copy the target's head rows, scaled to the best logit temperature.

        The regression's outputs have unit size. Their true sizes go into the head and not into the
        norm, which `feedback=normed` applies once more at every depth: a norm of the target's sizes
        (on SmolLM2 0.5 to 10) would make the first loss of depth 4 there 40.
        """
        rows = trace.supervised_rows(1)[: closed_form_init.SCALE_FIT_ROWS]
        guess = next(self.unroll(trace))
        self.norm.weight.fill_(1.0)
        self.lm_head.weight.copy_(target.head_weight[self.vocab.target_ids] * output_std)
        teacher = target.logits(trace.last.flatten(0, 1)[rows + 1])[:, self.vocab.target_ids]
        logits = self.head(guess.states(rows))
        scale = closed_form_init.optimal_logit_scale(logits.float(), teacher.float().softmax(-1))
        self.lm_head.weight.mul_(scale)
