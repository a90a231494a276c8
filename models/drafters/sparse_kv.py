"""The target drafts for itself over few rows of its own key-value cache (MagicDec).

Sources: Chen et al. 2024, "MagicDec", arXiv:2408.11049; StreamingLLM, arXiv:2309.17453, section 3;
SnapKV, arXiv:2404.14469. Of L committed rows after a prompt of P a draft token reads at most

    streaming   rows 0..sinks-1, and the last budget - sinks rows of L
    snapkv      per key head the budget - window rows of the prompt that its last `window` tokens
                attend to most, these `window` rows, and all rows after the prompt

and the draft tokens before it. All rows are exact: they are the target's own, and verification
replaces the rows of draft tokens. Where a budget covers all rows, a draft is the target's own
choice.

With `path` a draft model drafts over the same rows of a cache of its own (`PairedCache`). It reads
prompts with full attention. It reads the verified tokens of a round over few rows, in one forward
with the root of the next round; their rows replace those of the draft. Of the draft a b c after the
root r, two tokens are accepted, and x is the next root:

    rows of the draft model    L committed rows | r a b        the last level is not run
    rows of the next forward   L committed rows | r a b x      the state of x drafts

Differs (docs/drafters/sparse_kv.md): keys keep their absolute positions; the selection is made by
reading the last tokens of the prompt once more, before the first draft.

Legend: B prompts, N nodes of a level, M rows drafted in this round, H hidden size of the model that
drafts, T tokens of a piece of a prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.conf.automatic import adjust
from outrider.conf.errors import ConfigError
from outrider.conf.fields import TOKENS, option
from outrider.conf.schema import UntrainedConfig
from outrider.models.cache.attention_masks import branch_mask
from outrider.models.cache.budget_view import BudgetView, Front, Rows
from outrider.models.cache.kv_cache import KVCache
from outrider.models.cache.paired_cache import PairedCache
from outrider.models.cache.split_cache import SplitCache
from outrider.models.drafters.draft_lm import DraftLm
from outrider.models.drafters.parts import draft_model
from outrider.models.drafting.drafter import LevelIds, TargetInput
from outrider.models.drafting.row_selection import Selection, select, stack
from outrider.models.drafting.target_drafting import TargetDrafter, TargetDraftState
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import ModelShape, TargetEnds, Trace
from outrider.models.target.target import Target, TargetStates

METHODS = ("streaming", "snapkv")
MOST_TOKENS = 4194304  # of a budget


@dataclass(frozen=True)
class Config(UntrainedConfig):
    """Settings of sparse_kv; conf/drafter/sparse_kv.yaml describes each."""

    name: str = "sparse_kv"
    depths: int = option(4, "", "[1, 1024]")
    path: str | None = None
    method: str = "streaming"
    budget: int = option(512, "", TOKENS)
    sinks: int = option(4, "", "[0, 4194304]")
    window: int = option(32, "", TOKENS)
    pool: int = option(5, "", "[1, 1023]")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method not in METHODS:
            raise ValueError(f"method = {self.method}: use {' or '.join(METHODS)}")
        if self.method == "streaming" and not self._leaves_rows("sinks"):
            why = f"of {self.budget} rows, {self.sinks} sinks leave none for the newest text"
            raise ValueError(f"budget = {self.budget}: {why}; use more than drafter.sinks")
        if self.method == "snapkv" and not self._leaves_rows("window"):
            why = f"of {self.budget} rows, a window of {self.window} leaves none to select"
            raise ValueError(f"budget = {self.budget}: {why}; use more than drafter.window")
        if self.pool % 2 == 0:
            raise ValueError(f"pool = {self.pool}: a row and its neighbours are an odd number")

    def _leaves_rows(self, name: str) -> bool:
        """Return whether the budget exceeds `sinks` or `window`, if need be after an adjustment."""
        kept = getattr(self, name)
        if self.budget <= kept and not adjust(self, name, max(self.budget // 2, name == "window")):
            return self.budget + kept <= MOST_TOKENS and adjust(self, "budget", self.budget + kept)
        return bool(self.budget > getattr(self, name))


@dataclass(frozen=True)
class SparseState(TargetDraftState):
    """Decoding state of a prompt.

    Attributes:
        newest: the newest committed tokens: the last `window`, if they select rows, of those that
            the drafting model has read, and all that it has not.
        selection: None until the first draft after the prompt.
    """

    newest: Int[Tensor, " _"] | None = None
    selection: Selection | None = None


class SparseKV(TargetDrafter):
    """The target over a view of its cache, or a draft model over a view of its own.

    Attributes:
        draft: the draft model; None: the target drafts.
        reads: rows of every layer that the last draft step read, per prompt.
    """

    is_trained = False
    draft: DraftLm | None

    def __init__(
        self, cfg: Config, target: TargetEnds, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__()
        vocab.require_full()
        draft = None
        if cfg.path is not None:
            assert isinstance(target, Target), "a draft model is compared with the target"
            draft = draft_model.load(cfg.path, target)
        self.__dict__["draft"] = draft  # no submodule: nothing of it is saved
        self.cfg, self.taps = cfg, taps
        self.vocab = vocab if draft is None else draft.vocab
        self.snapkv, self.reads = cfg.method == "snapkv", 0
        self._stacked: tuple[list[Selection], list[Rows]] = ([], [])

    @classmethod
    def check_settings(cls, cfg: Config, shape: ModelShape) -> None:
        positions = shape.max_positions
        if cfg.method == "snapkv" and cfg.window > positions:
            why = f"The target's context is {positions} tokens, and a prompt is never longer."
            raise ConfigError("drafter.window", cfg.window, why, f"Use at most {positions}.")
        if cfg.path is not None:
            draft_model.check(cfg.path, shape)

    # ---- drafting ----

    def new_cache(self, target: Target, capacity: int, slots: int) -> KVCache | SplitCache:
        if self.draft is None:
            return super().new_cache(target, capacity, slots)
        return PairedCache(target, self.draft.lm, capacity, slots)

    def draft_cache(self, cache: KVCache | SplitCache) -> KVCache:
        return super().draft_cache(cache) if self.draft is None else _paired(cache).draft

    def draft_logits(
        self, target: Target, hidden: Float[Tensor, "B N H"]
    ) -> Float[Tensor, "B N Vd"]:
        if self.draft is None:
            return super().draft_logits(target, hidden)
        return self.draft.head(hidden)

    def run_level(
        self, states: Sequence[TargetDraftState], depth: int, ids: LevelIds, parents: LevelIds
    ) -> tuple[Float[Tensor, "B N H"], list[TargetDraftState]]:
        if depth == 1 and self.snapkv:
            cache = self.draft_cache(states[0].cache)
            prompts = zip(cache.active_slots, states, strict=True)
            states = [self.with_selection(slot, _own(state)) for slot, state in prompts]
        if depth == 1 and self.draft is not None:
            return self.read_newest(states, ids)
        return super().run_level(states, depth, ids, parents)

    def draft_level(
        self,
        states: Sequence[TargetDraftState],
        prefix: list[int],
        ids: Int[Tensor, "B N"],
        positions: Int[Tensor, "B N"],
        ancestors: Bool[Tensor, "B N M"],
    ) -> Float[Tensor, "B N H"]:
        """Run the tokens of a level on the visible rows only."""
        target, cache = states[0].target, self.draft_cache(states[0].cache)
        tails, front = self.visible_rows(states, prefix)
        view = BudgetView(cache, prefix, tails, ancestors.shape[2], front)
        self.reads = view.columns
        visible = view.limit(branch_mask(view.prefix, ancestors))
        return target.forward(ids, positions, visible, view).last

    def visible_rows(
        self, states: Sequence[TargetDraftState], prefix: list[int]
    ) -> tuple[list[int], Front]:
        """Return where the tail of each prompt starts, and the rows in front of the tails."""
        if not self.snapkv:
            recent = self.cfg.budget - self.cfg.sinks
            tails = [0 if n <= self.cfg.budget else n - recent for n in prefix]
            return tails, Front(self.cfg.sinks if any(tails) else 0)
        selections = [known for state in states if (known := _own(state).selection) is not None]
        tails = [each.tail for each in selections]
        if not any(tails):
            return tails, Front(0)
        return tails, Front(self.cfg.budget - self.cfg.window, self._stack(selections))

    def _stack(self, selections: list[Selection]) -> list[Rows]:
        """Return the rows of several prompts; kept while the prompts are the same."""
        if len(selections) == 1:
            return list(selections[0].rows)
        known, stacked = self._stacked
        same = len(known) == len(selections)
        if same and all(a is b for a, b in zip(known, selections, strict=True)):
            return stacked
        self._stacked = selections, stack(selections)
        return self._stacked[1]

    # ---- selection ----

    def with_selection(self, slot: int, state: SparseState) -> SparseState:
        """Return the state with the rows selected, if they were not; the prompt ends here."""
        cache, cfg, newest = self.draft_cache(state.cache), self.cfg, state.newest
        length = cache.lengths[slot]
        if state.selection is not None:
            return state
        if length <= cfg.budget:
            return replace(state, selection=Selection(0))
        assert newest is not None, "a selection before any token"
        unread = state.cache.lengths[slot] - length
        ids = newest[: len(newest) - unread][-cfg.window :]
        found = select(state.target, cache, slot, ids, cfg.budget - cfg.window, cfg.pool)
        return replace(state, selection=found)

    # ---- the text of a draft model ----

    def read_newest(
        self, states: Sequence[TargetDraftState], roots: Int[Tensor, "B 1"]
    ) -> tuple[Float[Tensor, "B 1 H"], list[TargetDraftState]]:
        """Run the verified tokens that the draft model has not read, and the root after them.

        Their rows replace those of the previous draft. Prompts with fewer tokens are padded behind.
        """
        pair = _paired(states[0].cache)
        cache, counts, read = pair.draft, pair.unread_counts, pair.draft.active_lengths
        texts = [
            torch.cat([_last(_own(state).newest, count), root])
            for state, count, root in zip(states, counts, roots, strict=True)
        ]
        hidden = self._read_few(states, read, pad_sequence(texts, batch_first=True))
        for slot, length in zip(cache.active_slots, pair.active_lengths, strict=True):
            cache.crop(slot, length)
        last = torch.stack([rows[count] for rows, count in zip(hidden, counts, strict=True)])
        itself = torch.ones(1, 1, dtype=torch.bool, device=last.device)
        after = [
            replace(state, ancestors=itself, hidden=row[None])
            for state, row in zip(states, last, strict=True)
        ]
        return last[:, None], after

    def _read_few(
        self, states: Sequence[TargetDraftState], read: list[int], ids: Int[Tensor, "B T"]
    ) -> Float[Tensor, "B T H"]:
        """Run tokens after the rows that the draft model has, over few of these rows."""
        (batch, width), device = ids.shape, ids.device
        self.draft_cache(states[0].cache).ensure_capacity(max(read) + width)
        positions = torch.tensor(read, device=device)[:, None] + torch.arange(width, device=device)
        causal = torch.ones(batch, width, width, dtype=torch.bool, device=device).tril()
        return self.draft_level(states, read, ids, self._clamp(positions), causal)

    def _read_prompt(
        self, pair: PairedCache, states: Sequence[TargetDraftState], ids: Int[Tensor, "B T"]
    ) -> None:
        """Run a piece of prompts of one length through the draft model, with full attention.

        Of the answer before it in a dialogue, the last tokens may not have been read.
        """
        read, length = pair.draft.active_lengths[0], pair.active_lengths[0]
        unread = length - ids.shape[1] - read
        if unread:
            ids = torch.cat([_last(_own(states[0]).newest, unread)[None], ids], dim=1)
        positions = torch.arange(read, length, device=ids.device).expand(len(ids), -1)
        visible = torch.arange(length, device=ids.device) <= positions[..., None]
        states[0].target.forward(ids, self._clamp(positions), visible, pair.draft)

    def _clamp(self, positions: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        """Set positions that the draft model does not have to its last one."""
        assert self.draft is not None, "the target has all positions of a text"
        return positions.clamp(max=self.draft.lm.shape().max_positions - 1)

    # ---- verification ----

    def run_target(
        self,
        target: Target,
        cache: KVCache | SplitCache,
        states: Sequence[TargetDraftState | None],
        new: TargetInput,
    ) -> tuple[TargetStates, list[TargetDraftState]]:
        """Run the target; a selection made by the draft is kept until more of a prompt is read."""
        out, after = super().run_target(target, cache, states, new)
        if new.tree is None:
            if self.draft is not None:
                self._read_prompt(_paired(cache), after, new.ids)
            return out, after
        known = [_own(state).selection for state in new.drafted]
        pairs = zip(map(_own, after), known, strict=True)
        return out, [replace(state, selection=selection) for state, selection in pairs]

    def after_verification(
        self, target: Target, cache: KVCache | SplitCache, state: TargetDraftState | None
    ) -> TargetDraftState:
        newest = None if state is None else _own(state).newest
        model = target if self.draft is None else self.draft.lm
        fresh = TargetDraftState.without_drafts(model, cache)
        return SparseState(model, cache, fresh.ancestors, fresh.hidden, newest)

    def absorb_batch(
        self, states: Sequence[TargetDraftState | None], traces: Sequence[Trace]
    ) -> list[TargetDraftState]:
        """Keep the newest tokens: those that a selection or the draft model has yet to read."""
        out = super().absorb_batch(states, traces)
        unread = [0] * len(out) if self.draft is None else _paired(out[0].cache).unread_counts
        window = self.cfg.window if self.snapkv else 0
        if not window and self.draft is None:
            return out
        for i, (state, trace) in enumerate(zip(map(_own, out), traces, strict=True)):
            ids = trace.ids[0] if state.newest is None else torch.cat([state.newest, trace.ids[0]])
            out[i] = replace(state, newest=_last(ids, window + unread[i]))
        return out


def _own(state: TargetDraftState) -> SparseState:
    assert isinstance(state, SparseState)
    return state


def _paired(cache: KVCache | SplitCache) -> PairedCache:
    assert isinstance(cache, PairedCache), "made by SparseKV.new_cache"
    return cache


def _last(ids: Int[Tensor, " _"] | None, count: int) -> Int[Tensor, " _"]:
    """Return the last tokens, at most `count`."""
    assert ids is not None, "before any token"
    return ids[max(0, len(ids) - count) :]
