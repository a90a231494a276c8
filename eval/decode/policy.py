"""Which guesses to ask the target about: a chain, or EAGLE-2's dynamic tree.

A policy asks the drafter level by level and returns a tree. Chains may be sampled, and then carry
the rows they were drawn from; the children of a dynamic tree are the drafter's favourites, chosen
without chance, and are verified by `match` (rules R1 and R3 of speculative decoding).
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.eval.decode.sampling import draw, first_argmax, warp
from outrider.eval.decode.tree import Tree, rerank
from outrider.models.base import State
from outrider.models.vocab import DraftVocab


class Sampling(NamedTuple):
    """How tokens are drawn; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def rows(self, logits: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
        return warp(logits, self.temperature, self.top_k, self.top_p)


class Draft(NamedTuple):
    """A tree, and the rows it was sampled from (None: chosen deterministically)."""

    tree: Tree
    q_rows: Float[Tensor, "N-1 V"] | None


@runtime_checkable
class Guesser(Protocol):
    """The part of a drafter that a policy asks (`models.base.Drafter` has it)."""

    vocab: DraftVocab
    reach: int

    def step(
        self, state: State, depth: int, ids: Int[Tensor, " N"], parents: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N Vd"], State]: ...


@runtime_checkable
class Policy(Protocol):
    """How a drafter is asked for guesses."""

    @property
    def nodes(self) -> int:
        """Most drafted nodes in one round (the root is not counted)."""
        ...

    def propose(
        self,
        drafter: Guesser,
        state: State,
        root: int,
        room: int,
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Draft:
        """
        Args:
            state: what the drafter absorbed; it stays as it is.
            root: the newest token.
            room: no guess deeper than this is of use (the token budget ends there).
        """
        ...


@dataclass(frozen=True)
class Chain:
    """One guess per depth: the favourite when greedy, else drawn from the warped draft row."""

    depth: int

    @property
    def nodes(self) -> int:
        return self.depth

    def propose(
        self,
        drafter: Guesser,
        state: State,
        root: int,
        room: int,
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Draft:
        device = drafter.vocab.d2t.device
        ids = [torch.tensor([root], device=device)]
        only = torch.zeros(1, dtype=torch.long, device=device)
        rows: list[Tensor] = []
        for depth in range(1, min(self.depth, room, drafter.reach) + 1):
            logits, state = drafter.step(state, depth, ids[-1], only)
            if sampling.temperature == 0:
                guess = first_argmax(logits)
            else:
                q = sampling.rows(logits)
                guess = draw(q, generator).to(device)
                rows.append(drafter.vocab.expand(q))
            ids.append(drafter.vocab.to_target(guess))
        return Draft(Tree.chain(torch.cat(ids)), torch.cat(rows) if rows else None)


@dataclass(frozen=True)
class DynamicTree:
    """Expand the most probable frontier, then keep the most probable nodes.

    Source: EAGLE-2, arXiv:2406.16858, section 4. Scores are sums of log-probabilities of the
    drafter's raw softmax, in float32.

    Attributes:
        depth: levels drafted.
        width: children per node, and nodes expanded per level.
        budget: drafted nodes the target verifies.
    """

    depth: int
    width: int
    budget: int

    @property
    def nodes(self) -> int:
        return self.budget

    def propose(
        self,
        drafter: Guesser,
        state: State,
        root: int,
        room: int,
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Draft:
        device = drafter.vocab.d2t.device
        frontier = torch.tensor([root], device=device)  # tokens of the level to expand
        parents = torch.zeros(1, dtype=torch.long, device=device)  # their rows one step before
        index = torch.full((1,), -1, device=device)  # their numbers among all candidates
        above = torch.zeros(1, device=device)
        levels: list[tuple[Tensor, Tensor, Tensor]] = []
        count = 0
        for depth in range(1, min(self.depth, room, drafter.reach) + 1):
            logits, state = drafter.step(state, depth, frontier, parents)
            width = min(self.width, logits.shape[-1])
            found = logits.float().log_softmax(-1).topk(width)
            scores = (above[:, None] + found.values).flatten()
            ids = drafter.vocab.to_target(found.indices).flatten()
            levels.append((ids, index.repeat_interleave(width), scores))
            best = _best(scores, self.width)
            frontier, parents, above = ids[best], best // width, scores[best]
            index, count = best + count, count + len(ids)
        ids, above_of, scores = (torch.cat(part) for part in zip(*levels, strict=True))
        sizes = torch.tensor([len(level[0]) for level in levels], device=device)
        depths = torch.repeat_interleave(torch.arange(1, len(levels) + 1, device=device), sizes)
        return Draft(_tree(root, ids, above_of, depths, scores, self.budget), None)


def _best(scores: Float[Tensor, " M"], count: int) -> Tensor:
    """The `count` best, ties to the lower index, in index order."""
    return scores.sort(descending=True, stable=True).indices[:count].sort().values


def _tree(
    root: int, ids: Tensor, parents: Tensor, depths: Tensor, scores: Tensor, budget: int
) -> Tree:
    kept = rerank(scores, parents, depths, budget)
    above = torch.searchsorted(kept, parents[kept]) + 1
    top = ids.new_tensor([root])
    return Tree(
        torch.cat([top, ids[kept]]),
        torch.cat([top.new_tensor([-1]), torch.where(parents[kept] < 0, 0, above)]),
        torch.cat([top.new_zeros(1), depths[kept]]),
    )
