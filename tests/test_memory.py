"""What a dialogue remembers: a prompt that goes on is not read again, one that differs is right."""

from collections.abc import Generator, Sequence

import pytest
from torch import Tensor

from outrider.models.batch_kv_cache import BatchKVCache
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.request import CHECKPOINTS, DialogueCache, Output, Request
from outrider.models.interface import Trace
from outrider.models.kv_cache import KVCache
from outrider.models.target import Target, TargetStates
from tests import tiny
from tests.families import small_model
from tests.tiny import ScriptedDrafter, ScriptState, greedy_tokens, random_logits

PROMPT = [27, 8, 30, 18, 56, 56, 34, 59]
POLICIES: list[Policy | None] = [None, Chain(3), DynamicTree(3, 3, 8)]
each_policy = pytest.mark.parametrize("policy", POLICIES, ids=["plain", "chain", "tree"])
FAMILIES = pytest.mark.parametrize("family", ["llama", "gemma3"])


class Counting(Target):
    """Notes the size of every forward."""

    read: list[int]

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        seen: Tensor,
        cache: KVCache | BatchKVCache | None = None,
        grad: bool = False,
    ) -> TargetStates:
        self.read.append(ids.shape[1])
        return super().forward(ids, positions, seen, cache, grad)


class Attentive(ScriptedDrafter):
    """Told, whose `handed` starts anew with every prompt it goes on with."""

    def absorb(self, state: ScriptState | None, trace: Trace) -> ScriptState:
        heard = super().absorb(state, trace)
        self.texts = [*getattr(self, "texts", []), heard.text]
        return heard


class Dialogue:
    """One memory, turn after turn."""

    def __init__(self, family: str, policy: Policy | None) -> None:
        self.target, self.memory = Counting(small_model(family)), DialogueCache()
        self.target.read = []
        drafter = Attentive(random_logits(tiny.VOCAB), tiny.VOCAB) if policy else None
        self.engine = Engine(self.target, drafter, policy)

    def say(self, prompt: Sequence[int], budget: int = 9) -> Output:
        self.target.read.clear()
        events = self.engine.run([Request(prompt, budget)], 1, dialogue=self.memory)
        return [event.out for event in events][-1]

    def right(self, prompt: Sequence[int], out: Output) -> bool:
        return out.ids == greedy_tokens(self.target, prompt, len(out.ids))

    @property
    def rows_read(self) -> int:
        """By the prompt's own forward."""
        return self.target.read[0]


@each_policy
@FAMILIES
def test_a_prompt_that_goes_on_reads_only_what_is_new(family: str, policy: Policy | None) -> None:
    """The newest token of the answer was in no cache yet, so it is read with the question."""
    talk, text = Dialogue(family, policy), list(PROMPT)
    out = talk.say(text)
    assert talk.rows_read == len(PROMPT)
    for question in ([40, 11, 7], [6], [19, 3, 33, 21, 50]):
        text += [*out.ids, *question]
        out = talk.say(text)
        assert talk.rows_read == 1 + len(question)
        assert talk.right(text, out)


@each_policy
@FAMILIES
def test_a_prompt_that_differs_in_the_middle_is_answered_as_if_new(
    family: str, policy: Policy | None
) -> None:
    """Behind the first prompt there is a mark to go on from; inside it there is none."""
    talk = Dialogue(family, policy)
    first = talk.say(PROMPT)
    changed = [*PROMPT, first.ids[0], (first.ids[1] + 1) % tiny.VOCAB, 4, 4]
    out = talk.say(changed)
    assert talk.right(changed, out)
    assert talk.rows_read == len(changed) - len(PROMPT)
    other = [*PROMPT[:4], 5, *PROMPT[5:], 9]
    out = talk.say(other)
    assert talk.right(other, out)
    assert talk.rows_read == len(other)


@each_policy
def test_the_same_or_a_shorter_prompt_is_right_too(policy: Policy | None) -> None:
    talk = Dialogue("llama", policy)
    first = talk.say(PROMPT)
    again = talk.say(PROMPT)
    assert again.ids == first.ids
    for shorter in (PROMPT[:5], PROMPT[:1], [*PROMPT, first.ids[0]], [*PROMPT, *first.ids[:6]]):
        assert talk.right(shorter, talk.say(shorter))


@each_policy
def test_an_answer_that_is_not_heard_to_its_end_is_known_as_far_as_it_came(
    policy: Policy | None,
) -> None:
    """The listener goes away in the middle of an answer."""
    talk = Dialogue("llama", policy)
    events = talk.engine.run([Request(PROMPT, 20)], 1, dialogue=talk.memory)
    assert isinstance(events, Generator)
    said = [next(events).out for _ in range(4)][-1].ids.copy()
    events.close()
    text = [*PROMPT, *said, 12, 9]
    out = talk.say(text)
    assert talk.right(text, out)
    assert talk.rows_read == 1 + 2
    other = [*PROMPT, 2, 9, 9]
    assert talk.right(other, talk.say(other))


def test_a_longer_answer_than_ever_finds_room() -> None:
    """The cache of the first turn is too small for the third."""
    talk, text = Dialogue("gemma3", Chain(3)), list(PROMPT)
    for budget in (2, 5, 40):
        out = talk.say(text, budget)
        assert talk.right(text, out)
        assert len(out.ids) == budget
        text += [*out.ids, 17]


@FAMILIES
def test_the_drafter_goes_on_from_its_own_memory(family: str) -> None:
    """It absorbs the whole text in order, each row once; `Told` checks that rows continue."""
    talk = Dialogue(family, Chain(3))
    out = talk.say(PROMPT)
    text = [*PROMPT, *out.ids, 40, 11]
    drafter = talk.engine.drafter
    assert isinstance(drafter, Attentive)
    before = len(drafter.texts)
    second = talk.say(text)
    assert list(drafter.texts[before]) == [*text, second.ids[0]]
    assert list(drafter.texts[-1]) == [*text, *second.ids]


def test_a_long_dialogue_keeps_few_marks() -> None:
    """Each holds all rows that the drafter had absorbed; the first and the newest are enough."""
    talk, text = Dialogue("llama", Chain(3)), list(PROMPT)
    for turn in range(7):
        out = talk.say(text, 5)
        assert talk.right(text, out)
        text += [*out.ids, 3 + turn]
    assert len(talk.memory.checkpoints) <= 1 + CHECKPOINTS
    again = [*PROMPT, *text[len(PROMPT) : len(PROMPT) + 1], 50]
    assert talk.right(again, talk.say(again))
    assert talk.rows_read == 2  # the first mark is still there
