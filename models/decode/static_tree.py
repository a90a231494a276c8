"""Static trees: one shape in every round, filled rank by rank.

The shape is a list of paths of ranks (`tree_shapes.py`): Medusa's choices, Sequoia's trees.

Shape letters: B prompts, N nodes of the tree, n nodes of a level, E expanded in the one above.

Source: Medusa, arXiv:2401.10774; sampled siblings, SpecInfer, arXiv:2305.09781, and Sequoia,
arXiv:2402.12374: their shape is fixed before a token is drawn (rule R3), and whether a node is
missing, because no token has probability left, depends only on its ancestors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from outrider.models.decode.draft_context import DraftContext
from outrider.models.decode.policy import Draft
from outrider.models.decode.rules.rule_table import BEST, INDEPENDENT, SAMPLED_DRAFTS, check_draft
from outrider.models.decode.rules.sibling_rules import draw_siblings
from outrider.models.decode.tree import NEVER, Tree
from outrider.models.decode.tree_shapes import Paths, contiguous, parse


@dataclass(frozen=True)
class StaticTree:
    """A tree of one shape in every round.

    Attributes:
        paths: the shape; with sampled drafts, sibling ranks are 0..k-1.
        draft: sampled drafts are better at high temperatures, where the target seldom draws the
            drafter's top-1; `best` ones are better at low temperatures.
    """

    paths: Paths
    draft: str = BEST

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", parse(self.paths))
        if check_draft(self.draft) in SAMPLED_DRAFTS and not contiguous(self.paths):
            raise ValueError(
                f"{self}: siblings are sampled in sequence, so the ranks of a node's children "
                "are 0, 1, 2, .."
            )

    @property
    def branches(self) -> bool:
        return len({path[:-1] for path in self.paths}) < len(self.paths)

    @property
    def nodes(self) -> int:
        return len(self.paths)

    @property
    def levels(self) -> int:
        return len(self.paths[-1])

    def propose(self, context: DraftContext) -> Draft:
        roots, sampling = context.roots, context.sampling
        is_sampled = not sampling.greedy and self.draft in SAMPLED_DRAFTS
        deepest = min(self.levels, max(context.depth_limits), context.max_depth)
        ids, real = [roots[:, None]], [torch.ones_like(roots, dtype=torch.bool)[:, None]]
        plan, rows = _level_plan(self.paths, roots.device)[:deepest], list[Tensor]()
        parents_above = torch.zeros_like(roots[:1])
        for depth, level in enumerate(plan, start=1):
            parents = parents_above[level.expanded].expand(len(roots), -1)
            logits = context.step(depth, ids[-1][:, level.expanded], parents)
            if is_sampled:
                q, replacement = sampling.probs(logits), self.draft == INDEPENDENT
                tokens, exists = draw_siblings(q, level.width, context.rng, replacement)
                rows.append(context.vocab.expand(q))
            else:
                top = logits.topk(min(level.width, logits.shape[-1]))
                tokens, exists = top.indices, top.values > NEVER
            rank = level.rank.clamp(max=tokens.shape[-1] - 1)  # a draft vocabulary may be tiny
            real.append(
                exists[:, level.parent, rank]
                & real[-1][:, level.expanded][:, level.parent]
                & (rank == level.rank)
            )
            ids.append(context.vocab.to_target(tokens)[:, level.parent, rank])
            parents_above = level.parent
        tree = self._tree(torch.cat(ids, 1), torch.cat(real, 1), context.depth_limits, deepest)
        if not rows:
            return Draft(tree, None)
        q_rows = rows[0].new_zeros(*tree.ids.shape, rows[0].shape[-1])
        for level, q in zip(plan, rows, strict=True):
            q_rows[:, level.nodes] = q
        return Draft(tree, q_rows)

    def _tree(
        self,
        ids: Int[Tensor, "B N"],
        real: Bool[Tensor, "B N"],
        depth_limits: Sequence[int],
        deepest: int,
    ) -> Tree:
        batch, count = ids.shape
        parents, depths, mask = (part.to(ids.device) for part in self._layout)
        if min(depth_limits) < deepest:
            limits = torch.tensor(depth_limits, device=ids.device)
            real = real & (depths[:count] <= limits[:, None])
        return Tree(
            ids,
            parents[:count].expand(batch, -1),
            depths[:count].expand(batch, -1),
            mask[:count, :count].expand(batch, -1, -1),
            real,
            deepest,
        )

    @cached_property
    def _layout(self) -> tuple[Tensor, Tensor, Tensor]:
        """Parents, depths and ancestor mask of all nodes."""
        number = {path: i for i, path in enumerate(((), *self.paths))}
        parents = torch.tensor([[-1] + [number[path[:-1]] for path in self.paths]])
        depths = torch.tensor([[0] + [len(path) for path in self.paths]])
        tree = Tree.from_parents(parents, parents, depths, self.levels)
        return parents[0], depths[0], tree.ancestor_mask[0]


class Level(NamedTuple):
    """One level of a shape.

    Attributes:
        expanded: the nodes of the level above that have children, by their index there.
        nodes: their indices in the tree.
        parent, rank: of every node of this level, its parent's index among the expanded ones, and
            its rank among its siblings.
        width: the largest rank, plus one.
    """

    expanded: Int[Tensor, " E"]
    nodes: Int[Tensor, " E"]
    parent: Int[Tensor, " n"]
    rank: Int[Tensor, " n"]
    width: int


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # shared by all callers
def _level_plan(paths: Paths, device: torch.device) -> list[Level]:
    """Return which nodes to expand at every level, and where their children go."""
    above: list[tuple[int, ...]] = [()]
    levels, first = list[Level](), 0
    parents = {path[:-1] for path in paths}
    for depth in range(1, len(paths[-1]) + 1):
        here = [path for path in paths if len(path) == depth]
        expanded = [i for i, path in enumerate(above) if path in parents]
        index = {above[i]: n for n, i in enumerate(expanded)}
        levels.append(
            Level(
                torch.tensor(expanded, device=device),
                torch.tensor([first + i for i in expanded], device=device),
                torch.tensor([index[path[:-1]] for path in here], device=device),
                torch.tensor([path[-1] for path in here], device=device),
                1 + max(path[-1] for path in here),
            )
        )
        above, first = here, first + len(above)
    return levels
