"""Operations of an optimizer step and bytes of a run's checkpoints, counted from shapes."""

from outrider.conf.schema import TrainConfig
from outrider.models.drafting.drafter import Drafter
from outrider.models.target.target import Target

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # of a layer, in config.json


def step_flops(
    target: Target, drafter: Drafter, *, size: int, depths: int, rows: float, tokens: float,
    online: bool = True, full_head: bool = True,
) -> float:  # fmt: skip
    """Return the floating-point operations of a step: drafter, teacher's head and online target.

    Attention over the row is not counted.

    Args:
        size: trained parameters.
        depths: depths with a loss.
        rows: supervised rows of a step.
        tokens: all rows of a step.
        online: the target runs in every step; false: its features are recorded.
        full_head: the teacher's logits of all tokens are needed; false: of the draft vocabulary.
    """
    flops = 6.0 * size * rows * drafter.forward_count(depths)
    vocab, hidden = len(drafter.vocab), target.head_weight.shape[1]
    if not any(p.ndim > 1 and len(p) == vocab for p in drafter.parameters()):
        flops += 4.0 * vocab * hidden * rows * depths  # through the target's frozen head
    flops += 2.0 * (target.vocab_size if full_head else vocab) * hidden * rows
    return flops + (2.0 * active_parameters(target) * tokens if online else 0.0)


def active_parameters(target: Target) -> int:
    """Return the parameters that a token uses: of a layer's experts, those it is routed to."""
    config = target.text_config
    experts = next((n for name in EXPERTS if (n := getattr(config, name, None))), 1)
    routed = getattr(config, "num_experts_per_tok", None) or experts
    return sum(
        p.numel() * routed // experts if p.ndim == 3 and len(p) == experts else p.numel()
        for p in target.model.parameters()
    )


def checkpoint_bytes(train: TrainConfig, size: int, states: int) -> float:
    """Return the bytes of checkpoints and drafters of a run.

    Args:
        size: trained parameters.
        states: float32 numbers of the optimizer.
    """
    stored = (2 if train.ema else 1) * size + states
    return float((train.keep_last + 1) * 4 * stored + 3 * 4 * size)
