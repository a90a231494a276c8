"""Verifying a draft as a whole instead of token by token: block and traversal verification.

Token by token, a draft ends at its first rejection, and a lucky token (p > q) is worth no more
than a sure one. Here luck is carried along: node i has a share

    r_root = 1,    r_i = min(1, r_parent * p(x_i) / q(x_i)),

how much of the path to i the target wants, and a path may be accepted although a node on it
failed its own coin. As many tokens are kept as any lossless rule can keep on a chain. Worked
example: p = (1/3, 2/3), q = (2/3, 1/3), two drafted tokens: `ratio` keeps 10/9 of them on
average, `block` 11/9.

    block       chains: the *deepest* node whose coin fell on its side; what failed above it is
                of no account, and stopping at the first failure is biased
    traversal   trees: leaves first, in the order drawn; a node is looked at when all below it
                is rejected, and its rejection takes its share out of its parent's row

On a chain they are the same.

Shape letters: B prompts, N nodes, V vocabulary.

Source: Sun et al. 2024, "Block verification", arXiv:2403.10444; Weng et al. 2025, "Traversal
verification", arXiv:2505.12398.
Differs from the traversal paper: it deletes leaf after leaf; what a deletion leaves behind does
not depend on the coins, so here the chances of all nodes are found from the root down, many
nodes at a time, then flipped at once, and the first success in that order of leaves counts.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.models.decode.sampling import Coins
from outrider.models.decode.sibling_rules import Sieve, waves
from outrider.models.decode.tree import Tree
from outrider.models.decode.verify import (
    CHAINS_ONLY,
    Accepted,
    at,
    branches,
    chances,
    continued,
    drafted_chances,
    draw_one,
    elders,
    path_to,
    refuse,
    residual,
)


def block(
    tree: Tree, p_rows: Float[Tensor, "B N V"], q_rows: Float[Tensor, "B N V"], coins: Coins
) -> Accepted:
    """Block verification of a chain; on average never keeps less than `verify.ratio`.

    Raises:
        ValueError: as `verify.ratio`.
    """
    p, q = drafted_chances(tree, p_rows, q_rows)
    refuse(tree, p, q, branches(tree), CHAINS_ONLY)
    share = _shares(p / q)
    left = (share[..., None] * p_rows - q_rows).clamp(min=0).sum(-1)
    goes_on = torch.cat([tree.real[:, 1:], torch.zeros_like(tree.real[:, :1])], dim=1)
    keep = torch.where(goes_on, kept_share(share, left), share)
    heads = coins.flip(chances(tree, keep))
    last = tree.depths.masked_fill(~heads, -1).argmax(-1)
    bonus = at(p_rows, last)
    correction, _ = residual(bonus, at(q_rows, last), at(share, last))
    row = torch.where(continued(tree, last)[:, None], correction, bonus)
    return Accepted(path_to(tree, last), at(tree.depths, last), draw_one(row, coins))


def _shares(ratios: Float[Tensor, "B N"]) -> Float[Tensor, "B N"]:
    """The share of every node of a chain, from the p / q of its token."""
    total = ratios[:, 1:].log().cumsum(1)  # min(1, share * ratio), again and again, is a sum that
    luck = total.cummax(1).values.clamp(min=0)  # starts anew wherever it rises above 0
    return torch.nn.functional.pad((total - luck).exp(), (1, 0), value=1.0)


def kept_share(share: Float[Tensor, "..."], left: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """A node's share once a child of it is rejected: Z / (Z + 1 - r), and 0/0 is 1.

    Args:
        left: Z, the mass of max(r p - q, 0).
    """
    whole = left + 1 - share
    return torch.where(whole > 0, left / whole, torch.ones_like(share))


def traversal(
    tree: Tree,
    p_rows: Float[Tensor, "B N V"],
    q_rows: Float[Tensor, "B N V"],
    coins: Coins,
    replacement: bool,
) -> Accepted:
    """Traversal verification of sampled trees; keeps more than testing sibling after sibling.

    Args:
        replacement: how siblings were drawn: independently (True), or none twice (False).

    Raises:
        ValueError: as `siblings.independent` or `siblings.without_replacement`.
    """
    family = elders(tree)
    rank = family.sum(-1) + tree.real.long()
    turn = (tree.seen * rank[:, None]).sum(-1) - rank[:, :1]  # the root takes none
    sieve = Sieve(tree, p_rows, q_rows, replacement)
    for wave in waves(tree, p_rows, q_rows, turn, replacement):
        above = sieve.above[wave]
        share = sieve.share[above]
        ratio, left = sieve.reject(wave)
        sieve.share[wave] = (share * ratio).clamp(max=1.0)
        sieve.share[above] = kept_share(share, left)
    heads = coins.flip(chances(tree, sieve.share.view_as(tree.ids)))
    last = leaves_first(tree).masked_fill(~heads, tree.size).argmin(-1)
    row = at(sieve.rest.view_as(p_rows), last)
    return Accepted(path_to(tree, last), at(tree.depths, last), draw_one(row, coins))


def leaves_first(tree: Tree) -> Int[Tensor, "B N"]:
    """When each real node is looked at: after all below it and below its elder siblings.

    This is the order "children first, then the node". A node comes after everything that is
    below an elder sibling of its own or of an ancestor, and after its own descendants.
    """
    below = (tree.seen & tree.real[:, :, None]).sum(1)  # with the node itself
    before = (elders(tree) * below[:, None]).sum(-1)
    return (tree.seen * before[:, None]).sum(-1) + below - 1
