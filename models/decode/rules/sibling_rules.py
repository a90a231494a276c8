"""Sampled siblings: how they are drawn, and the two rules that verify them in that order.

Both rules test the children of a node in order against a row R that starts as p. A child
x is accepted with probability min(1, R(x) / q(x)); if it is rejected, R becomes max(R - q, 0),
renormalised. If all are rejected, the token is drawn from the final R.

    independent           every child was drawn from q; one that repeats a token is tested too
    without replacement   q(x) becomes 0 after x was rejected, and q is renormalised: the next
                          child was drawn from this

R and q at the k-th child do not depend on any random number, so all acceptance probabilities are
computed first, rank by rank (all k-th children of all trees together), and flipped at once.

Shape letters: B prompts, N nodes, V vocabulary, K rows to draw children from, W nodes of one rank.

Source: Miao et al. 2023, "SpecInfer", arXiv:2305.09781 (independent); Chen et al. 2024,
"Sequoia", arXiv:2402.12374 (without replacement).
Differs from Sequoia's code: a residual without mass falls back to p instead of ending the text,
and random numbers are fresh in every round.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.models.decode.rules.token_rules import (
    Accepted,
    Rows,
    acceptance_probabilities,
    deepest_path,
    draft_nodes,
    draft_probabilities,
    draw_one,
    earlier_siblings,
    invalid_node_error,
    invalid_nodes,
    repeats_sibling,
    residual,
    select_node,
)
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.tree import Tree

REPEATED = "was drawn twice: siblings without replacement never repeat a token (R1)"


def sibling_by_sibling(
    tree: Tree, p_rows: Rows, q_rows: Rows, rng: RandomSource, replacement: bool
) -> Accepted:
    """SpecInfer's rule for independent siblings, or Sequoia's for siblings without replacement.

    Raises:
        ValueError: as `token_rules.ratio`, but trees may branch; or siblings without
            replacement repeat a token.
    """
    siblings = earlier_siblings(tree)
    rows = ResidualRows(tree, p_rows, q_rows, replacement)
    ratios = torch.zeros_like(rows.share)
    for nodes in nodes_by_rank(tree, p_rows, q_rows, siblings.sum(-1) + 1, replacement):
        ratios[nodes] = rows.reject(nodes)[0]
    flips = rng.flip(acceptance_probabilities(tree, ratios.view_as(tree.ids)))
    first = flips & ~(siblings & flips[:, None]).any(-1)
    path, length = deepest_path(tree, first)
    row = select_node(rows.target.view_as(p_rows), path[:, -1])
    return Accepted(path, length, draw_one(row, rng))


def nodes_by_rank(
    tree: Tree, p_rows: Rows, q_rows: Rows, rank: Int[Tensor, "B N"], replacement: bool
) -> list[Int[Tensor, " W"]]:
    """Return the draft nodes of rank 1, of rank 2, ..., as indices into [B * N].

    Synchronises with the device once.

    Args:
        rank: 1..N-1; no two children of a node have the same.

    Raises:
        ValueError: a token cannot have been sampled from its row.
    """
    p, q = draft_probabilities(tree, p_rows, q_rows)
    misplaced = torch.zeros_like(tree.real) if replacement else repeats_sibling(tree)
    invalid = invalid_nodes(tree, p, q, misplaced)
    ranks = rank.masked_fill(~draft_nodes(tree), 0).flatten()
    counts = torch.zeros(tree.size, dtype=torch.long, device=ranks.device)
    counts.scatter_add_(0, ranks, torch.ones_like(ranks))
    any_invalid, *sizes = torch.cat([invalid.any()[None].long(), counts]).tolist()
    if any_invalid:
        raise invalid_node_error(tree, p, q, misplaced, REPEATED)
    parts = ranks.argsort(stable=True).split(sizes)[1:]
    return [part for part, size in zip(parts, sizes[1:], strict=True) if size]


class ResidualRows:
    """Target and draft rows of all nodes, updated as their children are rejected.

    Attributes:
        target: R of each node, renormalised.
        draft: the distribution of each node's next child.
        share: r of `block_rules`; 1 where a node is accepted before its children are tested.
    """

    def __init__(self, tree: Tree, p_rows: Rows, q_rows: Rows, replacement: bool) -> None:
        first = torch.arange(len(tree.ids), device=tree.ids.device)[:, None] * tree.size
        self.parents = (tree.parents.clamp(min=0) + first).flatten()
        self.ids = tree.ids.long().flatten()
        self.replacement = replacement
        self.target: Float[Tensor, "BN V"] = p_rows.flatten(0, 1).clone()
        self.draft: Float[Tensor, "BN V"] = q_rows.flatten(0, 1)
        self.draft = self.draft if replacement else self.draft.clone()
        self.share: Float[Tensor, " BN"] = torch.ones_like(self.target[:, 0])

    def reject(self, nodes: Int[Tensor, " W"]) -> tuple[Float[Tensor, " W"], Float[Tensor, " W"]]:
        """Remove the tokens of nodes of different parents from the parents' rows.

        Returns:
            p / q of the tokens before, and the mass of max(share * p - q, 0).
        """
        parents, token = self.parents[nodes], self.ids[nodes][:, None]
        p, q = self.target[parents], self.draft[parents]
        self.target[parents], mass = residual(p, q, self.share[parents])
        if not self.replacement:
            self.draft[parents] = remove_tokens(q, token)
        return (p.gather(1, token) / q.gather(1, token))[:, 0], mass


def remove_tokens(q: Float[Tensor, "W V"], tokens: Int[Tensor, "W 1"]) -> Float[Tensor, "W V"]:
    """Return q without a token, renormalised; all zeros when it was the last one."""
    q = q.scatter(1, tokens, 0.0)
    mass = q.sum(-1, keepdim=True)
    return torch.where(mass == 0, q, q / mass)


def draw_siblings(
    rows: Float[Tensor, "B K V"], count: int, rng: RandomSource, replacement: bool
) -> tuple[Int[Tensor, "B K count"], Bool[Tensor, "B K count"]]:
    """Draw children for each row, in the order in which they must be verified.

    Args:
        rows: warped draft distributions.
        count: children per row, >= 1.
        replacement: True for `independent`, False for `without_replacement`.

    Returns:
        Token ids, and which of them are real: without replacement a row has no more children than
        tokens with mass.

    Raises:
        EmptyDistribution: a row is NaN or has no mass, and the random source checks it.
    """
    ids, real = [], [torch.ones_like(rows[..., 0], dtype=torch.bool)]
    for _ in range(count):
        ids.append(rng.draw(rows))
        if replacement:
            real.append(real[-1])
        else:
            rest = rows.scatter(2, ids[-1][..., None], 0.0)
            has_mass = (rest > 0).any(-1)
            rows = torch.where(has_mass[..., None], rest, rows)  # keep the last token drawable
            real.append(real[-1] & has_mass)
    return torch.stack(ids, dim=-1), torch.stack(real[:-1], dim=-1)
