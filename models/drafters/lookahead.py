"""Lookahead decoding: draft n-grams that the target itself chose in a window of later positions.

Source: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding",
arXiv:2402.02057, and the authors' code (LEVEL = n, WINDOW_SIZE = window, GUESS_SET_SIZE = guesses).

In every round the window's rows run in the same forward of the target as the draft tree
(`run_target`), and move on by one position; the columns of a full window become n-grams of the
pool. The draft is the trie of the n-grams that follow the newest token. The positions of the window
begin at the newest token, so after several accepted tokens they move further than its columns, as
in the authors' code (ALWAYS_FWD_ONE).

Differs (docs/drafters/lookahead.md): the window starts in the first round, not in the forward of
the prompt; the policy chooses how many n-grams are verified, and its rule is lossless at every
temperature; a round that accepts a whole n-gram also emits the target's next token; n-grams of the
answer are those of its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.conf.automatic import adjust
from outrider.conf.errors import ConfigError
from outrider.conf.fields import COUNT0, option
from outrider.conf.schema import UntrainedConfig
from outrider.models.argmax import first_argmax
from outrider.models.cache.kv_cache import KVCache
from outrider.models.cache.split_cache import SplitCache
from outrider.models.drafting.drafter import TargetInput
from outrider.models.drafting.lookahead_window import (
    Pool,
    Window,
    WindowRows,
    add_ngrams,
    merge_guesses,
    most_rows,
)
from outrider.models.drafting.lookup import Draft, DraftState, UntrainedDrafter
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import ModelShape, TargetEnds, Trace
from outrider.models.target.target import Target, TargetStates


@dataclass(frozen=True)
class Config(UntrainedConfig):
    """Settings of lookahead decoding; conf/drafter/lookahead.yaml describes each."""

    name: str = "lookahead"
    depths: int = option(4, "", "[1, 63]")
    n: int = option(5, "", "[2, 64]")
    window: int = option(7, "", "[1, 1024]")
    guesses: int = option(7, "", "[1, 64]")
    seed: int = option(0, "", COUNT0)
    from_prompt: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.depths < self.n or adjust(self, "depths", self.n - 1)
        if not (fits or adjust(self, "n", self.depths + 1)):
            raise ValueError(
                f"depths = {self.depths}: an n-gram of n = {self.n} tokens drafts n - 1 at most"
            )


@dataclass(frozen=True)
class LookaheadState(DraftState):
    """State of a prompt.

    Attributes:
        text: all tokens so far.
        window: None until the first round after a prompt.
    """

    text: tuple[int, ...]
    window: Window | None = None
    pool: Pool = field(default_factory=dict)


class Lookahead(UntrainedDrafter):
    """Lookahead decoding."""

    cfg: Config

    def __init__(
        self, cfg: Config, target: TargetEnds, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__(cfg, target, vocab, taps)
        self.last_position = target.shape().max_positions - 1
        self.extra_rows = most_rows(cfg.n, cfg.window)

    @classmethod
    def check_settings(cls, cfg: Config, shape: ModelShape) -> None:
        reach, positions = cfg.window + cfg.n - 2, shape.max_positions
        if reach > positions:
            why = (
                f"A window of {reach} positions (window + n - 2) exceeds the target's {positions}."
            )
            raise ConfigError("drafter.window", cfg.window, why, "Use a smaller window or n.")

    def absorb(self, state: LookaheadState | None, trace: Trace) -> LookaheadState:
        ids, newest = trace.ids[0].tolist(), int(trace.next_ids[0, -1])
        if state is None:
            state = LookaheadState(())
        known = len(state.text)
        text = (*state.text[:-1], *ids, newest)
        pool, n = state.pool, self.cfg.n
        if self.cfg.from_prompt:
            starts = range(max(0, known - n + 1), len(text) - n + 1)
            pool = add_ngrams(pool, (text[i : i + n] for i in starts), self.cfg.guesses)
        return LookaheadState(text, state.window, pool)

    def draft_after(self, state: LookaheadState) -> Draft:
        """Return the trie of the n-grams after the newest token, once the window is full."""
        if state.window is None or not state.window.is_full(self.cfg.n):
            return {}
        return merge_guesses(state.pool.get(state.text[-1], ()))

    def run_target(
        self,
        target: Target,
        cache: KVCache | SplitCache,
        states: Sequence[LookaheadState | None],
        new: TargetInput,
    ) -> tuple[TargetStates, Sequence[LookaheadState | None]]:
        """Run the windows after the trees; a piece of a prompt runs alone."""
        if new.tree is None:
            stopped = [one and replace(one, window=None) for one in states]
            return super().run_target(target, cache, stopped, new)
        drafting = [one for one in states if one is not None]  # all: a tree follows a prompt
        windows = [self._window_of(one) for one in drafting]
        rows, nodes = WindowRows.of(windows, new.ids.device), new.ids.shape[1]
        wider = rows.after(new, cache.active_lengths, self.last_position)
        taps, last = target.forward(wider.ids, wider.positions, wider.visible, cache)
        cache.drop_newest(rows.ids.shape[1])
        chosen = first_argmax(target.logits(rows.newest_states(last, nodes))).tolist()
        after = list(map(self._advance, drafting, windows, chosen))
        return TargetStates(taps[:, :nodes], last[:, :nodes]), after

    def _window_of(self, state: LookaheadState) -> Window:
        """Return the window; in the first round a new one, of the text before the newest token."""
        if state.window is not None:
            return state.window
        return Window.start(state.text[:-1], self.cfg.n, self.cfg.window, self.cfg.seed)

    def _advance(
        self, state: LookaheadState, window: Window, chosen: Sequence[int]
    ) -> LookaheadState:
        """Return the state with the window one step further, and its n-grams in the pool.

        Args:
            chosen: the target's argmax after each token of the last level, and padding.
        """
        pool, n, chosen = state.pool, self.cfg.n, chosen[: window.columns]
        if window.is_full(n):
            ngrams = window.ngrams(state.text[-1], chosen)
            pool = add_ngrams(pool, ngrams, self.cfg.guesses)
        return replace(state, window=window.advance(chosen, n), pool=pool)
