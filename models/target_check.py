"""Is a target read rightly? Its own words, compared with what `Target` makes of the model.

The probe is a prefix in the cache and a small tree behind it: the root, two guesses, and one below
the first. Each node must say what the model says of its path alone. It runs on every load.
"""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.conf.errors import RunError

if TYPE_CHECKING:
    from outrider.models.target import Target

PROBE = 8  # tokens of the prefix
WRONG = (TypeError, ValueError, IndexError, AttributeError, RuntimeError)  # a model misread


def check(target: "Target") -> None:
    """
    Raises:
        RunError: the logits, the taps or the cache are not what `Target` believes.
    """
    before = target.taps
    try:
        target.set_taps(range(target.depth))
        _both(target)
    except WRONG as error:
        if isinstance(error, RunError):
            raise
        raise RunError(
            f"{target.name} cannot be read as a target: {error}", "Its family is not supported."
        ) from error
    finally:
        target.set_taps(before)


def _both(target: "Target") -> None:
    """Its modules count; a lean forward that says something else is set aside."""
    try:
        _probe(target)
    except WRONG:
        if target.lean is None:
            raise
        target.lean = None
        _probe(target)


@torch.no_grad()
def _probe(target: "Target") -> None:
    prefix = torch.arange(1, PROBE + 1, device=target.device) % target.vocab
    tree = (prefix[-1:] + torch.arange(1, 5, device=target.device)) % target.vocab
    paths = ([0], [0, 1], [0, 2], [0, 1, 3])
    cache = target.new_cache(PROBE + len(tree))
    causal = torch.ones(1, PROBE, PROBE, dtype=torch.bool, device=target.device).tril()
    places = torch.arange(PROBE, device=target.device)[None]
    target.forward(prefix[None], places, causal, cache)
    if cache.layers_written != target.depth:
        raise RunError(
            f"{target.name}: {cache.layers_written} of {target.depth} layers wrote the cache.",
            "Its layers keep something else than keys and values; it cannot be a target here.",
        )
    seen = torch.zeros(1, len(tree), PROBE + len(tree), dtype=torch.bool, device=target.device)
    seen[..., :PROBE] = True
    for path in paths:
        seen[0, path[-1], [PROBE + node for node in path]] = True
    depths = torch.tensor([len(path) - 1 for path in paths], device=target.device)
    said = target.forward(tree[None], depths[None] + PROBE, seen, cache)
    if said.taps.shape[-1] != target.depth * said.last.shape[-1]:
        raise RunError(
            f"{target.name}: its decoder layers do not hand on one state each.",
            "It cannot be a target here.",
        )
    logits = target.logits(said.last[0]).float()
    for path in paths:
        ids = torch.cat([prefix, tree[path]])[None]
        own = target.model(input_ids=ids.to(target.lies), use_cache=False).logits[0, -1].float()
        _same(target, logits[path[-1]], own)


def _same(target: "Target", ours: Float[Tensor, " V"], own: Float[Tensor, " V"]) -> None:
    gap = (ours - own).abs().max().item()
    limit = (1e-3 if target.dtype == torch.float32 else 0.1) * max(1.0, own.abs().max().item())
    if not gap <= limit:
        raise RunError(
            f"{target.name}: read as a tree, its logits differ from its own by {gap:.3g}.",
            "This family does something that Outrider does not know; it cannot be a target.",
        )
