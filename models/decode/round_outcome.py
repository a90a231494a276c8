"""What a round decided for every prompt, on the host, where answers grow.

However large the batch, the host waits for a GPU once: all that it must know of a round comes in
one table. What is a matter of a few numbers per prompt is then decided there: for few prompts that
costs less than the operations of a device, for many as much (docs/log.md).

Shape letters: B prompts, N nodes, K rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, compress, pairwise
from math import isfinite
from operator import eq
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.models.decode.tree import Tree
from outrider.models.decode.verify import Accepted

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
    def of_chain(cls, ids: Numbers, deep: int, length: int, following: int) -> "News":
        """From a chain's tokens: `deep` of them were drafted, `length` of those are kept."""
        tokens, path = [*ids[1 : length + 1], following], list(range(length + 1))
        wrong = ids[length + 1] if length < deep else None
        return cls(tokens, path, length == deep, deep, wrong)

    @classmethod
    def of_tree(
        cls, ids: Numbers, parents: Numbers, depths: Numbers, path: Numbers, following: int
    ) -> "News":
        """From a tree's nodes: those of `path` are kept."""
        tokens = [*(ids[node] for node in path[1:]), following]
        return cls(tokens, path, path[-1] not in parents, max(depths))


def decided(tree: Tree, choice: Int[Tensor, "B N"], lead: Float[Tensor, "B K"]) -> list[News]:
    """`read(tree, verify.greedy(tree, choice), lead)`, decided on the host.

    chain    the cat sat on      the root "the" and three guesses
    choice   cat sat in  a       kept: "cat sat", followed by "in"

    Args:
        lead: the largest logits of rows: not finite if something there is NaN or +infinity.

    Raises:
        FloatingPointError: there is such a row.
    """
    if tree.straight:
        return [_decided_chain(*row) for row in _chains(tree, lead, choice)]
    return [_decided_tree(*row) for row in _told(lead, tree.ids, *family(tree), choice)]


def _decided_chain(deep: int, ids: Numbers, rows: Sequence[Numbers]) -> News:
    (said,) = rows
    length = [*map(eq, ids[1 : deep + 1], said), False].index(False)
    return News.of_chain(ids, deep, length, said[length])


def _decided_tree(ids: Numbers, parents: Numbers, depths: Numbers, said: Numbers) -> News:
    """The longest path of guesses that are the target's choice; ties to the lowest node."""
    agree = map(eq, ids, map(said.__getitem__, parents))
    reached = [0]
    for node in compress(range(len(ids)), agree):  # few: whoever carries its parent's choice
        if parents[node] in reached:  # never -1, which the root and nodes not real have
            reached.append(node)
    path = [max(reached, key=depths.__getitem__)]
    while path[0] != 0:
        path.insert(0, parents[path[0]])
    return News.of_tree(ids, parents, depths, path, said[path[-1]])


def read(tree: Tree, said: Accepted, lead: Float[Tensor, "B K"]) -> list[News]:
    """What a rule has decided; `lead` as above."""
    kept = said.length[:, None], said.next_ids[:, None]
    if tree.straight:
        return [
            News.of_chain(ids, deep, length, next_id)
            for deep, ids, ((length,), (next_id,)) in _chains(tree, lead, *kept)
        ]
    rows = _told(lead, tree.ids, *family(tree), said.path, *kept)
    return [
        News.of_tree(ids, parents, depths, path[: length + 1], next_id)
        for ids, parents, depths, path, (length,), (next_id,) in rows
    ]


def family(tree: Tree) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B N"]]:
    """Parents and depths; nodes that are not real are nobody's children."""
    if tree.whole:
        return tree.parents, tree.depths
    return tree.parents.masked_fill(~tree.real, -1), tree.depths * tree.real


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
