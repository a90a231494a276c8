"""What a round decided for every prompt, on the host, where answers grow.

However large the batch, the host waits for a GPU once: all that it must know of a round comes in
one table. What is a matter of a few numbers per prompt is then decided there, because the least
operation of a device costs more than they do.

Shape letters: B prompts, N nodes, K rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from math import isfinite
from operator import eq
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.eval.decode.tree import Tree
from outrider.eval.decode.verify import Accepted

EXPONENT = 0x7F800000  # of a float32: all ones in infinities and NaN, and in no other number
Numbers = list[int]


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
    for deep, ids, (said,) in _chains(tree, lead, choice):
        length = [*map(eq, ids[1 : deep + 1], said), False].index(False)
        news.append(News.of_chain(ids, deep, length, said[length]))
    return news


def read(tree: Tree, said: Accepted, lead: Float[Tensor, "B K"]) -> list[News]:
    """What a rule has decided; `lead` as above."""
    decided = said.length[:, None], said.next_ids[:, None]
    if tree.straight:
        chains = _chains(tree, lead, *decided)
        return [News.of_chain(ids, deep, *kept, *next_id) for deep, ids, (kept, next_id) in chains]
    parents, depths = tree.parents, tree.depths
    if not tree.whole:  # nodes that are not real are nobody's children
        parents, depths = parents.masked_fill(~tree.real, -1), depths * tree.real
    return [_of_tree(*row) for row in _told(lead, tree.ids, parents, depths, *decided, said.path)]


def _of_tree(
    ids: Numbers, parents: Numbers, depths: Numbers, length: Numbers, said: Numbers, path: Numbers
) -> News:
    path = path[: length[0] + 1]
    tokens = [*(ids[node] for node in path[1:]), *said]
    return News(tokens, path, path[-1] not in parents, max(depths))


def _chains(
    tree: Tree, lead: Float[Tensor, "B K"], *parts: Int[Tensor, "B _"]
) -> Iterator[tuple[int, Numbers, Sequence[Numbers]]]:
    """Of every prompt how many tokens were drafted, the chain's tokens, and the parts' numbers."""
    if tree.whole:
        return ((tree.levels, ids, row) for ids, *row in _told(lead, tree.ids, *parts))
    rows = _told(lead, tree.deepest()[:, None], tree.ids, *parts)
    return ((deep, ids, row) for (deep,), ids, *row in rows)


# ---- to the host ---------------------------------------------------------------------------------


def _told(lead: Float[Tensor, "B K"], *parts: Int[Tensor, "B _"]) -> Iterable[Sequence[Numbers]]:
    """Of every prompt, each part's numbers."""
    return (_one_by_one if lead.device.type == "cpu" else _in_one_table)(lead, *parts)


def _one_by_one(lead: Tensor, *parts: Tensor) -> Iterable[Sequence[Numbers]]:
    """Where nothing travels, and every operation costs."""
    if not all(map(isfinite, chain.from_iterable(lead.tolist()))):
        raise FloatingPointError
    return zip(*(part.tolist() for part in parts), strict=True)


def _in_one_table(lead: Tensor, *parts: Tensor) -> Iterable[Sequence[Numbers]]:
    """All parts side by side; the floats travel with them as their bits, in float32."""
    bits = lead.float().view(torch.int32)
    table = torch.cat([bits, *parts], dim=1).tolist()
    ends = list(accumulate(part.shape[1] for part in (bits, *parts)))
    if any(number & EXPONENT == EXPONENT for row in table for number in row[: ends[0]]):
        raise FloatingPointError
    return ([row[start:end] for start, end in pairwise(ends)] for row in table)
