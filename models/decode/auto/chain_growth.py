"""A chain that grows level by level while another level pays.

After each level the drafter has given a row, and nothing is drawn from it yet. Two decisions, each
from values known before the draw of the token concerned:

    submit    the drafter's confidence says how likely the token is accepted; it is drawn and
              verified if that pays for one more verified row and what may follow it
    go on     another level is drafted if, by the mean acceptance of deeper levels and a standard
              error of their sum over the requests, some number of them adds more tokens than the
              same seconds yield elsewhere

With survivals S, expected tokens per second of the best plan `rate`, and seconds C:

    sum of S over the requests and further levels  >  rate * (C further - C now)

Whether a token is submitted depends on the tokens before it and on its row, never on itself: so the
output has the target's distribution (R2 in `token_rules.py`).

Source: the stopping rule is Dinkelbach's for a ratio of expectations.
Shape letters: B prompts, N nodes, V tokens.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.models.decode.acceptance import RequestAcceptance
from outrider.models.decode.auto.choice import ChainCosts, optimism_of
from outrider.models.decode.draft_context import DraftContext
from outrider.models.decode.policy import Draft, chain_draft, next_token, root_index
from outrider.models.decode.rules.rule_table import SAMPLED_DRAFTS


class ChainGrowth:
    """One chain per prompt, of at most `deepest` tokens.

    Attributes:
        steps: levels that the drafter has computed.
        below: whether levels below the last computed one add more than they cost.
        confidences: per submitted level and request (`DraftContext.log_confidence`).
        logits: per submitted level.
        unsubmitted: per request, its confidence in a last level that was computed in vain; None:
            its draft had ended.
    """

    def __init__(
        self,
        requests: Sequence[RequestAcceptance],
        costs: ChainCosts,
        rate: float,
        deepest: int,
        draft: str,
        least: int = 0,
    ) -> None:
        """`least` levels are drafted and verified without a decision: those of a probe."""
        self.requests, self.costs, self.rate, self.deepest = requests, costs, rate, deepest
        self.least, self.below = least, False
        self.kind, self.steps = draft, 0
        self._means: list[list[float]] = []  # with optimism, per level and request
        self.confidences, self.logits = list[list[float]](), list[Tensor]()
        self.unsubmitted: Sequence[float | None] = ()

    def propose(self, context: DraftContext) -> Draft:
        """Draft; the first level is always computed."""
        roots, sampling = context.roots, context.sampling
        self.limits = [min(self.deepest, limit) for limit in context.depth_limits]
        self.limits = [min(limit, context.max_depth) for limit in self.limits]
        self.survival = [float(limit > 0) for limit in self.limits]
        ids, rows, depth = [roots[:, None]], list[Tensor](), 0
        parents = root_index(len(roots), roots.device)
        is_sampled = not sampling.greedy and self.kind in SAMPLED_DRAFTS
        while depth < max(self.limits) and (depth == 0 or self.pays(depth)):
            logits = context.step(depth + 1, ids[-1], parents)
            self.steps += 1
            self._end_abstaining(context, depth)
            if depth >= max(self.limits):
                break
            log_q = logits.float().log_softmax(-1)
            confidences = [*map(math.exp, context.log_confidence(log_q).flatten().tolist())]
            if not self.submits(depth + 1, confidences):
                self.unsubmitted = [
                    confidence if depth < limit else None
                    for confidence, limit in zip(confidences, self.limits, strict=True)
                ]
                break
            ids.append(next_token(context, logits, rows if is_sampled else None))
            self.confidences.append(confidences)
            self.logits.append(logits)
            depth += 1
        drafted = None
        if min(self.limits) < depth:
            drafted = torch.tensor(self.limits, device=roots.device).clamp(max=depth)
        return chain_draft(context, ids, rows, drafted)

    # ---- decisions, before the draw ----

    def submits(self, depth: int, confidences: Sequence[float]) -> bool:
        """Decide whether the tokens of a computed level are drawn; update the survivals."""
        self.survival = [
            s * one.given(depth, confidence) if depth <= limit else 0.0
            for s, one, confidence, limit in zip(
                self.survival, self.requests, confidences, self.limits, strict=True
            )
        ]
        row = self.rate * (self.costs.other[depth] - self.costs.other[depth - 1])
        worth = sum(self.survival) - row
        submitted = worth > 0 or depth <= self.least
        self.below = self._future_exceeds(0.0 if submitted else -worth, depth)
        return submitted or self.below

    def pays(self, depth: int) -> bool:
        """Decide whether levels below a submitted depth are drafted."""
        return depth < self.least or self.below

    def _future_exceeds(self, tokens: float, depth: int) -> bool:
        """Return whether levels below a depth add more than `tokens` beyond their cost."""
        net, survival = 0.0, self.survival
        for level in range(depth + 1, max(self.limits, default=0) + 1):
            survival = [s * mean for s, mean in zip(survival, self._mean(level), strict=True)]
            seconds = self.costs.total(level) - self.costs.total(level - 1)
            net += sum(survival) - self.rate * seconds
            if net > tokens:
                return True
        return False

    def _mean(self, level: int) -> list[float]:
        """Return the optimistic acceptance of every request; 0 beyond its limit."""
        while len(self._means) < level:
            depth = len(self._means) + 1
            optimism = optimism_of(sum(depth <= limit for limit in self.limits))
            self._means.append([
                one.mean(depth, optimism) if depth <= limit else 0.0
                for one, limit in zip(self.requests, self.limits, strict=True)
            ])  # fmt: skip
        return self._means[level - 1]

    def _end_abstaining(self, context: DraftContext, depth: int) -> None:
        if context.abstains is not None:
            ends = context.abstains.flatten().tolist()
            self.limits = [
                min(limit, depth) if end else limit
                for limit, end in zip(self.limits, ends, strict=True)
            ]
            self._means.clear()
