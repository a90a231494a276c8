"""`TargetDrafter`, the base of drafters whose draft tokens run through layers of the target.

A tree level is one forward of a part of the target over the tokens of the level. Its rows are
written behind the committed rows of the target's own cache, and verification replaces them:

    columns   committed rows | root | level 1 | level 2 | ..
    level 2   attends to       yes    parents   itself

A state holds the target and its cache. The selected slots of the cache are those of the prompts of
a call, in their order, as in every call of the engine.

Legend: B prompts, N nodes of a level, M rows drafted in this round, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.models.cache.attention_masks import branch_mask, extend_ancestor_mask
from outrider.models.cache.kv_cache import KVCache
from outrider.models.cache.split_cache import SplitCache
from outrider.models.drafting.drafter import BatchDrafter, LevelIds, TargetInput, target_head_logits
from outrider.models.drafting.self_feeding import gather_parents
from outrider.models.interface import Trace
from outrider.models.target.target import Target, TargetStates


@dataclass(frozen=True)
class TargetDraftState:
    """Decoding state of a prompt.

    Attributes:
        target: the model that drafts; `sparse_kv` may have a smaller one.
        ancestors: the drafted rows that each node of the last level attends to, itself included.
        hidden: states of the drafted rows, in the order of the cache.
    """

    target: Target
    cache: KVCache | SplitCache
    ancestors: Bool[Tensor, "N M"]
    hidden: Float[Tensor, "M H"]

    @classmethod
    def without_drafts(cls, target: Target, cache: KVCache | SplitCache) -> "TargetDraftState":
        weight = target.head_weight
        none = torch.zeros(1, 0, dtype=torch.bool, device=target.device)
        return cls(target, cache, none, weight.new_zeros(0, weight.shape[1]))


class TargetDrafter(BatchDrafter):
    """A drafter that runs draft tokens through the target.

    A subclass implements `draft_forward` or `draft_level`, and may override `draft_cache`,
    `run_target` and `absorb_batch`.
    """

    required_features = "ids"

    def draft_forward(
        self, target: Target, cache: KVCache, new: TargetInput
    ) -> Float[Tensor, "B N H"]:
        """Run draft tokens, and append their rows to the cache; see `Target.forward`.

        Returns:
            States that `draft_logits` reads.
        """
        raise NotImplementedError

    def draft_cache(self, cache: KVCache | SplitCache) -> KVCache:
        """Return the cache that `draft_forward` appends to: of all layers, by default."""
        assert isinstance(cache, KVCache), "a drafter with split caches overrides draft_cache"
        return cache

    def draft_logits(
        self, target: Target, hidden: Float[Tensor, "B N H"]
    ) -> Float[Tensor, "B N Vd"]:
        """Return the logits of the states of a level."""
        return target_head_logits(target, self.vocab, hidden)

    def step_batch(
        self, states: Sequence[TargetDraftState], depth: int, ids: LevelIds, parents: LevelIds
    ) -> tuple[Float[Tensor, "B N Vd"], list[TargetDraftState]]:
        hidden, states = self.run_level(states, depth, ids, parents)
        return self.draft_logits(states[0].target, hidden), states

    def run_level(
        self, states: Sequence[TargetDraftState], depth: int, ids: LevelIds, parents: LevelIds
    ) -> tuple[Float[Tensor, "B N H"], list[TargetDraftState]]:
        """Run the tokens of level depth - 1; return their states and those of the prompts."""
        cache = self.draft_cache(states[0].cache)
        above = [state.ancestors for state in states]
        ancestors = torch.stack(above) if depth == 1 else gather_parents(above, parents)
        ancestors = extend_ancestor_mask(ancestors)
        drafted, prefix = len(states[0].hidden), cache.active_lengths
        cache.ensure_capacity(max(prefix) + drafted + ids.shape[1])
        positions = level_positions(states, depth, ids)
        with cache.after_draft(drafted):
            hidden = self.draft_level(states, prefix, ids, positions, ancestors)
        after = [
            replace(state, ancestors=mask, hidden=torch.cat([state.hidden, new]))
            for state, mask, new in zip(states, ancestors, hidden, strict=True)
        ]
        return hidden, after

    def draft_level(
        self,
        states: Sequence[TargetDraftState],
        prefix: list[int],
        ids: Int[Tensor, "B N"],
        positions: Int[Tensor, "B N"],
        ancestors: Bool[Tensor, "B N M"],
    ) -> Float[Tensor, "B N H"]:
        """Run the tokens of a level after `prefix` committed rows; all rows are visible."""
        target, cache = states[0].target, self.draft_cache(states[0].cache)
        new = TargetInput(ids, positions, branch_mask(prefix, ancestors))
        return self.draft_forward(target, cache, new)

    def run_target(
        self,
        target: Target,
        cache: KVCache | SplitCache,
        states: Sequence[TargetDraftState | None],
        new: TargetInput,
    ) -> tuple[TargetStates, list[TargetDraftState]]:
        """Run the whole target; the rows of the new tokens replace those of the draft."""
        out = target.forward(new.ids, new.positions, new.visible, cache)
        return out, [self.after_verification(target, cache, state) for state in states]

    def after_verification(
        self, target: Target, cache: KVCache | SplitCache, state: TargetDraftState | None
    ) -> TargetDraftState:
        """Return the state of a prompt without drafted rows."""
        return TargetDraftState.without_drafts(target, cache)

    def absorb_batch(
        self, states: Sequence[TargetDraftState | None], traces: Sequence[Trace]
    ) -> list[TargetDraftState]:
        """Return the states: verified rows are in the target's cache."""
        return [state for state in states if state is not None]


def level_positions(
    states: Sequence[TargetDraftState], depth: int, ids: LevelIds
) -> Int[Tensor, "B N"]:
    """Return the rotary positions of the tokens of level depth - 1."""
    prefix, last = states[0].cache.active_lengths, states[0].target.shape().max_positions - 1
    positions = torch.tensor(prefix, device=ids.device)[:, None] + (depth - 1)
    return positions.clamp(max=last).expand(-1, ids.shape[1])  # unused guesses may exceed it
