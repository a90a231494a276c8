"""A dynamic tree that keeps as many nodes as pay.

The plan of a round says how many nodes are expected to pay, by the mean acceptance. Once the rows
are computed, their confidences say more: of the N most probable nodes

    sum of their probabilities  -  rate * seconds of verifying N nodes

is largest for the N that is kept, which may be 0; `rate` is the expected tokens per second of the
best plan. A node's probability is the product along its path. The first child has what the
estimates say for the confidence of its parent's row, if these are of most probable tokens; its
siblings share what it misses in proportion to the row. Coupled trees are kept whole: their scores
with noise are no probabilities.

All of it is known before the target runs, and no token is drawn: the tree is one of top-k tokens.

Source: Dinkelbach's rule for a ratio of expectations, as in `chain_growth.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.models.decode.acceptance import NEAR_ONE, RequestAcceptance
from outrider.models.decode.dynamic_tree import Candidates, DynamicTree
from outrider.models.decode.rules.rule_table import COUPLED
from outrider.models.decode.tree import NEVER


class RootRow(NamedTuple):
    """The confidence of the first level's row, and its most probable tokens."""

    confidence: float
    ids: list[int]


@dataclass(frozen=True)
class TreeGrowth(DynamicTree):
    """A dynamic tree of at most `budget` nodes.

    Attributes:
        requests: the estimates of every prompt.
        rate: expected tokens of the batch per second.
        rows: seconds of verifying 0, 1, .. `budget` nodes per prompt.
        confidences: per prompt, of the root's row.
        roots: per prompt, its first level; None: it has none.
        dropped: once, the expected tokens of the batch that were not kept.
    """

    requests: Sequence[RequestAcceptance] = ()
    rate: float = 0.0
    rows: Sequence[float] = ()
    confidences: list[float] = field(default_factory=list)
    roots: list[RootRow | None] = field(default_factory=list)
    dropped: list[float] = field(default_factory=list)

    def children(
        self, depth: int, confidence: Float[Tensor, "B n"], log_q: Float[Tensor, "B _ k"]
    ) -> Float[Tensor, "B n k"]:
        rates = confidence.exp().tolist()
        if depth == 1:
            self.confidences[:] = [one for (one,) in rates]
        if self.draft == COUPLED or any(one.shared.drawn for one in self.requests):
            return super().children(depth, confidence, log_q)
        known = [
            [min(one.given(depth, rate), NEAR_ONE) for rate in row]
            for one, row in zip(self.requests, rates, strict=True)
        ]
        first = torch.tensor(known, dtype=log_q.dtype, device=log_q.device).unsqueeze(2)
        first = first.masked_fill(log_q[..., :1].isnan(), 0.0)
        in_row = log_q.exp()
        missed = (1 - in_row[..., :1]).clamp(min=1 - NEAR_ONE)
        siblings = torch.minimum((1 - first) / missed, first / in_row[..., :1]) * in_row[..., 1:]
        return torch.cat([first, siblings], dim=2).log()

    def select(self, candidates: Candidates) -> Candidates:
        for ids, _, scores in candidates.levels[1:2]:
            found = zip(self.confidences, ids.tolist(), scores[:, 0].tolist(), strict=True)
            self.roots[:] = [
                None if score == NEVER else RootRow(confidence, top)
                for confidence, top, score in found
            ]
        if self.draft == COUPLED:
            return candidates
        tokens = candidates.expected_by_nodes()
        worth = [n - self.rate * row for n, row in zip(tokens, self.rows, strict=False)]
        best = max(range(len(worth)), key=worth.__getitem__)
        self.dropped[:] = [tokens[-1] - tokens[best]]
        return replace(candidates, budget=best)
