"""Siblings drawn by chance: how they are drawn, and the two rules that verify them in that order.

Both rules test the children of a node one after the other against a row R that starts as p.
A child x is accepted with chance min(1, R(x) / q(x)); if it is rejected, R becomes
max(R - q, 0), renormalised. If all are rejected, the token comes from what R is then.

    independent           every child was drawn from q; one that repeats a token is tested too
    without replacement   q(x) becomes 0 after x was rejected, and q is renormalised: this is
                          what the next child was drawn from

What R and q are when the k-th child is tested does not depend on any coin, so all nodes' chances
are found first, rank by rank (all k-th children of all trees together), and flipped at once.

Shape letters: B prompts, N nodes, V vocabulary, K rows to draw children from, W nodes of a wave.

Source: Miao et al. 2023, "SpecInfer", arXiv:2305.09781 (independent); Chen et al. 2024,
"Sequoia", arXiv:2402.12374 (without replacement).
Differs from Sequoia's code: a residual without mass falls back to p instead of ending the text,
and coins are fresh in every round.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.models.decode.sampling import Coins
from outrider.models.decode.tree import Tree
from outrider.models.decode.verify import (
    Accepted,
    at,
    chances,
    descend,
    drafted,
    drafted_chances,
    draw_one,
    elders,
    refusal,
    repeated,
    residual,
    unfit,
)

TWICE = "was drawn twice: siblings without replacement never repeat a token (R1)"


def independent(
    tree: Tree, p_rows: Float[Tensor, "B N V"], q_rows: Float[Tensor, "B N V"], coins: Coins
) -> Accepted:
    """SpecInfer's rule, for siblings drawn independently from one row.

    Raises:
        ValueError: as `verify.ratio`, but trees may branch.
    """
    return _verify(tree, p_rows, q_rows, coins, replacement=True)


def without_replacement(
    tree: Tree, p_rows: Float[Tensor, "B N V"], q_rows: Float[Tensor, "B N V"], coins: Coins
) -> Accepted:
    """Sequoia's rule, for siblings drawn one after the other, none of them twice.

    Raises:
        ValueError: as `verify.ratio`, but trees may branch; or siblings repeat a token.
    """
    return _verify(tree, p_rows, q_rows, coins, replacement=False)


def _verify(
    tree: Tree, p_rows: Tensor, q_rows: Tensor, coins: Coins, replacement: bool
) -> Accepted:
    family = elders(tree)
    sieve = Sieve(tree, p_rows, q_rows, replacement)
    chance = torch.zeros_like(sieve.share)
    for wave in waves(tree, p_rows, q_rows, family.sum(-1) + 1, replacement):
        chance[wave] = sieve.reject(wave)[0]
    heads = coins.flip(chances(tree, chance.view_as(tree.ids)))
    path, length = descend(tree, heads & ~(family & heads[:, None]).any(-1))
    return Accepted(path, length, draw_one(at(sieve.rest.view_as(p_rows), path[:, -1]), coins))


def waves(
    tree: Tree,
    p_rows: Float[Tensor, "B N V"],
    q_rows: Float[Tensor, "B N V"],
    turn: Int[Tensor, "B N"],
    replacement: bool,
) -> list[Int[Tensor, " W"]]:
    """The drafted nodes that are rejected at turn 1, at turn 2, ...: indices into [B * N].

    Waits for the device once: for how many nodes take each turn, and for whether any of them
    cannot have been drawn like this.

    Args:
        turn: 1..N-1; no two children of a node have the same.
    """
    p, q = drafted_chances(tree, p_rows, q_rows)
    wrong = torch.zeros_like(tree.real) if replacement else repeated(tree)
    bad = unfit(tree, p, q, wrong)
    turns = turn.masked_fill(~drafted(tree), 0).flatten()
    counts = torch.zeros(tree.size, dtype=torch.long, device=turns.device)
    counts.scatter_add_(0, turns, torch.ones_like(turns))
    refused, *sizes = torch.cat([bad.any()[None].long(), counts]).tolist()
    if refused:
        raise refusal(tree, p, q, bad, wrong, TWICE)
    parts = turns.argsort(stable=True).split(sizes)[1:]
    return [part for part, size in zip(parts, sizes[1:], strict=True) if size]


class Sieve:
    """The rows of all nodes, as they are left while one child after the other is rejected.

    Attributes:
        rest: what the target still has to say after each node, renormalised.
        drawn: what the node's next child was drawn from.
        share: r of traversal verification: how much of the path to the node the target wants;
            stays 1 where a node is accepted before its children are looked at.
    """

    def __init__(
        self,
        tree: Tree,
        p_rows: Float[Tensor, "B N V"],
        q_rows: Float[Tensor, "B N V"],
        replacement: bool,
    ) -> None:
        first = torch.arange(len(tree.ids), device=tree.ids.device)[:, None] * tree.size
        self.above = (tree.parents.clamp(min=0) + first).flatten()
        self.ids = tree.ids.long().flatten()
        self.replacement = replacement
        self.rest: Float[Tensor, "BN V"] = p_rows.flatten(0, 1).clone()
        self.drawn: Float[Tensor, "BN V"] = q_rows.flatten(0, 1)
        self.drawn = self.drawn if replacement else self.drawn.clone()
        self.share: Float[Tensor, " BN"] = torch.ones_like(self.rest[:, 0])

    def reject(self, nodes: Int[Tensor, " W"]) -> tuple[Float[Tensor, " W"], Float[Tensor, " W"]]:
        """Take the tokens of these nodes out of their parents' rows.

        Args:
            nodes: one child per parent.

        Returns:
            p / q of the tokens as the rows were, and the mass of max(share * p - q, 0).
        """
        above, token = self.above[nodes], self.ids[nodes][:, None]
        p, q = self.rest[above], self.drawn[above]
        self.rest[above], mass = residual(p, q, self.share[above])
        if not self.replacement:
            self.drawn[above] = without(q, token)
        return (p.gather(1, token) / q.gather(1, token))[:, 0], mass


def without(q: Float[Tensor, "W V"], tokens: Int[Tensor, "W 1"]) -> Float[Tensor, "W V"]:
    """What is drawn from when a token is gone; all zeros when it was the last one."""
    q = q.scatter(1, tokens, 0.0)
    mass = q.sum(-1, keepdim=True)
    return torch.where(mass == 0, q, q / mass)


def draw_siblings(
    rows: Float[Tensor, "B K V"], count: int, coins: Coins, replacement: bool
) -> tuple[Int[Tensor, "B K count"], Bool[Tensor, "B K count"]]:
    """Children for each row, in the order in which they must be verified.

    Args:
        rows: warped draft distributions.
        count: children per row, >= 1.
        replacement: True for `independent`; False for `without_replacement`, where a drawn
            token is taken out of its row before the next draw.

    Returns:
        Token ids, and which of them are real: without replacement a row has no more children
        than tokens with mass.

    Raises:
        NoMass: a row is NaN or has no mass, and the coins look.
    """
    ids, live = [], [torch.ones_like(rows[..., 0], dtype=torch.bool)]
    for _ in range(count):
        ids.append(coins.draw(rows))
        if not replacement:
            rest = rows.scatter(2, ids[-1][..., None], 0.0)
            some = (rest > 0).any(-1)
            rows = torch.where(some[..., None], rest, rows)  # the last token stays, to be drawn
            live.append(live[-1] & some)
        else:
            live.append(live[-1])
    return torch.stack(ids, dim=-1), torch.stack(live[:-1], dim=-1)
