"""Multi-token prediction: modules that read the target's last state and the tokens behind it.

Source: DeepSeek-V3, arXiv:2412.19437, section 2.2 (`mode=chained`): module k continues module k-1
at the same row and adds token x_{t+k}, so D modules guess D tokens. FastMTP, arXiv:2509.18362
(`mode=recurrent`): one module runs on its own output, as deep as one likes. Embedding and head are
the target's own, frozen. `models/mtp_modules.py` holds what a module computes and how both modes run.

Differs: the target is frozen and the loss is the drafter's alone (DeepSeek-V3 adds it to the
pre-training loss); decoding keeps lasting keys of decided tokens only, so nothing is cropped or
computed again; in the recurrent mode rotary positions grow with the depth and a row sees its own
branch alone, in training as in decoding (FastMTP's code trains with other keys than it decodes
with); training can start from a regression or from the modules in the target's checkpoint.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from outrider.conf.errors import ConfigError, RunError
from outrider.models import closed_form_init as fit
from outrider.models.drafter import BatchDrafter, Guess, Lender, Recipe, State, Trace, borrowed_head
from outrider.models.formats import mtp_target as shipped
from outrider.models.layers import random_weights
from outrider.models.mtp_modules import Chain, Loop, Stage
from outrider.models.target import Target
from outrider.models.vocab import DraftVocab

HELD = 2**28  # numbers of the target's states that are held for the regressions, at most


@dataclass(frozen=True)
class Config(Recipe):
    """Settings of an MTP drafter; conf/drafter/mtp.yaml says what each means."""

    name: str = "mtp"
    depths: int = 3
    depth_weights: str = "mean:0.3"
    mode: str = "chained"
    order: str = "embedding_first"
    feed: str = "raw"
    qk_norm: bool = False
    init: str = "linear"
    warm_start: str | None = None
    attention: str = "fast"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choose("mode", "chained", "recurrent")
        self.choose("order", "embedding_first", "state_first")
        self.choose("feed", "raw", "normed")
        self.choose("init", "linear", "random", "target")
        self.choose("attention", "fast", "reference")
        if (self.init == "target") != (self.warm_start is not None):
            raise ValueError(
                f"warm_start = {self.warm_start}: the target's folder, with init=target alone"
            )


class Mtp(BatchDrafter):
    """The modules, and the mode that runs them. States are normed: the target's head reads them."""

    in_target_space = True
    reads = "last"

    def __init__(
        self, cfg: Config, target: Lender, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.cfg, self.target, self.vocab, self.taps = cfg, target, vocab, taps
        chained = cfg.mode == "chained"
        stages = [
            Stage(target.shape(), cfg.order, cfg.feed, cfg.qk_norm)
            for _ in range(cfg.depths if chained else 1)
        ]
        self.stages = nn.ModuleList(stages)
        random_weights(self)
        way: Chain | Loop
        if chained:
            way, self.reach = Chain(stages, target, vocab, cfg.attention), cfg.depths
        else:
            way = Loop(stages[0], target, vocab, cfg.depths, cfg.attention)
        self._way = (way,)  # in a tuple: its modules are those above and have no second name

    def head(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows Vd"]:
        return borrowed_head(self.target, self.vocab, hidden)

    def unroll(self, trace: Trace) -> Iterator[Guess]:
        (way,) = self._way
        way.recompute = self.recompute
        if isinstance(way, Chain):
            yield from way.unroll(trace)
        else:
            for depth, hidden in way.unroll(trace):
                yield Guess(depth, way.stage.norm(hidden))

    def absorb_all(self, states: Sequence[State | None], traces: Sequence[Trace]) -> list[State]:
        return self._way[0].absorb_all(states, traces)

    def step_all(
        self,
        states: Sequence[State],
        depth: int,
        ids: Int[Tensor, "B N"],
        parents: Int[Tensor, "B N"],
    ) -> tuple[Float[Tensor, "B N Vd"], list[State]]:
        return self._way[0].step_all(states, depth, ids, parents)

    def kept(self, depths: int) -> float:
        stages = [stage for stage in self.stages if isinstance(stage, Stage)]
        each = sum(stage.block.kept + 7 * stage.eh_proj.out_features for stage in stages)
        return each if self.cfg.mode == "chained" else depths * each

    def passes(self, depths: int) -> int:
        return 1 if self.cfg.mode == "chained" else depths

    # ---- first weights ----

    @torch.no_grad()
    def initialise(self, target: Target, traces: Iterable[Trace]) -> str:
        """The modules the target came with, a regression per module, or random weights.

        The regression finds the target's state that a module should meet from what the module is
        given, its predecessor being fitted already; the decoder layers add nothing yet.
        """
        if self.cfg.init == "target":
            return self._adopt(target)
        some = self._some(traces) if self.cfg.init == "linear" else []
        if not some:
            silent = ": no answer to fit to" if self.cfg.init == "linear" else ""
            return f"random weights{silent}"
        states = [trace.last.flatten(0, 1).float() for trace in some]
        rows = sum(int(trace.counts(1).sum()) for trace in some)
        for depth, stage in enumerate(self.stages, start=1):
            assert isinstance(stage, Stage), "stages are stages"
            states = self._fit(stage, depth, target, some, states)
        return f"{len(self.stages)} linear fit(s) to {rows:,} states of {target.name}"

    def _some(self, traces: Iterable[Trace]) -> list[Trace]:
        """Enough text for every regression: rows that count at the deepest one."""
        some, rows, held = list[Trace](), 0, 0
        for trace in traces:
            if count := int(trace.counts(len(self.stages)).sum()):
                some.append(trace)
            rows, held = rows + count, held + trace.last.numel()
            if rows >= 2 * fit.ROWS * trace.last.shape[-1] or held >= HELD:
                break
        return some

    def _fit(
        self,
        stage: Stage,
        depth: int,
        target: Target,
        some: list[Trace],
        states: list[Float[Tensor, "_ H"]],
    ) -> list[Float[Tensor, "_ H"]]:
        """Place one module; returns what it feeds to the next."""
        moments = fit.Moments()
        for trace, state in zip(some, states, strict=True):
            rows = torch.nonzero(trace.counts(depth).flatten()).flatten()
            known = self._known(stage, depth, trace, state)[rows]
            moments.add(known, trace.last.flatten(0, 1)[rows + depth].float())
        stage.eh_proj.weight.copy_(moments.ridge())
        stage.block.self_attn.o_proj.weight.zero_()
        stage.block.mlp.down_proj.weight.zero_()
        stage.norm.weight.copy_(moments.spread)
        outputs = [
            stage.eh_proj(self._known(stage, depth, trace, state))
            for trace, state in zip(some, states, strict=True)
        ]
        self._sharpen(stage, depth, target, some[0], outputs[0])
        return [stage.feed(out) for out in outputs]

    def _known(
        self, stage: Stage, depth: int, trace: Trace, state: Float[Tensor, "BT H"]
    ) -> Float[Tensor, "BT HH"]:
        return stage.pair(self.target.embed(trace.ahead(depth).flatten()).float(), state)

    def _sharpen(
        self, stage: Stage, depth: int, target: Target, trace: Trace, out: Float[Tensor, "BT H"]
    ) -> None:
        """The norm undoes the outputs' unit, as sharp as pays."""
        rows = torch.nonzero(trace.counts(depth).flatten()).flatten()[: fit.SHARP_ROWS]
        last = trace.last.flatten(0, 1)
        teacher = target.logits(last[rows + depth])[:, self.vocab.kept]
        logits = self.head(stage.norm(out[rows]).to(last.dtype))
        stage.norm.weight.mul_(fit.sharpness(logits.float(), teacher.float().softmax(-1)))

    def _adopt(self, target: Target) -> str:
        """Modules of the target's own checkpoint; those it lacks begin as copies of its last."""
        found = shipped.read(Path(self.cfg.warm_start or "").expanduser(), target.depth)
        for name in ("order", "qk_norm"):
            mine, theirs = getattr(self.cfg, name), getattr(found, name)
            if mine != theirs:
                why = f"The modules in {self.cfg.warm_start} were trained the other way."
                raise ConfigError(f"drafter.{name}", mine, why, f"Use drafter.{name}={theirs}.")
        last = len(found.modules) - 1
        try:
            for k, stage in enumerate(self.stages):
                stage.load_state_dict(found.modules[min(k, last)])
        except RuntimeError as error:
            raise RunError(f"{self.cfg.warm_start}: {error}", shipped.FIX) from None
        used = min(len(self.stages), last + 1)
        return f"{used} of {last + 1} MTP module(s) in {self.cfg.warm_start}"
