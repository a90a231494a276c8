"""Multi-token prediction: modules that read the target's last state and the next tokens.

Source: DeepSeek-V3, arXiv:2412.19437, section 2.2 (`mode=chained`): module k continues module k-1
at the same row and adds token x_{t+k}, so D modules draft D tokens. FastMTP, arXiv:2509.18362
(`mode=recurrent`): one module runs on its own output, to any depth. Embedding and head are the
target's own, frozen. `models/drafting/mtp_modules.py` implements the modules and both modes.

Differs: the target is frozen and only the drafter's loss is trained (DeepSeek-V3 adds it to the
pre-training loss); decoding keeps keys of decided tokens only, so nothing is cropped or computed
again; in the recurrent mode rotary positions grow with the depth and a row attends to its own
branch only, in training as in decoding (FastMTP's code trains with other keys than it decodes
with); training can start from a regression or from the modules in the target's checkpoint. As in
engines, a module feeds the next depth its normed output (DeepSeek-V3: before the norm, `feed=raw`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from outrider.conf.automatic import adjust
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.fields import DEPTHS, option
from outrider.conf.quantities import format_count
from outrider.conf.schema import DrafterConfig
from outrider.models.drafting import closed_form_init
from outrider.models.drafting.drafter import BatchDrafter, LevelIds, State, target_head_logits
from outrider.models.drafting.layers import init_linear_weights
from outrider.models.drafting.mtp_modules import MtpChain, MtpLoop, MtpModule
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.formats import mtp_layouts
from outrider.models.interface import Guess, ModelShape, TargetEnds, Trace
from outrider.models.target.target import Target

MAX_STATE_ELEMENTS = 2**28  # of the target states held in memory for the regressions


@dataclass(frozen=True)
class Config(DrafterConfig):
    """Settings of an MTP drafter; conf/drafter/mtp.yaml describes each."""

    name: str = "mtp"
    depths: int = option(3, "", DEPTHS)
    depth_weights: str = "mean:0.3"
    mode: str = "chained"
    order: str = "embedding_first"
    feed: str = "normed"
    qk_norm: bool = False
    init: str = "linear"
    warm_start: str | None = None
    attention: str = "fast"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_choice("mode", "chained", "recurrent")
        self.require_choice("order", "embedding_first", "state_first")
        self.require_choice("feed", "raw", "normed")
        self.require_choice("init", "linear", "random", "target")
        self.require_choice("attention", "fast", "reference")
        if self.warm_start is not None and self.init != "target":
            adjust(self, "init", "target")
        if (self.init == "target") != (self.warm_start is not None):
            why = "set it to the target's folder if init=target, and to null otherwise"
            raise ValueError(f"warm_start = {self.warm_start}: {why}")

    @property
    def max_depth(self) -> int:
        return self.depths if self.mode == "chained" else super().max_depth


class Mtp(BatchDrafter):
    """The modules, and the mode that runs them. Guesses are normed states, inputs of the head."""

    predicts_target_states = True
    required_features = "last"

    def __init__(
        self, cfg: Config, target: TargetEnds, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.cfg, self.target, self.vocab, self.taps = cfg, target, vocab, taps
        chained = cfg.mode == "chained"
        stages = [
            MtpModule(target.shape(), cfg.order, cfg.feed, cfg.qk_norm)
            for _ in range(cfg.depths if chained else 1)
        ]
        self.stages = nn.ModuleList(stages)
        init_linear_weights(self)
        runner: MtpChain | MtpLoop
        if chained:
            runner = MtpChain(stages, target, vocab, cfg.attention)
        else:
            runner = MtpLoop(stages[0], target, vocab, cfg.depths, cfg.attention)
        self.max_depth = cfg.max_depth
        self._runner = (runner,)  # in a tuple, so that its parameters are not registered twice

    def head(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows Vd"]:
        return target_head_logits(self.target, self.vocab, hidden)

    def unroll(self, trace: Trace) -> Iterator[Guess]:
        (runner,) = self._runner
        runner.gradient_checkpointing = self.gradient_checkpointing
        for guess in runner.unroll(trace):
            if isinstance(runner, MtpLoop):
                guess = guess._replace(hidden=runner.stage.norm(guess.hidden))
            yield guess

    def absorb_batch(self, states: Sequence[State | None], traces: Sequence[Trace]) -> list[State]:
        return self._runner[0].absorb_batch(states, traces)

    def step_batch(
        self, states: Sequence[State], depth: int, ids: LevelIds, parents: LevelIds
    ) -> tuple[Float[Tensor, "B N Vd"], list[State]]:
        return self._runner[0].step_batch(states, depth, ids, parents)

    def activation_count(self, depths: int) -> float:
        hidden = self.target.shape().hidden
        each = sum(stage.block.activation_count + 7 * hidden for stage in self._stages())
        return each * self.forward_count(depths)

    def forward_count(self, depths: int) -> int:
        return 1 if self.cfg.mode == "chained" else depths

    def _stages(self) -> list[MtpModule]:
        return list(self.stages)  # type: ignore[arg-type]

    # ---- initial weights ----

    @classmethod
    def check_first_weights(cls, cfg: Config, shape: ModelShape) -> None:
        """Find the modules in the target's folder, and compare the settings that they imply."""
        if cfg.init != "target":
            return
        found = mtp_layouts.find_modules(Path(cfg.warm_start or "").expanduser(), shape.layers)
        for name, theirs in (("order", mtp_layouts.ORDER), ("qk_norm", found.qk_norm)):
            ours = getattr(cfg, name)
            if ours != theirs:
                why = f"The modules in {cfg.warm_start} have {name}={theirs}."
                raise ConfigError(f"drafter.{name}", ours, why, f"Use drafter.{name}={theirs}.")

    @torch.no_grad()
    def initialise(self, target: Target, traces: Iterable[Trace]) -> str:
        """Load the modules of the target's checkpoint, or fit one regression per module, in order.

        Each predicts the target's state; the decoder layers' output projections are zero.
        """
        if self.cfg.init == "target":
            return self._load_target_modules(target)
        samples = self._fit_traces(traces) if self.cfg.init == "linear" else []
        if not samples:
            reason = ": no answer to fit to" if self.cfg.init == "linear" else ""
            return f"random weights{reason}"
        states = [trace.last.flatten(0, 1).float() for trace in samples]
        rows = sum(int(trace.supervised_mask(1).sum()) for trace in samples)
        for depth, stage in enumerate(self._stages(), start=1):
            states = self._fit(stage, depth, target, samples, states)
        return f"{format_count(len(self.stages), 'linear fit')} to {rows:,} states of {target.name}"

    def _fit_traces(self, traces: Iterable[Trace]) -> list[Trace]:
        """Collect traces until the deepest regression has enough supervised rows."""
        samples, rows, elements = list[Trace](), 0, 0
        enough = 2 * closed_form_init.ROWS_PER_FEATURE * self.target.shape().hidden
        for trace in traces:
            if count := int(trace.supervised_mask(len(self.stages)).sum()):
                samples.append(trace)
            rows, elements = rows + count, elements + trace.last.numel()
            if rows >= enough or elements >= MAX_STATE_ELEMENTS:
                break
        return samples

    def _fit(
        self,
        stage: MtpModule,
        depth: int,
        target: Target,
        samples: list[Trace],
        states: list[Float[Tensor, "_ H"]],
    ) -> list[Float[Tensor, "_ H"]]:
        """Fit one module, and return the states that the next one reads."""
        moments = closed_form_init.RegressionMoments()
        for trace, state in zip(samples, states, strict=True):
            rows = trace.supervised_rows(depth)
            inputs = self._inputs(stage, depth, trace, state)[rows]
            moments.add(inputs, trace.last.flatten(0, 1)[rows + depth].float())
        stage.eh_proj.weight.copy_(moments.ridge())
        stage.block.self_attn.o_proj.weight.zero_()
        stage.block.mlp.down_proj.weight.zero_()
        stage.norm.weight.copy_(moments.output_std)
        outputs = [
            stage.eh_proj(self._inputs(stage, depth, trace, state))
            for trace, state in zip(samples, states, strict=True)
        ]
        self._fit_norm_scale(stage, depth, target, samples[0], outputs[0])
        return [stage.next_state(out) for out in outputs]

    def _inputs(
        self, stage: MtpModule, depth: int, trace: Trace, state: Float[Tensor, "BT H"]
    ) -> Float[Tensor, "BT HH"]:
        embedding = self.target.embed(trace.tokens_ahead(depth).flatten())
        return stage.concat_inputs(embedding.float(), state)

    def _fit_norm_scale(
        self, stage: MtpModule, depth: int, target: Target, trace: Trace, out: Float[Tensor, "BT H"]
    ) -> None:
        """Scale the norm to the best logit temperature."""
        rows = trace.supervised_rows(depth)[: closed_form_init.SCALE_FIT_ROWS]
        last = trace.last.flatten(0, 1)
        teacher = target.logits(last[rows + depth])[:, self.vocab.target_ids]
        logits = self.head(stage.norm(out[rows]).to(last.dtype))
        scale = closed_form_init.optimal_logit_scale(logits.float(), teacher.float().softmax(-1))
        stage.norm.weight.mul_(scale)

    def _load_target_modules(self, target: Target) -> str:
        """Load modules of the target's checkpoint; missing ones are copies of its last."""
        self.check_first_weights(self.cfg, target.shape())
        folder = Path(self.cfg.warm_start or "").expanduser()
        modules = mtp_layouts.read_modules(folder, target.num_layers)
        last = len(modules) - 1
        try:
            for k, stage in enumerate(self.stages):
                stage.load_state_dict(modules[min(k, last)])
        except RuntimeError as error:
            raise RunError(f"{self.cfg.warm_start}: {error}", mtp_layouts.FIX) from None
        used = min(len(self.stages), last + 1)
        return f"{used} of {format_count(last + 1, 'MTP module')} in {self.cfg.warm_start}"
