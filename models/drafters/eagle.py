"""EAGLE: one decoder layer that continues the target's own last states.

Source: Li et al. 2024, "EAGLE", arXiv:2401.15077; EAGLE-2 (arXiv:2406.16858) decodes with the same
weights. At row t the layer reads fc([embedding of x_{t+1}; last state of row t]) and its output is
the guess of the target's state at row t + 1, which the target's own frozen head turns into a
distribution of x_{t+2}. No norm in front of the layer, none behind it. Trained on depth 1 alone:
Smooth-L1 between states plus 0.1 times the soft cross-entropy. Deeper it feeds on its own output,
which training measures and does not train (HASS does).

Features are disturbed in training by uniform noise. The paper says its width is constant, 0.2; the
authors' code makes it 0.2 * 512 / length, which `noise_by_length` does for every document.

Differs: the weight of a row follows the predicted token (the reference lags by two); a draft
vocabulary may cut the head's work; the first weights are those of the best linear drafter.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from outrider.conf.errors import RunError
from outrider.models import closed_form_init as fit
from outrider.models.drafter import Lender, Recipe, Trace, borrowed_head
from outrider.models.layers import Block, random_weights
from outrider.models.self_feeding import SelfFeeding
from outrider.models.target import Target
from outrider.models.vocab import DraftVocab

USUAL_LENGTH = 512  # tokens of a document at which both kinds of noise are equal


@dataclass(frozen=True)
class Config(Recipe):
    """Settings of an EAGLE drafter; conf/drafter/eagle.yaml says what each means."""

    name: str = "eagle"
    loss: tuple[str, ...] = ("smooth_l1", "0.1*soft_ce")
    depth_weights: str = "first"
    bias: bool = True
    noise: float = 0.2
    noise_by_length: bool = False
    warm_start: str | None = None
    init: str = "linear"
    attention: str = "fast"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.noise < float("inf"):
            raise ValueError(f"noise = {self.noise}: a width is at least 0")
        self.choose("init", "linear", "random")
        self.choose("attention", "fast", "reference")


class Eagle(SelfFeeding):
    """The drafter: `fc`, one decoder layer, the target's head."""

    in_target_space = True
    reads = "last"

    def __init__(
        self, cfg: Config, target: Lender, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.cfg, self.target, self.vocab, self.taps = cfg, target, vocab, taps
        self.depths, self.attention = cfg.depths, cfg.attention
        shape = target.shape()
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=cfg.bias)
        self.layers = nn.ModuleList([Block(shape, input_norm=False)])
        random_weights(self)

    @property
    def blocks(self) -> list[Block]:
        return list(self.layers)  # type: ignore[arg-type]

    def start(self, trace: Trace) -> Float[Tensor, "BT D"]:
        last = trace.last.flatten(0, 1).to(self.fc.weight.dtype)
        if not (self.training and self.cfg.noise):
            return last
        width = self._width(trace).flatten()[:, None].to(last.dtype)
        return last + (torch.rand_like(last) - 0.5) * width

    def _width(self, trace: Trace) -> Float[Tensor, "B T"]:
        """Of the noise at every row."""
        width = torch.full_like(trace.ids, self.cfg.noise, dtype=torch.float32)
        if not self.cfg.noise_by_length:
            return width
        lengths = torch.stack([_lengths(row) for row in trace.document])
        return width * USUAL_LENGTH / lengths

    def join(
        self, embedding: Float[Tensor, "N H"], state: Float[Tensor, "N D"]
    ) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]:
        read: Tensor = self.fc(torch.cat([embedding, state], dim=-1))
        return read, read

    def head(self, hidden: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows Vd"]:
        return borrowed_head(self.target, self.vocab, hidden)

    # ---- first weights ----

    @torch.no_grad()
    def initialise(self, target: Target, traces: Iterable[Trace]) -> str:
        """Another drafter's weights; or `fc` from a regression of the next state on what is known.

        After the regression the layer adds nothing yet, and all else is learned.
        """
        if self.cfg.warm_start is not None:
            return self._continue(Path(self.cfg.warm_start).expanduser(), target)
        if self.cfg.init == "random":
            return "random weights"
        traces = iter(traces)
        moments, first = fit.Moments(), next(traces)
        sizes = [_size(self.target.embed(first.next_ids)), _size(first.last)]
        for trace in chain([first], traces):
            moments.add(*self._known(trace, sizes))
            if moments.count >= fit.ROWS * 2 * len(moments.y):
                break
        if not moments.count:
            return "random weights: no answer to fit to"
        self._place(moments, sizes)
        return f"linear fit to {moments.count:,} states of {target.name}"

    def _known(self, trace: Trace, sizes: list[float]) -> tuple[Tensor, Tensor]:
        """Of every row that counts at depth 1: what is known, of size 1, and the state to guess."""
        rows = torch.nonzero(trace.counts(1).flatten()).flatten()
        embedded = self.target.embed(trace.next_ids.flatten()[rows]).float() / sizes[0]
        last = trace.last.flatten(0, 1)
        known = [embedded, last[rows].float() / sizes[1], torch.ones(len(rows), 1).to(embedded)]
        return torch.cat(known[: 2 + self.cfg.bias], dim=-1), last[rows + 1].float()

    def _place(self, moments: fit.Moments, sizes: list[float]) -> None:
        weight = moments.ridge() * moments.spread[:, None]
        half = self.fc.out_features
        self.fc.weight[:, :half] = weight[:, :half] / sizes[0]
        self.fc.weight[:, half:] = weight[:, half : 2 * half] / sizes[1]
        if self.cfg.bias:
            self.fc.bias.copy_(weight[:, -1])
        for block in self.blocks:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()

    def _continue(self, folder: Path, target: Target) -> str:
        """Weights of an EAGLE or HASS drafter, which are one network."""
        from outrider.models import formats

        found, cfg = formats.recognise(folder).read(folder, target)
        weights = {k: v for k, v in found.state_dict().items() if not k.startswith("vocab.")}
        own = {k: v.shape for k, v in self.state_dict().items() if not k.startswith("vocab.")}
        if {k: v.shape for k, v in weights.items()} != own:
            raise RunError(
                f"{folder} holds a drafter {cfg.name!r}, whose weights do not fit {self.cfg.name}.",
                "Give drafter.warm_start an eagle or hass drafter, a run's or a published one.",
            )
        self.load_state_dict(weights, strict=False)
        return f"the weights of {folder}"


def _lengths(document: Int[Tensor, " T"]) -> Int[Tensor, " T"]:
    """At every row, how many rows its document has."""
    _, which, counts = document.unique(return_inverse=True, return_counts=True)
    out: Tensor = counts[which]
    return out


def _size(x: Tensor) -> float:
    return max(float(x.float().pow(2).mean().sqrt()), 1e-6)
