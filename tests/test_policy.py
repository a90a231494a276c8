"""Which guesses are asked: chains as drawn, and EAGLE-2's tree against a literal one."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.eval.decode.policy import Chain, Draft, DynamicTree, Policy, Sampling
from outrider.eval.decode.tree import Tree
from outrider.models.base import Drafter
from outrider.models.vocab import DraftVocab
from tests import tiny
from tests.tiny import Heard, Row, Text, Told

TEXT: Text = (3, 1, 4)
VOCAB = 7
GREEDY, WARM = Sampling(), Sampling(0.8, 1.0, 4)


def propose(
    policy: Policy, drafter: Drafter, room: int = 99, sampling: Sampling = GREEDY, seed: int = 0
) -> Draft:
    generator = torch.Generator().manual_seed(seed)
    return policy.propose(drafter, Heard(TEXT), TEXT[-1], room, sampling, generator)


def told(seed: int = 0, scale: float = 1.0) -> Told:
    return Told(tiny.by_chance(VOCAB, seed, scale), VOCAB)


def texts(tree: Tree) -> set[Text]:
    """The path of tokens to every drafted node; raises if two nodes have the same one."""
    found = [tuple(tree.tokens[i] for i in tree.path(node)[1:]) for node in range(1, len(tree))]
    assert len(found) == len(set(found))
    return set(found)


# ---- EAGLE-2, written as the paper tells it ------------------------------------------------------


def literally(row: Row, depth: int, width: int, budget: int) -> set[Text]:
    """Expand the `width` best of each level, then keep the `budget` best of all; paths as text.

    Ties go to the shallower node, then to the one that was proposed first.
    """
    scores: dict[Text, float] = {(): 0.0}
    order: dict[Text, int] = {}
    frontier: list[Text] = [()]
    for _ in range(depth):
        level: list[Text] = []
        for node in frontier:
            chances = row(TEXT + node).log_softmax(-1)
            best = sorted(range(len(chances)), key=lambda t: (-float(chances[t]), t))[:width]
            for token in best:
                child = (*node, token)
                scores[child] = scores[node] + float(chances[token])
                order[child] = len(order)
                level.append(child)
        frontier = sorted(level, key=lambda c: (-scores[c], order[c]))[:width]
        frontier.sort(key=lambda c: order[c])
    return set(sorted(order, key=lambda c: (-scores[c], len(c), order[c]))[:budget])


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    scale=st.sampled_from([0.3, 1.0, 4.0]),
    depth=st.integers(1, 5),
    width=st.integers(1, 5),
    budget=st.integers(1, 30),
)
def test_the_dynamic_tree_is_that_of_the_paper(
    seed: int, scale: float, depth: int, width: int, budget: int
) -> None:
    drafter = told(seed, scale)
    tree = propose(DynamicTree(depth, width, budget), drafter).tree
    assert tree.tokens[0] == TEXT[-1]
    assert texts(tree) == literally(drafter.row, depth, width, budget)


def test_a_tree_by_hand() -> None:
    """Level 1: .6 .3 .1; below each the same. Five best: 0, 00 (.36), 1 (.3), 000, 01 (.18).

    000 is .216; 01 and 10 are both .18, and 01 was proposed first.
    """
    chances = torch.tensor([0.6, 0.3, 0.1]).log()
    drafter = Told(lambda _: chances, 3)
    tree = propose(DynamicTree(depth=3, width=2, budget=5), drafter).tree
    assert texts(tree) == {(0,), (1,), (0, 0), (0, 0, 0), (0, 1)}
    assert tree.tokens == [4, 0, 1, 0, 1, 0]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1, 3]
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 3]


def test_equal_scores_prefer_shallow_nodes() -> None:
    """A drafter that is sure of everything: its path of score 0 is filled from above."""

    def sure(text: Text) -> torch.Tensor:
        logits = torch.full((4,), -200.0)
        logits[len(text) % 2] = 200.0
        return logits

    tree = propose(DynamicTree(depth=4, width=2, budget=3), Told(sure, 4)).tree
    assert texts(tree) == {(1,), (1, 0), (1, 0, 1)}


def test_scores_are_those_of_the_raw_softmax_whatever_the_temperature() -> None:
    """The shape of the tree does not depend on how the target will be sampled."""
    policy = DynamicTree(3, 3, 9)
    assert texts(propose(policy, told(), sampling=WARM).tree) == texts(propose(policy, told()).tree)


def test_children_of_a_dynamic_tree_come_without_rows() -> None:
    """They are chosen, not drawn (R1)."""
    assert propose(DynamicTree(3, 3, 9), told(), sampling=WARM).q_rows is None


# ---- budgets and room ----------------------------------------------------------------------------

POLICIES: list[Callable[[], Policy]] = [
    lambda: Chain(4),
    lambda: DynamicTree(4, 3, 10),
    lambda: DynamicTree(4, 5, 1),
    lambda: DynamicTree(1, 3, 10),  # fewer candidates than its budget
]


@pytest.mark.parametrize("build", POLICIES)
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_no_round_drafts_more_nodes_than_promised(
    build: Callable[[], Policy], sampling: Sampling
) -> None:
    """The cache is as large as `nodes` says."""
    for seed, room in itertools.product(range(5), (1, 2, 99)):
        policy = build()
        assert 1 <= len(propose(policy, told(seed), room, sampling).tree) - 1 <= policy.nodes


def test_the_budget_is_used_up_when_there_are_candidates() -> None:
    for budget in (1, 5, 12):
        assert len(propose(DynamicTree(3, 3, budget), told()).tree) == budget + 1
    assert len(propose(DynamicTree(2, 2, 50), told()).tree) == 1 + 2 + 4


@pytest.mark.parametrize("room", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("build", POLICIES[:2])
def test_no_guess_is_deeper_than_the_room(build: Callable[[], Policy], room: int) -> None:
    tree = propose(build(), told(scale=8.0), room).tree
    assert int(tree.depths.max()) == min(room, 4)


def test_a_vocabulary_smaller_than_the_width_is_no_trouble() -> None:
    """Two tokens, width 5: 2 + 4 candidates, then 8 below the four best."""
    drafter = Told(tiny.by_chance(2), 2)
    tree = propose(DynamicTree(3, 5, 99), drafter).tree
    assert texts(tree) == literally(drafter.row, 3, 5, 99)
    assert len(tree) == 1 + 2 + 4 + 8


# ---- chains --------------------------------------------------------------------------------------


def test_a_greedy_chain_is_the_drafters_favourites() -> None:
    drafter, text = told(), TEXT
    for _ in range(4):
        text = (*text, int(drafter.row(text).argmax()))
    draft = propose(Chain(4), drafter)
    assert draft.tree.tokens == list(text[2:])
    assert draft.q_rows is None


def test_a_sampled_chain_carries_the_rows_it_was_drawn_from() -> None:
    """Warped as the target's will be, over the target's vocabulary, one per drafted token."""
    drafter = told()
    draft = propose(Chain(4), drafter, sampling=WARM)
    assert draft.q_rows is not None
    said = list(TEXT)
    for row, token in zip(draft.q_rows, draft.tree.tokens[1:], strict=True):
        torch.testing.assert_close(row, WARM.rows(drafter.row(tuple(said))[None])[0])
        assert row[token] > 0
        said.append(token)


def test_a_sampled_chain_is_drawn_with_the_chances_of_its_rows() -> None:
    """800 first tokens against their row; four standard errors."""
    drafter, count = told(), 800
    row = WARM.rows(drafter.row(TEXT)[None])[0]
    generator = torch.Generator().manual_seed(0)
    drawn = [
        Chain(1).propose(drafter, Heard(TEXT), 4, 9, WARM, generator).tree.tokens[1]
        for _ in range(count)
    ]
    shares = torch.bincount(torch.tensor(drawn), minlength=VOCAB) / count
    assert ((shares - row).abs() <= 4 * (row * (1 - row) / count).sqrt()).all()


# ---- a reduced draft vocabulary ------------------------------------------------------------------


def reduced() -> Told:
    """Proposes only 1, 4 and 6: its row has three entries."""
    drafter = Told(tiny.by_chance(3), VOCAB)
    drafter.vocab = DraftVocab(torch.tensor([1, 4, 6]), VOCAB)
    return drafter


@pytest.mark.parametrize("build", POLICIES[:2])
def test_drafted_tokens_are_ids_of_the_target(build: Callable[[], Policy]) -> None:
    """The drafter is told target ids too: its texts hold no draft id."""
    heard: set[int] = set()
    drafter = reduced()
    row = drafter.row

    def listen(text: Text) -> torch.Tensor:
        heard.update(text[len(TEXT) :])
        return row(text)

    drafter.row = listen
    tree = propose(build(), drafter).tree
    assert set(tree.tokens[1:]) <= {1, 4, 6}
    assert heard <= {1, 4, 6}
    assert heard


def test_rows_of_a_reduced_vocabulary_are_zero_elsewhere() -> None:
    rows = propose(Chain(3), reduced(), sampling=Sampling(1.0)).q_rows
    assert rows is not None
    assert rows.shape == (3, VOCAB)
    assert not rows[:, [0, 2, 3, 5]].any()
    torch.testing.assert_close(rows.sum(-1), torch.ones(3))


@pytest.mark.parametrize("build", POLICIES[:2])
def test_the_state_is_left_as_it_was(build: Callable[[], Policy]) -> None:
    """Asked twice, a policy says the same."""
    drafter, state = told(), Heard(TEXT)
    first, second = (
        build().propose(drafter, state, 4, 9, GREEDY, torch.Generator()).tree.tokens
        for _ in range(2)
    )
    assert first == second
    assert state == Heard(TEXT)
