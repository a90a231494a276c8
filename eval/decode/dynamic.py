"""A tree that grows where the drafter is confident, and is cut to its best nodes.

The children are the drafter's favourites, chosen without chance, so they are verified by `match`
(rules R1 and R3). Scores are sums of log-probabilities of the drafter's raw softmax, in float32,
whatever the temperature.

Shape letters: B prompts, n nodes of a level, M candidates, N kept ones and the root.

Source: EAGLE-2, arXiv:2406.16858, section 4 (expand, rerank); OPT-Tree, arXiv:2406.17276 (the
expected length of a tree is the sum of its nodes' path probabilities; grow until one more level
adds too little to it).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.eval.decode.ask import Ask
from outrider.eval.decode.policy import Draft
from outrider.eval.decode.processors import Sampling
from outrider.eval.decode.rules import BEST
from outrider.eval.decode.sampling import Coins
from outrider.eval.decode.tree import Tree, rerank


@dataclass(frozen=True)
class DynamicTree:
    """Expand the most probable frontier, then keep the most probable nodes.

    Attributes:
        depth: levels drafted at most.
        width: children per node, and nodes expanded per level.
        budget: drafted nodes the target verifies.
        gain: grow no deeper once a level adds no more than this to the expected length of the
            draft (tokens); 0 always grows to `depth`.
    """

    depth: int
    width: int
    budget: int
    gain: float = 0.0
    draft = BEST
    branches = True

    @property
    def nodes(self) -> int:
        return self.budget

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
        frontier = roots[:, None]  # tokens of the level to expand
        parents = torch.zeros_like(frontier)  # their places in the step before
        number = parents - 1  # their numbers among all candidates
        above = torch.zeros(frontier.shape, device=roots.device)
        grown = _Grown(self.budget)
        allowed = torch.tensor(rooms, device=roots.device) if min(rooms) < self.depth else None
        for depth in range(1, min(self.depth, max(rooms), ask.reach) + 1):
            logits = ask.step(depth, frontier, parents)
            width = min(self.width, logits.shape[-1])
            found = logits.float().log_softmax(-1).topk(width)
            scores = (above[..., None] + found.values).flatten(1)
            if allowed is not None:
                scores = scores.masked_fill((allowed < depth)[:, None], float("-inf"))
            ids = ask.vocab.to_target(found.indices).flatten(1)
            best = _best(scores, self.width)
            number, fresh = best + grown.count, number.repeat_interleave(width, dim=1)
            grown.add(ids, fresh, scores)
            frontier, above = ids.gather(1, best), scores.gather(1, best)
            parents = best.div(width, rounding_mode="floor")
            if self.gain > 0:
                allowed = self._stop(grown, depth, allowed)
                if bool((allowed <= depth).all()):
                    break
        return Draft(grown.tree(roots), None)

    def _stop(self, grown: "_Grown", depth: int, allowed: Tensor | None) -> Int[Tensor, " B"]:
        """Deepest level of each prompt: this one, where it has added too little."""
        before, now = grown.length(depth - 1), grown.length(depth)
        if allowed is None:
            allowed = torch.full_like(before, self.depth, dtype=torch.long)
        return torch.where(now - before <= self.gain, allowed.clamp(max=depth), allowed)


def _best(scores: Float[Tensor, "B M"], count: int) -> Int[Tensor, "B n"]:
    """The `count` best, ties to the lower index, in index order."""
    ranked = scores.sort(dim=-1, descending=True, stable=True).indices
    return ranked[:, :count].sort(dim=-1).values


class _Grown:
    """All candidates of a round, level by level."""

    def __init__(self, budget: int) -> None:
        self.budget, self.count = budget, 0
        self.levels: list[tuple[Tensor, Tensor, Tensor]] = []  # ids, parents' numbers, scores

    def add(self, ids: Tensor, parents: Tensor, scores: Tensor) -> None:
        self.levels.append((ids, parents, scores))
        self.count += ids.shape[1]

    def length(self, depth: int) -> Float[Tensor, " B"]:
        """Expected accepted tokens of the best tree of so many levels."""
        if depth == 0:
            return self.levels[0][2].new_zeros(len(self.levels[0][2]))
        chances = torch.cat([scores for _, _, scores in self.levels[:depth]], dim=1).exp()
        return chances.topk(min(self.budget, chances.shape[1])).values.sum(-1)

    def tree(self, roots: Int[Tensor, " B"]) -> Tree:
        """The root and the best candidates; those of no use hang below it and are not real."""
        parts = zip(*self.levels, strict=True)
        ids, above, scores = (torch.cat(part, dim=1) for part in parts)
        sizes = torch.tensor([level[0].shape[1] for level in self.levels], device=ids.device)
        levels = torch.arange(1, len(sizes) + 1, device=ids.device).repeat_interleave(sizes)
        kept = rerank(scores, self.budget)
        above, real = above.gather(1, kept), scores.gather(1, kept) > float("-inf")
        parents = torch.searchsorted(kept, above) + 1
        parents = torch.where(real & (above >= 0), parents, 0)
        depths = torch.where(real, levels[kept], 1)
        top = roots[:, None]
        return Tree.grown(
            torch.cat([top, ids.gather(1, kept)], dim=1),
            torch.cat([torch.full_like(top, -1), parents], dim=1),
            torch.cat([torch.zeros_like(top), depths], dim=1),
            len(self.levels),
            torch.cat([torch.ones_like(top, dtype=torch.bool), real], dim=1),
        )
