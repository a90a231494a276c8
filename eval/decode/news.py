"""What a round decided for every prompt, on the host, where answers grow.

However large the batch, the host waits for the device once: all that it must know of a round comes
in one table. What is a matter of a few numbers per prompt is then decided there, because the least
operation of a device costs more than they do.

Shape letters: B prompts, N nodes, K rows.
"""

from collections.abc import Iterator
from operator import eq
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.eval.decode.tree import Tree
from outrider.eval.decode.verify import Accepted

EXPONENT = 0x7F800000  # of a float32: all ones in infinities and NaN, and in no other number


class News(NamedTuple):
    """What a round decided for one prompt.

    Attributes:
        tokens: the accepted guesses and the token behind them.
        path: nodes of the accepted path, the root first: as many as tokens.
        leaf: the path ends where the draft does.
        deep: how deep the draft went.
        wrong: the first guess of a chain that was rejected.
    """

    tokens: list[int]
    path: list[int]
    leaf: bool
    deep: int
    wrong: int | None = None

    @property
    def following(self) -> int:
        """The token behind the accepted ones."""
        return self.tokens[-1]

    @classmethod
    def of_chain(cls, ids: list[int], deep: int, length: int, following: int) -> "News":
        """From a chain's tokens: `deep` of them were drafted, `length` of those are kept."""
        tokens, path = [*ids[1 : length + 1], following], list(range(length + 1))
        wrong = ids[length + 1] if length < deep else None
        return cls(tokens, path, length == deep, deep, wrong)


def agreed(tree: Tree, choice: Int[Tensor, "B N"], lead: Float[Tensor, "B K"]) -> list[News]:
    """`verify.greedy` for chains: kept up to the first guess that is not the target's choice.

    chain    the cat sat on      the root "the" and three guesses
    choice   cat sat in  a       kept: "cat sat", followed by "in"

    Args:
        lead: the largest logits of rows: not finite if something there is NaN or +infinity.

    Raises:
        FloatingPointError: there is such a row.
    """
    news = []
    for ids, said, deep in _chains(tree, lead, choice):
        length = [*map(eq, ids[1 : deep + 1], said), False].index(False)
        news.append(News.of_chain(ids, deep, length, said[length]))
    return news


def read(tree: Tree, said: Accepted, lead: Float[Tensor, "B K"]) -> list[News]:
    """What a rule has decided; `lead` as above."""
    decided = said.length[:, None], said.next_ids[:, None]
    if tree.straight:
        chains = _chains(tree, lead, *decided)
        return [News.of_chain(ids, deep, *row[:2]) for ids, row, deep in chains]
    parents, depths = tree.parents, tree.depths
    if not tree.whole:  # nodes that are not real are nobody's children
        parents, depths = parents.masked_fill(~tree.real, -1), depths * tree.real
    table = _table(lead, tree.ids, parents, depths, *decided, said.path)
    return [_of_tree(row, tree.size) for row in table]


def _chains(
    tree: Tree, lead: Float[Tensor, "B K"], *parts: Int[Tensor, "B _"]
) -> Iterator[tuple[list[int], list[int], int]]:
    """Of every prompt the chain's tokens, the parts' numbers, and how many were drafted."""
    size = tree.size
    if not tree.whole:
        parts = (*parts, tree.deepest()[:, None])
    for row in _table(lead, tree.ids, *parts):
        yield row[:size], row[size:], tree.levels if tree.whole else row[-1]


def _table(lead: Float[Tensor, "B K"], *parts: Int[Tensor, "B _"]) -> list[list[int]]:
    """All parts side by side; the floats travel with them as their bits."""
    count = lead.shape[1]
    table = torch.cat([lead.float().view(torch.int32), *parts], dim=1).tolist()
    if any(bits & EXPONENT == EXPONENT for row in table for bits in row[:count]):
        raise FloatingPointError
    return [row[count:] for row in table]


def _of_tree(row: list[int], size: int) -> News:
    ids, parents, depths = (row[i * size : (i + 1) * size] for i in range(3))
    length, following, *path = row[3 * size :]
    path = path[: length + 1]
    tokens = [*(ids[node] for node in path[1:]), following]
    return News(tokens, path, path[-1] not in parents, max(depths))
