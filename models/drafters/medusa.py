"""Medusa: residual heads that guess K tokens at once from one state of the target.

Source: Cai et al. 2024, "Medusa", arXiv:2401.10774, and its reference code. Head d at row t reads
the target's last state there, h_t, and nothing else; the paper's head d is depth d:

    depth   state            predicts
    1       head_1(h_t)      x_{t+2}
    2       head_2(h_t)      x_{t+3}       whatever x_{t+2} is

So there is no draft cache, all depths are drafted in one pass, and in a tree the children of every
node of a level are the same. Medusa-1 trains the heads. Medusa-2 (`adapter_rank` > 0) trains LoRA
pairs inside the target with them and so CHANGES THE TARGET: decoding is exact for the changed one.

Differs: own heads start from a regression (`init=copy`: from the target's matrix, as in the paper,
so that a fresh head repeats the target exactly, for its biases start at zero too); the draft
vocabulary is reduced, or the target's matrix shared (`own_heads=false`); several `res_layers` have
weights of their own (the reference repeats one module); the loss is under the target's distribution
(the paper: the text's tokens, `loss=[ce]`); Medusa-2 trains both parts from the start, and the
target's own head stays as it is.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from outrider.conf.errors import ConfigError
from outrider.models import closed_form_init as fit
from outrider.models.drafter import (
    BatchDrafter,
    Guess,
    Lender,
    Recipe,
    State,
    Trace,
    borrowed_head,
)
from outrider.models.lora import Adapters
from outrider.models.target import Target, packed
from outrider.models.vocab import DraftVocab


@dataclass(frozen=True)
class Config(Recipe):
    """Settings of Medusa heads; conf/drafter/medusa.yaml says what each means."""

    name: str = "medusa"
    draft_vocab_size: int | None = 8192
    own_heads: bool = True
    res_layers: int = 1
    adapter_rank: int = 0
    adapter_alpha: float = 16.0
    adapter_rate: float = 0.25
    keep: float = 1.0
    init: str = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choose("init", "linear", "copy")
        if self.res_layers < 1:
            raise ValueError(f"res_layers = {self.res_layers}: needs at least one")
        for name in ("adapter_rank", "keep"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must not be negative")
        for name in ("adapter_alpha", "adapter_rate"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be positive")
        if self.adapter_rank and self.draft_vocab_size is not None:
            raise ValueError(
                f"draft_vocab_size = {self.draft_vocab_size}: adapters change the chances of every "
                "token, and the target is kept what it is over the draft vocabulary only, so use "
                "null with adapter_rank"
            )


class Head(nn.Module):
    """x + silu(Wx + b), layer after layer; W = 0 and b = 0 at first, so it repeats its input."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]:
        for layer in self.layers:
            x = x + F.silu(_apply(layer, x)).to(x.dtype)
        return x


class Medusa(BatchDrafter):
    """The drafter: a head per depth, with or without a vocabulary matrix, and perhaps adapters."""

    reads = "guesses"

    def __init__(
        self, cfg: Config, target: Lender, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.cfg, self.target, self.vocab, self.taps = cfg, target, vocab, taps
        self.reach, self.keep = cfg.depths, cfg.keep
        hidden, owned = target.shape().hidden, cfg.depths if cfg.own_heads else 0
        self.blocks = nn.ModuleList(Head(hidden, cfg.res_layers) for _ in range(cfg.depths))
        self.lm_heads = nn.ModuleList(
            nn.Linear(hidden, len(vocab), bias=False) for _ in range(owned)
        )
        self.adapters = _adapters(cfg, target) if cfg.adapter_rank else None

    @torch.no_grad()
    def initialise(self, target: Target, traces: Iterable[Trace]) -> str:
        """The target's own guess at every depth; or, for own heads, the best linear one.

        A regression of the target's state d rows on, on the state here, in front of its matrix.
        """
        for head in self.lm_heads:
            head.weight.copy_(target.head_weight[self.vocab.kept])  # type: ignore[operator]
        moments = [fit.Moments() for _ in self.lm_heads] if self.cfg.init == "linear" else []
        some = list[Trace]()
        for trace in traces if moments else ():
            for depth, part in enumerate(moments, start=1):
                part.add(*_ahead(trace, depth))
            some = some or [trace] * bool(trace.counts(len(moments)).any())
            if moments[-1].count >= fit.ROWS * trace.last.shape[-1]:
                break
        if not some or not moments[-1].count:
            return f"every head repeats {target.name}"
        for depth, (head, part) in enumerate(zip(self.lm_heads, moments, strict=True), start=1):
            head.weight.copy_(head.weight @ (part.ridge() * part.spread[:, None]))  # type: ignore[operator]
            head.weight.mul_(self._sharpness(target, some[0], depth))  # type: ignore[operator]
        return f"linear fit to {moments[0].count:,} states of {target.name}, in front of its head"

    def _sharpness(self, target: Target, trace: Trace, depth: int) -> float:
        now, then = (part[: fit.SHARP_ROWS] for part in _ahead(trace, depth))
        teacher = target.logits(then.to(target.dtype))[:, self.vocab.kept]
        logits = self._own(now, depth)
        return fit.sharpness(logits.float(), teacher.float().softmax(-1))

    def rates(self) -> dict[str, float]:
        return {} if self.adapters is None else {"adapters.": self.cfg.adapter_rate}

    def passes(self, depths: int) -> int:
        return 1

    def kept(self, depths: int) -> float:
        return float((1 + depths * self.cfg.res_layers) * self.target.shape().hidden)

    def change(self, target: Lender) -> str | None:
        if self.adapters is None:
            return None
        assert isinstance(target, Target), "adapters stand in the whole target"
        self.adapters.stay(target.layers)
        return f"the target is changed by LoRA adapters of rank {self.cfg.adapter_rank} (Medusa-2)"

    # ---- heads ----

    def head(self, hidden: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows Vd"]:
        assert not self.cfg.own_heads, "each depth has a vocabulary matrix of its own: ask `heads`"
        return borrowed_head(self.target, self.vocab, hidden)

    def heads(
        self, hidden: Sequence[Float[Tensor, "_ D"]], depths: Sequence[int]
    ) -> Float[Tensor, "N Vd"]:
        if not self.cfg.own_heads:
            return self.head(torch.cat(list(hidden)))
        return torch.cat([self._own(x, depth) for x, depth in zip(hidden, depths, strict=True)])

    def _own(self, hidden: Float[Tensor, "N D"], depth: int) -> Float[Tensor, "N Vd"]:
        """By the matrix of this depth; at depth 0 the changed target speaks, by its own."""
        if depth == 0:
            return borrowed_head(self.target, self.vocab, hidden)
        return _apply(self.lm_heads[depth - 1], hidden)

    # ---- training ----

    def unroll(self, trace: Trace) -> Iterator[Guess]:
        last = trace.last
        if self.adapters is not None:
            last = self._adapted(self.adapters, trace)
            yield Guess(0, last)
        for depth, block in enumerate(self.blocks, start=1):
            yield Guess(depth, block(last))

    def _adapted(self, adapters: Adapters, trace: Trace) -> Float[Tensor, "B T H"]:
        """What the changed target says of the same rows, with gradient to the adapters."""
        target, grad = self.target, torch.is_grad_enabled()
        assert isinstance(target, Target), "adapters run the whole target, not its ends alone"
        with adapters.active(target.layers):
            return target.forward(
                trace.ids, trace.positions, packed(trace.document), grad=grad
            ).last

    # ---- decoding ----

    def absorb_all(
        self, states: Sequence[State | None], traces: Sequence[Trace]
    ) -> list[Float[Tensor, "1 H"]]:
        """The only memory: where the target stands now."""
        return [trace.last[0, -1:] for trace in traces]

    def step_all(
        self,
        states: Sequence[Float[Tensor, "_ _"]],
        depth: int,
        ids: Int[Tensor, "B N"],
        parents: Int[Tensor, "B N"],
    ) -> tuple[Float[Tensor, "B N Vd"], list[Float[Tensor, "K Vd"]]]:
        """All heads speak at depth 1, a shared matrix being read once; later levels look it up."""
        if depth == 1:
            stands = torch.cat(list(states))
            said = [block(stands) for block in self.blocks]
            spoken = self.heads(said, range(1, len(said) + 1)).unflatten(0, (len(said), -1))
            states = spoken.unbind(1)
        logits = torch.stack([state[depth - 1] for state in states])
        return logits[:, None].expand(-1, ids.shape[1], -1), list(states)


def _ahead(trace: Trace, depth: int) -> tuple[Float[Tensor, "N H"], Float[Tensor, "N H"]]:
    """The target's states where a guess of this depth counts, and those it is judged by."""
    rows = torch.nonzero(trace.counts(depth).flatten()).flatten()
    last = trace.last.flatten(0, 1).float()
    return last[rows], last[rows + depth]


def _apply(linear: nn.Module, x: Float[Tensor, "*rows X"]) -> Float[Tensor, "*rows Y"]:
    """In the dtype of the weights, which need not be the target's."""
    out: Tensor = linear(x.to(next(linear.parameters()).dtype))
    return out


def _adapters(cfg: Config, target: Lender) -> Adapters:
    assert isinstance(target, Target), "adapters stand in the whole target, not in its ends alone"
    if target.elsewhere:
        why = f"{target.name} lies in shares or on other devices, where adapters cannot stand."
        raise ConfigError("drafter.adapter_rank", cfg.adapter_rank, why, "Use Medusa-1: 0.")
    try:
        return Adapters(target.layers, cfg.adapter_rank, cfg.adapter_alpha)
    except ValueError as error:
        raise ConfigError(
            "drafter.adapter_rank", cfg.adapter_rank, f"{target.name}: {error}.",
            "Use drafter.adapter_rank=0 (Medusa-1), or another target.",
        ) from None  # fmt: skip
