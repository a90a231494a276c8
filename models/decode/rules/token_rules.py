"""Verification token by token: which draft tokens are accepted, and which token follows them.

Pure functions on a batch of trees and rows of probabilities. Their output has exactly the
distribution of plain decoding. The rows come from `warping.warp`: p row i is the target's
distribution of the token after node i, leaves included; q row i is the distribution from which the
children of node i were drawn (rows of leaves are not read). The children of a node are stored in
the order drawn. Here are the rules for deterministic drafts and for sampled chains; `rules` lists
all.

The conditions for losslessness, each violated by some published decoder:

    R1   q is the distribution the token was drawn from; an argmax or top-k draft is a point mass
         without a q row, verified by `match`.
    R2   whether a draft token is verified must not depend on that token, only on earlier ones:
         drafting may stop *after* an unlikely token, but must not drop it.
    R3   sampled siblings must all be verified, in the order drawn: `ratio` takes chains only.
    R4   after a rejection the token comes from the residual, or is the sample that failed to
         match; it is never drawn again from p.
    R5   one random number per context, shared by all paths through it.
    R6   fresh random numbers in every round.
    R9   a residual without mass falls back to p.
    R10  greedy is the limit of temperature 0.

The engine ensures R7 (penalties depend on each node's own text) and R8 (cut at the first end token
and at the budget, then crop the caches).

Each rule flips once for all nodes and then draws once per prompt, so the result of a prompt does
not depend on the other trees. Rules that read q synchronise with the device, to refuse tokens that
cannot have been drawn from their rows.

Shape letters: B prompts, N nodes, root included, V vocabulary, P nodes of a longest path.

Source: Leviathan et al. 2023, section 2.3, arXiv:2211.17192 (`ratio`); Miao et al. 2023,
"SpecInfer", arXiv:2305.09781, and EAGLE-2's verification with point masses (`match`).
Differs from EAGLE-2's code: one draw from p per node decides between all children and the emitted
token at once; the distribution is the same as testing child after child.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.tree import Tree

Rows = Float[Tensor, "B N V"]  # a distribution, or logits, after every node
NodeValues = Float[Tensor, "B N"]  # a probability or a ratio of every node
NodeFlags = Bool[Tensor, "B N"]
NO_ROWS = "a sampled draft needs the rows it was drawn from (R1)"
CHAINS_ONLY = "does not follow the node before it: this rule verifies chains only (R3)"


class Accepted(NamedTuple):
    """The result of a rule as tensors; `round_outcome.outcomes` brings it to the host.

    Attributes:
        path: accepted nodes, root first; the last one is repeated up to the end.
        length: number of accepted draft nodes, 0..levels; path[:, : length + 1] counts.
        next_ids: the token after the path: the correction, or the bonus after a leaf.
    """

    path: Int[Tensor, "B P"]
    length: Int[Tensor, " B"]
    next_ids: Int[Tensor, " B"]


def match(tree: Tree, p_rows: Rows, rng: RandomSource) -> Accepted:
    """Draw y ~ p at every node; accept a child that carries y, else emit y.

    Exact for every tree that does not depend on the random numbers of this call: EAGLE-2 and Medusa
    trees, and sampled trees too (there called "sampled": it accepts less than the rules that read
    q). Of siblings that repeat a token only the first is followed: choosing the one that leads
    deeper would use a context's random number twice (R5).

    Raises:
        ValueError: p_rows does not have one row per node; a row is NaN or has no mass.
    """
    check_shapes(tree, p_rows=p_rows)
    choice = rng.draw(p_rows)
    matching = tree.ids == choice.gather(1, tree.parents.clamp(min=0))
    path, length = deepest_path(tree, matching & ~repeats_sibling(tree))
    return Accepted(path, length, choice.gather(1, path[:, -1:])[:, 0])


def ratio(tree: Tree, p_rows: Rows, q_rows: Rows, rng: RandomSource) -> Accepted:
    """Speculative sampling of a chain: accept x with probability min(1, p(x) / q(x)), in order.

    At the first rejection the token comes from max(p - q, 0), renormalised (R4); after the last
    acceptance the bonus token comes from p of the last node.

    Args:
        tree: chains.
        q_rows: over the target's vocabulary (0 outside a reduced draft vocabulary).

    Raises:
        ValueError: a tree branches (R3); p_rows and q_rows do not have one row per node of one
            vocabulary; q gives a draft token no probability (R1); or a probability is NaN.
    """
    p, q = draft_probabilities(tree, p_rows, q_rows)
    check_nodes(tree, p, q, off_chain(tree), CHAINS_ONLY)
    path, length = deepest_path(tree, rng.flip(acceptance_probabilities(tree, p / q)))
    last = length if tree.is_chain else path[:, -1]
    bonus = select_node(p_rows, last)
    correction, _ = residual(bonus, select_node(q_rows, last))
    row = torch.where(has_child(tree, last)[:, None], correction, bonus)
    return Accepted(path, length, draw_one(row, rng))


# ---- paths ---------------------------------------------------------------------------------------


def deepest_path(
    tree: Tree, passed: NodeFlags, tie_scores: NodeValues | None = None
) -> tuple[Int[Tensor, "B P"], Int[Tensor, " B"]]:
    """Return the path to the deepest node that passed together with all its ancestors.

    Args:
        passed: whether each node passed; the root counts as passed, a padding node does not.
        tie_scores: choose the node with the largest score among equally deep ones; None, and equal
            scores: the lowest index.
    """
    if tree.is_chain:  # up to the first node that did not pass
        passed = passed[:, 1:] if tree.unpadded else passed[:, 1:] & tree.real[:, 1:]
        length = passed.cumprod(1).sum(1)
        return torch.minimum(tree.depths, length[:, None]), length
    failed = passed[:, None, 1:] < tree.ancestor_mask[:, :, 1:]
    excluded = failed.any(-1)
    depth = tree.depths.masked_fill(excluded if tree.unpadded else excluded | ~tree.real, -1)
    length, last = depth.max(-1)
    if tie_scores is not None:
        last = tie_scores.masked_fill(depth != length[:, None], -torch.inf).argmax(-1)
    return path_to(tree, last), length


def path_to(tree: Tree, last: Int[Tensor, " B"]) -> Int[Tensor, "B P"]:
    """Return the nodes from the root to these ones, each at the index of its depth."""
    beyond = tree.levels + 1  # an index after the path for all nodes that are not on it
    index = tree.depths.masked_fill(~select_node(tree.ancestor_mask, last), beyond)
    return last[:, None].expand(-1, beyond + 1).scatter(1, index, tree.nodes)[:, :-1]


# ---- relations between nodes ---------------------------------------------------------------------


def earlier_siblings(tree: Tree) -> Bool[Tensor, "B N N"]:
    """Return whether, at [b, i, j], node j is a sibling of i drawn before it, and both are real."""
    siblings = (tree.parents[:, :, None] == tree.parents[:, None]) & tree.real[:, None]
    return siblings.tril(-1) & tree.real[:, :, None]


def repeats_sibling(tree: Tree) -> NodeFlags:
    """Return whether an earlier sibling carries the same token."""
    return (earlier_siblings(tree) & (tree.ids[:, :, None] == tree.ids[:, None])).any(-1)


def has_child(tree: Tree, nodes: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Return whether a node has a real child."""
    if tree.is_chain:
        return nodes < (tree.levels if tree.unpadded else tree.max_depths())
    return ((tree.parents == nodes[:, None]) & tree.real).any(-1)


def draft_nodes(tree: Tree) -> NodeFlags:
    """Return the real nodes below the root."""
    return tree.real & (tree.depths > 0)


def off_chain(tree: Tree) -> NodeFlags | None:
    """Return the nodes whose parent is not the node before them; None: a chain, there is none."""
    if tree.is_chain:
        return None
    before = torch.arange(-1, tree.size - 1, device=tree.ids.device)
    return draft_nodes(tree) & (tree.parents != before)


# ---- rows ----------------------------------------------------------------------------------------


def select_node(rows: Tensor, nodes: Int[Tensor, " B"]) -> Tensor:
    """Return the row of one node per prompt: [B, N, ...] and [B] give [B, ...]."""
    index = nodes.view(-1, *[1] * (rows.dim() - 1))
    return rows.gather(1, index.expand(-1, 1, *rows.shape[2:]))[:, 0]


def draft_probabilities(tree: Tree, p_rows: Rows, q_rows: Rows) -> tuple[NodeValues, NodeValues]:
    """Return p and q of every draft token at its parent; 1 for the root and padding nodes."""
    check_rows(tree, p_rows, q_rows)
    if tree.is_chain:  # the parent is the node before
        tokens = tree.ids[:, 1:, None].long()
        p, q = (_chain_probabilities(tree, rows, tokens) for rows in (p_rows, q_rows))
        return p, q
    prompt = torch.arange(len(tree.ids), device=tree.ids.device)[:, None]
    others = ~draft_nodes(tree)
    index = (prompt, tree.parents.clamp(min=0), tree.ids.long().masked_fill(others, 0))
    return p_rows[index].masked_fill(others, 1.0), q_rows[index].masked_fill(others, 1.0)


def _chain_probabilities(tree: Tree, rows: Rows, tokens: Int[Tensor, "B drafted 1"]) -> NodeValues:
    probs = F.pad(rows.gather(2, tokens)[..., 0], (1, 0), value=1.0)
    return probs if tree.unpadded else probs.masked_fill(~tree.real, 1.0)


def acceptance_probabilities(tree: Tree, ratios: NodeValues) -> NodeValues:
    """Return min(1, ratio); 1 for the root, and 0 for padding nodes, so that they never pass."""
    probs = ratios.clamp(max=1.0)
    probs = probs if tree.unpadded else probs.masked_fill(~tree.real, 0.0)
    return probs.masked_fill(tree.depths == 0, 1.0)


def residual(
    p: Float[Tensor, "n V"], q: Float[Tensor, "n V"], share: Float[Tensor, " n"] | None = None
) -> tuple[Float[Tensor, "n V"], Float[Tensor, " n"]]:
    """Return max(share * p - q, 0), renormalised, and its mass; p where nothing is left (R9).

    NaN stays NaN, so that the draw refuses it.
    """
    rest = ((p if share is None else share[:, None] * p) - q).clamp(min=0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass == 0, p, rest / mass), mass[:, 0]


def draw_one(rows: Float[Tensor, "B V"], rng: RandomSource) -> Int[Tensor, " B"]:
    return rng.draw(rows[:, None])[:, 0]


# ---- checks --------------------------------------------------------------------------------------


def check_shapes(tree: Tree, **rows: Tensor) -> None:
    """Raise ValueError if a tensor does not have one row per node."""
    for name, part in rows.items():
        if part.shape[:2] != tree.ids.shape:
            raise ValueError(
                f"{name} has shape {tuple(part.shape)}, and a batch of {len(tree.ids)} trees of "
                f"{tree.size} nodes needs as many rows"
            )


def check_rows(tree: Tree, p_rows: Rows, q_rows: Rows) -> None:
    """Raise ValueError if they do not have one row per node, over one vocabulary."""
    check_shapes(tree, p_rows=p_rows, q_rows=q_rows)
    if p_rows.shape[2] != q_rows.shape[2]:
        raise ValueError(
            f"p_rows have {p_rows.shape[2]} tokens and q_rows {q_rows.shape[2]}: "
            "scatter a reduced draft vocabulary to the target's first"
        )


def check_nodes(
    tree: Tree, p: NodeValues, q: NodeValues, misplaced: NodeFlags | None, reason: str
) -> None:
    """Check that every node can be verified without bias; synchronises with the device.

    Args:
        misplaced: nodes that must not be in the tree, and `reason` why; None: none is.

    Raises:
        ValueError: a node is misplaced, p is not a probability, or q = 0, so that the token cannot
            have been drawn from q.
    """
    if bool(invalid_nodes(tree, p, q, misplaced).any()):
        raise invalid_node_error(tree, p, q, misplaced, reason)


def invalid_nodes(
    tree: Tree, p: NodeValues, q: NodeValues, misplaced: NodeFlags | None
) -> NodeFlags:
    """Return the nodes that `check_nodes` refuses."""
    invalid = ~((p >= 0) & (q > 0))  # true of NaN; the root and padding nodes have 1 in both
    return invalid if misplaced is None else invalid | (draft_nodes(tree) & misplaced)


def invalid_node_error(
    tree: Tree, p: NodeValues, q: NodeValues, misplaced: NodeFlags | None, reason: str
) -> ValueError:
    """Return the error about the first invalid node."""
    prompt, node = invalid_nodes(tree, p, q, misplaced).nonzero()[0].tolist()
    token = f"token {int(tree.ids[prompt, node])} of node {node}"
    if misplaced is not None and misplaced[prompt, node]:
        return ValueError(f"{token} {reason}")
    return ValueError(
        f"{token} has p = {float(p[prompt, node])} and q = {float(q[prompt, node])}: "
        "q_rows must be the rows the tokens were drawn from (R1), and p a probability"
    )
