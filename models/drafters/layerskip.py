"""LayerSkip: the target's own first layers draft, and training makes their states fit its head.

Source: Elhoushi et al. 2024, "LayerSkip", arXiv:2404.16710. Every layer l is an exit, whose state
goes through the final norm and the head. Training minimises a weighted sum over the exits, the true
last output included, and skips whole layers for single rows at random:

    L       = sum_l w(t, l) loss(head(norm(h_l)))      w = C e / sum C e, C: the curriculum
    e(l)    = s (1 + .. + l) for l < L-1               e(L-1) = L-1 + s (1 + .. + L-2)
    p(l)    = p_max (2^(l / (L-1)) - 1)                the probability that a row skips layer l

It CHANGES THE TARGET: decoding is exact for the changed target. Its first E layers draft, and their
cache and states are used again in verification (models/drafting/early_exit.py).

Row t has read x_0..x_{t+1}: the guess of depth d is the exit state of row t + d, so depth 1 is
trained and deeper guesses are copies of it. Other exits, and the last output, are guesses of depth
0 with their weights: the changed target's own prediction of x_{t+1}.

Differs (docs/drafters/layerskip.md): the loss is taken against the original target's distribution;
embedding and head stay frozen; a skipped layer is computed and its output not used.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.conf.fields import DEPTHS, PROBABILITY, option
from outrider.conf.schema import DrafterConfig, LaunchConfig, TargetConfig
from outrider.models.drafting.drafter import target_head_logits
from outrider.models.drafting.early_exit import EarlyExit, check_exit
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import Guess, TargetEnds, Trace, shifted_guesses
from outrider.models.target.target import Target
from outrider.models.target.target_copy import TargetCopy


@dataclass(frozen=True)
class Config(DrafterConfig):
    """Settings of LayerSkip; conf/drafter/layerskip.yaml describes each."""

    name: str = "layerskip"
    depth_weights: str = "first"
    exit_layer: int | None = option(None, "", DEPTHS)
    exit_scale: float = option(1.0, "", "[0, inf)")
    curriculum: str = "rotational"
    rotation: int = option(4, "", DEPTHS)
    layer_dropout: float = option(0.2, "", PROBABILITY)
    layer_rate: float = option(0.01, "", "(0, inf)")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_choice("curriculum", "rotational", "gradual", "all")
        if self.draft_vocab_size is not None:
            why = "training changes the probability of every token, so use null"
            raise ValueError(f"draft_vocab_size = {self.draft_vocab_size}: {why}")

    def warning(self) -> str:
        if self.exit_layer == 1:
            why = "The exit after the first layer has weight 0 in the loss: it is not trained"
            return f"{why}. drafter.exit_layer=2 has a weight."
        if self.exit_scale == 0:
            why = "All exits but the last have weight 0 in the loss: the draft is not trained"
            return f"{why}. drafter.exit_scale=1 gives them one."
        return ""

    def exit_of(self, layers: int) -> int:
        """Return E; by default a quarter of the layers, and not the first exit: it has no weight.

        Raises:
            ConfigError: the target does not have so many layers.
        """
        default = min(layers, max(2, layers // 4))
        exit_layer = default if self.exit_layer is None else self.exit_layer
        check_exit(exit_layer, layers)
        return exit_layer

    def check_run(self, launch: LaunchConfig, target: TargetConfig) -> None:
        """Refuse placements of the target whose layers cannot be copied.

        Raises:
            ConfigError: the target is quantised, or not whole in every process.
        """
        why = "The drafter trains copies of the target's layers."
        if target.quantise is not None:
            raise ConfigError("target.quantise", target.quantise, why, "Use target.quantise=null.")
        if target.place != "replicated":
            raise ConfigError("target.place", target.place, why, "Use target.place=replicated.")

    def tap_layers(self, layers: int) -> tuple[int, ...]:
        """Check the exit; training reads no taps."""
        self.exit_of(layers)
        return ()


class LayerSkip(EarlyExit):
    """The first layers of a target that is trained to exit after any layer."""

    required_features = "ids"

    def __init__(
        self, cfg: Config, target: TargetEnds, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__()
        assert isinstance(target, Target), "LayerSkip needs the decoder layers"
        vocab.require_full()
        self.cfg, self.target, self.vocab, self.taps = cfg, target, vocab, taps
        self.target_loss = cfg.loss
        self.set_exit(cfg.exit_of(target.num_layers), target.num_layers)
        self.body = TargetCopy(target)
        self.step_number, self.share_done, self._checkpoints = 0, 0.0, False

    def initialise(self, target: Target, traces: Iterable[Trace]) -> str:
        return f"the layers of {target.name}"

    def lr_factors(self) -> dict[str, float]:
        return {"body.": self.cfg.layer_rate}

    def begin_step(self, step: int, done: float) -> None:
        self.step_number, self.share_done = step, done

    def forward_count(self, depths: int) -> int:
        return 1

    def activation_count(self, depths: int) -> float:
        shape = self.body.lm.shape()
        queries = shape.heads * shape.head_dim
        layer = 7.3 * shape.hidden + 4.1 * queries + 4.0 * shape.intermediate
        return shape.layers * layer + 2.0 * shape.hidden

    def describe_target_change(self) -> str:
        return "the layers of the target are changed (LayerSkip)"

    def patch_target(self, target: TargetEnds) -> str:
        assert isinstance(target, Target), "LayerSkip needs the decoder layers"
        self.body.write_to(target)
        return self.describe_target_change()

    def head(self, hidden: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows Vd"]:
        return target_head_logits(self.target, self.vocab, hidden)

    # ---- training ----

    def unroll(self, trace: Trace) -> Iterator[Guess]:
        """Yield the last output, in training the other exits of this step, then all depths."""
        if self.gradient_checkpointing and not self._checkpoints:
            self.body.enable_gradient_checkpointing()
            self._checkpoints = True
        weights = exit_weights(self.target.num_layers, self.cfg, self.step_number, self.share_done)
        self.body.kept_rows = self._draw_kept_rows(len(trace.ids)) if self.training else None
        outputs, last = self.body(trace)
        yield Guess.everywhere(0, last, weights.pop())
        drafting = self.exit_layer - 1
        for layer, weight in enumerate(weights):
            if weight and self.training and layer != drafting:
                yield Guess.everywhere(0, self.body.final_norm(outputs[layer]), weight)
        whole = self.exit_layer == self.target.num_layers
        hidden = last if whole else self.body.final_norm(outputs[drafting])
        weight = 0.0 if whole else weights[drafting]
        rows = torch.arange(trace.ids.numel(), device=last.device)
        for guess in shifted_guesses(rows, hidden.flatten(0, 1), self.cfg.depths):
            yield guess._replace(weight=weight)

    def _draw_kept_rows(self, rows: int) -> Bool[Tensor, "L B"] | None:
        """Draw which layers each row runs, from torch's global random generator."""
        if not self.cfg.layer_dropout:
            return None
        chances = drop_chances(self.target.num_layers, self.cfg.layer_dropout)
        kept = torch.rand(len(chances), rows) >= torch.tensor(chances)[:, None]
        return kept.to(self.target.device)


def exit_weights(layers: int, cfg: Config, step: int, done: float) -> list[float]:
    """Return the weight of every exit in one optimizer step; they sum to 1.

    The curricula, for four layers and rotation=2 (e: enabled):

        rotational    step 0  e . e e     step 1  . e . e    step 2  e . e e
        gradual       start   . . . e     1/8     . . e e    1/4  . e e e    3/8, 1/2  e e e e

    Args:
        step: optimizer steps taken before.
        done: share of the training that they are.
    """
    last = layers - 1
    rotation, exits = cfg.rotation, range(last)
    enabled = {
        "rotational": [i % rotation == step % rotation for i in exits],
        "gradual": [last - i <= 2 * layers * done for i in exits],
        "all": [True for _ in exits],
    }[cfg.curriculum]
    weights = [cfg.exit_scale * sum(range(i + 1)) * enabled[i] for i in exits]
    weights.append((last + cfg.exit_scale * sum(exits)) or 1.0)
    total = sum(weights)
    return [weight / total for weight in weights]


def drop_chances(layers: int, largest: float) -> list[float]:
    """Return the probability that a row skips each layer: 0 at the first, `largest` at the last."""
    return [largest * (2 ** (layer / max(1, layers - 1)) - 1) for layer in range(layers)]
