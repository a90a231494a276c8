"""Optimizers of the trained parameters: AdamW, SGD, Adafactor, and Muon for matrices beside AdamW.

`OPTIMIZERS` has what `train.optimizer.name` may name; all but the composition of Muon and AdamW
are torch's classes. `train.lr` is AdamW's learning rate; `train.optimizer.rate` is the factor of
others.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from outrider.conf.compose import add_choice
from outrider.conf.errors import ConfigError
from outrider.conf.plugins import OWN_PART, Registry
from outrider.conf.schema import LaunchConfig, OptimizerConfig, TrainConfig
from outrider.conf.short_forms import OPTIMIZER
from outrider.models.drafting.drafter import Drafter

Groups = list[dict[str, Any]]


class OptimizerKind(NamedTuple):
    """An optimizer, and what a run has to know about it.

    Attributes:
        build: takes parameter groups with `params`, `weight_decay`, `lr_factor` and `matrix`.
        states: float32 numbers that it keeps for a parameter; `matrix` as below.
        elementwise: whether ZeRO may divide its states: the update of a number reads no other.
        splits: hidden matrices have groups of their own, with `matrix` true, and only they have
            `train.optimizer.rate`.
        needs: (class of torch.optim, version of torch that added it).
    """

    build: Callable[[Groups, TrainConfig, bool | None], torch.optim.Optimizer]
    states: Callable[[torch.Size, bool, TrainConfig], int] = lambda shape, *_: 2 * shape.numel()
    elementwise: bool = True
    splits: bool = False
    needs: tuple[str, str] = ("AdamW", "1.2")


def _adamw(groups: Groups, train: TrainConfig, fused: bool | None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, fused=fused)


def _sgd(groups: Groups, train: TrainConfig, fused: bool | None) -> torch.optim.Optimizer:
    momentum = train.optimizer.momentum
    nesterov = train.optimizer.nesterov and momentum > 0  # without momentum it changes nothing
    return torch.optim.SGD(groups, train.lr, momentum=momentum, nesterov=nesterov, fused=fused)


def _adafactor(groups: Groups, train: TrainConfig, fused: bool | None) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups, lr=train.lr)


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon on the groups of matrices, AdamW on the others, with the states of both."""

    def __init__(self, groups: Groups, train: TrainConfig, fused: bool | None) -> None:
        cfg, matrices = train.optimizer, [group for group in groups if group["matrix"]]
        rest = [group for group in groups if not group["matrix"]]
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            self.parts += [torch.optim.Muon(
                matrices, lr=train.lr, momentum=cfg.momentum, nesterov=cfg.nesterov,
                adjust_lr_fn="match_rms_adamw",
            )]  # fmt: skip
        if rest:
            self.parts += [_adamw(rest, train, fused)]
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step both. accelerate replaces groups and states, so the parts get them every time."""
        first = 0
        for part in self.parts:
            last = first + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[first:last], self.state
            part.step()
            first = last


def _sgd_states(shape: torch.Size, matrix: bool, train: TrainConfig) -> int:
    return shape.numel() if train.optimizer.momentum > 0 else 0


def _adafactor_states(shape: torch.Size, matrix: bool, train: TrainConfig) -> int:
    """Return the rows and columns of a matrix; of a vector, all numbers."""
    size = shape.numel()
    return size // shape[-1] + size // shape[-2] if len(shape) > 1 else size


def _muon_states(shape: torch.Size, matrix: bool, train: TrainConfig) -> int:
    return shape.numel() * (1 if matrix else 2)


def _add_optimizer(name: str, _: OptimizerKind) -> None:
    add_choice(OPTIMIZER, OptimizerConfig(name=name))


OPTIMIZERS: Registry[OptimizerKind] = Registry("optimizer", OptimizerKind, {
    "adamw": OptimizerKind(_adamw),
    "sgd": OptimizerKind(_sgd, _sgd_states),
    "adafactor": OptimizerKind(
        _adafactor, _adafactor_states, elementwise=False, needs=("Adafactor", "2.5")
    ),
    "muon": OptimizerKind(
        MuonAndAdamW, _muon_states, elementwise=False, splits=True, needs=("Muon", "2.9")
    ),
}, taken=("auto",), on_add=_add_optimizer)  # fmt: skip


def check_optimizer(train: TrainConfig, launch: LaunchConfig) -> None:
    """Raise a `ConfigError` for an optimizer that does not exist, or not under this launch."""
    name = train.optimizer.name
    kind = OPTIMIZERS.get(name)
    if kind is None:
        why = "There is no optimizer of this name."
        fix = f"Use one of: {', '.join(OPTIMIZERS)}. {OWN_PART}"
        raise ConfigError("train.optimizer", name, why, fix)
    if launch.name.startswith("zero") and not kind.elementwise:
        why = f"launch={launch.name} divides flattened parameters over the ranks, and {name} "
        why += "needs whole matrices."
        raise ConfigError("train.optimizer", name, why, "Use launch=ddp, or adamw or sgd.")


def require_torch_class(train: TrainConfig) -> None:
    """Raise a `ConfigError` if this version of torch lacks the optimizer; only training needs it.

    A run that was trained elsewhere can be evaluated.
    """
    needed, version = OPTIMIZERS[train.optimizer.name].needs
    if not hasattr(torch.optim, needed):
        why = f"torch.optim.{needed} needs torch >= {version}, and this is {torch.__version__}."
        raise ConfigError("train.optimizer", train.optimizer.name, why, "Upgrade it, or use adamw.")


def build_optimizer(
    drafter: Drafter, train: TrainConfig, launch: LaunchConfig
) -> torch.optim.Optimizer:
    """Return the optimizer, with parameter groups by weight decay and learning rate.

    Each group has an `lr_factor`, which the loop multiplies with the learning rate of the step.
    Norms and biases have no weight decay.

    Raises:
        ConfigError: DeepSpeed with several groups: it can save the moments of the first only; or
            torch lacks the optimizer.
    """
    require_torch_class(train)
    kind, groups = OPTIMIZERS[train.optimizer.name], dict[tuple[float, float, bool], list[Any]]()
    factors = drafter.lr_factors()
    for name, parameter, matrix in _trained(drafter):
        factor = next((f for prefix, f in factors.items() if name.startswith(prefix)), 1.0)
        if matrix or not kind.splits:
            factor *= train.optimizer.rate
        decay = train.weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((factor, decay, matrix and kind.splits), []).append(parameter)
    if len(groups) > 1 and launch.name.startswith("zero"):
        raise ConfigError(
            "launch", launch.name,
            "Norms without weight decay, or parts with another learning rate, make several "
            "parameter groups, and DeepSpeed cannot save their moments.",
            "Use launch=ddp; or train.weight_decay=0 and one learning rate.",
        )  # fmt: skip
    parts = [
        {"params": parameters, "weight_decay": decay, "lr_factor": factor, "matrix": matrix}
        for (factor, decay, matrix), parameters in groups.items()
    ]
    # offloaded to the CPU, the plain implementation takes eight times as long
    return kind.build(parts, train, True if launch.offload != "none" else None)


def state_numbers(drafter: Drafter, train: TrainConfig) -> int:
    """Return the float32 numbers that the optimizer keeps, from shapes."""
    states = OPTIMIZERS[train.optimizer.name].states
    return sum(states(p.shape, matrix, train) for _, p, matrix in _trained(drafter))


def _trained(drafter: Drafter) -> list[tuple[str, nn.Parameter, bool]]:
    """Return the trained parameters: name, parameter, and whether it is a hidden matrix.

    Hidden matrices neither read nor write the vocabulary: no embeddings and no heads. The number of
    rows alone does not tell: hidden states and draft vocabularies often have 8192.
    """
    sizes = len(drafter.vocab), drafter.vocab.t2d.numel()  # rows of a head
    tables = {id(m.weight) for m in drafter.modules() if isinstance(m, nn.Embedding)}
    return [
        (name, p, p.ndim == 2 and id(p) not in tables and not ("head" in name and len(p) in sizes))
        for name, p in drafter.named_parameters()
        if p.requires_grad
    ]
