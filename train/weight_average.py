"""The exponential moving average of the trained parameters, `train.ema`.

After the n-th step it is d e(n-1) + (1 - d) w(n), with e(0) = w(0), the initial weights. Under
DeepSpeed in bfloat16 it averages the rounded weights that the forward computes with.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """Averages beside the parameters of a model, in float32.

    Attributes:
        tensors: the averages, by the name of the parameter.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.tensors = {n: p.detach().float().clone() for n, p in self.parameters.items()}
        self._update = get_ema_multi_avg_fn(decay)

    def update(self) -> None:
        """Include the weights of another step."""
        weights = [p.detach().float() for p in self.parameters.values()]
        self._update(list(self.tensors.values()), weights, 0)

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Set the averages, by the same names; KeyError for a missing one."""
        for name, own in self.tensors.items():
            own.copy_(tensors[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the averages in place of the weights, and the weights back afterwards."""
        weights = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._set(self.tensors)
        try:
            yield
        finally:
            self._set(weights)

    @torch.no_grad()
    def _set(self, tensors: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[name])
