"""Comparison of a `Target` with the model's own forward, on every load.

The probe is a prefix in the cache and a small tree after it: the root, two children, and one child
of the first. The logits of each node must equal the model's own for the node's path.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.models.target import Target

PROBE = 8  # tokens of the prefix
FAILURES = (TypeError, ValueError, IndexError, AttributeError, RuntimeError)


def check_target(target: Target) -> None:
    """Compare logits, taps and cache with the model's own.

    Raises:
        RunError: they differ.
    """
    before = target.taps
    try:
        target.set_taps(range(target.num_layers))
        _check_forwards(target)
    except FAILURES as error:
        if isinstance(error, RunError):
            raise
        raise RunError(
            f"{target.name} cannot be read as a target: {error}", "Its family is not supported."
        ) from error
    finally:
        target.set_taps(before)


def _check_forwards(target: Target) -> None:
    """Check the fast forward, and drop it in favour of the model's modules if it fails."""
    try:
        _probe(target)
    except FAILURES:
        if target.fast_forward is None:
            raise
        target.fast_forward = None
        _probe(target)


@torch.no_grad()
def _probe(target: Target) -> None:
    prefix = torch.arange(1, PROBE + 1, device=target.device) % target.vocab_size
    tree = (prefix[-1:] + torch.arange(1, 5, device=target.device)) % target.vocab_size
    paths = ([0], [0, 1], [0, 2], [0, 1, 3])
    cache = target.new_cache(PROBE + len(tree))
    causal = torch.ones(1, PROBE, PROBE, dtype=torch.bool, device=target.device).tril()
    positions = torch.arange(PROBE, device=target.device)[None]
    target.forward(prefix[None], positions, causal, cache)
    if cache.layers_written != target.num_layers:
        raise RunError(
            f"{target.name}: {cache.layers_written} of {target.num_layers} layers wrote the cache.",
            "Its layers keep something other than keys and values, so it cannot be a target.",
        )
    mask = torch.zeros(1, len(tree), PROBE + len(tree), dtype=torch.bool, device=target.device)
    mask[..., :PROBE] = True
    for path in paths:
        mask[0, path[-1], [PROBE + node for node in path]] = True
    depths = torch.tensor([len(path) - 1 for path in paths], device=target.device)
    states = target.forward(tree[None], depths[None] + PROBE, mask, cache)
    if states.taps.shape[-1] != target.num_layers * states.last.shape[-1]:
        raise RunError(
            f"{target.name}: its decoder layers do not output one state each.",
            "It cannot be a target.",
        )
    logits = target.logits(states.last[0]).float()
    for path in paths:
        ids = torch.cat([prefix, tree[path]])[None]
        own = (
            target.model(input_ids=ids.to(target.layer_device), use_cache=False)
            .logits[0, -1]
            .float()
        )
        _compare(target, logits[path[-1]], own)


def _compare(target: Target, ours: Float[Tensor, " V"], own: Float[Tensor, " V"]) -> None:
    difference = (ours - own).abs().max().item()
    limit = (1e-3 if target.dtype == torch.float32 else 0.1) * max(1.0, own.abs().max().item())
    if not difference <= limit:
        raise RunError(
            f"{target.name}: read as a tree, its logits differ from its own by {difference:.3g}.",
            "This family has a feature that Outrider does not support; it cannot be a target.",
        )
