"""`EarlyExit`, the base of drafters that read the states after the first layers of the target.

Draft tokens run through layers 0..E-1. Their keys, values and exit states are kept, so that
verification of a chain runs these layers on its last token only, and layers E.. on all tokens:

    token            root   1   2   3       a chain of three draft tokens
    layers 0..E-1     d     d   d   v       d: while drafting, v: in verification
    layers E..        v     v   v   v

The cache has a range for each part. A tree is drafted in another order than it is verified in; all
its tokens run through all layers then.

Legend: B prompts, T tokens, N nodes of a level, S columns, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.conf.fields import DEPTHS, option
from outrider.conf.schema import DrafterConfig
from outrider.models.cache.kv_cache import KVCache
from outrider.models.cache.split_cache import SplitCache
from outrider.models.drafting.drafter import TargetInput
from outrider.models.drafting.target_drafting import TargetDrafter, TargetDraftState
from outrider.models.target.layer_parts import Part
from outrider.models.target.target import Target, TargetStates


def check_exit(exit_layer: int, layers: int) -> None:
    """Raise ConfigError unless a target of so many layers has this exit."""
    if not 1 <= exit_layer <= layers:
        why = f"The target has {layers} layers, and a draft runs at least one of them."
        fix = f"Use 1 to {layers}; {layers} drafts with the whole target."
        raise ConfigError("drafter.exit_layer", exit_layer, why, fix)


@dataclass(frozen=True)
class EarlyExitConfig(DrafterConfig):
    """Settings of a drafter that is trained on exit states, which are its tap."""

    exit_layer: int = option(2, "", DEPTHS)

    def tap_layers(self, layers: int) -> tuple[int, ...]:
        """Return the layer whose output is the exit state.

        Raises:
            ConfigError: the target does not have so many layers.
        """
        check_exit(self.exit_layer, layers)
        return (self.exit_layer - 1,)


class EarlyExit(TargetDrafter):
    """A drafter that exits the target after `exit_layer` layers.

    A subclass calls `set_exit`, and may override `draft_logits` and `absorb_batch`, whose traces
    hold the exit states of verified rows as `taps`. One whose training reads exit states has an
    `EarlyExitConfig`.
    """

    required_features = "taps"
    exit_layer: int

    def set_exit(self, exit_layer: int, layers: int) -> None:
        """Set the exit and the ranges of the cache: one range if the exit is the target's end.

        Raises:
            ConfigError: the target does not have so many layers.
        """
        check_exit(exit_layer, layers)
        self.exit_layer = exit_layer
        self.splits = (exit_layer,) if exit_layer < layers else ()

    def draft_cache(self, cache: KVCache | SplitCache) -> KVCache:
        return cache.parts[0] if isinstance(cache, SplitCache) else cache

    def draft_forward(
        self, target: Target, cache: KVCache, new: TargetInput
    ) -> Float[Tensor, "B N H"]:
        """Return the output of layer E-1."""
        part = Part(0, self.exit_layer)
        return target.forward(new.ids, new.positions, new.visible, cache, part=part).last

    def draft_logits(
        self, target: Target, hidden: Float[Tensor, "B N H"]
    ) -> Float[Tensor, "B N Vd"]:
        return super().draft_logits(target, target.final_norm(hidden))

    def run_target(
        self,
        target: Target,
        cache: KVCache | SplitCache,
        states: Sequence[TargetDraftState | None],
        new: TargetInput,
    ) -> tuple[TargetStates, list[TargetDraftState]]:
        """Run the layers that drafting has not run."""
        if not isinstance(cache, SplitCache):
            return super().run_target(target, cache, states, new)
        lower, upper = cache.parts
        known = _drafted_states(target, new)
        count = known.shape[1]
        lower.add_written_rows(count)
        if count < new.ids.shape[1]:
            ids, positions, visible = (x[:, count:] for x in (new.ids, new.positions, new.visible))
            rest = TargetInput(ids, positions, visible)
            known = torch.cat([known, self.draft_forward(target, lower, rest)], dim=1)
        part = Part(self.exit_layer, hidden=known)
        last = target.forward(new.ids, new.positions, new.visible, upper, part=part).last
        after = [self.after_verification(target, cache, state) for state in states]
        return TargetStates(known, last), after


def _drafted_states(target: Target, new: TargetInput) -> Float[Tensor, "B T H"]:
    """Return the exit states of the first tokens, whose rows drafting has written."""
    if new.tree is None or not new.tree.is_chain or not new.drafted:
        return target.head_weight.new_zeros(len(new.ids), 0, target.shape().hidden)
    return torch.stack([state.hidden for state in new.drafted])
