"""Block and traversal verification: a draft is verified as a whole instead of token by token.

Token by token, a draft ends at its first rejection, and a token with p > q counts no more than one
with p = q. Here the surplus is carried along: node i has a share

    r_root = 1,    r_i = min(1, r_parent * p(x_i) / q(x_i)),

and a path may be accepted although a node on it failed its own flip. On a chain no lossless rule
accepts more tokens. Worked example: p = (1/3, 2/3), q = (2/3, 1/3), two draft tokens: `ratio`
accepts 10/9 of them on average, `block` 11/9.

    block       chains: the *deepest* node whose flip succeeded; failures above it do not count, and
                stopping at the first failure is biased
    traversal   trees: leaves first, in the order drawn; a node is tested when all below it is
                rejected, and its rejection removes its share from its parent's row; on a chain the
                same as block

Shape letters: B prompts, N nodes, V vocabulary.

Source: Sun et al. 2024, "Block verification", arXiv:2403.10444; Weng et al. 2025, "Traversal
verification", arXiv:2505.12398.
Differs from the traversal paper: it deletes leaf after leaf; the rows after a deletion do not
depend on the random numbers, so here the acceptance probabilities of all nodes are computed from
the root down, many nodes at a time, then flipped at once, and the first success in that order of
leaves counts.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.models.decode.rules.sibling_rules import ResidualRows, nodes_by_rank
from outrider.models.decode.rules.token_rules import (
    CHAINS_ONLY,
    Accepted,
    NodeValues,
    Rows,
    acceptance_probabilities,
    check_nodes,
    draft_probabilities,
    draw_one,
    earlier_siblings,
    has_child,
    off_chain,
    path_to,
    residual,
    select_node,
)
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.tree import Tree


def block(tree: Tree, p_rows: Rows, q_rows: Rows, rng: RandomSource) -> Accepted:
    """Block verification of a chain; refuses what `ratio` refuses, accepts no less on average."""
    p, q = draft_probabilities(tree, p_rows, q_rows)
    check_nodes(tree, p, q, off_chain(tree), CHAINS_ONLY)
    share = _shares(p / q)
    mass = (share[..., None] * p_rows - q_rows).clamp(min=0).sum(-1)
    continues = torch.cat([tree.real[:, 1:], torch.zeros_like(tree.real[:, :1])], dim=1)
    probs = torch.where(continues, share_after_rejection(share, mass), share)
    flips = rng.flip(acceptance_probabilities(tree, probs))
    last = tree.depths.masked_fill(~flips, -1).argmax(-1)
    bonus = select_node(p_rows, last)
    correction, _ = residual(bonus, select_node(q_rows, last), select_node(share, last))
    row = torch.where(has_child(tree, last)[:, None], correction, bonus)
    return Accepted(path_to(tree, last), select_node(tree.depths, last), draw_one(row, rng))


def _shares(ratios: NodeValues) -> NodeValues:
    """Return the share of every node of a chain, from the p / q of its token.

    The repeated min(1, share * ratio) is a cumulative sum of logarithms that restarts whenever it
    exceeds 0.
    """
    total = ratios[:, 1:].log().cumsum(1)
    surplus = total.cummax(1).values.clamp(min=0)
    return torch.nn.functional.pad((total - surplus).exp(), (1, 0), value=1.0)


def share_after_rejection(
    share: Float[Tensor, "..."], mass: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """Return a node's share once a child of it is rejected: Z / (Z + 1 - r), and 0/0 is 1.

    Args:
        mass: Z, the mass of max(r p - q, 0).
    """
    total = mass + 1 - share
    return torch.where(total > 0, mass / total, torch.ones_like(share))


def traversal(
    tree: Tree, p_rows: Rows, q_rows: Rows, rng: RandomSource, replacement: bool
) -> Accepted:
    """Traversal verification of sampled trees; accepts more than rules that test siblings in order.

    Args:
        replacement: siblings were drawn independently (True), or without replacement (False).

    Raises:
        ValueError: as `sibling_rules.sibling_by_sibling`.
    """
    siblings = earlier_siblings(tree)
    rank = siblings.sum(-1) + tree.real.long()
    turn = (tree.ancestor_mask * rank[:, None]).sum(-1) - rank[:, :1]  # without the root's
    rows = ResidualRows(tree, p_rows, q_rows, replacement)
    for nodes in nodes_by_rank(tree, p_rows, q_rows, turn, replacement):
        parents = rows.parents[nodes]
        share = rows.share[parents]
        ratio, mass = rows.reject(nodes)
        rows.share[nodes] = (share * ratio).clamp(max=1.0)
        rows.share[parents] = share_after_rejection(share, mass)
    flips = rng.flip(acceptance_probabilities(tree, rows.share.view_as(tree.ids)))
    last = leaves_first(tree).masked_fill(~flips, tree.size).argmin(-1)
    row = select_node(rows.target.view_as(p_rows), last)
    return Accepted(path_to(tree, last), select_node(tree.depths, last), draw_one(row, rng))


def leaves_first(tree: Tree) -> Int[Tensor, "B N"]:
    """Return when each real node is tested: after its own descendants, and after everything below
    an earlier sibling of its own or of an ancestor.
    """
    below = (tree.ancestor_mask & tree.real[:, :, None]).sum(1)  # including the node
    before = (earlier_siblings(tree) * below[:, None]).sum(-1)
    return (tree.ancestor_mask * before[:, None]).sum(-1) + below - 1
