"""The outcome of a round for every prompt, on the host.

Every rule on every device ends here. The host synchronises with a GPU once per round: all that it
needs comes in one table. Decisions on a few numbers per prompt are then made on the host, which is
as fast as a device for large batches and faster for small ones.

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

from outrider.models.decode.rules.token_rules import Accepted
from outrider.models.decode.tree import Tree

EXPONENT = 0x7F800000  # of a float32: all ones in infinities and NaN, and in no other number
Numbers = list[int]


class RoundOutcome(NamedTuple):
    """What a round adds to the answer of one prompt.

    Attributes:
        tokens: the accepted draft tokens and the token after them.
        path: nodes of the accepted path, the root first: as many as tokens.
        ends_at_leaf: the path ends where the draft ends, so the last token is a bonus.
        draft_depth: depth of the deepest draft token.
        rejected: the first rejected token of a chain; None for trees, or if none was rejected.
    """

    tokens: list[int]
    path: list[int]
    ends_at_leaf: bool
    draft_depth: int
    rejected: int | None = None

    @property
    def next_id(self) -> int:
        """The token after the accepted ones."""
        return self.tokens[-1]

    @classmethod
    def from_chain(cls, ids: Numbers, depth: int, length: int, next_id: int) -> "RoundOutcome":
        """Return the outcome where `length` of the `depth` draft tokens of a chain are accepted."""
        tokens, path = [*ids[1 : length + 1], next_id], list(range(length + 1))
        rejected = ids[length + 1] if length < depth else None
        return cls(tokens, path, length == depth, depth, rejected)

    @classmethod
    def from_tree(
        cls, ids: Numbers, parents: Numbers, depths: Numbers, path: Numbers, next_id: int
    ) -> "RoundOutcome":
        """Return the outcome where the nodes of `path` are accepted."""
        tokens = [*(ids[node] for node in path[1:]), next_id]
        return cls(tokens, path, path[-1] not in parents, max(depths))


def greedy_outcomes(
    tree: Tree, choice: Int[Tensor, "B N"], max_logits: Float[Tensor, "B K"]
) -> list[RoundOutcome]:
    """Accept the longest path whose every token is the target's argmax at its parent (R10).

    chain    the cat sat on      the root "the" and three draft tokens
    choice   cat sat in  a       accepted: "cat sat", followed by "in"

    Args:
        choice: the target's argmax after each node, ties to the lowest id.
        max_logits: maxima of rows of logits: not finite if a row holds NaN or +infinity.

    Raises:
        FloatingPointError: a maximum is not finite.
    """
    if tree.is_chain:
        chains = _chains_to_host(tree, max_logits, choice)
        return [_greedy_chain(depth, ids, *parts) for depth, ids, parts in chains]
    rows = _to_host(max_logits, tree.ids, *real_parents_and_depths(tree), choice)
    return [_greedy_tree(*row) for row in rows]


def _greedy_chain(depth: int, ids: Numbers, choice: Numbers) -> RoundOutcome:
    length = [*map(eq, ids[1 : depth + 1], choice), False].index(False)
    return RoundOutcome.from_chain(ids, depth, length, choice[length])


def _greedy_tree(ids: Numbers, parents: Numbers, depths: Numbers, choice: Numbers) -> RoundOutcome:
    """Accept the longest path of tokens that are the target's choice; ties to the lowest node."""
    matches = map(eq, ids, map(choice.__getitem__, parents))
    accepted = [0]
    for node in compress(range(len(ids)), matches):
        if parents[node] in accepted:  # never -1, the parent of the root and of padding nodes
            accepted.append(node)
    path = [max(accepted, key=depths.__getitem__)]
    while path[0] != 0:
        path.insert(0, parents[path[0]])
    return RoundOutcome.from_tree(ids, parents, depths, path, choice[path[-1]])


def outcomes(
    tree: Tree, accepted: Accepted, max_logits: Float[Tensor, "B K"]
) -> list[RoundOutcome]:
    """Transfer the result of a rule to the host; `max_logits` as for `greedy_outcomes`."""
    ends = accepted.length[:, None], accepted.next_ids[:, None]
    if tree.is_chain:
        return [
            RoundOutcome.from_chain(ids, depth, length, next_id)
            for depth, ids, ((length,), (next_id,)) in _chains_to_host(tree, max_logits, *ends)
        ]
    relations = real_parents_and_depths(tree)
    rows = _to_host(max_logits, tree.ids, *relations, accepted.path, *ends)
    return [
        RoundOutcome.from_tree(ids, parents, depths, path[: length + 1], next_id)
        for ids, parents, depths, path, (length,), (next_id,) in rows
    ]


def real_parents_and_depths(tree: Tree) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B N"]]:
    """Return parents and depths; padding nodes have parent -1 and depth 0."""
    if tree.unpadded:
        return tree.parents, tree.depths
    return tree.parents.masked_fill(~tree.real, -1), tree.depths * tree.real


# ---- to the host ---------------------------------------------------------------------------------


def _chains_to_host(
    tree: Tree, max_logits: Float[Tensor, "B K"], *parts: Int[Tensor, "B _"]
) -> Iterator[tuple[int, Numbers, Sequence[Numbers]]]:
    """Return the draft depth, the tokens and the numbers of the parts of every chain."""
    if tree.unpadded:
        rows = _to_host(max_logits, tree.ids, *parts)
        return ((tree.levels, ids, row) for ids, *row in rows)
    rows = _to_host(max_logits, tree.max_depths()[:, None], tree.ids, *parts)
    return ((depth, ids, row) for (depth,), ids, *row in rows)


def _to_host(
    max_logits: Float[Tensor, "B K"], *parts: Int[Tensor, "B _"]
) -> Iterable[Sequence[Numbers]]:
    """Return the numbers of every part, prompt by prompt."""
    transfer = _separately if max_logits.device.type == "cpu" else _in_one_transfer
    return transfer(max_logits, *parts)


def _separately(max_logits: Tensor, *parts: Tensor) -> Iterable[Sequence[Numbers]]:
    """Without concatenation, which costs more than it saves on a CPU."""
    if not all(map(isfinite, chain.from_iterable(max_logits.tolist()))):
        raise FloatingPointError
    return zip(*(part.tolist() for part in parts), strict=True)


def _in_one_transfer(max_logits: Tensor, *parts: Tensor) -> Iterable[Sequence[Numbers]]:
    """All parts side by side; the floats as their bits, in float32."""
    bits = max_logits.float().view(torch.int32)
    table = torch.cat([bits, *parts], dim=1).tolist()
    ends = list(accumulate(part.shape[1] for part in (bits, *parts)))
    if any(number & EXPONENT == EXPONENT for row in table for number in row[: ends[0]]):
        raise FloatingPointError
    return ([row[start:end] for start, end in pairwise(ends)] for row in table)
