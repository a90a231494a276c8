"""A tree that grows where the drafter is confident, and is cut to its best nodes.

The children are the drafter's favourites, chosen without chance, so they are verified by `match`
(rules R1 and R3); or favourites of rows with noise, which belongs to a place and not to a tree, so
that these may be cut by their chances too (`coupled`). Scores are sums of log-probabilities, in
float32: of the drafter's raw softmax whatever the temperature, or of what noise has made of it.

Shape letters: B prompts, n nodes of a level, M candidates, A parents of all levels, N kept ones and
the root.

Source: EAGLE-2, arXiv:2406.16858, section 4 (expand, rerank); OPT-Tree, arXiv:2406.17276 (the
expected length of a tree is the sum of its nodes' path probabilities; grow until one more level
adds too little to it).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.models.decode.draft_context import Ask
from outrider.models.decode.policy import Draft
from outrider.models.decode.rules import BEST, COUPLED
from outrider.models.decode.sampling import Coins
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.tree import Tree, rerank


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
    draft: str = BEST
    branches = True

    def __post_init__(self) -> None:
        if min(self.depth, self.width, self.budget) < 1 or not self.gain >= 0:
            raise ValueError(f"{self}: depth, width and budget are at least 1, gain at least 0")
        if self.draft not in (BEST, COUPLED):
            raise ValueError(
                f"{self}: a tree that is cut by its tokens' chances must not toss them (R3): "
                f"its draft is {BEST} or {COUPLED}"
            )

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
        places, above = _root(len(roots), roots.device)  # places: in the newest level
        parents = places  # of the frontier: which of the nodes asked last each hangs below
        grown = _Grown(frontier, places, above, self.budget)
        allowed = torch.tensor(rooms, device=roots.device) if min(rooms) < self.depth else None
        deepest = min(self.depth, max(rooms), ask.reach)
        for depth in range(1, deepest + 1):
            logits = ask.step(depth, frontier, parents)
            width = min(self.width, logits.shape[-1])
            found = logits.float().log_softmax(-1).topk(width)
            scores = (above.unsqueeze(2) + found.values).flatten(1)
            if allowed is not None:
                scores = scores.masked_fill((allowed < depth)[:, None], float("-inf"))
            ids = ask.vocab.to_target(found.indices).flatten(1)
            grown.add(ids, places, scores)
            if self.gain > 0:
                allowed = self._stop(grown, depth, allowed)
                if bool((allowed <= depth).all()):
                    break
            if depth < deepest:
                # of equal ones topk may take any: whom to ask is free, whom to keep (rerank) is not
                above, places = scores.topk(min(self.width, scores.shape[1]))
                frontier = ids.gather(1, places)
                parents = places.div(width, rounding_mode="floor")
        return Draft(grown.tree(whole=allowed is None), None)

    def _stop(self, grown: "_Grown", depth: int, allowed: Tensor | None) -> Int[Tensor, " B"]:
        """Deepest level of each prompt: this one, where it has added too little."""
        before, now = grown.length(depth - 1), grown.length(depth)
        if allowed is None:
            allowed = torch.full_like(before, self.depth, dtype=torch.long)
        return torch.where(now - before <= self.gain, allowed.clamp(max=depth), allowed)


class _Grown:
    """All candidates of a round, level by level; the root is the first, and certain."""

    def __init__(
        self,
        roots: Int[Tensor, "B 1"],
        places: Int[Tensor, "B 1"],
        certain: Float[Tensor, "B 1"],
        budget: int,
    ) -> None:
        self.budget = budget
        self.levels: list[tuple[Tensor, Tensor, Tensor]] = []  # ids, parents, scores
        self.add(roots, places, certain)  # as if their own parents, until the tree is cut

    def add(
        self, ids: Int[Tensor, "B M"], parents: Int[Tensor, "B n"], scores: Float[Tensor, "B M"]
    ) -> None:
        """A level: as many children of every parent, one parent's after the other's.

        Args:
            parents: of the nodes asked, their places in the level before.
        """
        self.levels.append((ids, parents, scores))

    def length(self, depth: int) -> Float[Tensor, " B"]:
        """Expected accepted tokens of the best tree of so many levels."""
        found = [scores for _, _, scores in self.levels[: depth + 1]]
        chances = torch.cat(found, dim=1).exp()
        return chances.topk(min(self.budget + 1, chances.shape[1])).values.sum(-1) - 1

    def tree(self, whole: bool) -> Tree:
        """The root and the best candidates; those of no use hang below it and are not real.

        Args:
            whole: all are of use.
        """
        ids, above, scores = (torch.cat(part, dim=1) for part in zip(*self.levels, strict=True))
        kept = rerank(scores, self.budget + 1)
        shape = tuple((parents.shape[1], ids.shape[1]) for ids, parents, _ in self.levels)
        depths, owner, starts = _layout(shape, ids.device)
        parents = torch.searchsorted(kept, (above + starts).gather(1, owner.take(kept)))
        depths, real = depths.take(kept), None
        if not whole:
            real = scores.gather(1, kept) > float("-inf")
            parents, depths = torch.where(real, parents, 0), torch.where(real, depths, 1)
        parents[:, 0] = -1
        return Tree.grown(ids.gather(1, kept), parents, depths, len(self.levels) - 1, real)


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept for all who come
def _root(batch: int, device: torch.device) -> tuple[Int[Tensor, "B 1"], Float[Tensor, "B 1"]]:
    """Of the first candidate its place and its score."""
    places = torch.zeros(batch, 1, dtype=torch.long, device=device)
    return places, torch.zeros(batch, 1, device=device)


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept for all who come
def _layout(
    levels: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[Int[Tensor, " M"], Int[Tensor, " M"], Int[Tensor, " A"]]:
    """Where all candidates stand.

    Args:
        levels: parents and candidates of each, the root's included.

    Returns:
        Of every candidate its depth, and its parent's entry in the row of all parents; of every
        such entry the number of the first candidate of the level that the parent is in.
    """
    parents, children = torch.tensor(levels, device=device).unbind(1)
    depths = torch.arange(len(levels), device=device).repeat_interleave(children)
    each = (children // parents).repeat_interleave(parents)
    owner = torch.arange(len(each), device=device).repeat_interleave(each)
    begins = children.cumsum(0) - children
    before = (begins - children.roll(1)).clamp(min=0)  # where the level above begins
    return depths, owner, before.repeat_interleave(parents)
