"""Acceptance of draft tokens, estimated online from what is known before a token is drawn.

For every depth the conditional probability that the token there is accepted, given that all before
it were: levels behind the first rejection say nothing and are left out, never counted as rejected.
Two estimates:

    mean(depth)               before the drafter has run; of this request, shrunk to that of all;
                              a level that is not submitted counts with what `given` says of it
    given(depth, confidence)  after it, from the drafter's confidence; bins of all requests,
                              corrected by one offset in log-odds of this request

A label is 0 or 1, or the probability of acceptance where it is known (the overlap of both rows):
the same mean with less variance. All counts forget slowly. Means and bins begin as they were
measured on held-out text, if they were (`AcceptanceTable`). Else bins begin as the confidence
itself, with more weight if that is calibrated; those of drawn tokens begin at one value, high
enough that deeper levels are tried.

Siblings are accepted with a share of what the first token misses, by their rank, at all depths.

Source: bins, Guo et al. 2017, arXiv:1706.04599 (`eval/calibration.py`); a bias in log-odds, shrunk
and forgetting, is that of vLLM's adaptive verification, here with one Newton step per label.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

BINS = 10  # of confidence
DEPTHS = 16  # deeper ones count as the last
RANKS = 4  # children of a node
PRIOR = 10.0  # labels that the estimate of all requests weighs in that of one
CALIBRATED, GUESSED = 50.0, 4.0  # labels that a measured confidence weighs, and other first values
MEASURED = 20.0  # labels that a row or, at most, a bin of a measured table weighs
FIRST = 0.6  # acceptance at every depth, before any is seen
SIBLINGS = (0.3, 0.12, 0.06)  # of what the first child misses, by rank, before any is seen
MEMORY, MEMORY_ALL = 0.96, 0.998  # of a label, in the estimate of one request and of all
BIAS, MEMORY_BIAS = 10.0, 0.99  # tokens that the first value weighs, and memory per round
STIFFNESS = 12.5  # of the offset of a request: 50 labels of probability 1/2
NEAR_ONE = 0.999
AFRESH = 0.8  # acceptance after a probe has been accepted: where drafts pay, it is often high


class AcceptanceTable(NamedTuple):
    """Acceptance of a drafter's tokens, measured by teacher forcing (`eval/rank_tables.py`).

    Attributes:
        ranks: probability by depth and rank.
        bins: by depth and bin of the drafter's confidence, how many rows there were, and how many
            first tokens are expected to be accepted in them; None: not measured.
    """

    ranks: Float[Tensor, "D K"]
    bins: Float[Tensor, "D bins 2"] | None = None


@dataclass
class Rate:
    """A rate of labels, with forgetting."""

    labels: float
    total: float

    @property
    def mean(self) -> float:
        return self.total / self.labels

    def add(self, label: float, memory: float) -> None:
        self.labels = memory * self.labels + 1
        self.total = memory * self.total + label

    def add_measured(self, labels: float, total: float) -> None:
        """Add labels that were measured before; they weigh MEASURED at most."""
        share = min(1.0, MEASURED / max(labels, 1.0))
        self.labels += share * labels
        self.total += share * total


def _guess(mean: float, weight: float = GUESSED) -> Rate:
    return Rate(weight, weight * mean)


@dataclass
class Bias:
    """The ratio of accepted to expected tokens, with forgetting; 1 at first.

    The expectation already contains it, so that a ratio of 1 leaves it as it is.
    """

    accepted: float = BIAS
    expected: float = BIAS

    @property
    def value(self) -> float:
        return self.accepted / self.expected

    def add(self, accepted: float, expected: float) -> None:
        """Count a round; `expected` contains the bias."""
        value = self.value
        self.forget()
        self.accepted += accepted
        self.expected += expected / value

    def forget(self) -> None:
        """Move towards 1."""
        self.accepted += (1 - MEMORY_BIAS) * (BIAS - self.accepted)
        self.expected += (1 - MEMORY_BIAS) * (BIAS - self.expected)


class Acceptance:
    """The estimates of all requests of a decoder."""

    def __init__(
        self,
        weight: float = GUESSED,
        drawn: bool = False,
        table: AcceptanceTable | None = None,
    ) -> None:
        """
        Args:
            weight: of the drafter's confidence, in labels: CALIBRATED if it is measured.
            drawn: tokens are drawn from the drafter's rows, and accepted with the overlap of these
                and the target's: the confidence says nothing of it until labels do.
            table: the first values; the deepest row stands for deeper ones.
        """
        self.drawn = drawn
        self.levels = [_guess(FIRST) for _ in range(DEPTHS)]
        bins = [AFRESH if drawn else (i + 0.5) / BINS for i in range(BINS)]
        self.bins = [[_guess(middle, weight) for middle in bins] for _ in range(DEPTHS)]
        self.siblings = [_guess(share) for share in SIBLINGS]
        if table is None:
            return
        rows = _to_depths(table.ranks)
        self.levels = [_guess(row[0], MEASURED) for row in rows]
        missed = max(1 - rows[0][0], 1 - NEAR_ONE)
        known = [_guess(rate / missed, MEASURED) for rate in rows[0][1:RANKS]]
        self.siblings = known + self.siblings[len(known) :]
        if table.bins is not None:
            for own, measured in zip(self.bins, _to_depths(table.bins), strict=True):
                for rate, (count, accepted) in zip(own, measured, strict=True):
                    rate.add_measured(count, accepted)

    def sibling_row(self, first: float) -> list[float]:
        """Return the acceptance of a node's children by rank, given that of the first."""
        return [first, *((1 - first) * rate.mean for rate in self.siblings)]

    def add_rank(self, rank: int | None, children: int) -> None:
        """Count the rank of the accepted child of a node; None: none of so many."""
        if rank != 0:
            for i, rate in enumerate(self.siblings[: children - 1], start=1):
                rate.add(float(rank == i), MEMORY_ALL)


@dataclass
class RequestAcceptance:
    """The estimates of one request."""

    shared: Acceptance
    levels: list[Rate] = field(default_factory=lambda: [Rate(0.0, 0.0) for _ in range(DEPTHS)])
    offset: float = 0.0
    curvature: float = 0.0

    def mean(self, depth: int, optimism: float = 0.0) -> float:
        """Return the estimate before the drafter runs.

        Args:
            optimism: standard errors that are added.
        """
        level = min(depth, DEPTHS) - 1
        own, prior = self.levels[level], self.shared.levels[level].mean
        labels = own.labels + PRIOR
        mean = (own.total + PRIOR * prior) / labels
        if optimism:
            mean += optimism * math.sqrt(max(mean * (1 - mean), 0.0) / labels)
        return min(mean, NEAR_ONE)

    def given(self, depth: int, confidence: float) -> float:
        """Return the estimate after the drafter has computed a row with this largest value."""
        bins = self.shared.bins[min(depth, DEPTHS) - 1]
        return _shifted(bins[_bin(confidence)].mean, self.offset)

    def restart(self, confidence: float | None) -> None:
        """Forget the labels, for the text has changed: AFRESH at every depth.

        Args:
            confidence: of an accepted first token, whose estimate becomes AFRESH too.
        """
        self.levels = [_guess(AFRESH, PRIOR) for _ in range(DEPTHS)]
        self.offset = self.curvature = 0.0
        if confidence is not None:
            self.offset = _log_odds(AFRESH) - _log_odds(self.given(1, confidence))

    def add(self, depth: int, label: float, confidence: float | None = None) -> None:
        """Add a label of a depth that was reached; without a confidence, to the means alone."""
        level = min(depth, DEPTHS) - 1
        self.levels[level].add(label, MEMORY)
        self.shared.levels[level].add(label, MEMORY_ALL)
        if confidence is None:
            return
        expected = self.given(depth, confidence)
        self.curvature = MEMORY * self.curvature + expected * (1 - expected)
        self.offset += (label - expected) / (self.curvature + STIFFNESS)
        self.shared.bins[level][_bin(confidence)].add(label, MEMORY_ALL)


def bin_of(confidence: Float[Tensor, " N"]) -> Int[Tensor, " N"]:
    """Return the bins of confidences."""
    return (confidence * BINS).long().clamp(0, BINS - 1)


def _bin(confidence: float) -> int:
    return min(BINS - 1, int(max(0.0, confidence) * BINS))


def _to_depths(table: Tensor) -> list[Sequence[Any]]:
    """Return DEPTHS rows of a table by depth; the deepest stands for deeper ones."""
    return [*table.tolist(), *[table[-1].tolist()] * DEPTHS][:DEPTHS]


def _shifted(rate: float, offset: float) -> float:
    """Add to the log-odds of a rate."""
    return 1 / (1 + math.exp(-_log_odds(rate) - offset)) if offset else rate


def _log_odds(rate: float) -> float:
    rate = min(max(rate, 1 - NEAR_ONE), NEAR_ONE)
    return math.log(rate / (1 - rate))
