"""Which guesses to ask the target about: what a policy is, and the simplest one, the chain.

A policy asks the drafter level by level and returns a tree per prompt. Its guesses are `best`, the
drafter's favourites, chosen without chance; or they are tossed from its warped rows: `drawn`,
siblings without replacement, or `independent` ones. The rows go with the tree, because only they
tell the verifier what a tossed guess is worth (rule R1); favourites need none. `coupled` guesses
are favourites too, of rows that noise has been added to (coupled.py).

Trees are in `static.py` and `dynamic.py`.

Shape letters: B prompts, N nodes of the tree, V the target's tokens.

Source: chains, Leviathan et al. 2023, arXiv:2211.17192; when to stop a chain early is R2 of the
rules in `verify.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.models.decode.draft_context import Ask
from outrider.models.decode.rules import (
    BEST,
    DRAWN,
    TOSSED,
    Fitted,
    Judge,
    default_rule,
    judge,
    known,
)
from outrider.models.decode.sampling import Coins
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.tree import Tree


class Draft(NamedTuple):
    """A tree per prompt, and the rows its guesses were tossed from (None: none was).

    Row i of q_rows is what the children of node i were drawn from; rows of leaves are not read.
    """

    tree: Tree
    q_rows: Float[Tensor, "B N V"] | None


@runtime_checkable
class Policy(Protocol):
    """How a drafter is asked for guesses."""

    @property
    def draft(self) -> str:
        """How guesses come about at temperatures above 0: one of rules.DRAFTS."""
        ...

    @property
    def nodes(self) -> int:
        """Most drafted nodes per prompt in one round (the root is not counted)."""
        ...

    @property
    def levels(self) -> int:
        """Deepest guess."""
        ...

    @property
    def branches(self) -> bool:
        """Whether a node may have several children."""
        ...

    def propose(
        self,
        ask: Ask,
        roots: Int[Tensor, " B"],
        rooms: Sequence[int],
        sampling: Sampling,
        coins: Coins,
    ) -> Draft:
        """
        Args:
            roots: the newest tokens.
            rooms: no guess of a prompt deeper than this is of use (its budget ends there).
        """
        ...


@dataclass(frozen=True)
class Chain:
    """One guess per depth: the favourite, or drawn from the warped draft row.

    Attributes:
        confidence: drafting stops behind a guess that the drafter gives less chance than this
            (noise counted in, where guesses are coupled). The guess itself is still verified, or
            the answer's law would change (rule R2).
    """

    depth: int
    draft: str = DRAWN
    confidence: float = 0.0
    branches = False

    def __post_init__(self) -> None:
        if self.depth < 1 or not 0 <= self.confidence <= 1:
            raise ValueError(f"{self}: depth is at least 1, confidence between 0 and 1")
        known(self.draft)

    @property
    def nodes(self) -> int:
        return self.depth

    @property
    def levels(self) -> int:
        return self.depth

    def propose(
        self,
        ask: Ask,
        roots: Int[Tensor, " B"],
        rooms: Sequence[int],
        sampling: Sampling,
        coins: Coins,
    ) -> Draft:
        ids, rows = [roots[:, None]], list[Tensor]()
        only = _only(len(roots), roots.device)
        deepest = min(self.depth, max(rooms), ask.reach)
        drafted = None  # all of it
        if self.confidence > 0 or min(rooms) < deepest:
            drafted = torch.tensor(rooms, device=roots.device).clamp(max=self.depth)
        tossed = not sampling.greedy and self.draft in TOSSED
        for depth in range(1, deepest + 1):
            logits = ask.step(depth, ids[-1], only)
            if tossed:
                rows.append(sampling.rows(logits))
                guess = coins.draw(rows[-1])
            else:
                guess = sampling.choice(logits)
            ids.append(ask.vocab.to_target(guess))
            if drafted is not None and self.confidence > 0:
                chance = logits.float().softmax(-1).gather(-1, guess[..., None]).flatten()
                drafted = torch.where(chance < self.confidence, drafted.clamp(max=depth), drafted)
                if bool((drafted <= depth).all()):
                    break
        tree = Tree.chain(torch.cat(ids, dim=1), drafted)
        if not tossed:
            return Draft(tree, None)
        whole = [ask.vocab.expand(row) for row in rows]
        return Draft(tree, torch.cat([*whole, torch.zeros_like(whole[0])], dim=1))


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept for all who come
def _only(batch: int, device: torch.device) -> Int[Tensor, "B 1"]:
    """The place of the only node of a level."""
    return torch.zeros(batch, 1, dtype=torch.long, device=device)


def usual_rule(policy: Policy | None) -> Judge:
    """The usual lossless rule for a policy's guesses."""
    draft, chain = (BEST, True) if policy is None else (policy.draft, not policy.branches)
    return judge(default_rule(draft, chain), draft)


def check_fit(rule: Judge, policy: Policy) -> None:
    """
    Raises:
        ValueError: the rule was made for other drafts than the policy's.
    """
    if isinstance(rule, Fitted) and rule.draft != policy.draft:
        raise ValueError(
            f"rule {rule.name!r} was made for {rule.draft!r} drafts, and the policy's are "
            f"{policy.draft!r}: take judge({rule.name!r}, {policy.draft!r})"
        )
    if isinstance(rule, Fitted) and rule.chains_only and policy.branches:
        raise ValueError(f"rule {rule.name!r} verifies chains only, and the policy grows trees")
