"""EAGLE: one decoder layer that predicts the target's next last state.

Source: Li et al. 2024, "EAGLE", arXiv:2401.15077; EAGLE-2 (arXiv:2406.16858) decodes with the same
weights. At row t the layer reads fc([embedding of x_{t+1}; last state of row t]) and predicts the
target's last state of row t + 1; the target's frozen head turns it into a distribution of x_{t+2}.
There is no norm before or after the layer. The embedding is scaled as the target's own module does
(Gemma: by sqrt(H)). Training covers depth 1 only: Smooth-L1 between states
plus 0.1 times the soft cross-entropy. Deeper depths read the drafter's own output; they are
measured but not trained (HASS trains them).

Differs (docs/drafters/eagle.md): the weight of a row follows the predicted token; `noise_by_length`
chooses between the noise widths of the paper and of its code; a draft vocabulary may reduce the
head; training starts from the best linear drafter.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from outrider.conf.errors import RunError
from outrider.conf.fields import option
from outrider.conf.schema import DrafterConfig
from outrider.models.drafting import closed_form_init
from outrider.models.drafting.drafter import target_head_logits
from outrider.models.drafting.layers import DecoderLayer, init_linear_weights
from outrider.models.drafting.self_feeding import SelfFeeding
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import ModelShape, TargetEnds, Trace
from outrider.models.target.target import Target

WARM_START = "Give drafter.warm_start an eagle or hass drafter: of a run, RUN/drafter."
NOISE_LENGTH = 512  # tokens of a document at which both noise widths are equal


@dataclass(frozen=True)
class Config(DrafterConfig):
    """Settings of an EAGLE drafter; conf/drafter/eagle.yaml describes each."""

    name: str = "eagle"
    loss: tuple[str, ...] = ("smooth_l1", "0.1*soft_ce")
    depth_weights: str = "first"
    bias: bool = True
    activation: str = "silu"
    noise: float = option(0.2, "", "[0, inf)")
    noise_by_length: bool = False
    warm_start: str | None = None
    init: str = "linear"
    attention: str = "fast"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_choice("activation", "silu", "gelu")
        self.require_choice("init", "linear", "random")
        self.require_choice("attention", "fast", "reference")


class Eagle(SelfFeeding):
    """The drafter: `fc`, one decoder layer, the target's head."""

    predicts_target_states = True
    required_features = "last"

    def __init__(
        self, cfg: Config, target: TargetEnds, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.cfg, self.target, self.vocab, self.taps = cfg, target, vocab, taps
        self.depths, self.attention = cfg.depths, cfg.attention
        self.shape = shape = target.shape()._replace(activation=cfg.activation)
        self.embedding_scale = target.embedding_scale
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=cfg.bias)
        self.layers = nn.ModuleList([DecoderLayer(shape, input_norm=False)])
        init_linear_weights(self)

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def initial_state(self, trace: Trace) -> Float[Tensor, "BT D"]:
        last = trace.last.flatten(0, 1).to(self.fc.weight.dtype)
        if not (self.training and self.cfg.noise):
            return last
        width = self._noise_width(trace).flatten()[:, None].to(last.dtype)
        return last + (torch.rand_like(last) - 0.5) * width

    def _noise_width(self, trace: Trace) -> Float[Tensor, "B T"]:
        width = torch.full_like(trace.ids, self.cfg.noise, dtype=torch.float32)
        if not self.cfg.noise_by_length:
            return width
        for row, document in zip(width, trace.document, strict=True):
            _, index, counts = document.unique(return_inverse=True, return_counts=True)
            row.mul_(NOISE_LENGTH).div_(counts[index])
        return width

    def layer_inputs(
        self, embedding: Float[Tensor, "N H"], state: Float[Tensor, "N D"]
    ) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]:
        x: Tensor = self.fc(torch.cat([embedding * self.embedding_scale, state], dim=-1))
        return x, x

    def head(self, hidden: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows Vd"]:
        return target_head_logits(self.target, self.vocab, hidden)

    # ---- initial weights ----

    @classmethod
    def check_first_weights(cls, cfg: Config, shape: ModelShape) -> None:
        """Compare `fc` in the folder's headers; `initialise` compares all weights."""
        if cfg.warm_start is None:
            return
        from outrider.models.formats.weight_folder import WeightFolder

        opened = WeightFolder(Path(cfg.warm_start).expanduser(), WARM_START)
        fusions = [size for key, size in opened.shapes.items() if key.endswith("fc.weight")]
        if (shape.hidden, 2 * shape.hidden) not in fusions:
            why = f"{cfg.warm_start} holds no eagle or hass drafter of hidden size {shape.hidden}."
            raise RunError(why, WARM_START)
        own = opened.config.get("drafter")  # of Outrider's own format
        stored = own if isinstance(own, dict) else {}
        for name in ("bias", "activation"):
            if (theirs := stored.get(name)) not in (None, getattr(cfg, name)):
                value = str(theirs).lower()
                raise RunError(
                    f"{cfg.warm_start} holds a drafter whose weights do not fit {cfg.name}.",
                    f"Set drafter.{name}={value}, which it was trained with.",
                )

    @torch.no_grad()
    def initialise(self, target: Target, traces: Iterable[Trace]) -> str:
        """Load another drafter's weights, or fit `fc` to the target's next state."""
        if self.cfg.warm_start is not None:
            return self._load_weights(Path(self.cfg.warm_start).expanduser(), target)
        if self.cfg.init == "random":
            return "random weights"
        traces = iter(traces)
        moments, first = closed_form_init.RegressionMoments(), next(traces)
        sizes = [self.embedding_scale * _rms(self.target.embed(first.next_ids)), _rms(first.last)]
        for trace in chain([first], traces):
            moments.add(*self._regression_pairs(trace, sizes))
            if moments.count >= closed_form_init.ROWS_PER_FEATURE * 2 * len(moments.y):
                break
        if not moments.count:
            return "random weights: no answer to fit to"
        self._install_fit(moments, sizes)
        return f"linear fit to {moments.count:,} states of {target.name}"

    def _regression_pairs(
        self, trace: Trace, sizes: list[float]
    ) -> tuple[Float[Tensor, "N F"], Float[Tensor, "N H"]]:
        """Return unit-size inputs and the target's next state, where depth 1 is supervised."""
        rows = trace.supervised_rows(1)
        embedded = self.target.embed(trace.next_ids.flatten()[rows]).float()
        embedded = embedded * (self.embedding_scale / sizes[0])
        last = trace.last.flatten(0, 1)
        inputs = [embedded, last[rows].float() / sizes[1], torch.ones(len(rows), 1).to(embedded)]
        return torch.cat(inputs[: 2 + self.cfg.bias], dim=-1), last[rows + 1].float()

    def _install_fit(self, moments: closed_form_init.RegressionMoments, sizes: list[float]) -> None:
        weight = moments.ridge() * moments.output_std[:, None]
        half = self.fc.out_features
        self.fc.weight[:, :half] = weight[:, :half] / sizes[0]
        self.fc.weight[:, half:] = weight[:, half : 2 * half] / sizes[1]
        if self.cfg.bias:
            self.fc.bias.copy_(weight[:, -1])
        for block in self.decoder_layers:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()

    def _load_weights(self, folder: Path, target: Target) -> str:
        """Load an EAGLE or HASS drafter; they are the same network."""
        from outrider.models import formats

        drafter, cfg = formats.recognise(folder).read(folder, target)
        weights, own = (dict(module.named_parameters()) for module in (drafter, self))
        if {k: v.shape for k, v in weights.items()} != {k: v.shape for k, v in own.items()}:
            why = f"holds a drafter {cfg.name!r}, whose weights do not fit {self.cfg.name}."
            fix = WARM_START
            if weights.keys() ^ own.keys() == {"fc.bias"}:
                value = str("fc.bias" in weights).lower()
                fix = f"Set drafter.bias={value}, which it was trained with."
            raise RunError(f"{folder} {why}", fix)
        if cfg.activation != self.cfg.activation:
            fix = f"Set drafter.activation={cfg.activation}, which it was trained with."
            why = f"holds a drafter whose MLP has {cfg.activation}, and this one's has"
            raise RunError(f"{folder} {why} {self.cfg.activation}.", fix)
        self.load_state_dict(weights, strict=False)
        return f"the weights of {folder}"


def _rms(x: Tensor) -> float:
    return max(float(x.float().pow(2).mean().sqrt()), 1e-6)
