"""The target drafts for itself over few rows of its own key-value cache (MagicDec).

Sources: Chen et al. 2024, "MagicDec", arXiv:2408.11049; StreamingLLM, arXiv:2309.17453, section 3;
SnapKV, arXiv:2404.14469. Of L committed rows after a prompt of P a draft token reads at most

    streaming   rows 0..sinks-1, and the last budget - sinks rows of L
    snapkv      per key head the budget - window rows of the prompt that its last `window` tokens
                attend to most, these `window` rows, and all rows after the prompt

and the draft tokens before it. All rows are exact: they are the target's own, and verification
replaces the rows of draft tokens. Where a budget covers all rows, a draft is the target's own
choice.

Differs (docs/drafters/sparse_kv.md): keys keep their absolute positions; the selection is made by
reading the last tokens of the prompt once more, before the first draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.conf.fields import option
from outrider.conf.schema import TOKENS, UntrainedConfig
from outrider.models.attention_masks import sliding_layers
from outrider.models.budget_view import BudgetView, Front, Rows
from outrider.models.decode.tree_layout import branch_mask
from outrider.models.drafter import LevelIds, TargetInput
from outrider.models.interface import TargetEnds, Trace
from outrider.models.kv_cache import KVCache
from outrider.models.prompt_observer import PromptObserver, observed_modules
from outrider.models.split_cache import SplitCache
from outrider.models.target import Target, TargetStates
from outrider.models.target_drafting import TargetDrafter, TargetDraftState
from outrider.models.vocab import DraftVocab

METHODS = ("streaming", "snapkv")


@dataclass(frozen=True)
class Config(UntrainedConfig):
    """Settings of sparse_kv; conf/drafter/sparse_kv.yaml describes each."""

    name: str = "sparse_kv"
    depths: int = option(4, "", "[1, 1024]")
    method: str = "streaming"
    budget: int = option(512, "", TOKENS)
    sinks: int = option(4, "", "[0, 4194304]")
    window: int = option(32, "", TOKENS)
    pool: int = option(5, "", "[1, 1023]")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method not in METHODS:
            raise ValueError(f"method = {self.method}: use {' or '.join(METHODS)}")
        if self.method == "streaming" and self.budget <= self.sinks:
            why = f"of {self.budget} rows, {self.sinks} sinks leave none for the newest text"
            raise ValueError(f"budget = {self.budget}: {why}; use more than drafter.sinks")
        if self.method == "snapkv" and self.budget <= self.window:
            why = f"of {self.budget} rows, a window of {self.window} leaves none to select"
            raise ValueError(f"budget = {self.budget}: {why}; use more than drafter.window")
        if self.pool % 2 == 0:
            raise ValueError(f"pool = {self.pool}: a row and its neighbours are an odd number")


@dataclass(frozen=True)
class Selection:
    """Rows of one prompt that were selected.

    Attributes:
        tail: the first row after them; 0: the budget covers the prompt, and there are none.
        rows: copies, of each layer.
    """

    tail: int
    rows: tuple[Rows, ...] = ()


@dataclass(frozen=True)
class SparseState(TargetDraftState):
    """Decoding state of a prompt.

    Attributes:
        newest: the newest committed tokens, at most `window`.
        selection: None until the first draft after the prompt.
    """

    newest: Int[Tensor, " _"] | None = None
    selection: Selection | None = None


class SparseKV(TargetDrafter):
    """The target over a view of its cache.

    Attributes:
        reads: rows of every layer that the last draft step read, per prompt.
    """

    is_trained = False

    def __init__(
        self, cfg: Config, target: TargetEnds, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__()
        vocab.require_full()
        self.cfg, self.vocab, self.taps = cfg, vocab, taps
        self.snapkv, self.reads = cfg.method == "snapkv", 0
        self._stacked: tuple[list[Selection], list[Rows]] = ([], [])
        positions = target.shape().max_positions
        if self.snapkv and cfg.window > positions:
            why = f"The target's context is {positions} tokens, and a prompt is never longer."
            raise ConfigError("drafter.window", cfg.window, why, f"Use at most {positions}.")

    # ---- drafting ----

    def run_level(
        self, states: Sequence[TargetDraftState], depth: int, ids: LevelIds, parents: LevelIds
    ) -> tuple[Float[Tensor, "B N H"], list[TargetDraftState]]:
        if depth == 1 and self.snapkv:
            cache = self.draft_cache(states[0].cache)
            prompts = zip(cache.active_slots, states, strict=True)
            states = [self.with_selection(slot, _own(state)) for slot, state in prompts]
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
        """Return the rows of several prompts, of each layer; kept while the prompts are the same.

        A prompt without selected rows gets zeros, which the mask excludes.
        """
        if len(selections) == 1:
            return list(selections[0].rows)
        known, stacked = self._stacked
        same = len(known) == len(selections)
        if same and all(a is b for a, b in zip(known, selections, strict=True)):
            return stacked
        model = next(each for each in selections if each.tail)
        none = tuple((torch.zeros_like(k), torch.zeros_like(v)) for k, v in model.rows)
        parts = [each.rows or none for each in selections]
        stacked = [
            (torch.cat([k for k, _ in layer]), torch.cat([v for _, v in layer]))
            for layer in zip(*parts, strict=True)
        ]
        self._stacked = selections, stacked
        return stacked

    # ---- selection ----

    def with_selection(self, slot: int, state: SparseState) -> SparseState:
        """Return the state with the rows selected, if they were not; the prompt ends here."""
        cache, cfg = self.draft_cache(state.cache), self.cfg
        length = cache.lengths[slot]
        if state.selection is not None:
            return state
        if length <= cfg.budget:
            return replace(state, selection=Selection(0))
        slides = sliding_layers(state.target.text_config, state.target.num_layers)
        observed = [layer for layer, is_sliding in enumerate(slides) if not is_sliding]
        observer = PromptObserver(cache, slot, observed)
        if observed:
            _read_again(state, observer)
        count, tail = cfg.budget - cfg.window, length - cfg.window
        rows = list[Rows]()
        for layer, is_sliding in enumerate(slides):
            keys, values = cache.rows(layer, slot)
            if is_sliding:
                span = slice(tail - count, tail)
                rows.append((keys[:, :, span].clone(), values[:, :, span].clone()))
            else:
                chosen = observer.selected(layer, count, cfg.window, cfg.pool)
                rows.append((_take(keys, chosen), _take(values, chosen)))
        return replace(state, selection=Selection(tail, tuple(rows)))

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
            return out, after
        known = [_own(state).selection for state in new.drafted]
        pairs = zip(map(_own, after), known, strict=True)
        return out, [replace(state, selection=selection) for state, selection in pairs]

    def after_verification(
        self, target: Target, cache: KVCache | SplitCache, state: TargetDraftState | None
    ) -> TargetDraftState:
        newest = None if state is None else _own(state).newest
        fresh = TargetDraftState.without_drafts(target, cache)
        return SparseState(target, cache, fresh.ancestors, fresh.hidden, newest)

    def absorb_batch(
        self, states: Sequence[TargetDraftState | None], traces: Sequence[Trace]
    ) -> list[TargetDraftState]:
        """Keep the newest tokens, which a selection reads again."""
        out = super().absorb_batch(states, traces)
        if not self.snapkv:
            return out
        for i, (state, trace) in enumerate(zip(map(_own, out), traces, strict=True)):
            ids = trace.ids[0] if state.newest is None else torch.cat([state.newest, trace.ids[0]])
            out[i] = replace(state, newest=ids[-self.cfg.window :])
        return out


def _own(state: TargetDraftState) -> SparseState:
    assert isinstance(state, SparseState)
    return state


def _read_again(state: SparseState, observer: PromptObserver) -> None:
    """Read the newest tokens of a prompt once more; the observer receives their queries."""
    target, ids, length = state.target, state.newest, observer.length
    assert ids is not None, "a selection before any token"
    positions = torch.arange(length - len(ids), length, device=ids.device)
    visible = torch.arange(length, device=ids.device) <= positions[:, None]
    with observed_modules(target.text_config, observer):
        target.forward(ids[None], positions[None], visible[None], observer)


def _take(rows: Float[Tensor, "1 A P C"], chosen: Int[Tensor, "A K"]) -> Float[Tensor, "1 A K C"]:
    """Return the chosen rows of each key head."""
    return rows.gather(2, chosen[None, :, :, None].expand(-1, -1, -1, rows.shape[3]))
