"""A dynamic tree that keeps as many nodes as pay.

The plan of a round says how many nodes are expected to pay, by the mean acceptance. Once the rows
are computed, their confidences say more: of the N most probable nodes

    sum of their probabilities  -  rate * seconds of verifying N nodes

is largest for the N that is kept, which may be 0; `rate` is the expected tokens per second of the
best plan. The probabilities are the products of those that the estimates give for the confidence of
each row, where these are of the most probable tokens; siblings count in proportion.

All of it is known before the target runs, and no token is drawn: the tree is one of top-k tokens.

Source: Dinkelbach's rule for a ratio of expectations, as in `chain_growth.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.models.decode.acceptance import RequestAcceptance
from outrider.models.decode.draft_context import DraftContext
from outrider.models.decode.dynamic_tree import Candidates, DynamicTree
from outrider.models.decode.rules.rule_table import COUPLED


@dataclass(frozen=True)
class TreeGrowth(DynamicTree):
    """A dynamic tree of at most `budget` nodes.

    Attributes:
        requests: the estimates of every prompt.
        rate: expected tokens of the batch per second.
        rows: seconds of verifying 0, 1, .. `budget` nodes per prompt.
        confidences: per prompt, of the root's row.
        shares: once, the share of the expected tokens that the kept nodes have.
    """

    requests: Sequence[RequestAcceptance] = ()
    rate: float = 0.0
    rows: Sequence[float] = ()
    confidences: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    def log_confidence(
        self, context: DraftContext, log_q: Float[Tensor, "B n Vd"], depth: int
    ) -> Float[Tensor, "B n"]:
        raw = super().log_confidence(context, log_q, depth)
        rows = raw.exp().tolist()
        if depth == 1:
            self.confidences[:] = [row[0] for row in rows]
        if self.draft == COUPLED or any(one.shared.drawn for one in self.requests):
            return raw
        rates = [
            [one.given(depth, confidence) for confidence in row]
            for one, row in zip(self.requests, rows, strict=True)
        ]
        return torch.tensor(rates, dtype=raw.dtype, device=raw.device).log()

    def select(self, candidates: Candidates) -> Candidates:
        if self.draft == COUPLED:  # its scores are no probabilities
            return candidates
        tokens = candidates.expected_by_nodes()
        worth = [n - self.rate * row for n, row in zip(tokens, self.rows, strict=False)]
        best = max(range(len(worth)), key=worth.__getitem__)
        self.shares[:] = [tokens[best] / tokens[-1] if tokens[-1] else 1.0]
        return replace(candidates, budget=best)
