"""Multi-step verification of merged drafts: nodes that stand for draws of several rows.

The draws after a node are tested in order against a row R that starts as p. A draw x from the row q
is accepted with probability min(1, R(x) / q(x)); if it is rejected, R becomes max(R - q, 0),
renormalised. If all are rejected, the token is drawn from the final R. A node that was drawn k
times is tested k times, each with the row of that draw.

Exact for any rows, also without a common token, if the draws after a node are independent of each
other and their order and number are fixed before any of them is drawn.

R and q at a draw do not depend on a random number, so all acceptance probabilities are computed
first, rank by rank (the k-th draws after all nodes together), and flipped at once.

Shape letters: B prompts, N nodes, K draws, W draws of one rank, V tokens.

Source: Miao et al. 2023, "SpecInfer", arXiv:2305.09781, algorithm 2 (multi-step speculative
sampling).
Differs: draws are tested in the order drawn instead of a random one, which is as exact and needs no
random numbers.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.models.decode.rules.token_rules import (
    Accepted,
    Rows,
    check_shapes,
    deepest_path,
    draft_nodes,
    draw_one,
    residual,
    select_node,
)
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.tree import Tree


def multi_step(
    tree: Tree, p_rows: Rows, q_rows: Float[Tensor, "B K V"], rng: RandomSource
) -> Accepted:
    """Verify a trie and its draws.

    Args:
        tree: with `draws`, or without a draft node.
        q_rows: the row that every draw was drawn from.

    Raises:
        ValueError: p_rows does not have a row per node, or q_rows one per draw; q gives a token no
            probability (R1); or a probability is NaN.
    """
    check_shapes(tree, p_rows=p_rows)
    draws = tree.draws
    if draws is None:  # random numbers are taken as with a draw, which other prompts may have
        if bool(draft_nodes(tree).any()):
            raise ValueError("a tree of merged drafts needs the draws of its nodes")
        draws, q_rows = torch.full_like(tree.ids, -1), p_rows
    if q_rows.shape != (*draws.shape, p_rows.shape[2]):
        raise ValueError(f"q_rows has shape {tuple(q_rows.shape)}: one row per draw is needed")
    real, node = draws >= 0, draws.clamp(min=0)
    parent, token = tree.parents.gather(1, node), tree.ids.gather(1, node).long()
    together = (parent[:, :, None] == parent[:, None]) & real[:, :, None] & real[:, None]
    earlier = together.tril(-1)
    rank = earlier.sum(-1).masked_fill(~real, -1)
    rows, ratios = p_rows.clone(), torch.zeros_like(q_rows[..., 0])
    for number in range(int(rank.max()) + 1):
        prompt, draw = (rank == number).nonzero(as_tuple=True)
        at = prompt, parent[prompt, draw]
        p, q, drawn = rows[at], q_rows[prompt, draw], token[prompt, draw, None]
        ratios[prompt, draw] = _ratio(p.gather(1, drawn), q.gather(1, drawn))[:, 0]
        rows[at] = residual(p, q)[0]
    flips = rng.flip(ratios.clamp(max=1.0))
    first = flips & real & ~(earlier & flips[:, None]).any(-1)
    passed = torch.zeros_like(tree.parents).scatter_add(1, node, first.long()) > 0
    passed[:, 0] = True
    path, length = deepest_path(tree, passed)
    return Accepted(path, length, draw_one(select_node(rows, path[:, -1]), rng))


def _ratio(p: Float[Tensor, "W 1"], q: Float[Tensor, "W 1"]) -> Float[Tensor, "W 1"]:
    """Return p / q; ValueError if p is no probability or q has no mass."""
    if not bool(((p >= 0) & (q > 0)).all()):  # false for NaN
        raise ValueError("q_rows must be the rows the tokens were drawn from (R1), and p finite")
    return p / q
