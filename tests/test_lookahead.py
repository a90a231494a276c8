"""Lookahead decoding: its schedule against a literal one, its rows in the target's forward."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.models.decode import tree_layout
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.request import DialogueCache, Request
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.static_tree import StaticTree
from outrider.models.decode.tree import Tree
from outrider.models.drafter import TargetInput
from outrider.models.drafters.lookahead import Config, Lookahead, LookaheadState
from outrider.models.interface import LayerCache, Trace
from outrider.models.kv_cache import KVCache
from outrider.models.layer_parts import WHOLE, Part
from outrider.models.lookahead_window import (
    Pool,
    Window,
    WindowRows,
    add_ngrams,
    merge_guesses,
    most_rows,
)
from outrider.models.split_cache import SplitCache
from outrider.models.target import Target, TargetStates
from outrider.models.vocab import DraftVocab
from tests import tiny
from tests.enumeration import Context, Law, distance, enumerate_law
from tests.families import FAMILIES, small_model
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


# ---- the window, by hand ----

FULL = Window(((1, 2), (3, 4, 5), (6, 7, 8)))  # n = 4, width 3: the example of lookahead_window.py


def test_columns_become_ngrams_and_levels_move_up() -> None:
    assert FULL.ngrams(9, [10, 11, 12]) == [(9, 3, 6, 10), (1, 4, 7, 11), (2, 5, 8, 12)]
    assert FULL.advance([10, 11, 12], 4).levels == ((4, 5), (6, 7, 8), (10, 11, 12))


def test_a_window_gains_a_level_and_loses_a_column_until_it_is_full() -> None:
    window = Window.start([7], n=4, width=3, seed=0)
    assert window.levels == ((7, 7, 7, 7),)
    window = window.advance([1, 2, 3, 4, 5], 4)
    assert window.levels == ((7, 7, 7), (2, 3, 4, 5))
    assert not window.is_full(4)
    window = window.advance([1, 2, 3, 4], 4)
    assert window.levels == ((7, 7), (3, 4, 5), (2, 3, 4))
    assert window.is_full(4)


def test_rows_follow_the_tree_and_attend_to_the_prefix_the_root_and_their_own_column() -> None:
    """Two prompts of 2 and 1 cached rows, trees of the root and one node; the second is shorter."""
    short = Window(((1,),))
    rows = WindowRows.of([FULL, short], torch.device("cpu"))
    assert rows.ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8], [1, 0, 0, 0, 0, 0, 0, 0]]
    tree = Tree.chain(torch.tensor([[9, 20], [9, 20]]))
    positions, visible = tree_layout.positions_and_mask(tree, [2, 1])
    out = rows.after(TargetInput(tree.ids, positions, visible, tree), [2, 1], last=6)
    assert out.ids[0].tolist() == [9, 20, 1, 2, 3, 4, 5, 6, 7, 8]
    assert out.positions[0].tolist() == [2, 3, 3, 4, 3, 4, 5, 4, 5, 6]
    assert out.positions[1].tolist() == [1, 2, 2, 1, 1, 1, 1, 1, 1, 1]
    expected = """
        o o r . . . . . . . . .
        o o r n . . . . . . . .
        o o r . 1 . . . . . . .
        o o r . 1 2 . . . . . .
        o o r . . . 3 . . . . .
        o o r . 1 . . 4 . . . .
        o o r . 1 2 . . 5 . . .
        o o r . . . 3 . . 6 . .
        o o r . 1 . . 4 . . 7 .
        o o r . 1 2 . . 5 . . 8
    """
    grid = [[cell != "." for cell in line.split()] for line in expected.split("\n") if line.strip()]
    assert out.visible[0].tolist() == grid
    second = out.visible[1].nonzero().tolist()
    assert second[:7] == [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1]]
    assert second[7:] == [[2, 3], *([row, c] for row in range(3, 10) for c in (0, 1, row + 1))]
    states = torch.arange(20.0).view(2, 10, 1)
    assert rows.newest_states(states, 2).flatten(1).tolist() == [[7, 8, 9], [10, 12, 10]]


def test_rows_beyond_the_last_position_take_it() -> None:
    rows = WindowRows.of([FULL], torch.device("cpu"))
    tree = Tree.chain(torch.tensor([[9]]))
    positions, visible = tree_layout.positions_and_mask(tree, [4])
    out = rows.after(TargetInput(tree.ids, positions, visible, tree), [4], last=5)
    assert out.positions[0].tolist() == [4, 5, 5, 5, 5, 5, 5, 5, 5]


@pytest.mark.parametrize(("n", "width"), [(2, 1), (2, 5), (5, 1), (4, 3), (5, 7)])
def test_no_window_has_more_rows_than_the_cache_has_room_for(n: int, width: int) -> None:
    window, sizes = Window.start([7], n, width, 0), list[int]()
    for _ in range(n + 1):
        sizes.append(sum(map(len, window.levels)))
        window = window.advance([7] * window.columns, n)
    assert sizes[-1] == (n - 1) * width - 1
    assert max(sizes) == most_rows(n, width)


# ---- the pool ----


def test_the_pool_keeps_the_latest_used_ngrams() -> None:
    pool: Pool = {}
    for second in (1, 2, 3, 2, 4):
        pool = add_ngrams(pool, [(0, second)], most=3)
    assert pool == {0: ((3,), (2,), (4,))}


def test_guesses_share_the_probability_by_their_use() -> None:
    """Weights 1, 1/2, 1/4 of the latest three; the latest is the most probable chain."""
    draft = merge_guesses([(4, 6), (4, 5), (3, 8)])
    assert {token: p for token, (p, _) in draft.items()} == pytest.approx({3: 4 / 7, 4: 3 / 7})
    after_four = {token: p for token, (p, _) in draft[4][1].items()}
    assert after_four == pytest.approx({5: 2 / 3, 6: 1 / 3})
    assert draft[3][1] == {8: (1.0, {})}
    assert merge_guesses([]) == {}


# ---- text of a period ----

PERIOD = 12


class CycleTarget(Target):
    """After token t comes t + 1, and after the last token the first; a state is its own token."""

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: LayerCache | None = None,
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


# ---- what the window must not change ----


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_with_all_ngrams_equals_plain_decoding(family: str) -> None:
    """test_lookup.py has the default settings and narrow drafts; here all n-grams are verified."""
    target = Target(small_model(family))
    drafter, accepted = build(target, Lookahead, n=3, window=5, guesses=4, from_prompt=True), 0
    requests = [Request(prompt, 16) for prompt in (*PROMPTS, [5, 9] * 9)]
    plain = [out.ids for out in Engine(target, None, None).generate_all(requests, 1)]
    ranks = StaticTree(((0,), (1,), (2,), (0, 0), (1, 0)))
    for policy in (Chain(2), wide(3, 4), ranks):
        for batch in (1, 4):
            outs = Engine(target, drafter, policy).generate_all(requests, batch)
            assert [out.ids for out in outs] == plain
            accepted += sum(sum(out.accepted) for out in outs)
    assert accepted > 0


class Checked(Engine):
    """Compares every slot with a fresh prefill after every round."""

    rounds_checked = 0

    def _round(self, active: list[Any]) -> list[int]:
        counts = super()._round(active)
        for slot, one in enumerate(active):
            text = [*one.request.prompt, *one.out.ids[:-1]]
            fresh, count = self.target.new_cache(len(text)), len(text)
            causal = torch.ones(1, count, count, dtype=torch.bool).tril()
            self.target.forward(torch.tensor([text]), torch.arange(count)[None], causal, fresh)
            assert self.cache.lengths[slot] == count
            assert torch.equal(self.cache.positions(slot), fresh.positions())
            for layer in range(self.target.num_layers):
                actual, expected = self.cache.rows(layer, slot), fresh.rows(layer)
                for mine, theirs in zip(actual, expected, strict=True):
                    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
        self.rounds_checked += 1
        return counts


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("policy", [Chain(4), wide()], ids=["chain", "tree"])
def test_every_slot_equals_a_fresh_prefill_after_every_round(family: str, policy: Policy) -> None:
    target = tiny.target(family)
    decoder = Checked(target, build(target, Lookahead), policy)
    outs = decoder.generate_all([Request(prompt, 24) for prompt in PROMPTS], 3)
    assert sum(sum(out.accepted) for out in outs) > 0
    assert decoder.rounds_checked > 8


class Rounds(NamedTuple):
    """A decoder in the middle of two answers; both slots of the cache are selected."""

    drafter: Lookahead
    cache: KVCache | SplitCache
    states: list[LookaheadState]
    prefix: list[int]

    def crop(self) -> None:
        """Drop what was appended."""
        for slot, length in enumerate(self.prefix):
            self.cache.crop(slot, length)


def after_rounds(target: Target, **settings: Any) -> Rounds:
    """Decode two prompts together for six rounds: three with a full window."""
    drafter = build(target, Recorder, **settings)
    drafter.watch(*PROMPTS[:2])
    decoder = Engine(target, drafter, Chain(2))
    for _ in decoder.run([Request(prompt, 40) for prompt in PROMPTS[:2]], 2):
        if decoder.rounds == 6:
            break
    states = [of_prompt[-1] for of_prompt in drafter.states.values()]
    decoder.cache.select_slots(0, 2)
    return Rounds(drafter, decoder.cache, states, decoder.cache.active_lengths)


@torch.inference_mode()
def tree_states(target: Target) -> tuple[Tensor, Tensor]:
    """The states of a tree without windows, and with them."""
    drafter, cache, states, prefix = rounds = after_rounds(target)
    ids = torch.tensor([[one.text[-1], 7, 12, 30] for one in states])
    parents, depths = torch.tensor([[-1, 0, 0, 1]] * 2), torch.tensor([[0, 1, 1, 2]] * 2)
    tree = Tree.from_parents(ids, parents, depths, 2)
    new = TargetInput(ids, *tree_layout.positions_and_mask(tree, prefix), tree)
    alone = target.forward(new.ids, new.positions, new.visible, cache)
    rounds.crop()
    together, _ = drafter.run_target(target, cache, states, new)
    assert cache.active_lengths == [length + 4 for length in prefix]
    return alone.last, together.last


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mixtral"])
def test_the_states_of_a_tree_are_those_without_a_window(family: str) -> None:
    alone, together = tree_states(tiny.target(family))
    assert together.shape == (2, 4, 32)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_a_tree_that_attends_to_the_window_has_other_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control of the test above."""
    right = WindowRows.after

    def wrong(self: WindowRows, new: TargetInput, *args: Any) -> TargetInput:
        out = right(self, new, *args)
        return out._replace(visible=out.visible | out.visible[:, -1:])

    monkeypatch.setattr(WindowRows, "after", wrong)
    alone, together = tree_states(tiny.target())
    assert (together - alone).abs().max() > 0.01


def test_a_used_state_can_be_used_again() -> None:
    """Two runs of the target from one state give one result, and the state stays as it was."""
    target = tiny.target()
    drafter, cache, states, prefix = rounds = after_rounds(target, from_prompt=True)
    copies = [(one.text, one.window, dict(one.pool)) for one in states]
    roots, results = Tree.chain(torch.tensor([[one.text[-1]] for one in states])), list[Any]()
    for _ in range(2):
        new = TargetInput(roots.ids, *tree_layout.positions_and_mask(roots, prefix), roots)
        with torch.inference_mode():
            results.append(drafter.run_target(target, cache, states, new)[1])
        rounds.crop()
        drafter.absorb(states[0], trace_of([states[0].text[-1]], 3))
    assert results[0] == results[1]
    assert all(a.window != b.window for a, b in zip(states, results[0], strict=True))
    assert [(one.text, one.window, dict(one.pool)) for one in states] == copies


def test_a_window_may_reach_beyond_the_last_position() -> None:
    """GPT-2 has a table of 128 positions, the last of which the answer uses."""
    target = Target(small_model("gpt2"))
    prompt = [5, 9, 7] * 35
    plain = Engine(target, None, None).generate(prompt, 23)
    out = Engine(target, build(target, Lookahead, window=20), wide()).generate(prompt, 23)
    assert len(prompt) + 23 == target.shape().max_positions
    assert out.ids == plain.ids


def test_a_later_turn_of_a_dialogue_starts_a_new_window() -> None:
    target, dialogue = tiny.target(), DialogueCache()
    drafter, text = build(target, Recorder, from_prompt=True), list[int]()
    for words in ([5, 9, 5, 9, 7], [11, 40]):
        text += words
        drafter.watch(text)
        decoder = Engine(target, drafter, wide())
        *_, last = decoder.run([Request(text, 20)], 1, dialogue=dialogue)
        assert last.out.ids == Engine(target, None, None).generate(text, 20).ids
        first, second, *_ = drafter.states[tuple(text)]
        assert first.window is None
        assert second.window is not None
        assert len(second.window.levels) == 2
        text += last.out.ids


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
    build(tiny.target(), Lookahead, window=125)
    with pytest.raises(ConfigError, match="exceeds the target's 128") as error:
        build(tiny.target(), Lookahead, window=126)
    assert error.value.key == "drafter.window"
