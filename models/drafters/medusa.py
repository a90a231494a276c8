"""Medusa: residual heads that draft K tokens at once from one state of the target.

Source: Cai et al. 2024, "Medusa", arXiv:2401.10774, and its reference code. Head d at row t reads
the target's last state there, h_t, and nothing else; the paper's head d is depth d:

    depth   state            predicts
    1       head_1(h_t)      x_{t+2}
    2       head_2(h_t)      x_{t+3}       independent of x_{t+2}

There is no draft cache, all depths are drafted in one pass, and all nodes of a tree level have the
same children. Medusa-1 trains the heads. Medusa-2 (`adapter_rank` > 0) also trains LoRA adapters
inside the target, so it CHANGES THE TARGET: decoding is exact for the changed target.

Differs (docs/drafters/medusa.md): own heads start from a regression; the draft vocabulary may be
reduced; the loss is taken against the target's distribution; Medusa-2 trains heads and adapters
from the start and keeps the target's own head.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from outrider.conf.automatic import adjust
from outrider.conf.errors import ConfigError
from outrider.conf.fields import COUNT, DEPTHS, option
from outrider.conf.schema import DrafterConfig
from outrider.models.cache.attention_masks import document_mask
from outrider.models.drafting import closed_form_init
from outrider.models.drafting.drafter import BatchDrafter, LevelIds, State, target_head_logits
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import Guess, TargetEnds, Trace
from outrider.models.target.lora import Adapters
from outrider.models.target.target import Target


@dataclass(frozen=True)
class Config(DrafterConfig):
    """Settings of Medusa heads; conf/drafter/medusa.yaml describes each."""

    name: str = "medusa"
    draft_vocab_size: int | None = option(8192, "", COUNT)
    own_heads: bool = True
    res_layers: int = option(1, "", DEPTHS)
    adapter_rank: int = option(0, "", "[0, 65536]")
    adapter_alpha: float = option(16.0, "", "(0, inf)")
    adapter_rate: float = option(0.25, "", "(0, inf)")
    keep: float = option(1.0, "", "[0, inf)")
    init: str = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_choice("init", "linear", "copy")
        if self.depths * self.res_layers > 1024:
            raise ValueError(f"res_layers = {self.res_layers}: depths * res_layers exceeds 1024")
        reduced = self.draft_vocab_size is not None
        if self.adapter_rank and reduced and not adjust(self, "draft_vocab_size", None):
            why = "adapters change the probability of every token, and the loss that keeps the "
            why += "target covers the draft vocabulary only, so use null with adapter_rank"
            raise ValueError(f"draft_vocab_size = {self.draft_vocab_size}: {why}")

    @property
    def max_depth(self) -> int:
        return self.depths


class ResidualHead(nn.Module):
    """Layers x + silu(Wx + b); W = 0 and b = 0 at first, so it is the identity."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]:
        for layer in self.layers:
            x = x + F.silu(_linear(layer, x)).to(x.dtype)
        return x


class Medusa(BatchDrafter):
    """One head per depth, optional vocabulary matrices, and optional adapters of the target."""

    required_features = "guesses"

    def __init__(
        self, cfg: Config, target: TargetEnds, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.cfg, self.target, self.vocab, self.taps = cfg, target, vocab, taps
        self.max_depth = cfg.max_depth
        hidden, owned = target.shape().hidden, cfg.depths if cfg.own_heads else 0
        self.blocks = nn.ModuleList(ResidualHead(hidden, cfg.res_layers) for _ in range(cfg.depths))
        self.lm_heads = nn.ModuleList(
            nn.Linear(hidden, len(vocab), bias=False) for _ in range(owned)
        )
        self.adapters = _adapters(cfg, target) if cfg.adapter_rank else None

    @torch.no_grad()
    def initialise(self, target: Target, traces: Iterable[Trace]) -> str:
        """Repeat the target at every depth; or, with own heads, install a linear fit.

        The state d rows ahead is regressed on the present one; the target's matrix follows.
        """
        for head in self.lm_heads:
            head.weight.copy_(target.head_weight[self.vocab.target_ids])  # type: ignore[operator]
        fitted = self.lm_heads if self.cfg.init == "linear" else ()
        moments = [closed_form_init.RegressionMoments() for _ in fitted]
        samples = list[Trace]()
        for trace in traces if moments else ():
            for depth, part in enumerate(moments, start=1):
                part.add(*_regression_pairs(trace, depth))
            samples = samples or [trace] * bool(trace.supervised_mask(len(moments)).any())
            if moments[-1].count >= closed_form_init.ROWS_PER_FEATURE * trace.last.shape[-1]:
                break
        if not samples or not moments[-1].count:
            return f"every head repeats {target.name}"
        for depth, (head, part) in enumerate(zip(self.lm_heads, moments, strict=True), start=1):
            head.weight.copy_(head.weight @ (part.ridge() * part.output_std[:, None]))  # type: ignore[operator]
            head.weight.mul_(self._fit_logit_scale(target, samples[0], depth))  # type: ignore[operator]
        return f"linear fit to {moments[0].count:,} states of {target.name}, in front of its head"

    def _fit_logit_scale(self, target: Target, trace: Trace, depth: int) -> float:
        pairs = _regression_pairs(trace, depth)
        now, ahead = (part[: closed_form_init.SCALE_FIT_ROWS] for part in pairs)
        teacher = target.logits(ahead.to(target.dtype))[:, self.vocab.target_ids]
        logits = self._own_logits(now, depth)
        return closed_form_init.optimal_logit_scale(logits.float(), teacher.float().softmax(-1))

    def lr_factors(self) -> dict[str, float]:
        return {} if self.adapters is None else {"adapters.": self.cfg.adapter_rate}

    def forward_count(self, depths: int) -> int:
        return 1

    def activation_count(self, depths: int) -> float:
        return float((1 + depths * self.cfg.res_layers) * self.target.shape().hidden)

    def describe_target_change(self) -> str | None:
        if self.adapters is None:
            return None
        return f"the target is changed by LoRA adapters of rank {self.cfg.adapter_rank} (Medusa-2)"

    def patch_target(self, target: TargetEnds) -> str | None:
        if self.adapters is not None:
            assert isinstance(target, Target), "adapters need the decoder layers"
            self.adapters.attach(target.layers)
        return self.describe_target_change()

    # ---- heads ----

    def head(self, hidden: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows Vd"]:
        assert not self.cfg.own_heads, "each depth has a separate head: use heads_by_depth"
        return target_head_logits(self.target, self.vocab, hidden)

    def heads_by_depth(
        self, hidden: Sequence[Float[Tensor, "_ D"]], depths: Sequence[int]
    ) -> Float[Tensor, "N Vd"]:
        if not self.cfg.own_heads:
            return self.head(torch.cat(list(hidden)))
        pairs = zip(hidden, depths, strict=True)
        return torch.cat([self._own_logits(x, depth) for x, depth in pairs])

    def _own_logits(self, hidden: Float[Tensor, "N D"], depth: int) -> Float[Tensor, "N Vd"]:
        """Apply the matrix of this depth; depth 0 is the changed target and uses its head."""
        if depth == 0:
            return target_head_logits(self.target, self.vocab, hidden)
        return _linear(self.lm_heads[depth - 1], hidden)

    # ---- training ----

    def unroll(self, trace: Trace) -> Iterator[Guess]:
        last = trace.last
        if self.adapters is not None:
            last = self._adapted_states(self.adapters, trace)
            yield Guess.everywhere(0, last, self.cfg.keep)
        depths = range(1, len(self.blocks) + 1)
        mask = torch.stack([trace.supervised_mask(depth) for depth in depths]).any(0)
        rows, states = torch.nonzero(mask.flatten()).flatten(), last[mask]
        for depth, block in zip(depths, self.blocks, strict=True):
            yield Guess(depth, rows, block(states))

    def _adapted_states(self, adapters: Adapters, trace: Trace) -> Float[Tensor, "B T H"]:
        """Return the changed target's states of the same rows, with gradient to the adapters."""
        target, grad = self.target, torch.is_grad_enabled()
        assert isinstance(target, Target), "adapters need the decoder layers"
        mask = document_mask(trace.document)
        with adapters.active(target.layers):
            return target.forward(trace.ids, trace.positions, mask, grad=grad).last

    # ---- decoding ----

    def absorb_batch(
        self, states: Sequence[State | None], traces: Sequence[Trace]
    ) -> list[Float[Tensor, "1 H"]]:
        """Return the target's last state of the newest row, the only state."""
        return [trace.last[0, -1:] for trace in traces]

    def step_batch(
        self, states: Sequence[Float[Tensor, "_ _"]], depth: int, ids: LevelIds, parents: LevelIds
    ) -> tuple[Float[Tensor, "B N Vd"], list[Float[Tensor, "K Vd"]]]:
        """Compute all depths' logits at depth 1, in one product; deeper levels look them up."""
        if depth == 1:
            last, count = torch.cat(list(states)), len(self.blocks)
            hidden = [block(last) for block in self.blocks]
            by_depth = self.heads_by_depth(hidden, range(1, count + 1))
            states = by_depth.unflatten(0, (count, -1)).unbind(1)
        logits = torch.stack([state[depth - 1] for state in states])
        return logits[:, None].expand(-1, ids.shape[1], -1), list(states)


def _regression_pairs(
    trace: Trace, depth: int
) -> tuple[Float[Tensor, "N H"], Float[Tensor, "N H"]]:
    """Return the target's states at the rows supervised at this depth, and `depth` rows ahead."""
    rows, last = trace.supervised_rows(depth), trace.last.flatten(0, 1).float()
    return last[rows], last[rows + depth]


def _linear(linear: nn.Module, x: Float[Tensor, "*rows X"]) -> Float[Tensor, "*rows Y"]:
    """Apply a linear map in the dtype of its weights, which may differ from the target's."""
    out: Tensor = linear(x.to(next(linear.parameters()).dtype))
    return out


def _adapters(cfg: Config, target: TargetEnds) -> Adapters:
    assert isinstance(target, Target), "adapters need the decoder layers"
    if target.is_remote:
        why = f"{target.name} is sharded or on other devices, which adapters do not support."
        raise ConfigError("drafter.adapter_rank", cfg.adapter_rank, why, "Use Medusa-1: 0.")
    try:
        return Adapters(target.layers, cfg.adapter_rank, cfg.adapter_alpha)
    except ValueError as error:
        why, fix = f"{target.name}: {error}.", "Use adapter_rank=0 (Medusa-1), or another target."
        raise ConfigError("drafter.adapter_rank", cfg.adapter_rank, why, fix) from None
