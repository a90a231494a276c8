"""Positions and attention masks of draft trees, and the rows kept after verification.

Shape letters: B prompts, N and M nodes, P nodes of a path, S columns of the cache, R of a cached
mask.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.models.cache.attention_masks import branch_mask
from outrider.models.cache.kv_cache import is_prefix
from outrider.models.decode.tree import Tree
from outrider.models.drafting.drafter import Drafter
from outrider.models.interface import Trace
from outrider.models.target.target import Target, TargetStates

MASK_STEP = 512  # columns by which a cached mask grows


class KeptRows(NamedTuple):
    """The rows kept after a round, on the device; a prompt with a shorter path uses the first ones.

    Attributes:
        next_ids: the tokens after `ids`.
        paths: nodes; None: the first nodes, as in a chain.
    """

    ids: Int[Tensor, "B P"]
    next_ids: Int[Tensor, "B P"]
    positions: Int[Tensor, "B P"]
    paths: Int[Tensor, "B P"] | None = None


def kept_rows(
    tree: Tree,
    choice: Int[Tensor, "B N"] | None,
    positions: Int[Tensor, "B N"],
    prefix: Sequence[int],
    texts: Sequence[list[int]],
    paths: Sequence[list[int]],
) -> KeptRows:
    """Return the rows of the accepted paths.

    If the paths are the first nodes, and each is followed by the target's choice, everything is on
    the device already.

    Args:
        prefix: position of each root.
        texts: of each prompt, the tokens of its path and the one after it.
    """
    if choice is not None and is_prefix(paths):
        return KeptRows(tree.ids, choice, positions)
    return send_rows(texts, prefix, paths, positions.device)


def send_rows(
    texts: Sequence[list[int]],
    starts: Sequence[int],
    paths: Sequence[list[int]],
    device: torch.device,
) -> KeptRows:
    """Send `kept_rows` from the host in one table; short paths are padded with node and token 0."""
    longest, first_nodes = max(map(len, paths)), is_prefix(paths)
    rows = []
    for text, start, path in zip(texts, starts, paths, strict=True):
        padding = [0] * (longest - len(path))
        nodes = () if first_nodes else (*path, *padding)
        rows.append([*text, *padding, *range(start, start + longest), *nodes])
    table, end = torch.tensor(rows, device=device), 2 * longest + 1
    return KeptRows(
        table[:, :longest],
        table[:, 1 : longest + 1],
        table[:, longest + 1 : end],
        None if first_nodes else table[:, end:],
    )


def kept_traces(counts: Sequence[int], rows: KeptRows, states: TargetStates) -> list[Trace]:
    """Return the first `counts` kept rows of every prompt as Traces for the drafter."""
    taps, last = states.taps, states.last
    if rows.paths is not None:
        taps, last = _select_rows(taps, rows.paths), _select_rows(last, rows.paths)
    traces = []
    for slot, count in enumerate(counts):
        document, answer = _one_document(count, last.device)
        parts = (rows.ids, rows.next_ids, rows.positions, taps, last)
        ids, next_ids, at, own_taps, own_last = (_first_rows(part, slot, count) for part in parts)
        traces.append(Trace(ids, next_ids, answer, document, at, own_taps, own_last))
    return traces


def _select_rows(part: Shaped[Tensor, "B N ..."], paths: Int[Tensor, "B P"]) -> Tensor:
    """Return the rows of the paths: [B, N, ...] -> [B, P, ...]."""
    if len(part) == 1:
        return part.index_select(1, paths[0])
    shape = (*paths.shape, *part.shape[2:])
    return part.gather(1, paths.view(*paths.shape, *[1] * (part.dim() - 2)).expand(shape))


def _first_rows(part: Shaped[Tensor, "B N ..."], slot: int, count: int) -> Tensor:
    """Return the first rows of one prompt; slices that change nothing are omitted, for speed."""
    part = part if len(part) == 1 else part[slot : slot + 1]
    return part if part.shape[1] == count else part[:, :count]


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # shared by all callers
def _one_document(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return document numbers and the answer mask of decoded rows: all 0, all False."""
    document = torch.zeros(1, count, dtype=torch.long, device=device)
    return document, document.bool()


def positions_and_mask(
    tree: Tree, prefix: list[int]
) -> tuple[Int[Tensor, "B N"], Bool[Tensor, "B N S"]]:
    """Return the position of every node, and what it attends to: the prefix and its ancestors."""
    start, size = prefix[0], tree.size
    depths = tree.depths  # padding nodes get the root's position: there may be none beyond it
    depths = depths if tree.unpadded else depths.masked_fill(~tree.real, 0)
    if all(length == start for length in prefix):
        if tree.is_chain and tree.unpadded:
            return _chain_layout(len(depths), size, start, depths.device)
        return depths + start, branch_mask(prefix, tree.ancestor_mask)
    starts = torch.tensor(prefix, device=tree.ids.device)[:, None]
    return depths + starts, branch_mask(prefix, tree.ancestor_mask)


def _chain_layout(
    batch: int, size: int, start: int, device: torch.device
) -> tuple[Int[Tensor, "B N"], Bool[Tensor, "B N S"]]:
    """`positions_and_mask` of chains after `start` columns: views of a cached mask."""
    width = -(-start // MASK_STEP) * MASK_STEP
    positions, visible = _causal_mask(batch, size, width, device)
    return positions[:, start : start + size], visible[:, :, width - start :]


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # shared by all callers
def _causal_mask(
    batch: int, size: int, width: int, device: torch.device
) -> tuple[Int[Tensor, "B R"], Bool[Tensor, "B N R"]]:
    """Return all positions up to a chain after `width` columns, and what the chain attends to."""
    positions = torch.arange(width + size, device=device)
    visible = positions <= positions[width:, None]
    return positions.expand(batch, -1), visible.expand(batch, -1, -1)


def tree_refusal(model: str, policy: str = "a tree") -> ConfigError:
    """Return the error of a tree with a model that has recurrent layers."""
    why = f"The {model} has recurrent layers, whose state follows one path of a tree."
    return ConfigError(
        "decode", policy, why, "Use decode=chain or decode=auto, which drafts chains."
    )


def require_no_states(target: Target, drafter: Drafter | None) -> None:
    """Raise ConfigError for trees with a target or a draft model that has recurrent layers."""
    if target.recurrent:
        raise tree_refusal("target")
    if drafter is not None and drafter.chains_only:
        raise tree_refusal("draft model")
