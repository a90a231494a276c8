"""Candidate trees of `decode=auto`: their shapes, and the tokens that are expected of them."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from outrider.models.decode.acceptance import Acceptance, Bias
from outrider.models.decode.auto.choice import Choice, tree_shapes_of
from outrider.models.decode.costs.round_costs import DraftShape

KEPT = 16  # rounds for which the shapes of the candidate trees are kept
NEAR = 0.9  # share of the best chain's rate that one of them must reach to be considered so long
Seconds = Callable[[DraftShape, float], float]


class CandidateTrees:
    """The candidate trees of a decoder.

    Attributes:
        bias: of their expected tokens.
    """

    def __init__(self) -> None:
        self._shapes: list[tuple[DraftShape, float]] = []
        self._age, self._near, self.bias = KEPT, True, Bias()

    def renew(self) -> None:
        """Select the shapes again in the next round."""
        self._age = KEPT

    def choices(
        self,
        chains: Sequence[Choice],
        tokens: Sequence[float],
        shared: Acceptance,
        seconds: Seconds,
        limits: tuple[int, int],
    ) -> list[Choice]:
        """Return a choice per tree, or none while no tree comes near the best chain.

        Args:
            chains: the choices of chains of 1, 2, .. tokens.
            tokens: expected of the batch with chains of 0, 1, .. tokens.
            seconds: of a shape, and the tokens that are expected of it.
            limits: children per node, and nodes.
        """
        self._age += 1
        if renewed := self._age > KEPT:
            survivals = [tokens[0], *(b - a for a, b in pairwise(tokens))]
            first = [b / a if a else 0.0 for a, b in pairwise(survivals)]
            self._shapes, self._age = tree_shapes_of(shared, first, *limits), 0
        elif not self._near:
            return []
        plain, deepest, trees = chains[0].rate / chains[0].gain, len(tokens) - 1, list[Choice]()
        for shape, drafted in self._shapes:
            if shape.depth <= deepest:
                expected = tokens[0] * (1 + self.bias.value * drafted)
                time = seconds(shape, expected)
                trees.append(Choice(shape, expected, time, expected / time / plain))
        if renewed:
            least = NEAR * max(one.rate for one in chains)
            self._near = any(one.rate > least for one in trees)
        return trees
