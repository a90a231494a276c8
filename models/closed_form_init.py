"""First weights in closed form: all that a linear drafter can know, before the first step.

To a good part the target's next state is a linear function of what a drafter is given: the tapped
states of row t and the embedding of x_{t+1}. So that regression is solved first, from one pass
over some text, and training begins where it ends: ahead of where a hundred steps from random
weights arrive (docs/log.md).

Legend: N rows, F features (inputs), H outputs, R rank.

Source: ridge regression; its best low-rank form under the inputs' covariance is reduced-rank
regression (Izenman 1975, "Reduced-rank regression for the multivariate linear model").
"""

import torch
from jaxtyping import Float
from scipy.optimize import minimize_scalar
from torch import Tensor

ROWS = 64  # of a regression, per input feature: more change little
SHARP_ROWS = 512  # that the scale of the first logits is found from
STRENGTH = 1e-2  # of the ridge, relative to the mean variance of an input
SHARPEST, FLATTEST = 4.0, 0.02  # between these the scale of the logits is searched


class Moments:
    """Sums over rows of inputs x and outputs y: enough for every linear fit of y on x."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, x: Float[Tensor, "N F"], y: Float[Tensor, "N H"]) -> None:
        parts = (x.mT @ x, x.mT @ y, y.sum(0), y.square().sum(0))
        if not self.count:
            self.xx, self.xy, self.y, self.yy = parts
        else:
            for total, part in zip((self.xx, self.xy, self.y, self.yy), parts, strict=True):
                total += part
        self.count += len(x)

    @property
    def spread(self) -> Float[Tensor, " H"]:
        """Standard deviation of each output."""
        variance = self.yy / self.count - (self.y / self.count).square()
        return variance.clamp(min=1e-12).sqrt()

    @property
    def covariance(self) -> Float[Tensor, "F F"]:
        """Of the inputs, about zero."""
        return self.xx / self.count

    def ridge(self) -> Float[Tensor, "H F"]:
        """The least-squares map from x to y / spread, without an offset."""
        return _solve(self.covariance, self.xy / self.count / self.spread).mT


def _solve(covariance: Float[Tensor, "F F"], right: Float[Tensor, "F any"]) -> Tensor:
    damped = covariance.double()
    damped.diagonal().add_(STRENGTH * float(damped.diagonal().mean()))
    solution: Tensor = torch.linalg.solve(damped, right.double())
    return solution.float()


def reduced(
    weight: Float[Tensor, "H F"], covariance: Float[Tensor, "F F"], rank: int
) -> tuple[Float[Tensor, "H R"], Float[Tensor, "R F"]]:
    """Two factors whose product is `weight` as nearly as `rank` allows on such inputs.

    Returns:
        (out, into): into @ x has unit covariance times the singular values' roots.
    """
    values, vectors = torch.linalg.eigh(covariance.double())
    root = values.clamp(min=1e-9 * float(values[-1])).sqrt()
    left, singular, right = torch.linalg.svd((weight.double() @ vectors) * root)
    scale = singular[:rank].sqrt()
    into = (scale[:, None] * right[:rank] / root) @ vectors.mT
    return (left[:, :rank] * scale).float(), into.float()


def constant(x: Float[Tensor, "N F"]) -> Float[Tensor, " F"]:
    """The direction along which all rows are nearly 1: what stands in for a bias."""
    mean = x.mean(0)
    direction = _solve(x.mT @ x / len(x), mean[:, None])[:, 0]
    return direction / (direction @ mean)


def sharpness(logits: Float[Tensor, "N V"], teacher: Float[Tensor, "N V"]) -> float:
    """The factor on the logits at which their cross-entropy against the teacher is least."""

    def nats(log_scale: float) -> float:
        rows = (logits * torch.tensor(log_scale).exp()).log_softmax(-1)
        return float(-(teacher * rows).sum(-1).mean())

    low, high = torch.tensor([FLATTEST, SHARPEST]).log().tolist()
    found = minimize_scalar(nats, bounds=(low, high), method="bounded", options={"xatol": 0.05})
    return float(torch.tensor(found.x).exp())
