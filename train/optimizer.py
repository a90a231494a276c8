"""AdamW over the trained parameters of a drafter."""

import torch
from torch import nn

from outrider.conf.errors import ConfigError
from outrider.conf.schema import LaunchConfig, TrainConfig
from outrider.models.drafting.drafter import Drafter


def build_optimizer(
    drafter: Drafter, train: TrainConfig, launch: LaunchConfig
) -> torch.optim.Optimizer:
    """Return AdamW with a parameter group per weight decay (norms have none) and learning rate.

    Each group has an `lr_factor`, which the loop multiplies with the learning rate of the step.

    Raises:
        ConfigError: DeepSpeed with several groups: it can save the moments of the first only.
    """
    groups = dict[tuple[float, float], list[nn.Parameter]]()
    factors = drafter.lr_factors()
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            factor = next((f for prefix, f in factors.items() if name.startswith(prefix)), 1.0)
            decay = train.weight_decay if parameter.ndim > 1 else 0.0
            groups.setdefault((factor, decay), []).append(parameter)
    if len(groups) > 1 and launch.name.startswith("zero"):
        raise ConfigError(
            "launch", launch.name,
            "Norms without weight decay, or parts with another learning rate, make several "
            "parameter groups, and DeepSpeed cannot save their moments.",
            "Use launch=ddp; or train.weight_decay=0 and one learning rate.",
        )  # fmt: skip
    parts = [
        {"params": parameters, "weight_decay": decay, "lr_factor": factor}
        for (factor, decay), parameters in groups.items()
    ]
    # offloaded to the CPU, the plain implementation takes eight times as long
    fused = True if launch.offload != "none" else None
    return torch.optim.AdamW(parts, lr=train.lr, betas=train.betas, fused=fused)
