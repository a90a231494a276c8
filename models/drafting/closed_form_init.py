"""Closed-form initial weights: the best linear drafter, from one pass over some text.

The target's next state is largely a linear function of the drafter's inputs: the tapped states of
row t and the embedding of x_{t+1}.

Legend: N rows, F features (inputs), H outputs, R rank.

Source: ridge regression; its best low-rank form under the inputs' covariance is reduced-rank
regression (Izenman 1975, "Reduced-rank regression for the multivariate linear model").
"""

import torch
from jaxtyping import Float
from scipy.optimize import minimize_scalar
from torch import Tensor

ROWS_PER_FEATURE = 64  # of a regression, per input feature; more change little
SCALE_FIT_ROWS = 512  # from which the scale of the initial logits is fitted
RIDGE = 1e-2  # strength, relative to the mean variance of an input
MIN_SCALE, MAX_SCALE = 0.02, 4.0  # search interval of the logit scale


class RegressionMoments:
    """Sums over rows of inputs x and outputs y, from which y is regressed on x."""

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
    def output_std(self) -> Float[Tensor, " H"]:
        """Standard deviation of each output."""
        variance = self.yy / self.count - (self.y / self.count).square()
        return variance.clamp(min=1e-12).sqrt()

    @property
    def covariance(self) -> Float[Tensor, "F F"]:
        """Second moment of the inputs, not centred."""
        return self.xx / self.count

    def ridge(self) -> Float[Tensor, "H F"]:
        """Return the ridge regression of y / output_std on x, without intercept."""
        return _solve(self.covariance, self.xy / self.count / self.output_std).mT


def tap_scale(taps: Float[Tensor, "N KH"], count: int) -> Float[Tensor, " K"]:
    """Return powers of two that bring each of `count` concatenated taps to about unit size."""
    sizes = taps.float().unflatten(-1, (count, -1)).pow(2).mean(-1).sqrt().median(0).values
    return torch.exp2(-sizes.clamp(min=1e-6).log2().round())


def _solve(covariance: Float[Tensor, "F F"], right: Float[Tensor, "F any"]) -> Tensor:
    damped = covariance.double()
    damped.diagonal().add_(RIDGE * float(damped.diagonal().mean()))
    solution: Tensor = torch.linalg.solve(damped, right.double())
    return solution.float()


def low_rank(
    weight: Float[Tensor, "H F"], covariance: Float[Tensor, "F F"], rank: int
) -> tuple[Float[Tensor, "H R"], Float[Tensor, "R F"]]:
    """Factor `weight` with the least error on inputs of this covariance.

    Returns:
        (out, into): the entries of into @ x are uncorrelated; their variances are the singular
    values.
    """
    values, vectors = torch.linalg.eigh(covariance.double())
    root = values.clamp(min=1e-9 * float(values[-1])).sqrt()
    left, singular, right = torch.linalg.svd((weight.double() @ vectors) * root)
    scale = singular[:rank].sqrt()
    into = (scale[:, None] * right[:rank] / root) @ vectors.mT
    return (left[:, :rank] * scale).float(), into.float()


def bias_direction(x: Float[Tensor, "N F"]) -> Float[Tensor, " F"]:
    """Return the vector whose product with every row is about 1, as a substitute for a bias."""
    mean = x.mean(0)
    direction = _solve(x.mT @ x / len(x), mean[:, None])[:, 0]
    return direction / (direction @ mean)


def optimal_logit_scale(logits: Float[Tensor, "N V"], teacher: Float[Tensor, "N V"]) -> float:
    """Return the factor on the logits that minimises cross-entropy with the teacher."""

    def nats(log_scale: float) -> float:
        rows = (logits * torch.tensor(log_scale).exp()).log_softmax(-1)
        return float(-(teacher * rows).sum(-1).mean())

    low, high = torch.tensor([MIN_SCALE, MAX_SCALE]).log().tolist()
    result = minimize_scalar(nats, bounds=(low, high), method="bounded", options={"xatol": 0.05})
    return float(torch.tensor(result.x).exp())
