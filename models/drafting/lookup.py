"""Base classes of drafters without weights: those that look their tokens up, in text or elsewhere.

A draft is a nested dictionary, token -> (probability, draft of what follows):

    {"cat": (0.75, {"sat": (1.0, {})}), "dog": (0.25, {})}

The logits of a node's children are the logarithms of these probabilities, and -inf for all other
tokens; a node without children gets -inf everywhere, so that nothing is drafted after it. All
probabilities come from counts, never from the target, and only tokens are read: the target's states
are not, unless a subclass runs the target on tokens of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import TargetEnds, Trace

Draft: TypeAlias = dict[int, tuple[float, Any]]  # token -> (probability, Draft)


@dataclass(frozen=True, eq=False)
class Text:
    """A text, as another text and the tokens that follow it; the empty text has no other one."""

    before: "Text | None" = None
    added: tuple[int, ...] = ()
    length: int = 0

    def extended(self, tokens: Sequence[int]) -> "Text":
        """Return this text and some tokens."""
        return Text(self, tuple(tokens), self.length + len(tokens))


class TextIndex(ABC):
    """A text, indexed for look-ups; subclasses implement `append` and `remove_last`.

    Attributes:
        tokens: the text.
    """

    def __init__(self) -> None:
        self.tokens, self.start = list[int](), Text()
        self._text = self.start

    @abstractmethod
    def append(self, token: int) -> None:
        """Add a token to the text and to the index."""

    @abstractmethod
    def remove_last(self) -> None:
        """Undo the last `append`."""

    def move_to(self, text: Text) -> None:
        """Remove and add the tokens in which the text of the index and another one differ.

        Args:
            text: made from `start`.
        """
        missing, other = list[Text](), text
        while other is not self._text:
            if other.length > self._text.length:
                missing.append(other)
                assert other.before is not None, "it follows the empty text"
                other = other.before
            else:
                for _ in self._text.added:
                    self.remove_last()
                assert self._text.before is not None, "it follows the empty text"
                self._text = self._text.before
        for part in reversed(missing):
            for token in part.added:
                self.append(token)
        self._text = text


@dataclass(frozen=True)
class DraftState:
    """State of a prompt while a tree is drafted: what follows each node of the last level."""

    level: tuple[Draft, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class LookupState(DraftState):
    """State of a prompt: its text, its index, and the drafts of a tree level.

    All states of a prompt share the index, which moves to the text of the state that is used.
    """

    index: TextIndex
    text: Text


def children(
    level: Sequence[Draft], ids: Int[Tensor, " N"], parents: Int[Tensor, " N"]
) -> list[Draft]:
    """Return what follows tokens that were drafted after the nodes of a level."""
    nodes = zip(ids.tolist(), parents.tolist(), strict=True)
    return [level[parent].get(token, (0.0, {}))[1] for token, parent in nodes]


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
            level = children(state.level, ids, parents)
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
        state.index.move_to(state.text)
        return self.look_up(state.index)

    def absorb(self, state: LookupState | None, trace: Trace) -> LookupState:
        ids, newest = trace.ids[0].tolist(), int(trace.next_ids[0, -1])
        if state is None:
            index = self.new_index()
            text = index.start.extended([*ids, newest])
        else:
            index, text = state.index, state.text.extended([*ids[1:], newest])
        index.move_to(text)
        return LookupState(index, text)
