"""The window and the pool of lookahead decoding by hand, and what the window must not change."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from outrider.models.cache.kv_cache import KVCache
from outrider.models.cache.split_cache import SplitCache
from outrider.models.decode import tree_layout
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.request import DialogueCache, Request
from outrider.models.decode.static_tree import StaticTree
from outrider.models.decode.tree import Tree
from outrider.models.drafters.lookahead import Lookahead, LookaheadState
from outrider.models.drafting.drafter import TargetInput
from outrider.models.drafting.lookahead_window import (
    Pool,
    Window,
    WindowRows,
    add_ngrams,
    merge_guesses,
    most_rows,
)
from outrider.models.target.target import Target
from tests import tiny
from tests.families import FAMILIES, small_model
from tests.test_lookahead import PROMPTS, Recorder, build, wide
from tests.test_lookup import trace_of

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
