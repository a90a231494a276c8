"""Which drafted tokens the target keeps, and which token it says next.

Pure functions on a batch of trees and on rows of probabilities; no model, no cache, no state.
What they emit has exactly the law of plain decoding. The rows come from `sampling.warp`: p row i
is the target's warped distribution of the token after node i, leaves included; q row i is the
distribution from which the children of node i were really drawn (rows of leaves are not read).
The children of a node are stored in the order drawn. Here are the rules for trees chosen
without chance and for sampled chains; `siblings` and `block` have those for sampled trees and
whole chains, `lossy` those that change the law, `rules` says which one fits which draft.

The rules that keep this lossless, each broken by some published decoder:

    R1   q is the distribution the token was drawn from; an argmax or top-k draft has no q row,
         it is a point mass and goes through `match`.
    R2   whether a drafted token is verified must not depend on that token (only on earlier
         ones): the caller may stop *after* an unlikely token, never drop it.
    R3   sampled siblings must be verified all, in the order drawn: `ratio` takes chains only.
    R4   after a rejection the token comes from the residual, or is the sample that failed to
         match; it is never drawn afresh from p.
    R5   one coin per context, shared by all paths through it.
    R6   fresh coins in every round.
    R9   a residual without mass falls back to p.
    R10  greedy is the limit of temperature 0.

R7 (processors see each node's own history) and R8 (cut at the first end token and at the
budget, then crop the caches) are duties of whoever builds the rows and commits the path.

Every rule that flips asks once, for all nodes, and then draws once per prompt; what a prompt
gets therefore does not depend on the trees beside it. A draw waits for the device, to refuse rows
without mass, and rules that read q wait once more, to refuse rows that the tokens cannot have been
drawn from; `greedy` never does.

Shape letters: B prompts, N nodes, root included, V vocabulary, P nodes of a longest path.

Source: Leviathan et al. 2023, section 2.3, arXiv:2211.17192 (`ratio`); Miao et al. 2023,
"SpecInfer", arXiv:2305.09781, and EAGLE-2's verification with point masses (`match`).
Differs from EAGLE-2's code: one draw from p per node decides between all children and the
emitted token at once; the law is the same as testing child after child.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.models.decode.sampling import Coins
from outrider.models.decode.tree import Tree

NO_ROWS = "a sampled draft comes with the rows it was drawn from (R1)"
CHAINS_ONLY = "does not follow the node before it: this rule verifies chains only (R3)"


class Accepted(NamedTuple):
    """A round's result: the nodes to commit, and the token that follows them.

    Attributes:
        path: accepted nodes, root first; behind the end the last one is repeated.
        length: how many drafted nodes were accepted, 0..levels; path[:, : length + 1] counts.
        next_ids: the token that follows: the correction, or the bonus behind a leaf.
    """

    path: Int[Tensor, "B P"]
    length: Int[Tensor, " B"]
    next_ids: Int[Tensor, " B"]


def greedy(tree: Tree, choice: Int[Tensor, "B N"]) -> Accepted:
    """The longest path whose every token is the target's choice at its parent (R10).

    The reference: the engine decides the same on the host, from numbers it fetches anyway
    (`news.decided`), and a test holds the two equal.

    Args:
        choice: the target's argmax after each node, ties to the lowest id.

    Raises:
        ValueError: choice does not have one entry per node.
    """
    fits(tree, choice=choice)
    path, length = descend(tree, _agreed(tree, choice))
    return Accepted(path, length, choice.gather(1, path[:, -1:])[:, 0])


def match(tree: Tree, p_rows: Float[Tensor, "B N V"], coins: Coins) -> Accepted:
    """Sample and match: draw y ~ p at every node; a child that carries y is accepted, else y
    is emitted.

    Exact for every tree that does not depend on the coins of this call: chains of argmax
    tokens, EAGLE-2 and Medusa trees, looked-up n-grams, and sampled trees too (under the name
    "sampled": less is accepted than by the rules that read q). The token drawn is the token
    emitted (R4). Of siblings that repeat a token only the first is followed: looking which of
    them leads deeper would toss a context's coin twice (R5).

    Raises:
        ValueError: p_rows does not have one row per node; a row is NaN or has no mass.
    """
    fits(tree, p_rows=p_rows)
    choice = coins.draw(p_rows)
    path, length = descend(tree, _agreed(tree, choice) & ~repeated(tree))
    return Accepted(path, length, choice.gather(1, path[:, -1:])[:, 0])


def _agreed(tree: Tree, choice: Int[Tensor, "B N"]) -> Bool[Tensor, "B N"]:
    return tree.ids == choice.gather(1, tree.parents.clamp(min=0))


def ratio(
    tree: Tree, p_rows: Float[Tensor, "B N V"], q_rows: Float[Tensor, "B N V"], coins: Coins
) -> Accepted:
    """Speculative sampling of a chain: accept x with chance min(1, p(x) / q(x)), in order.

    At the first rejection the token comes from max(p - q, 0), renormalised (R4); after the
    last acceptance the bonus token comes from the warped p of the last node. Waits for the
    device once, for the check.

    Args:
        tree: chains.
        q_rows: over the target's vocabulary (0 outside a reduced draft vocabulary).
        coins: fresh ones (R6).

    Raises:
        ValueError: a tree branches (R3); p_rows and q_rows do not have one row per node of one
            vocabulary; q gives a drafted token no probability, so it was not drawn from q
            (R1); or a probability is NaN.
    """
    p, q = drafted_chances(tree, p_rows, q_rows)
    refuse(tree, p, q, branches(tree), CHAINS_ONLY)
    path, length = descend(tree, coins.flip(chances(tree, p / q)))
    last = length if tree.straight else path[:, -1]
    bonus = at(p_rows, last)
    correction, _ = residual(bonus, at(q_rows, last))
    row = torch.where(continued(tree, last)[:, None], correction, bonus)
    return Accepted(path, length, draw_one(row, coins))


# ---- where a path ends ---------------------------------------------------------------------------


def descend(
    tree: Tree, passed: Bool[Tensor, "B N"], likes: Float[Tensor, "B N"] | None = None
) -> tuple[Int[Tensor, "B P"], Int[Tensor, " B"]]:
    """The path to the deepest node that passed together with all its ancestors.

    Args:
        passed: whether each node itself passed; the root always has, one that is not real never.
        likes: among equally deep nodes the one that is liked most; None, and ties: the lowest
            index.

    Returns:
        Path and length, as in Accepted.
    """
    if tree.straight:
        return _along(tree, passed[:, 1:])
    closed = (tree.seen[:, :, 1:] > passed[:, None, 1:]).any(-1)  # below one that did not pass
    depth = tree.depths.masked_fill(closed if tree.whole else closed | ~tree.real, -1)
    length, last = depth.max(-1)
    if likes is not None:
        last = likes.masked_fill(depth != length[:, None], -torch.inf).argmax(-1)
    return path_to(tree, last), length


def _along(
    tree: Tree, passed: Bool[Tensor, "B drafted"]
) -> tuple[Int[Tensor, "B P"], Int[Tensor, " B"]]:
    """`descend` for chains: up to the first node behind the root that did not pass."""
    passed = passed if tree.whole else passed & tree.real[:, 1:]
    length = passed.cumprod(1).sum(1)
    return torch.minimum(tree.depths, length[:, None]), length


def path_to(tree: Tree, last: Int[Tensor, " B"]) -> Int[Tensor, "B P"]:
    """All nodes from the root to these ones, each at the place of its depth."""
    others = tree.levels + 1  # a place behind the path for all that are not on it
    place = tree.depths.masked_fill(~at(tree.seen, last), others)
    return last[:, None].expand(-1, others + 1).scatter(1, place, tree.nodes)[:, :-1]


# ---- families ------------------------------------------------------------------------------------


def elders(tree: Tree) -> Bool[Tensor, "B N N"]:
    """elders[b, i, j]: node j is a sibling of node i, was drawn before it, and both are real."""
    siblings = (tree.parents[:, :, None] == tree.parents[:, None]) & tree.real[:, None]
    return siblings.tril(-1) & tree.real[:, :, None]


def repeated(tree: Tree) -> Bool[Tensor, "B N"]:
    """Whether an elder sibling carries the same token."""
    return (elders(tree) & (tree.ids[:, :, None] == tree.ids[:, None])).any(-1)


def continued(tree: Tree, nodes: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Whether a node has a real child."""
    if tree.straight:
        return nodes < (tree.levels if tree.whole else tree.deepest())
    return ((tree.parents == nodes[:, None]) & tree.real).any(-1)


def drafted(tree: Tree) -> Bool[Tensor, "B N"]:
    """Real nodes below the root."""
    return tree.real & (tree.depths > 0)


def branches(tree: Tree) -> Bool[Tensor, "B N"] | None:
    """Nodes that a chain cannot have: their parent is not the node before them. None: none is."""
    if tree.straight:
        return None
    before = torch.arange(-1, tree.size - 1, device=tree.ids.device)
    return drafted(tree) & (tree.parents != before)


# ---- rows ----------------------------------------------------------------------------------------


def at(rows: Tensor, nodes: Int[Tensor, " B"]) -> Tensor:
    """The row of one node per prompt: [B, N, ...] and [B] give [B, ...]."""
    where = nodes.view(-1, *[1] * (rows.dim() - 1))
    return rows.gather(1, where.expand(-1, 1, *rows.shape[2:]))[:, 0]


def drafted_chances(
    tree: Tree, p_rows: Float[Tensor, "B N V"], q_rows: Float[Tensor, "B N V"]
) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N"]]:
    """What p and q give every drafted token at its parent; 1 for the root and nodes not real."""
    fit_both(tree, p_rows, q_rows)
    if tree.straight:  # a node's row is the one before its own
        drawn = tree.ids[:, 1:, None].long()
        return _along_rows(tree, p_rows, drawn), _along_rows(tree, q_rows, drawn)
    prompt = torch.arange(len(tree.ids), device=tree.ids.device)[:, None]
    others = ~drafted(tree)
    where = (prompt, tree.parents.clamp(min=0), tree.ids.long().masked_fill(others, 0))
    return p_rows[where].masked_fill(others, 1.0), q_rows[where].masked_fill(others, 1.0)


def _along_rows(
    tree: Tree, rows: Float[Tensor, "B N V"], drawn: Int[Tensor, "B drafted 1"]
) -> Float[Tensor, "B N"]:
    """What rows 0..N-2 give the tokens drawn; 1 for the root."""
    found = torch.nn.functional.pad(rows.gather(2, drawn)[..., 0], (1, 0), value=1.0)
    return found if tree.whole else found.masked_fill(~tree.real, 1.0)


def chances(tree: Tree, wanted: Float[Tensor, "B N"]) -> Float[Tensor, "B N"]:
    """At most 1; 1 for the root; 0 for nodes that are not real, so that they never pass."""
    wanted = wanted.clamp(max=1.0)
    wanted = wanted if tree.whole else wanted.masked_fill(~tree.real, 0.0)
    return wanted.masked_fill(tree.depths == 0, 1.0)


def residual(
    p: Float[Tensor, "n V"], q: Float[Tensor, "n V"], share: Float[Tensor, " n"] | None = None
) -> tuple[Float[Tensor, "n V"], Float[Tensor, " n"]]:
    """max(share * p - q, 0), renormalised, and its mass; p itself where nothing is left (R9).

    A NaN stays one, for the draw to refuse.
    """
    wanted = p if share is None else share[:, None] * p
    rest = (wanted - q).clamp(min=0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass == 0, p, rest / mass), mass[:, 0]


def draw_one(rows: Float[Tensor, "B V"], coins: Coins) -> Int[Tensor, " B"]:
    return coins.draw(rows[:, None])[:, 0]


# ---- what is refused -----------------------------------------------------------------------------


def fits(tree: Tree, **rows: Tensor) -> None:
    """
    Raises:
        ValueError: something does not have one row per node.
    """
    for name, part in rows.items():
        if part.shape[:2] != tree.ids.shape:
            raise ValueError(
                f"{name} has shape {tuple(part.shape)}, and a batch of {len(tree.ids)} trees of "
                f"{tree.size} nodes needs as many rows"
            )


def fit_both(tree: Tree, p_rows: Float[Tensor, "B N V"], q_rows: Float[Tensor, "B N V"]) -> None:
    """
    Raises:
        ValueError: the rows do not fit the tree, or are not of one vocabulary.
    """
    fits(tree, p_rows=p_rows, q_rows=q_rows)
    if p_rows.shape[2] != q_rows.shape[2]:
        raise ValueError(
            f"p_rows have {p_rows.shape[2]} tokens and q_rows {q_rows.shape[2]}: "
            "scatter a reduced draft vocabulary to the target's first"
        )


def refuse(
    tree: Tree,
    p: Float[Tensor, "B N"],
    q: Float[Tensor, "B N"],
    wrong: Bool[Tensor, "B N"] | None,
    why: str,
) -> None:
    """Waits for the device: a biased text is worse than a short wait.

    Args:
        wrong: nodes that must not be there; None: none is.

    Raises:
        ValueError: which node cannot be verified; the tree is `wrong` for a reason, or p is no
            probability (a NaN is not >= 0), or q says that the token cannot have been drawn.
    """
    bad = unfit(tree, p, q, wrong)
    if bool(bad.any()):
        raise refusal(tree, p, q, bad, wrong, why)


def unfit(
    tree: Tree, p: Float[Tensor, "B N"], q: Float[Tensor, "B N"], wrong: Bool[Tensor, "B N"] | None
) -> Bool[Tensor, "B N"]:
    bad = ~((p >= 0) & (q > 0))  # the root and nodes not real have 1 in both
    return bad if wrong is None else bad | (drafted(tree) & wrong)


def refusal(
    tree: Tree,
    p: Float[Tensor, "B N"],
    q: Float[Tensor, "B N"],
    bad: Bool[Tensor, "B N"],
    wrong: Bool[Tensor, "B N"] | None,
    why: str,
) -> ValueError:
    """What to say of the first bad node."""
    prompt, node = (int(index) for index in bad.nonzero()[0])
    token = f"token {int(tree.ids[prompt, node])} of node {node}"
    if wrong is not None and wrong[prompt, node]:
        return ValueError(f"{token} {why}")
    return ValueError(
        f"{token} has p = {float(p[prompt, node])} and q = {float(q[prompt, node])}: "
        "q_rows must be the rows the tokens were drawn from (R1), and p a probability"
    )
