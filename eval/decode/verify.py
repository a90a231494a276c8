"""Which drafted tokens the target keeps, and which token it says next.

Pure functions on a tree and on rows of probabilities; no model, no cache, no state. What they
emit has exactly the law of plain decoding. The rows come from `sampling.warp`: p row i is the
target's warped distribution of the token after node i, bonus rows included; q row i is the
distribution that node i + 1's token was really drawn from.

The rules that keep this lossless, each broken by some published decoder:

    R1   q is the distribution the token was drawn from; an argmax or top-k draft has no q row,
         it is a point mass and goes through `match`.
    R2   whether a drafted token is verified must not depend on that token (only on earlier
         ones): the caller may stop *after* an unlikely token, never drop it.
    R3   sampled siblings must be verified all, in the order drawn: `ratio` takes chains only.
    R4   after a rejection the token comes from the residual, or is the sample that failed to
         match; it is never drawn afresh from p.
    R5   one coin per node, shared by all paths through it.
    R6   fresh coins in every round.
    R9   a residual without mass falls back to p.
    R10  greedy is the limit of temperature 0.

R7 (processors see each node's own history) and R8 (cut at the first end token and at the
budget, then crop the caches) are duties of whoever builds the rows and commits the path.

Shape letters: N nodes, root included, V vocabulary, A accepted drafted tokens.

Source: Leviathan et al. 2023, section 2.3, arXiv:2211.17192 (`ratio`); Miao et al. 2023,
"SpecInfer", arXiv:2305.09781, and EAGLE-2's verification with point masses (`match`).
Differs from EAGLE-2's code: one draw from p per level decides between all children and the
emitted token at once; the law is the same as testing child after child.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.eval.decode.sampling import Coins
from outrider.eval.decode.tree import Tree


class Accepted(NamedTuple):
    """A round's result: the nodes to commit, root first, and the token that follows them.

    The round emits len(path) tokens: the tokens of path[1:], then next_id, which is the next
    round's root.
    """

    path: Int[Tensor, " A+1"]
    next_id: int


def verify(
    tree: Tree,
    p_rows: Float[Tensor, "N V"],
    q_rows: Float[Tensor, "N-1 V"] | None,
    coins: Coins,
) -> Accepted:
    """`match` for children chosen deterministically (no q rows), `ratio` for a sampled chain."""
    if q_rows is None:
        return match(tree, p_rows, coins)
    return ratio(tree, p_rows, q_rows, coins)


def greedy(tree: Tree, choice: Int[Tensor, " N"]) -> Accepted:
    """The longest path whose every token is the target's choice at its parent (R10).

    Args:
        tree: any tree.
        choice: the target's argmax after each node, ties to the lowest id.

    Raises:
        ValueError: choice does not have one entry per node.
    """
    if len(choice) != len(tree):
        raise ValueError(f"{len(choice)} choices for a tree of {len(tree)} nodes")
    chosen: list[int] = choice.tolist()
    agreed = [0]  # all nodes of one level; more than one only where siblings repeat a token
    while deeper := [
        node
        for parent in agreed
        for node in tree.children(parent)
        if tree.tokens[node] == chosen[parent]
    ]:
        agreed = deeper
    return _accept(tree, tree.path(agreed[0]), chosen[agreed[0]])


def match(tree: Tree, p_rows: Float[Tensor, "N V"], coins: Coins) -> Accepted:
    """Sample and match: draw y ~ p; a child that carries y is accepted, else y is emitted.

    Exact for every tree that does not depend on the coins of this round: chains of argmax
    tokens, EAGLE-2 and Medusa trees, looked-up n-grams. The token drawn is the token emitted
    (R4), and one draw serves all children of a node (R5). At a leaf y is the bonus token.
    Draws, and waits for the device, once per level.

    Raises:
        ValueError: p_rows does not have one row per node.
    """
    _check_rows("p_rows", p_rows, len(tree))
    path = [0]
    while True:
        token = coins.draw(p_rows[path[-1]])
        below = [node for node in tree.children(path[-1]) if tree.tokens[node] == token]
        if not below:
            return _accept(tree, path, token)
        path.append(below[0])


def ratio(
    tree: Tree, p_rows: Float[Tensor, "N V"], q_rows: Float[Tensor, "N-1 V"], coins: Coins
) -> Accepted:
    """Speculative sampling of a chain: accept x with chance min(1, p(x) / q(x)), in order.

    At the first rejection the token comes from max(p - q, 0), renormalised (R4); after the
    last acceptance the bonus token comes from the warped p of the last node. Waits for the
    device twice, however long the chain.

    Args:
        tree: a chain.
        p_rows: row i is the target's warped distribution of the token after node i.
        q_rows: row i is the warped draft distribution that token i + 1 was drawn from (R1),
            over the target's vocabulary (0 outside a reduced draft vocabulary).
        coins: fresh ones (R6).

    Raises:
        ValueError: the tree branches (R3); p_rows and q_rows do not have N and N - 1 rows of
            one vocabulary; q gives a drafted token no probability, so it was not drawn from
            q (R1); or a probability is NaN.
    """
    if tree.branches:
        raise ValueError("ratio verifies chains only: siblings chosen by rank take match (R1, R3)")
    _check_rows("p_rows", p_rows, len(tree))
    _check_rows("q_rows", q_rows, len(tree) - 1)
    if p_rows.shape[1] != q_rows.shape[1]:
        raise ValueError(
            f"p_rows have {p_rows.shape[1]} tokens and q_rows {q_rows.shape[1]}: "
            "scatter a reduced draft vocabulary to the target's first"
        )
    for last, chance in enumerate(_chances(tree, p_rows, q_rows)):
        if not coins.flip(chance):
            return _accept(tree, tree.path(last), coins.draw(_residual(p_rows[last], q_rows[last])))
    return _accept(tree, tree.path(len(tree) - 1), coins.draw(p_rows[-1]))


def _chances(
    tree: Tree, p_rows: Float[Tensor, "N V"], q_rows: Float[Tensor, "N-1 V"]
) -> list[float]:
    """min(1, p(x) / q(x)) of every drafted token, in one transfer; item i is for node i + 1."""
    drafted = tree.ids[1:, None].long()
    pairs = torch.cat(
        [p_rows[:-1].gather(1, drafted).double(), q_rows.gather(1, drafted).double()], dim=1
    ).tolist()
    for node, (p, q) in enumerate(pairs, start=1):
        if not (p >= 0 and q > 0):
            raise ValueError(
                f"token {tree.tokens[node]} of node {node} has p = {p} and q = {q}: "
                "q_rows must be the rows the tokens were drawn from (R1), and p a probability"
            )
    return [min(1.0, p / q) for p, q in pairs]


def _residual(p: Float[Tensor, " V"], q: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
    """max(p - q, 0), renormalised; p itself where rounding left no mass (R9)."""
    rest = (p - q).clamp(min=0)
    mass = rest.sum()
    return torch.where(mass > 0, rest / mass, p)


def _accept(tree: Tree, path: list[int], next_id: int) -> Accepted:
    return Accepted(torch.tensor(path, device=tree.ids.device), next_id)


def _check_rows(name: str, rows: Float[Tensor, "rows V"], count: int) -> None:
    if len(rows) != count:
        raise ValueError(f"{name} has {len(rows)} rows, and this tree needs {count}")
