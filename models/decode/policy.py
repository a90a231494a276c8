"""Draft policies: which draft tokens a round proposes; and the simplest policy, the chain.

A policy runs the drafter level by level and returns a tree per prompt. Its kind of draft tokens is
one of rule_table.py: `drawn` and `independent` ones are sampled from the drafter's warped rows,
which are returned with the tree (rule R1); `best` and `coupled` ones are the top-k of its scores.

Shape letters: B prompts, N nodes of the tree, V the target's tokens.

Source: chains, Leviathan et al. 2023, arXiv:2211.17192; when to stop a chain early is R2 of the
rules in `token_rules.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.models.argmax import first_argmax
from outrider.models.decode.adaptive_confidence import AdaptiveConfidence
from outrider.models.decode.draft_context import DraftContext
from outrider.models.decode.request import ActiveRequest
from outrider.models.decode.rules.rule_table import (
    BEST,
    DRAWN,
    SAMPLED_DRAFTS,
    BoundRule,
    VerifyFn,
    bind_rule,
    check_draft,
    default_rule,
)
from outrider.models.decode.tree import Tree
from outrider.models.drafting.drafter import Drafter
from outrider.models.target.target import Target, TargetStates


class Draft(NamedTuple):
    """A tree per prompt, and the rows its tokens were drawn from (None: they were not drawn).

    Row i of q_rows is the distribution of the children of node i; rows of leaves are not read. Of
    merged drafts it is the distribution of draw i (`Tree.draws`).
    """

    tree: Tree
    q_rows: Float[Tensor, "B rows V"] | None


@runtime_checkable
class Policy(Protocol):
    """The interface of all policies.

    Attributes:
        draft: the kind of draft tokens at temperatures above 0: one of rules.DRAFTS.
        nodes: maximum number of draft tokens per prompt and round (without the root).
        levels: maximum depth of a draft token.
        branches: whether a node may have several children.
    """

    @property
    def draft(self) -> str: ...
    @property
    def nodes(self) -> int: ...
    @property
    def levels(self) -> int: ...
    @property
    def branches(self) -> bool: ...

    def propose(self, context: DraftContext) -> Draft:
        """Return the draft of a round."""
        ...


@runtime_checkable
class SkippingPolicy(Policy, Protocol):
    """A policy that decides before every round whether there is a draft: `decode=auto`."""

    def wrap(self, drafter: Drafter, target: Target) -> Drafter:
        """Return the drafter in the form that rounds can skip.

        Raises:
            ConfigError: no round can skip it.
        """
        ...

    def prepare(self, target: Target, slots: int, rows: int) -> None:
        """Prepare for batches of `slots` requests of `rows` rows."""
        ...

    def drafts(self, active: Sequence[ActiveRequest]) -> bool:
        """Return whether the next round may draft; else it is plain, and `defer` ends it."""
        ...

    def defer(
        self, active: Sequence[ActiveRequest], prefix: Sequence[int], states: TargetStates
    ) -> None:
        """Keep the rows of a plain round, at the positions `prefix`, for the drafter."""
        ...


@dataclass(frozen=True)
class Chain:
    """One draft token per depth: the drafter's argmax, or drawn from its warped row.

    Attributes:
        confidence: drafting stops after a token if the drafter's confidence at its place
            (`DraftContext.log_confidence`) is below this or below an adaptive threshold. Neither
            this nor the verification of the token depends on which token was drawn, else the output
            distribution would change (rule R2).
    """

    depth: int
    draft: str = DRAWN
    confidence: float | AdaptiveConfidence = 0.0
    branches = False

    def __post_init__(self) -> None:
        fixed = 0.0 if isinstance(self.confidence, AdaptiveConfidence) else self.confidence
        if self.depth < 1 or not 0 <= fixed <= 1:
            raise ValueError(f"{self}: depth is at least 1, confidence between 0 and 1")
        check_draft(self.draft)

    @property
    def nodes(self) -> int:
        return self.depth

    @property
    def levels(self) -> int:
        return self.depth

    def propose(self, context: DraftContext) -> Draft:
        roots, depth_limits, sampling = context.roots, context.depth_limits, context.sampling
        ids, rows = [roots[:, None]], list[Tensor]()
        parents = root_index(len(roots), roots.device)
        deepest = min(self.depth, max(depth_limits), context.max_depth)
        drafted, threshold = None, self._threshold(context)  # None: all
        if threshold is not None or context.may_abstain or min(depth_limits) < deepest:
            drafted = torch.tensor(depth_limits, device=roots.device).clamp(max=self.depth)
        is_sampled = not sampling.greedy and self.draft in SAMPLED_DRAFTS
        for depth in range(1, deepest + 1):
            logits = context.step(depth, ids[-1], parents)
            if drafted is not None and context.abstains is not None:
                ends = context.abstains.flatten()
                drafted = torch.where(ends, drafted.clamp(max=depth - 1), drafted)
                if bool((drafted < depth).all()):
                    break
            ids.append(next_token(context, logits, rows if is_sampled else None))
            if drafted is not None and threshold is not None:
                confidence = context.log_confidence(logits.float().log_softmax(-1)).exp().flatten()
                drafted = torch.where(confidence < threshold, drafted.clamp(max=depth), drafted)
                if bool((drafted <= depth).all()):
                    break
        return chain_draft(context, ids, rows, drafted)

    def _threshold(self, context: DraftContext) -> float | Float[Tensor, " B"] | None:
        """Return the confidence below which drafts end, or that of every prompt; None: none."""
        if not isinstance(self.confidence, AdaptiveConfidence):
            return self.confidence or None
        deepest = min(self.depth, context.max_depth)
        values = [_adapted(self.confidence, one, deepest) for one in context.requests]
        return torch.tensor(values, device=context.roots.device)


def next_token(
    context: DraftContext,
    logits: Float[Tensor, "B 1 Vd"],
    rows: list[Float[Tensor, "B 1 Vd"]] | None,
) -> Int[Tensor, "B 1"]:
    """Return the next token of each chain: the argmax, or drawn from its warped row.

    The warped row is appended to `rows`; None: nothing is drawn.
    """
    if rows is None:
        return context.vocab.to_target(first_argmax(logits))
    rows.append(context.sampling.probs(logits))
    return context.vocab.to_target(context.rng.draw(rows[-1]))


def chain_draft(
    context: DraftContext,
    ids: list[Int[Tensor, "B 1"]],
    rows: list[Float[Tensor, "B 1 Vd"]],
    drafted: Int[Tensor, " B"] | None,
) -> Draft:
    """Return the draft of chains.

    Args:
        ids: the roots, then the tokens of each level.
        rows: what the tokens of each level were drawn from; empty: they were not drawn.
        drafted: tokens of each chain that are verified; None: all.
    """
    tree = Tree.chain(torch.cat(ids, dim=1), drafted)
    if not rows:
        return Draft(tree, None)
    q_rows = [context.vocab.expand(row) for row in rows]
    return Draft(tree, torch.cat([*q_rows, torch.zeros_like(q_rows[0])], dim=1))


def _adapted(rule: AdaptiveConfidence, one: ActiveRequest, deepest: int) -> float:
    """Return the threshold of a request's next round, and keep it with the request."""
    threshold, out = one.threshold or rule.initial(), one.out
    for i in range(threshold.rounds, out.rounds):
        drafted, longest = out.drafted[i], min(deepest, out.room[i])
        threshold = rule.update(threshold, drafted, out.accepted[i], drafted == longest)
    one.threshold = threshold
    return threshold.value


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # shared by all callers
def root_index(batch: int, device: torch.device) -> Int[Tensor, "B 1"]:
    """Return index 0, the root's in its level, for every prompt."""
    return torch.zeros(batch, 1, dtype=torch.long, device=device)


@runtime_checkable
class OwnRule(Protocol):
    """A policy whose drafts are of several kinds, and which brings the rule for them."""

    def default_rule(self) -> BoundRule: ...


def default_rule_of(policy: Policy | None) -> BoundRule:
    """Return the default lossless rule for a policy's drafts."""
    if isinstance(policy, OwnRule):
        return policy.default_rule()
    draft, chain = (BEST, True) if policy is None else (policy.draft, not policy.branches)
    return bind_rule(default_rule(draft, chain), draft)


def check_compatible(rule: VerifyFn, policy: Policy) -> None:
    """Raise ValueError if a rule was made for another kind of draft, or for chains only."""
    if not isinstance(rule, BoundRule):
        return
    if rule.draft != policy.draft:
        raise ValueError(
            f"rule {rule.name!r} was made for {rule.draft!r} drafts, and the policy's are "
            f"{policy.draft!r}: take bind_rule({rule.name!r}, {policy.draft!r})"
        )
    if rule.chains_only and policy.branches:
        raise ValueError(f"rule {rule.name!r} verifies chains only, and the policy grows trees")
