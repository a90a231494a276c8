"""`verify.match` and `verify.ratio` for a CPU: the same laws from fewer operations on fewer rows.

A GPU verifies all nodes at once, so that the host waits for it once. A CPU makes nobody wait, but
finds its caches full of the forward before: every operation costs more than its arithmetic there
(docs/log.md), and so does every row of a large vocabulary. So here a tree is gone down level by
level, all prompts together, and rows that none of them reaches are neither warped nor drawn from;
and how far a chain is kept is decided among a few numbers.

Shape letters: B prompts, N nodes, V vocabulary.
"""

from collections.abc import Callable, Sequence
from operator import lt, truediv
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.models.decode import verify
from outrider.models.decode.round_outcome import News, family, read
from outrider.models.decode.sampling import Coins
from outrider.models.decode.tree import Tree

Warp = Callable[[Tensor], Tensor]  # logits to probabilities, row by row


@runtime_checkable
class Picking(Protocol):
    """What says a token per prompt: coins, or their place holder (coupled.Winners)."""

    def pick(self, rows: Float[Tensor, "B V"]) -> list[int]: ...


OnCpu = Callable[[Tree, Tensor, Warp, Tensor | None, Coins], list[News]]


def match(
    tree: Tree,
    logits: Float[Tensor, "B N V"],
    warp: Warp,
    _q_rows: Float[Tensor, "B N V"] | None,
    coins: Picking,
) -> list[News]:
    """`verify.match`: what is drawn behind a node says which child is next, or follows the path.

    Raises:
        ValueError: logits do not have one row per node; a row that was reached is NaN or has no
            mass.
    """
    verify.fits(tree, logits=logits)
    ids, parents, depths = (part.tolist() for part in (tree.ids, *family(tree)))
    below = [*map(_children, ids, parents)]
    paths, following = [[0] for _ in ids], [-1] * len(ids)
    while -1 in following:
        rows = warp(_behind(logits, [path[-1] for path in paths]))
        for prompt, token in enumerate(coins.pick(rows)):
            if following[prompt] >= 0:  # over, while others go on
                continue
            child = below[prompt].get((paths[prompt][-1], token))
            if child is None:
                following[prompt] = token
            else:
                paths[prompt].append(child)
    if tree.straight:
        lengths = [len(path) - 1 for path in paths]
        return [*map(News.of_chain, ids, map(max, depths), lengths, following)]
    return [*map(News.of_tree, ids, parents, depths, paths, following)]


def _children(ids: Sequence[int], parents: Sequence[int]) -> dict[tuple[int, int], int]:
    """Which child of a node carries a token: (node, token) to child.

    Of siblings that repeat a token the first. What is below -1, the root and nodes that are not
    real, is nobody's child.
    """
    named = [*zip(parents, ids, strict=True)]
    return dict(zip(named[::-1], range(len(named) - 1, -1, -1), strict=True))


def ratio(
    tree: Tree,
    logits: Float[Tensor, "B N V"],
    warp: Warp,
    q_rows: Float[Tensor, "B N V"] | None,
    coins: Coins,
) -> list[News]:
    """`verify.ratio`: the same flips, and the same draw from what is left.

    Raises:
        ValueError: as there.
    """
    p_rows = warp(logits)
    q_rows = p_rows if tree.size == 1 else q_rows  # nothing was drafted, from no row
    if q_rows is None:
        raise ValueError(verify.NO_ROWS)
    verify.fit_both(tree, p_rows, q_rows)
    if not tree.straight:
        return read(tree, verify.ratio(tree, p_rows, q_rows, coins), logits.amax(2))
    ids, deepest = tree.ids.tolist(), tree.deepest().tolist()
    lengths = _kept(tree, deepest, p_rows, q_rows, coins)
    rest = _behind(p_rows, lengths)
    rejected = [*map(lt, lengths, deepest)]
    if any(rejected):
        left, _ = verify.residual(rest, _behind(q_rows, lengths))
        rest = torch.where(torch.tensor(rejected)[:, None], left, rest)
    return [*map(News.of_chain, ids, deepest, lengths, coins.pick(rest))]


def _kept(
    tree: Tree,
    deepest: Sequence[int],
    p_rows: Float[Tensor, "B N V"],
    q_rows: Float[Tensor, "B N V"],
    coins: Coins,
) -> list[int]:
    """How many guesses of each chain pass, up to the first that does not."""
    guesses, chances = tree.ids[:, 1:, None], []
    told = (rows.gather(2, guesses).squeeze(2).tolist() for rows in (p_rows, q_rows))
    for deep, p, q in zip(deepest, *told, strict=True):
        p, q = p[:deep], q[:deep]
        if not (all(map((0.0).__le__, p)) and all(map((0.0).__lt__, q))):  # nor is NaN
            found = verify.drafted_chances(tree, p_rows, q_rows)
            verify.refuse(tree, *found, None, verify.CHAINS_ONLY)  # and says what is wrong
        chances.append([1.0, *map(truediv, p, q), *[0.0] * (tree.levels - deep)])
    return [[*heads, False].index(False) - 1 for heads in coins.toss(chances)]


def _behind(logits: Float[Tensor, "B N V"], nodes: Sequence[int]) -> Float[Tensor, "B V"]:
    """What the target says behind one node per prompt."""
    if len(nodes) == 1:
        return logits[:, nodes[0]]
    return logits[torch.arange(len(nodes)), torch.tensor(nodes)]
