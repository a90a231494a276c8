"""Lookahead decoding: its schedule against a literal one, its rows in the target's forward."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.models.cache.attention_cache import AttentionCache
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.request import Request
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.static_tree import StaticTree
from outrider.models.drafters.lookahead import Config, Lookahead, LookaheadState
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import Trace
from outrider.models.target.layer_parts import WHOLE, Part
from outrider.models.target.target import Target, TargetStates
from tests import tiny
from tests.enumeration import Context, Law, distance, enumerate_law
from tests.families import small_model
from tests.test_lookup import trace_of

PROMPTS = ([5, 9, 5, 9, 7, 5, 9], [11], [40, 17, 23, 40, 17, 3, 3, 8, 30, 21, 4])
AnyLookahead = TypeVar("AnyLookahead", bound=Lookahead)
Argmax = Callable[[Sequence[int]], int]


def build(of: Target, kind: type[AnyLookahead], **settings: Any) -> AnyLookahead:
    """Drafts are as deep as n-grams are long, unless `depths` is given."""
    settings = {"depths": settings.get("n", 5) - 1, "draft_vocab_size": None, **settings}
    cfg = tiny.config("lookahead", **settings)
    return kind(cfg, of, DraftVocab.identity(of.vocab_size), ())


# ---- the published schedule ----


class Schedule:
    """The schedule of the authors' code; the target is a function from a text to the next token.

    Every token of the window is the argmax after the text, the first tokens of level 0 and the
    tokens of its own column, so that no mask and no position is needed. `past` has None for levels
    that are not yet filled.
    """

    def __init__(self, argmax: Argmax, prompt: list[int], cfg: Config, verified: int) -> None:
        self.argmax, self.cfg, self.verified = argmax, cfg, verified
        draw = Random(cfg.seed)
        first = [draw.choice(prompt) for _ in range(cfg.window + cfg.n - 3)]
        self.past: list[list[int] | None] = [first, *[None] * (cfg.n - 2)]
        self.pool: dict[int, list[tuple[int, ...]]] = {}
        self.text: list[int] = []
        self.extend([*prompt, argmax(prompt)])

    @property
    def levels(self) -> list[list[int]]:
        return [level for level in self.past if level is not None]

    def extend(self, tokens: Sequence[int]) -> None:
        """Add decoded tokens, each with its n-gram where the pool is also filled from the text."""
        for token in tokens:
            self.text.append(token)
            if self.cfg.from_prompt and len(self.text) >= self.cfg.n:
                self.remember(self.text[-self.cfg.n :])

    def remember(self, ngram: Sequence[int]) -> None:
        """Insert into the list of the first token; the least recently used is dropped."""
        known = self.pool.setdefault(ngram[0], [])
        if tuple(ngram[1:]) in known:
            known.remove(tuple(ngram[1:]))
        elif len(known) == self.cfg.guesses:
            del known[0]
        known.append(tuple(ngram[1:]))

    def chosen(self) -> list[int]:
        """The argmax after each token of the last level, column 0 of which the first step lacks."""
        level_0, *later = self.levels
        if not later and self.cfg.n > 2:
            return [self.argmax(self.text + level_0[: i + 1]) for i in range(len(level_0))]
        return [
            self.argmax(self.text + level_0[:i] + [level[i] for level in later])
            for i in range(len(level_0) + 1)
        ]

    def round(self) -> None:
        chosen, root = self.chosen(), self.text[-1]
        if None in self.past:
            before = self.levels
            new = chosen if len(before) == 1 else chosen[1:]
            levels = [*(level[1:] for level in before), new]
            self.past = [*levels, *[None] * (self.cfg.n - 1 - len(levels))]
            self.extend([self.argmax(self.text)])
            return
        emitted = self.verify()
        level_0, *later = self.levels
        for i, token in enumerate(chosen):
            first = root if i == 0 else level_0[i - 1]
            self.remember([first, *(level[i] for level in later), token])
        levels = [*later, chosen]
        self.past = [levels[0][1:], *levels[1:]]
        self.extend(emitted)

    def verify(self) -> list[int]:
        """The longest prefix of a guess that is the target's text, and the token after it."""
        best: list[int] = []
        for guess in self.pool.get(self.text[-1], [])[-self.verified :]:
            accepted: list[int] = []
            for token in guess:
                if self.argmax(self.text + accepted) != token:
                    break
                accepted.append(token)
            best = max(best, accepted, key=len)
        return [*best, self.argmax(self.text + best)]


@cache
def target_and_argmax(family: str) -> tuple[Target, Argmax]:
    """A target, and its next token by transformers alone: no cache and no mask."""
    target = tiny.target(family)

    @cache
    @torch.no_grad()
    def argmax(text: tuple[int, ...]) -> int:
        ids = torch.tensor([text])
        return int(target.model(input_ids=ids, use_cache=False).logits[0, -1].argmax())

    return target, lambda text: argmax(tuple(text))


class Recorder(Lookahead):
    """Records the states after a prompt and after every round, by the prompt."""

    def watch(self, *prompts: Sequence[int]) -> None:
        self.states: dict[tuple[int, ...], list[LookaheadState]] = {tuple(p): [] for p in prompts}

    def absorb(self, state: LookaheadState | None, trace: Trace) -> LookaheadState:
        new = super().absorb(state, trace)
        for prompt, states in self.states.items():
            if new.text[: len(prompt)] == prompt:
                states.append(new)
        return new


def assert_follows(states: Sequence[LookaheadState], slow: Schedule) -> None:
    """The states of the first rounds have the schedule's text, window and pool."""
    assert states[0].window is None
    assert len(states) > 2 * slow.cfg.n
    for state in states[:-2]:  # the budget may end the last drafts early
        assert state.text == tuple(slow.text)
        if state.window is not None:
            assert state.window.levels == tuple(map(tuple, slow.levels))
        assert state.pool == {first: tuple(guesses) for first, guesses in slow.pool.items()}
        slow.round()


def wide(n: int = 5, guesses: int = 7) -> DynamicTree:
    """A tree with room for all n-grams of a token."""
    return DynamicTree(n - 1, guesses, guesses * (n - 1))


SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("gemma3", {"from_prompt": True, "seed": 3}),
    ("gpt2", {"n": 4, "window": 9, "guesses": 3}),
    ("llama", {"n": 2, "window": 4, "guesses": 2}),
    ("llama", {"n": 3, "window": 1, "guesses": 1, "from_prompt": True}),
]


@pytest.mark.parametrize("case", SCHEDULES, ids=str)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_window_and_pool_equal_the_published_schedule_after_every_round(
    case: tuple[str, dict[str, Any]], tree: bool
) -> None:
    """Prompts of several lengths, alone and together; windows are then of unequal sizes."""
    target, argmax = target_and_argmax(case[0])
    drafter = build(target, Recorder, **case[1])
    cfg = drafter.cfg
    policy = wide(cfg.n, cfg.guesses) if tree else Chain(cfg.n - 1)
    requests = [Request(prompt, 30) for prompt in PROMPTS]
    for batch in (1, 2):
        drafter.watch(*PROMPTS)
        Engine(target, drafter, policy).generate_all(requests, batch)
        for prompt, states in drafter.states.items():
            verified = cfg.guesses if tree else 1
            assert_follows(states, Schedule(argmax, list(prompt), cfg, verified))


# ---- text of a period ----

PERIOD = 12


class CycleTarget(Target):
    """After token t comes t + 1, and after the last token the first; a state is its own token."""

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: AttentionCache | None = None,
        grad: bool = False,
        part: Part = WHOLE,
    ) -> TargetStates:
        last = self.embed(ids)
        assert cache is not None
        cache.reserve(ids.shape[1])
        cache.update(last[:, None], last[:, None], 0)
        cache.commit(positions)
        return TargetStates(last[..., :0], last)


def cycle() -> Target:
    model = small_model("llama", vocab_size=PERIOD, hidden_size=PERIOD, num_hidden_layers=1)
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight").copy_(torch.eye(PERIOD))
        model.get_parameter("lm_head.weight").copy_(torch.eye(PERIOD).roll(1, 0))
    return CycleTarget(model)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_text_of_a_period_is_accepted_whole_and_a_full_match_emits_the_next_token(n: int) -> None:
    """The authors' greedy code ends such a round after the n - 1 accepted tokens."""
    target, budget = cycle(), 110
    out = Engine(target, build(target, Lookahead, n=n), Chain(n - 1)).generate(
        list(range(PERIOD)), budget
    )
    assert out.ids == [i % PERIOD for i in range(budget)]
    late = n + PERIOD  # the window is full, and every column has had every token of the period
    rounds = list(zip(out.accepted, out.room, strict=True))
    assert {accepted for accepted, room in rounds[late:] if room >= n - 1} == {n - 1}
    assert out.origins[-3 * n : -2 * n].count("bonus") == 1
    assert sum(out.accepted) + len(out.accepted) + 1 == budget
    if n == 5:
        assert out.tau is not None
        assert out.tau > 3


# ---- sampling ----

SAMPLED: list[tuple[str, Policy]] = [
    ("drawn chain", Chain(2)),
    ("best chain", Chain(2, "best")),
    ("dynamic tree", DynamicTree(2, 2, 4)),
    ("drawn tree", StaticTree(((0,), (1,), (0, 0)), "drawn")),
]


@pytest.mark.parametrize("policy", [policy for _, policy in SAMPLED], ids=[n for n, _ in SAMPLED])
def test_sampling_has_exactly_the_distribution_of_plain_sampling(policy: Policy) -> None:
    """Five tokens jointly over three; the window for n = 3 is full in the second round."""
    size: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    target = tiny.target(vocab_size=3, **size, **heads)
    drafter = build(target, Lookahead, n=3, window=2, guesses=3, from_prompt=True)
    sampling, prompt, budget = Sampling(0.8, 1.0, 2), [1, 2, 1, 2, 0], 5
    decoder, drafted = Engine(target, drafter, policy, sampling=sampling), Counter[str]()

    def run(rng: RandomSource) -> Context:
        tiny.inject_random_source(decoder, rng)
        out = decoder.generate(prompt, budget)
        drafted.update(drafted=sum(out.drafted), accepted=sum(out.accepted))
        return tuple(out.ids)

    law: Law = {(): 1.0}
    with torch.no_grad():
        for _ in range(budget):
            ids = torch.tensor([[*prompt, *tokens] for tokens in law])
            rows = sampling.probs(target.model(input_ids=ids, use_cache=False).logits[:, -1])
            law = {
                (*tokens, token): before * p
                for (tokens, before), row in zip(law.items(), rows.tolist(), strict=True)
                for token, p in enumerate(row)
                if p > 0
            }
    assert distance(enumerate_law(run), law) < 1e-5
    assert 0 < drafted["accepted"] < drafted["drafted"]


# ---- settings ----


def test_the_draft_waits_until_the_window_is_full() -> None:
    """As in the authors' code, also where the pool is filled from the prompt."""
    target = tiny.target()
    drafter = build(target, Lookahead, from_prompt=True)
    out = Engine(target, drafter, Chain(4)).generate([5, 9, 5, 9, 7] * 4, 24)
    assert out.drafted[:3] == [0, 0, 0]
    assert max(out.drafted) == 4


@pytest.mark.parametrize("piece", [1, 3, 11])
def test_ngrams_of_a_prompt_are_the_same_for_pieces_of_any_size(piece: int) -> None:
    drafter, state = build(tiny.target(), Lookahead, from_prompt=True, n=3, guesses=2), None
    text = [5, 9, 5, 9, 7, 5, 9, 5, 9, 7, 5, 9]
    for first in range(0, len(text) - 1, piece):
        part = text[first : min(first + piece, len(text) - 1)]
        state = drafter.absorb(state, trace_of(part, text[first + len(part)]))
    assert state is not None
    assert state.text == tuple(text)
    assert state.pool == {5: ((9, 5), (9, 7)), 9: ((5, 9), (7, 5)), 7: ((5, 9),)}


class RepeatedToken(Schedule):
    """The authors' greedy code: the history has a round's last token in place of each of them."""

    def __init__(self, *args: Any) -> None:
        self.history: list[int] = []
        super().__init__(*args)

    def extend(self, tokens: Sequence[int]) -> None:
        repeated = [tokens[-1]] * len(tokens) if self.text else tokens  # the prompt is right
        for token, copy in zip(tokens, repeated, strict=True):
            self.text.append(token)
            self.history.append(copy)
            if len(self.history) >= self.cfg.n:
                self.remember(self.history[-self.cfg.n :])


def test_the_pool_holds_the_ngrams_of_the_answer() -> None:
    """A round that accepts a whole guess adds the n-gram of each of its tokens."""
    target, prompt = cycle(), list(PROMPTS[0])
    drafter = build(target, Recorder, n=3, from_prompt=True)
    drafter.watch(prompt)
    Engine(target, drafter, wide(3)).generate(prompt, 40)
    (states,) = drafter.states.values()
    assert max(len(b.text) - len(a.text) for a, b in pairwise(states)) == 3
    right = Schedule(lambda text: (text[-1] + 1) % PERIOD, prompt, drafter.cfg, 7)
    assert_follows(states, right)
    wrong = RepeatedToken(right.argmax, prompt, drafter.cfg, 7)
    for _ in states[:-2]:
        wrong.round()
    assert wrong.text[:30] == right.text[:30]
    assert wrong.pool != right.pool


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"n": 1}, "n"),
        ({"n": 3, "depths": 3}, "depths"),
        ({"window": 0}, "window"),
        ({"guesses": 0}, "guesses"),
        ({"seed": -1}, "seed"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        Config(**settings)


def test_a_window_wider_than_the_context_is_refused() -> None:
    shape = tiny.target().shape()
    Lookahead.check_settings(Config(window=125), shape)
    with pytest.raises(ConfigError, match="exceeds the target's 128") as error:
        Lookahead.check_settings(Config(window=126), shape)
    assert error.value.key == "drafter.window"
