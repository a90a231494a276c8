"""What a round has shown: tokens, seconds, and labels for the estimates of acceptance."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.models.decode.acceptance import AFRESH, RANKS, RequestAcceptance
from outrider.models.decode.auto.choice import Choice, describe
from outrider.models.decode.auto.tree_growth import RootRow
from outrider.models.decode.costs.live_costs import LiveCosts
from outrider.models.decode.costs.round_costs import PLAIN, DraftShape, chain_shape
from outrider.models.decode.request import ACCEPTED, ActiveRequest
from outrider.models.drafting.vocab import DraftVocab

PASSAGE = 12  # rounds after which a text has changed, at even odds: a guess


@dataclass
class Round:
    """A round between its draft and the next one.

    Attributes:
        choice: what was planned.
        plain: expected seconds of a plain round in its place.
        kinds: per request LOOK_UP, or "" for drafts by weights.
        table: seconds of the drafted shape by the measured table alone.
        levels: the part of `table` that levels of a chain below the first add.
        own: seconds of the controller itself, looking included.
        looked: the part of `own` in which many rows were looked at.
        drafted: what the drafter has computed, which may be less or more than planned.
        confidences, logits, unsubmitted: of a chain (`ChainGrowth`).
        is_tree: it drafted a tree, of which maybe no node was kept.
        roots: per request, the tree's first level; None: it has none.
        dropped: expected tokens of the nodes of the tree that were not kept.
        vocab: the drafter's.
        overlaps: per request and level of a chain, the probability that its token is accepted,
            where the rule has computed it.
    """

    requests: Sequence[ActiveRequest]
    estimates: Sequence[RequestAcceptance]
    choice: Choice
    plain: float
    kinds: Sequence[str] = ()
    vocab: DraftVocab | None = None
    table: float = 0.0
    levels: float = 0.0
    own: float = 0.0
    looked: float = 0.0
    drafted: DraftShape | None = None
    confidences: Sequence[Sequence[float]] = ()
    logits: Sequence[Tensor] = ()
    unsubmitted: Sequence[float | None] = ()
    is_tree: bool = False
    roots: Sequence[RootRow | None] = ()
    dropped: float = 0.0
    overlaps: Sequence[Sequence[float]] = ()

    def __post_init__(self) -> None:
        self._lengths = [len(one.out.ids) for one in self.requests]
        self._start = self.requests[-1].out.times.rounds

    @property
    def shape(self) -> DraftShape:
        """What was drafted."""
        return self.drafted or self.choice.shape

    @property
    def draft_kind(self) -> str:
        """LOOK_UP, or "" if a request drafts by weights."""
        return min(self.kinds, default="")

    @property
    def kind(self) -> str:
        """Kind of the round: `plain`, `chain`, `tree`, or LOOK_UP."""
        if self.shape.depth and self.draft_kind:
            return self.draft_kind
        return "tree" if self.is_tree else self.shape.kind

    @property
    def verified(self) -> DraftShape:
        """What of it the target has verified: a chain may end before its last level."""
        if self.is_tree or self.choice.shape == PLAIN:
            return self.shape
        return chain_shape(len(self.confidences))

    @property
    def label(self) -> str:
        """`plain`, `chain 4` or `tree 15`."""
        if not self.verified.nodes:
            return "plain"
        return f"tree {self.verified.nodes}" if self.is_tree else describe(self.verified)

    def set_table(self, costs: LiveCosts, length: int) -> None:
        """Set `table` and `levels`, at a mean length of the texts."""
        self.table = self._table_seconds(costs, length, self.shape, self.verified)
        if self.kind == "chain":
            first = chain_shape(1), chain_shape(min(1, self.verified.depth))
            self.levels = self.table - self._table_seconds(costs, length, *first)

    def _table_seconds(
        self, costs: LiveCosts, length: int, drafted: DraftShape, verified: DraftShape
    ) -> float:
        """Return the table's seconds of a round that drafts and verifies these shapes."""
        parts = (costs.table_seconds(s, len(self.requests), length) for s in (drafted, verified))
        draft, other = (part[i] for i, part in enumerate(parts))
        return other if self.draft_kind else draft + other

    @property
    def is_over(self) -> bool:
        """Whether its outcome is known: an interrupted round has none."""
        return len(self.requests[-1].out.ids) > self._lengths[-1]

    @property
    def seconds(self) -> float:
        """Seconds of the round, of the batch: each request has an equal share."""
        return len(self.requests) * (self.requests[-1].out.times.rounds - self._start)

    @property
    def tokens(self) -> int:
        """New tokens of the batch."""
        return sum(len(one.out.ids) for one in self.requests) - sum(self._lengths)

    def teach(self) -> None:
        """Add the round's labels to the estimates."""
        if self.is_tree:
            self._teach_roots()
            return
        rejected = list[tuple[int, int]]()  # slot, and level of its first rejected token
        for slot, (one, estimate) in enumerate(zip(self.requests, self.estimates, strict=True)):
            accepted, drafted = one.out.accepted[-1], one.out.drafted[-1]
            cut = _is_cut(one)
            reached = min(accepted if cut else accepted + 1, drafted, len(self.confidences))
            for level in range(reached):
                label = float(level < accepted)
                if self.overlaps:
                    label = self.overlaps[slot][level]
                estimate.add(level + 1, label, self.confidences[level][slot])
            unsubmitted = self.unsubmitted[slot] if self.unsubmitted else None
            if unsubmitted is not None and accepted == drafted == len(self.confidences) and not cut:
                level = drafted + 1
                estimate.add(level, estimate.given(level, unsubmitted))
            if accepted < drafted and not cut and not self.overlaps:
                rejected.append((slot, accepted))
        self._teach_ranks(rejected)

    def restart(self, waited: int) -> None:
        """Begin the estimates afresh where the text has probably changed.

        That is, where the outcome of the round, that of all requests together, is more probable
        after a change, which raises estimates to AFRESH, than by the estimates as they are. A
        request without an accepted token keeps its own.

        Args:
            waited: rounds since the weights drafted, in which it may have changed: at even odds
                after PASSAGE and more.
        """
        changed, unchanged, right = min(1.0, waited / PASSAGE), 1.0, list[int]()
        for slot, (one, estimate) in enumerate(zip(self.requests, self.estimates, strict=True)):
            if self.kinds and self.kinds[slot]:
                continue
            accepted = one.out.accepted[-1]
            means = [*map(estimate.mean, range(1, accepted + 1))]
            unchanged *= math.prod(means)
            changed *= math.prod(max(AFRESH, mean) for mean in means)
            if accepted < one.out.drafted[-1] and not _is_cut(one):
                mean = estimate.mean(accepted + 1)
                unchanged *= 1 - mean
                changed *= 1 - max(AFRESH, mean)
            if accepted and means[0] < AFRESH:
                right.append(slot)
        for slot in right if changed > unchanged else ():
            confidence = self.confidences[0][slot] if self.confidences else None
            self.estimates[slot].restart(confidence)

    def _teach_ranks(self, rejected: Sequence[tuple[int, int]]) -> None:
        """Count which siblings of rejected tokens would have been accepted."""
        known = [(slot, level) for slot, level in rejected if level < len(self.logits)]
        if not known or self.vocab is None:
            return
        rows = torch.stack([self.logits[level][slot, 0] for slot, level in known])
        top_ids = self.vocab.to_target(rows.topk(min(RANKS, rows.shape[1])).indices)
        for (slot, _), top in zip(known, top_ids.tolist(), strict=True):
            correction = self.requests[slot].out.ids[-1]
            rank = top.index(correction) if correction in top else None
            self.estimates[slot].shared.add_rank(rank, len(top))

    def _teach_roots(self) -> None:
        """Count the rank of the next token in the first level of a tree, kept or not.

        Deeper levels teach nothing: which of them are kept depends on how sure the drafter is.
        """
        for one, before, estimate, root in zip(
            self.requests, self._lengths, self.estimates, self.roots, strict=True
        ):
            if root is None:
                continue
            token = one.out.ids[before]
            rank = root.ids.index(token) if token in root.ids else None
            if not estimate.shared.drawn:  # else the means are those of drawn tokens
                estimate.add(1, float(rank == 0), root.confidence)
            estimate.shared.add_rank(rank, len(root.ids))


def _is_cut(one: ActiveRequest) -> bool:
    """Return whether the text ends within its draft, which hides the next level."""
    return bool(one.out.stop_reason) and one.out.origins[-1] == ACCEPTED
