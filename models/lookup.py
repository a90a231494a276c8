"""Base classes of drafters without weights: those that look their tokens up, in text or elsewhere.

A draft is a nested dictionary, token -> (probability, draft of what follows):

    {"cat": (0.75, {"sat": (1.0, {})}), "dog": (0.25, {})}

The logits of a node's children are the logarithms of these probabilities, and -inf for all other
tokens; a node without children gets -inf everywhere, so that nothing is drafted after it. All
probabilities come from counts, never from the target, and only tokens are read: the target's states
are not, unless a subclass runs the target on tokens of its own.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.models.drafter import Drafter
from outrider.models.interface import TargetEnds, Trace
from outrider.models.vocab import DraftVocab

Draft: TypeAlias = dict[int, tuple[float, Any]]  # token -> (probability, Draft)


@runtime_checkable
class TextIndex(Protocol):
    """A text that only grows, indexed for look-ups.

    Attributes:
        tokens: the text so far.
    """

    tokens: list[int]

    def append(self, token: int) -> None:
        """Add a token to the text and to the index."""


@dataclass(frozen=True)
class DraftState:
    """State of a prompt while a tree is drafted: what follows each node of the last level."""

    level: tuple[Draft, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class LookupState(DraftState):
    """State of a prompt: the first `length` tokens of an index, and the drafts of a tree level.

    Later states share the index. A state that is not the latest gets an index of its own before
    tokens are added to it.
    """

    index: TextIndex
    length: int


class UntrainedDrafter(Drafter):
    """A drafter without weights; subclasses implement `absorb` and `draft_after`."""

    is_trained = False
    may_abstain = True
    required_features = "ids"

    def __init__(
        self, cfg: Any, target: TargetEnds, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__()
        vocab.require_full()
        self.cfg, self.vocab, self.taps, self.max_depth = cfg, vocab, taps, cfg.depths

    @abstractmethod
    def draft_after(self, state: Any) -> Draft:
        """Return what may follow the text of a state, which is a `DraftState`."""

    def step(
        self, state: Any, depth: int, ids: Int[Tensor, " N"], parents: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N Vd"], Any]:
        if depth == 1:
            level: Sequence[Draft] = [self.draft_after(state)]
        else:
            nodes = zip(ids.tolist(), parents.tolist(), strict=True)
            level = [state.level[parent].get(token, (0.0, {}))[1] for token, parent in nodes]
        logits = torch.full((len(level), len(self.vocab)), float("-inf"), device=ids.device)
        for row, draft in zip(logits, level, strict=True):
            if draft:
                tokens = torch.tensor(list(draft), device=ids.device)
                row[tokens] = torch.tensor([p for p, _ in draft.values()], device=ids.device).log()
        return logits, replace(state, level=tuple(level))


class LookupDrafter(UntrainedDrafter):
    """A drafter that looks up earlier text; subclasses implement `new_index` and `look_up`."""

    @abstractmethod
    def new_index(self) -> TextIndex:
        """Return the index of an empty text."""

    @abstractmethod
    def look_up(self, index: TextIndex) -> Draft:
        """Return what may follow the text of the index."""

    def draft_after(self, state: LookupState) -> Draft:
        return self.look_up(self._index_of(state))

    def absorb(self, state: LookupState | None, trace: Trace) -> LookupState:
        ids, newest = trace.ids[0].tolist(), int(trace.next_ids[0, -1])
        if state is None:
            index, added = self.new_index(), [*ids, newest]
        else:
            index, added = self._index_of(state), [*ids[1:], newest]
        for token in added:
            index.append(token)
        return LookupState(index, len(index.tokens))

    def _index_of(self, state: LookupState) -> TextIndex:
        """Return an index that holds the state's text only."""
        if len(state.index.tokens) == state.length:
            return state.index
        index = self.new_index()
        for token in state.index.tokens[: state.length]:
            index.append(token)
        return index
