"""Dynamic trees: grow where the drafter is confident, keep the most probable nodes.

The children of a node are the drafter's top-k tokens, so they are verified by `match` (rules R1 and
R3); or the top-k with noise (`coupled`), which belongs to a position and not to a tree, so these
may be pruned by their probabilities too. Scores are sums of log-probabilities in float32, from the
drafter's raw softmax whatever the temperature, or from the scores with noise. The most probable
child has the drafter's confidence as its probability (`DraftContext.log_confidence`), its siblings
in proportion; by default it is the softmax's own.

A tree whose width is its budget is best-first: it has the `budget` most probable paths of all, as
if nodes were taken one by one from a heap (DDTree, for drafters that guess a block in one pass).
For a kept node is among the best `budget` of its level and of its siblings, and so are its
ancestors: no child is more probable than its parent. Levels expand only nodes that may be kept.

Shape letters: B prompts, n nodes of a level, M candidates, A parents of all levels, N kept nodes
and the root.

Source: EAGLE-2, arXiv:2406.16858, section 4 (expand, rerank); OPT-Tree, arXiv:2406.17276 (a tree's
expected length is the sum of its nodes' path probabilities; grow while a level adds enough to it);
DDTree, arXiv:2604.12989 (a tree over the marginals of a block, of the most probable paths).
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.models.decode.draft_context import DraftContext
from outrider.models.decode.policy import Draft, root_index
from outrider.models.decode.rules.rule_table import BEST, COUPLED
from outrider.models.decode.tree import NEVER, Tree, rerank


@dataclass(frozen=True)
class DynamicTree:
    """Draft tree of the most probable nodes, grown level by level and then pruned.

    Attributes:
        depth: maximum number of levels.
        width: children per node, and nodes expanded per level.
        budget: draft nodes that the target verifies.
        gain: stop growing once a level adds no more than this to the expected length of the draft
            (tokens); 0 always grows to `depth`.
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
                f"{self}: a tree that is pruned by probability must not sample its tokens (R3): "
                f"its draft is {BEST} or {COUPLED}"
            )

    @property
    def nodes(self) -> int:
        return self.budget

    @property
    def levels(self) -> int:
        return self.depth

    def propose(self, context: DraftContext) -> Draft:
        roots, depth_limits = context.roots, context.depth_limits
        frontier = roots[:, None]  # tokens of the level to expand
        indices = root_index(len(roots), roots.device)  # of the frontier: index in its level
        above = torch.zeros_like(frontier, dtype=torch.float32)  # of the frontier: log-probability
        parents = indices  # of the frontier: index among the nodes of the previous step
        candidates = Candidates([(frontier, indices, above)], self.budget)
        limits = None
        if context.may_abstain or min(depth_limits) < self.depth:
            limits = torch.tensor(depth_limits, device=roots.device)
        deepest = min(self.depth, max(depth_limits), context.max_depth)
        for depth in range(1, deepest + 1):
            logits = context.step(depth, frontier, parents)
            width, expanded = min(self.width, logits.shape[-1]), frontier.shape[1]
            one = logits.stride(1) == 0  # a row for all nodes, expanded: marginals of a block
            log_q = (logits[:, :1] if one else logits).float().log_softmax(-1)
            top = log_q.topk(width)
            confidence = context.log_confidence(log_q.expand_as(logits))
            children = self.children(depth, confidence, top.values)
            scores = (above.unsqueeze(2) + children).flatten(1)
            if limits is not None:
                scores = scores.masked_fill((limits < depth)[:, None], NEVER)
            if context.abstains is not None:
                scores = scores.masked_fill(context.abstains.repeat_interleave(width, 1), NEVER)
                if bool((scores == NEVER).all()):
                    break
            ids = context.vocab.to_target(top.indices).expand(-1, expanded, -1).flatten(1)
            candidates.levels.append((ids, indices, scores))
            if self.gain > 0:
                limits = self._stop(candidates, depth, limits)
                if bool((limits <= depth).all()):
                    break
            if depth < deepest:
                count = min(self.width, scores.shape[1])
                if self.width >= self.budget:
                    count = min(count, candidates.open_nodes())
                    if not count:
                        break
                # topk may break ties in any way: only the final choice (rerank) must be exact
                above, indices = scores.topk(count)
                frontier = ids.gather(1, indices)
                parents = indices.div(width, rounding_mode="floor")
        return Draft(self.select(candidates).tree(unpadded=limits is None), None)

    def children(
        self, depth: int, confidence: Float[Tensor, "B n"], log_q: Float[Tensor, "B _ k"]
    ) -> Float[Tensor, "B n k"]:
        """Return the log-probability that each child is accepted if its parent is.

        Args:
            depth: of the children.
            confidence: of each parent's row.
            log_q: of the children, from the most probable on; one row if it is that of all parents.
        """
        return (confidence - log_q[..., 0]).unsqueeze(2) + log_q

    def select(self, candidates: "Candidates") -> "Candidates":
        """Return the candidates with the number of nodes to keep."""
        return candidates

    def _stop(
        self, candidates: "Candidates", depth: int, limits: Tensor | None
    ) -> Int[Tensor, " B"]:
        """Return each prompt's depth limit: this depth, where it has added too little."""
        before, now = candidates.expected_length(depth - 1), candidates.expected_length(depth)
        if limits is None:
            limits = torch.full_like(before, self.depth, dtype=torch.long)
        return torch.where(now - before <= self.gain, limits.clamp(max=depth), limits)


@dataclass
class Candidates:
    """All candidates of a round, level by level; the first is the root, with probability 1.

    Attributes:
        levels: ids, parents and scores: the same number of children for every parent, parent by
            parent, the indices of these parents in the level before (the root is its own), scores.
    """

    levels: list[tuple[Int[Tensor, "B _"], Int[Tensor, "B _"], Float[Tensor, "B _"]]]
    budget: int

    def expected_length(self, depth: int) -> Float[Tensor, " B"]:
        """Return the expected accepted tokens of the best tree of depth `depth`."""
        scores = [scores for _, _, scores in self.levels[: depth + 1]]
        probs = torch.cat(scores, dim=1).exp()
        return probs.topk(min(self.budget + 1, probs.shape[1])).values.sum(-1) - 1

    def expected_by_nodes(self) -> list[float]:
        """Return the expected accepted tokens of all prompts, with 0, 1, .. `budget` nodes each."""
        probs = torch.cat([scores for _, _, scores in self.levels], dim=1).exp().nan_to_num(0.0)
        best = probs.topk(min(self.budget + 1, probs.shape[1])).values
        total: list[float] = (best.sum(0).cumsum(0) - len(probs)).tolist()
        return total

    def open_nodes(self) -> int:
        """Count the nodes of the last level that may be kept, of the prompt that has the most."""
        scores = torch.cat([scores for _, _, scores in self.levels], dim=1)
        worst = scores.topk(min(self.budget + 1, scores.shape[1])).values[:, -1:]
        return int((self.levels[-1][2] >= worst).sum(1).max())

    def tree(self, unpadded: bool) -> Tree:
        """Return the root and the best candidates; those beyond a depth limit become padding."""
        ids, above, scores = (torch.cat(part, dim=1) for part in zip(*self.levels, strict=True))
        kept = rerank(scores, self.budget + 1)
        shape = tuple((parents.shape[1], ids.shape[1]) for ids, parents, _ in self.levels)
        depths, owner, starts = _layout(shape, ids.device)
        parents = torch.searchsorted(kept, (above + starts).gather(1, owner.take(kept)))
        depths, real = depths.take(kept), None
        if not unpadded:
            real = scores.gather(1, kept) > NEVER
            parents, depths = torch.where(real, parents, 0), torch.where(real, depths, 1)
        parents[:, 0] = -1
        return Tree.from_parents(ids.gather(1, kept), parents, depths, len(self.levels) - 1, real)


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # shared by all callers
def _layout(
    levels: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[Int[Tensor, " M"], Int[Tensor, " M"], Int[Tensor, " A"]]:
    """Return depth and parent of every candidate.

    Args:
        levels: number of parents and of candidates of each, the root's included.

    Returns:
        Of every candidate its depth, and its parent's index among all parents; of every such index
        the number of the first candidate of the level that the parent is in.
    """
    parents, children = torch.tensor(levels, device=device).unbind(1)
    depths = torch.arange(len(levels), device=device).repeat_interleave(children)
    per_parent = (children // parents).repeat_interleave(parents)
    owner = torch.arange(len(per_parent), device=device).repeat_interleave(per_parent)
    starts = children.cumsum(0) - children
    above = (starts - children.roll(1)).clamp(min=0)  # where the level above starts
    return depths, owner, above.repeat_interleave(parents)
