"""Between trees and tensors: where a round's tokens stand, and the rows of it that are kept.

Shape letters: B prompts, N nodes, P nodes of a path, S columns of the cache, K taps, H hidden size.
"""

from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.eval.decode.tree import Tree
from outrider.models.base import Trace


def rows_of(part: Float[Tensor, "B N ..."], paths: Int[Tensor, "B P"]) -> Tensor:
    """The rows of the paths: [B, N, ...] -> [B, P, ...]."""
    shape = (*paths.shape, *part.shape[2:])
    return part.gather(1, paths.view(*paths.shape, *[1] * (part.dim() - 2)).expand(shape))


def trace_of(
    text: list[int],
    start: int,
    taps: Float[Tensor, "1 N KH"],
    last: Float[Tensor, "1 N H"],
) -> Trace:
    """The kept rows of one prompt, as the drafter reads them."""
    count = len(text) - 1
    row = torch.tensor([[*text, *range(start, start + count)]], device=last.device)
    document, answer = _one_document(count, last.device)
    return Trace(
        ids=row[:, :count],
        next_ids=row[:, 1 : count + 1],
        answer=answer,
        document=document,
        positions=row[:, count + 1 :],
        taps=taps[:, :count],
        last=last[:, :count],
    )


@lru_cache(maxsize=64)
def _one_document(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What a decoded row belongs to, and that nothing is said of answers."""
    document = torch.zeros(1, count, dtype=torch.long, device=device)
    return document, document.bool()


def laid_out(tree: Tree, prefix: list[int]) -> tuple[Int[Tensor, "B N"], Bool[Tensor, "B N S"]]:
    """Where every node stands, and what it sees: its slot's prefix, its ancestors and itself."""
    start, size = prefix[0], tree.size
    depths = tree.depths  # what is not real stands at the root: there may be no positions beyond it
    depths = depths if tree.whole else depths.masked_fill(~tree.real, 0)
    if all(length == start for length in prefix):
        return depths + start, torch.nn.functional.pad(tree.seen, (start, 0), value=True)
    at = torch.tensor(prefix, device=tree.ids.device)[:, None]
    columns = torch.arange(max(prefix) + size, device=at.device)
    visible = (columns < at)[:, None].repeat(1, size, 1)
    own = (at + columns[:size])[:, None].expand(-1, size, -1)
    return depths + at, visible.scatter_(2, own, tree.seen)
