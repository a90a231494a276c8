"""The policy of `decode=merged_tree`: chains of one or several drafters, merged into a trie.

Each of the chains belongs to one of the drafters that draft together (`Drafter.sources`); the
drafters share the chains by their weights. Above temperature 0 every chain is drawn from the rows
of its drafter, independently of the others, and chains that draw the same tokens share nodes, each
with all its draws: `multi_step` verifies them. At temperature 0, and with `best` drafts, the chains
of a drafter begin with its most probable tokens, one each, and continue with the most probable one.

How many chains a drafter gets depends on earlier rounds, and the shape of the trie only on tokens
nearer to the root: no draw decides whether it is verified itself (R2, R3).

Source: Miao et al. 2023, "SpecInfer", arXiv:2305.09781, section 3 (merge-based speculation).
Shape letters: B prompts, N nodes, F nodes of a level, S drafters, M chains, K draws, V tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.models.decode.draft_context import DraftContext
from outrider.models.decode.policy import Draft
from outrider.models.decode.rules.rule_table import BEST, MERGED
from outrider.models.decode.tree import Tree
from outrider.models.decode.tries.trie import Trie, tree_of


@dataclass(frozen=True)
class MergedTree:
    """Chains that share the nodes of their common beginnings.

    Attributes:
        depth: tokens of a chain.
        chains: of all drafters together.
    """

    depth: int
    chains: int
    draft: str = MERGED
    branches = True

    def __post_init__(self) -> None:
        if min(self.depth, self.chains) < 1 or self.draft not in (BEST, MERGED):
            raise ValueError(
                f"{self}: depth and chains are at least 1, and drafts are {BEST} or {MERGED}"
            )

    @property
    def nodes(self) -> int:
        return self.depth * self.chains

    @property
    def levels(self) -> int:
        return self.depth

    def propose(self, context: DraftContext) -> Draft:
        tries = [Trie([root], self.chains) for root in context.roots.tolist()]
        is_sampled = not context.sampling.greedy and self.draft == MERGED
        owners, rows = list[list[int]](), list[Tensor]()
        deepest = min(self.depth, max(context.depth_limits), context.max_depth)
        for depth in range(1, deepest + 1):
            limits = zip(tries, context.depth_limits, strict=True)
            for trie, limit in limits:
                trie.end_chains([limit < depth] * len(trie.frontier))
            logits = context.step(depth, *_level(tries, context.roots.device))
            if context.abstains is not None:
                for trie, over in zip(tries, context.abstains.tolist(), strict=True):
                    trie.end_chains(over)
            if not any(any(trie.alive) for trie in tries):
                break
            sources = context.sources(logits)
            if depth == 1:
                owners = [shared_out(self.chains, w) for w in sources.weights.tolist()]
            own = _rows_of_chains(sources.logits, tries, owners)
            if is_sampled:
                rows.append(context.vocab.expand(context.sampling.probs(own)))
                tokens = context.rng.draw(context.sampling.probs(own))
            else:
                tokens = _best(own, owners) if depth == 1 else own.argmax(-1)
            for trie, drawn in zip(tries, context.vocab.to_target(tokens).tolist(), strict=True):
                trie.grow(drawn)
        if not any(trie.draws for trie in tries):
            return Draft(Tree.chain(context.roots[:, None]), None)
        return Draft(tree_of(tries, context.roots.device), torch.cat(rows, 1) if rows else None)


def shared_out(count: int, weights: Sequence[float]) -> list[int]:
    """Share out `count` chains by weight (largest remainders); return the drafter of each.

    Chains of one drafter follow each other. Equal remainders go to the first drafter.
    """
    total = sum(weights)
    shares = [count * weight / total for weight in weights]
    counts = [int(share) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda s: counts[s] - shares[s])
    for drafter in by_rest[: count - sum(counts)]:
        counts[drafter] += 1
    return [drafter for drafter, chains in enumerate(counts) for _ in range(chains)]


def _level(
    tries: Sequence[Trie], device: torch.device
) -> tuple[Int[Tensor, "B F"], Int[Tensor, "B F"]]:
    """Return tokens and parents of the frontiers; padding repeats the first node."""
    size = max(len(trie.frontier) for trie in tries)
    ids, parents = list[list[int]](), list[list[int]]()
    for trie in tries:
        frontier, above = trie.frontier or [0], trie.parent_places() or [0]
        missing = size - len(frontier)
        ids.append([trie.ids[node] for node in [*frontier, *frontier[:1] * missing]])
        parents.append([*above, *above[:1] * missing])
    return torch.tensor(ids, device=device), torch.tensor(parents, device=device)


def _rows_of_chains(
    logits: Float[Tensor, "B F S V"], tries: Sequence[Trie], owners: Sequence[Sequence[int]]
) -> Float[Tensor, "B M V"]:
    """Return the row that every chain continues with: of its drafter, after its last node."""
    places = torch.tensor([trie.places() for trie in tries], device=logits.device)
    prompts = torch.arange(len(tries), device=logits.device)[:, None]
    return logits[prompts, places, torch.tensor(owners, device=logits.device)]


def _best(own: Float[Tensor, "B M V"], owners: Sequence[Sequence[int]]) -> Int[Tensor, "B M"]:
    """Return the r-th most probable token for the r-th chain of every drafter, from the root."""
    top = own.topk(min(own.shape[1], own.shape[2])).indices
    ranks = [[m - chains.index(drafter) for m, drafter in enumerate(chains)] for chains in owners]
    rank = torch.tensor(ranks, device=own.device).clamp(max=top.shape[2] - 1)
    return top.gather(2, rank[..., None])[..., 0]
