"""`match` and `ratio` of token_rules.py for a CPU: equal distributions from fewer operations.

A GPU verifies all nodes at once, so that the host synchronises once. On a CPU every operation and
every row of a large vocabulary is expensive. So a tree is descended level by level, all prompts
together; rows that no path reaches are neither warped nor drawn from; and the accepted length of a
chain is decided on the host.

Shape letters: B prompts, N nodes, V vocabulary.
"""

from collections.abc import Callable, Sequence
from operator import lt, truediv
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.models.decode.rules import token_rules
from outrider.models.decode.rules.round_outcome import (
    RoundOutcome,
    outcomes,
    real_parents_and_depths,
)
from outrider.models.decode.rules.token_rules import Rows
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.tree import Tree

Warp = Callable[[Tensor], Tensor]  # logits to probabilities, row by row
CpuRule = Callable[[Tree, Tensor, Warp, Tensor | None, RandomSource], list[RoundOutcome]]


@runtime_checkable
class TokenSource(Protocol):
    """Source of one token per prompt: a RandomSource, or gumbel_coupling.NoiseDraws."""

    def draw_host(self, rows: Float[Tensor, "B V"]) -> list[int]: ...


def match(
    tree: Tree, logits: Rows, warp: Warp, _q_rows: Rows | None, rng: TokenSource
) -> list[RoundOutcome]:
    """`match`: the token drawn after a node selects the next child, or follows the path.

    Raises:
        ValueError: logits do not have one row per node; a visited row is NaN or has no mass.
    """
    token_rules.check_shapes(tree, logits=logits)
    ids, parents, depths = (part.tolist() for part in (tree.ids, *real_parents_and_depths(tree)))
    children = [*map(_children, ids, parents)]
    paths, next_ids = [[0] for _ in ids], [-1] * len(ids)
    while -1 in next_ids:
        rows = warp(_rows_at(logits, [path[-1] for path in paths]))
        for prompt, token in enumerate(rng.draw_host(rows)):
            if next_ids[prompt] >= 0:  # this prompt has ended, others have not
                continue
            child = children[prompt].get((paths[prompt][-1], token))
            if child is None:
                next_ids[prompt] = token
            else:
                paths[prompt].append(child)
    if tree.is_chain:
        lengths = [len(path) - 1 for path in paths]
        return [*map(RoundOutcome.from_chain, ids, map(max, depths), lengths, next_ids)]
    return [*map(RoundOutcome.from_tree, ids, parents, depths, paths, next_ids)]


def _children(ids: Sequence[int], parents: Sequence[int]) -> dict[tuple[int, int], int]:
    """Map (node, token) to the child of the node that carries the token.

    Of siblings that repeat a token the first counts. The root and padding nodes have parent -1.
    """
    keys = [*zip(parents, ids, strict=True)]
    return dict(zip(keys[::-1], range(len(keys) - 1, -1, -1), strict=True))


def ratio(
    tree: Tree, logits: Rows, warp: Warp, q_rows: Rows | None, rng: RandomSource
) -> list[RoundOutcome]:
    """`ratio`: the same flips, the same draw from the residual, the same errors."""
    p_rows = warp(logits)
    q_rows = p_rows if tree.size == 1 else q_rows  # there is no draft token, and no row is read
    if q_rows is None:
        raise ValueError(token_rules.NO_ROWS)
    token_rules.check_rows(tree, p_rows, q_rows)
    if not tree.is_chain:
        return outcomes(tree, token_rules.ratio(tree, p_rows, q_rows, rng), logits.amax(2))
    ids, depths = tree.ids.tolist(), tree.max_depths().tolist()
    lengths = _accepted_lengths(tree, depths, p_rows, q_rows, rng)
    rows = _rows_at(p_rows, lengths)
    rejected = [*map(lt, lengths, depths)]
    if any(rejected):
        correction, _ = token_rules.residual(rows, _rows_at(q_rows, lengths))
        rows = torch.where(torch.tensor(rejected)[:, None], correction, rows)
    return [*map(RoundOutcome.from_chain, ids, depths, lengths, rng.draw_host(rows))]


def _accepted_lengths(
    tree: Tree, depths: Sequence[int], p_rows: Rows, q_rows: Rows, rng: RandomSource
) -> list[int]:
    """Return how many draft tokens of each chain are accepted."""
    tokens, chances = tree.ids[:, 1:, None], []
    both = (rows.gather(2, tokens).squeeze(2).tolist() for rows in (p_rows, q_rows))
    for depth, p, q in zip(depths, *both, strict=True):
        p, q = p[:depth], q[:depth]
        if not (all(map((0.0).__le__, p)) and all(map((0.0).__lt__, q))):  # true of NaN too
            probs = token_rules.draft_probabilities(tree, p_rows, q_rows)
            token_rules.check_nodes(tree, *probs, None, token_rules.CHAINS_ONLY)  # raises
        chances.append([1.0, *map(truediv, p, q), *[0.0] * (tree.levels - depth)])
    return [[*flips, False].index(False) - 1 for flips in rng.flip_host(chances)]


def _rows_at(rows: Rows, nodes: Sequence[int]) -> Float[Tensor, "B V"]:
    """Return the row of one node per prompt."""
    if len(nodes) == 1:
        return rows[:, nodes[0]]
    return rows[torch.arange(len(nodes)), torch.tensor(nodes)]
