"""Drafts of toy models that are merged into a trie, for exact laws by enumeration."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.tree import Tree
from outrider.models.decode.tries.trie import Trie
from tests.enumeration import Draft, Propose, Toy

RowsOf = Callable[[Toy], Tensor]  # [C, V]: the row after every context


def own_rows(toy: Toy) -> Tensor:
    return toy.q


def other_rows(toy: Toy) -> Tensor:
    """Another drafter's."""
    return replace(toy, seed=toy.seed + 100).q.roll(1, dims=1)


def supported(rows: RowsOf, *tokens: int) -> RowsOf:
    """A drafter that draws these tokens alone."""

    def some(toy: Toy) -> Tensor:
        kept = torch.zeros_like(toy.q)
        kept[:, list(tokens)] = rows(toy)[:, list(tokens)] + 1e-3
        return kept / kept.sum(-1, keepdim=True)

    return some


def tries(drafters: Sequence[RowsOf], depth: int) -> Propose:
    """A chain of each of these drafters, merged; a drafter may be there twice."""

    def propose(toy: Toy, starts: Tensor, rng: RandomSource) -> Draft:
        tables, trie = [rows(toy) for rows in drafters], Trie([0], len(drafters))
        contexts, drawn_from = {0: starts}, list[Tensor]()
        for _ in range(depth):
            rows = [table[contexts[end]] for table, end in zip(tables, trie.ends, strict=True)]
            tokens = [int(rng.draw(row[:, None])[0, 0]) for row in rows]  # equal for all prompts
            trie.grow(tokens)
            drawn_from += rows
            for node in trie.frontier:
                contexts[node] = contexts[trie.parents[node]] * toy.vocab + trie.ids[node]
        return _draft(toy, trie, contexts, torch.stack(drawn_from, 1))

    return propose


def _draft(toy: Toy, trie: Trie, contexts: dict[int, Tensor], q_rows: Tensor) -> Draft:
    """Trees of one size, whatever was drawn."""
    size, missing = len(trie.draws) + 1, len(trie.draws) + 1 - len(trie.ids)
    batch = len(q_rows)
    places = torch.stack([contexts.get(node, contexts[0] * toy.vocab) for node in range(size)], 1)
    parents = torch.tensor([*trie.parents, *[0] * missing]).expand(batch, -1)
    depths = torch.tensor([*trie.depths, *[1] * missing]).expand(batch, -1)
    real = (torch.arange(size) < len(trie.ids)).expand(batch, -1)
    tree = Tree.from_parents(places % toy.vocab, parents, depths, max(trie.depths), real)
    return Draft(tree.with_draws(torch.tensor(trie.draws).expand(batch, -1)), places, q_rows)
