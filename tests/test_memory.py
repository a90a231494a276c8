"""The cache of a dialogue: continued prompts are not read again, changed ones are exact."""

from collections.abc import Generator, Sequence

import pytest
from torch import Tensor

from outrider.models.cache.attention_cache import AttentionCache
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.request import CHECKPOINTS, DialogueCache, Output, Request
from outrider.models.interface import Trace
from outrider.models.target.layer_parts import WHOLE, Part
from outrider.models.target.target import Target, TargetStates
from tests import tiny
from tests.families import small_model
from tests.tiny import ScriptedDrafter, ScriptState, greedy_tokens, random_logits

PROMPT = [27, 8, 30, 18, 56, 56, 34, 59]
POLICIES: list[Policy | None] = [None, Chain(3), DynamicTree(3, 3, 8)]
each_policy = pytest.mark.parametrize("policy", POLICIES, ids=["plain", "chain", "tree"])
FAMILIES = pytest.mark.parametrize("family", ["llama", "gemma3"])


class CountingTarget(Target):
    """A target that records the size of every forward."""

    read: list[int]

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        seen: Tensor,
        cache: AttentionCache | None = None,
        grad: bool = False,
        part: Part = WHOLE,
    ) -> TargetStates:
        self.read.append(ids.shape[1])
        return super().forward(ids, positions, seen, cache, grad, part)


class RecordingDrafter(ScriptedDrafter):
    """A drafter that records the text of every state."""

    def absorb(self, state: ScriptState | None, trace: Trace) -> ScriptState:
        new = super().absorb(state, trace)
        self.texts = [*getattr(self, "texts", []), new.text]
        return new


class Dialogue:
    """Turns that share one cache."""

    def __init__(self, family: str, policy: Policy | None) -> None:
        self.target, self.memory = CountingTarget(small_model(family)), DialogueCache()
        self.target.read = []
        drafter = RecordingDrafter(random_logits(tiny.VOCAB), tiny.VOCAB) if policy else None
        self.engine = Engine(self.target, drafter, policy)

    def answer(self, prompt: Sequence[int], budget: int = 9) -> Output:
        self.target.read.clear()
        events = self.engine.run([Request(prompt, budget)], 1, dialogue=self.memory)
        return [event.out for event in events][-1]

    def is_greedy(self, prompt: Sequence[int], out: Output) -> bool:
        return out.ids == greedy_tokens(self.target, prompt, len(out.ids))

    @property
    def rows_read(self) -> int:
        """Rows of the prompt's forward."""
        return self.target.read[0]


@each_policy
@FAMILIES
def test_continued_prompt_reads_only_new_tokens(family: str, policy: Policy | None) -> None:
    """The newest token of the answer was in no cache yet, so it is read with the question."""
    dialogue, text = Dialogue(family, policy), list(PROMPT)
    out = dialogue.answer(text)
    assert dialogue.rows_read == len(PROMPT)
    for question in ([40, 11, 7], [6], [19, 3, 33, 21, 50]):
        text += [*out.ids, *question]
        out = dialogue.answer(text)
        assert dialogue.rows_read == 1 + len(question)
        assert dialogue.is_greedy(text, out)


@each_policy
@FAMILIES
def test_changed_prompt_equals_a_new_one(family: str, policy: Policy | None) -> None:
    """There is a checkpoint after the first prompt, and none inside it."""
    dialogue = Dialogue(family, policy)
    first = dialogue.answer(PROMPT)
    changed = [*PROMPT, first.ids[0], (first.ids[1] + 1) % tiny.VOCAB, 4, 4]
    out = dialogue.answer(changed)
    assert dialogue.is_greedy(changed, out)
    assert dialogue.rows_read == len(changed) - len(PROMPT)
    other = [*PROMPT[:4], 5, *PROMPT[5:], 9]
    out = dialogue.answer(other)
    assert dialogue.is_greedy(other, out)
    assert dialogue.rows_read == len(other)


@each_policy
def test_same_or_shorter_prompt_is_exact(policy: Policy | None) -> None:
    dialogue = Dialogue("llama", policy)
    first = dialogue.answer(PROMPT)
    again = dialogue.answer(PROMPT)
    assert again.ids == first.ids
    for shorter in (PROMPT[:5], PROMPT[:1], [*PROMPT, first.ids[0]], [*PROMPT, *first.ids[:6]]):
        assert dialogue.is_greedy(shorter, dialogue.answer(shorter))


@each_policy
def test_interrupted_answer_is_cached_as_far_as_it_was_generated(
    policy: Policy | None,
) -> None:
    """The consumer closes the generator in the middle of an answer."""
    dialogue = Dialogue("llama", policy)
    events = dialogue.engine.run([Request(PROMPT, 20)], 1, dialogue=dialogue.memory)
    assert isinstance(events, Generator)
    ids = [next(events).out for _ in range(4)][-1].ids.copy()
    events.close()
    text = [*PROMPT, *ids, 12, 9]
    out = dialogue.answer(text)
    assert dialogue.is_greedy(text, out)
    assert dialogue.rows_read == 1 + 2
    other = [*PROMPT, 2, 9, 9]
    assert dialogue.is_greedy(other, dialogue.answer(other))


def test_cache_grows_for_a_longer_answer() -> None:
    """The cache of the first turn is too small for the third."""
    dialogue, text = Dialogue("gemma3", Chain(3)), list(PROMPT)
    for budget in (2, 5, 40):
        out = dialogue.answer(text, budget)
        assert dialogue.is_greedy(text, out)
        assert len(out.ids) == budget
        text += [*out.ids, 17]


@FAMILIES
def test_drafter_continues_from_its_own_state(family: str) -> None:
    """It absorbs the text in order, each row once; `ScriptedDrafter` checks that rows continue."""
    dialogue = Dialogue(family, Chain(3))
    out = dialogue.answer(PROMPT)
    text = [*PROMPT, *out.ids, 40, 11]
    drafter = dialogue.engine.drafter
    assert isinstance(drafter, RecordingDrafter)
    before = len(drafter.texts)
    second = dialogue.answer(text)
    assert list(drafter.texts[before]) == [*text, second.ids[0]]
    assert list(drafter.texts[-1]) == [*text, *second.ids]


def test_long_dialogue_has_few_checkpoints() -> None:
    """Each has all rows that the drafter had absorbed; the first and the newest are enough."""
    dialogue, text = Dialogue("llama", Chain(3)), list(PROMPT)
    for turn in range(7):
        out = dialogue.answer(text, 5)
        assert dialogue.is_greedy(text, out)
        text += [*out.ids, 3 + turn]
    assert len(dialogue.memory.checkpoints) <= 1 + CHECKPOINTS
    again = [*PROMPT, *text[len(PROMPT) : len(PROMPT) + 1], 50]
    assert dialogue.is_greedy(again, dialogue.answer(again))
    assert dialogue.rows_read == 2  # the first checkpoint is still there
