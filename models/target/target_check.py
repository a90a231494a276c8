"""Comparison of a `Target` with the model's own forward, on every load.

A small tree after a cached prefix: each node's logits must equal the model's own for its path.
Recurrent layers take chains only; of these, some rows are dropped before the next forward.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.models.cache.kv_cache import KVCache
from outrider.models.cache.split_cache import SplitCache
from outrider.models.target.recurrent import are_sharded
from outrider.models.target.target import Target

PROBE = 8  # tokens of the prefix
PATHS = [0], [0, 1], [0, 2], [0, 1, 3]  # from the root to each node of the tree
CHAIN = [0], [0, 1], [0, 1, 2], [0, 1, 2, 3]
KEPT = 2  # tokens of a chain
FAILURES = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError)


def check_target(target: Target) -> None:
    """Raise RunError if logits, taps or cache differ from the model's own."""
    before = target.taps
    try:
        target.set_taps(range(target.num_layers))
        target.shape()
        try:
            _probe(target)
        except FAILURES:
            if target.fast_forward is None:
                raise
            target.fast_forward = None  # run the model's modules instead
            _probe(target)
    except RunError:
        raise
    except FAILURES as error:
        why = f"{target.name} cannot be read as a target: {error}"
        raise RunError(why, "Its family is not supported.") from error
    finally:
        target.set_taps(before)


@torch.no_grad()
def _probe(target: Target) -> None:
    device = target.device
    prefix = torch.arange(1, PROBE + 1, device=device) % target.vocab_size
    tree = (prefix[-1:] + torch.arange(1, 5, device=device)) % target.vocab_size
    cache = target.new_cache(PROBE + KEPT + len(tree))
    cache.undo_rows = len(tree)
    causal = torch.ones(1, PROBE, PROBE, dtype=torch.bool, device=device).tril()
    target.forward(prefix[None], torch.arange(PROBE, device=device)[None], causal, cache)
    if len(cache) != target.num_layers and not target.recurrent:
        raise RunError(
            f"{target.name}: {len(cache)} of {target.num_layers} layers wrote the cache.",
            "Its layers keep something other than keys and values, so it cannot be a target.",
        )
    if not target.recurrent:
        _compare(target, cache, prefix, tree, PATHS)
        return
    _compare(target, cache, prefix, tree, CHAIN)
    if are_sharded(target.layers):  # it is read and not decoded
        return
    cache.keep_rows([range(KEPT)])
    _compare(target, cache, torch.cat([prefix, tree[:KEPT]]), tree.flip(0), CHAIN)


def _compare(
    target: Target,
    cache: KVCache | SplitCache,
    prefix: Int[Tensor, " P"],
    tree: Int[Tensor, " N"],
    paths: Sequence[list[int]],
) -> None:
    """Compare the logits of a tree after a cached prefix with the model's own.

    Args:
        paths: from the root to each node.
    """
    start, device = len(prefix), target.device
    mask = torch.zeros(1, len(tree), start + len(tree), dtype=torch.bool, device=device)
    mask[..., :start] = True
    for path in paths:
        mask[0, path[-1], [start + node for node in path]] = True
    positions = torch.tensor([[start + len(path) - 1 for path in paths]], device=device)
    states = target.forward(tree[None], positions, mask, cache)
    if states.taps.shape[-1] != target.num_layers * states.last.shape[-1]:
        why = f"{target.name}: its decoder layers do not output one state each."
        raise RunError(why, "It cannot be a target.")
    logits = target.logits(states.last[0]).float()
    for path in paths:
        ids = torch.cat([prefix, tree[path]])[None].to(target.layer_device)
        own = target.model(input_ids=ids, use_cache=False).logits[0, -1].float()
        difference = (logits[path[-1]] - own).abs().max().item()
        limit = (1e-3 if target.dtype == torch.float32 else 0.1) * max(1.0, own.abs().max().item())
        if not difference <= limit:
            why = f"its logits for a tree differ from the model's own by {difference:.3g}."
            fix = "This family has a feature that Outrider does not support; it cannot be a target."
            raise RunError(f"{target.name}: {why}", fix)
