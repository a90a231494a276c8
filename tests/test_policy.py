"""Draft tokens of the policies: chains as drawn, and dynamic trees against literal ones."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Draft, Policy
from outrider.models.decode.rules.rule_table import BEST, COUPLED
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.static_tree import StaticTree
from outrider.models.decode.tree import Tree
from outrider.models.drafting.vocab import DraftVocab
from tests import tiny
from tests.enumeration import Law, distance, enumerate_law
from tests.tiny import (
    TOKENS,
    Row,
    ScriptedDrafter,
    Text,
    inject_random_source,
    logits_after,
    mean_target,
    paths,
)
from tests.trees import checked

TEXT: Text = (3, 1, 4)
VOCAB = 7
GREEDY, WARM = Sampling(), Sampling(0.8, 1.0, 4)


def propose(
    policy: Policy,
    drafter: ScriptedDrafter,
    room: int = 99,
    sampling: Sampling = GREEDY,
    seed: int = 0,
) -> Draft:
    """For one prompt."""
    return tiny.propose(policy, drafter, [TEXT], [room], sampling, [seed])


def drafter_of(seed: int = 0, scale: float = 1.0) -> ScriptedDrafter:
    return ScriptedDrafter(tiny.random_logits(VOCAB, seed, scale), VOCAB)


def drafted(tree: Tree, row: int = 0) -> int:
    """Real nodes, the root left out."""
    return int(tree.real[row].sum()) - 1


def texts(tree: Tree, row: int = 0) -> set[Text]:
    """The path of tokens to every drafted node; no two nodes have the same one."""
    actual = paths(checked(tree), row)
    assert len(actual) == len(set(actual))
    return set(actual)


# ---- EAGLE-2, literally as in the paper ------------------------------------------------------


def literally(row: Row, depth: int, width: int, budget: int, gain: float = 0.0) -> set[Text]:
    """Expand the `width` best of each level, then keep the `budget` best of all; paths as text.

    Ties go to the shallower node, then to the one that was proposed first. With a gain, OPT-Tree:
    no further level once the best tree's sum of path probabilities has risen by no more than it.
    """
    scores: dict[Text, float] = {(): 0.0}
    order: dict[Text, int] = {}
    frontier: list[Text] = [()]
    worth = 0.0
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
        before, worth = worth, expected(scores, order, budget)
        if gain > 0 and worth - before <= gain:
            break
    return set(sorted(order, key=lambda c: (-scores[c], len(c), order[c]))[:budget])


def expected(scores: dict[Text, float], nodes: dict[Text, int], budget: int) -> float:
    """Tokens that the best `budget` nodes are expected to have accepted, by the drafter."""
    chances = torch.tensor([scores[node] for node in nodes], dtype=torch.float64).exp()
    return float(chances.sort(descending=True).values[:budget].sum())


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**16),
    scale=st.sampled_from([0.3, 1.0, 4.0]),
    depth=st.integers(1, 5),
    width=st.integers(1, 5),
    budget=st.integers(1, 30),
    gain=st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.3, 0.7]),
)
def test_dynamic_tree_matches_the_literal_algorithm(
    seed: int, scale: float, depth: int, width: int, budget: int, gain: float
) -> None:
    drafter = drafter_of(seed, scale)
    tree = propose(DynamicTree(depth, width, budget, gain), drafter).tree
    assert int(tree.ids[0, 0]) == TEXT[-1]
    assert texts(tree) == literally(drafter.row, depth, width, budget, gain)


def test_dynamic_tree_by_hand() -> None:
    """Level 1: .6 .3 .1; below each the same. Five best: 0, 00 (.36), 1 (.3), 000, 01 (.18).

    000 is .216; 01 and 10 are both .18, and 01 was proposed first.
    """
    chances = torch.tensor([0.6, 0.3, 0.1]).log()
    drafter = ScriptedDrafter(lambda _: chances, 3)
    tree = propose(DynamicTree(depth=3, width=2, budget=5), drafter).tree
    assert texts(tree) == {(0,), (1,), (0, 0), (0, 0, 0), (0, 1)}
    assert tree.ids.tolist() == [[4, 0, 1, 0, 1, 0]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1, 3]]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2, 3]]


@pytest.mark.parametrize(
    ("gain", "levels"), [(0.0, 4), (0.01, 3), (0.35, 3), (0.37, 2), (0.89, 2), (0.91, 1)]
)
def test_growing_ends_when_a_level_adds_too_little(gain: float, levels: int) -> None:
    """The best three of .6 .3 after every node.

    Level 1 has .6 + .3, so it adds .9; level 2 makes it .6 + .36 + .3 and adds .36; the best of
    level 3 is .216, less than any of these, so it adds nothing.
    """
    chances = torch.tensor([0.6, 0.3, 0.1]).log()
    policy = DynamicTree(depth=4, width=2, budget=3, gain=gain)
    assert propose(policy, ScriptedDrafter(lambda _: chances, 3)).tree.levels == levels


def test_equal_scores_prefer_shallow_nodes() -> None:
    """A drafter that is sure of everything: its path of score 0 is filled from above."""

    def sure(text: Text) -> torch.Tensor:
        logits = torch.full((4,), -200.0)
        logits[len(text) % 2] = 200.0
        return logits

    tree = propose(DynamicTree(depth=4, width=2, budget=3), ScriptedDrafter(sure, 4)).tree
    assert texts(tree) == {(1,), (1, 0), (1, 0, 1)}


def test_scores_are_those_of_the_raw_softmax_whatever_the_temperature() -> None:
    """The shape of the tree does not depend on how the target will be sampled."""
    policy = DynamicTree(3, 3, 9)
    assert texts(propose(policy, drafter_of(), sampling=WARM).tree) == texts(
        propose(policy, drafter_of()).tree
    )


def test_best_drafts_have_no_rows() -> None:
    """They are chosen, not drawn (R1)."""
    for policy in (DynamicTree(3, 3, 9), Chain(3, BEST)):
        assert propose(policy, drafter_of(), sampling=WARM).q_rows is None


# ---- budgets and room ----------------------------------------------------------------------------

POLICIES: list[Policy] = [
    Chain(4),
    DynamicTree(4, 3, 10),
    DynamicTree(4, 5, 1),
    DynamicTree(1, 3, 10),  # fewer candidates than its budget
    DynamicTree(4, 3, 10, gain=0.3),
    Chain(4, confidence=0.2),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_no_round_drafts_more_nodes_than_the_budget(policy: Policy, sampling: Sampling) -> None:
    """The cache has room for `nodes`."""
    for seed, room in itertools.product(range(5), (1, 2, 99)):
        tree = checked(propose(policy, drafter_of(seed), room, sampling).tree)
        assert 1 <= drafted(tree) <= tree.size - 1 <= policy.nodes
        assert int(tree.depths.max()) <= tree.levels <= policy.levels


def test_the_budget_is_used_up_when_there_are_candidates() -> None:
    for budget in (1, 5, 12):
        assert drafted(propose(DynamicTree(3, 3, budget), drafter_of()).tree) == budget
    assert drafted(propose(DynamicTree(2, 2, 50), drafter_of()).tree) == 2 + 4


@pytest.mark.parametrize("room", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("policy", POLICIES[:2], ids=str)
def test_no_token_is_deeper_than_the_depth_limit(policy: Policy, room: int) -> None:
    tree = propose(policy, drafter_of(scale=8.0), room).tree
    assert int((tree.depths * tree.real).max()) == min(room, 4)


def test_vocabulary_smaller_than_the_width() -> None:
    """Two tokens, width 5: 2 + 4 candidates, then 8 below the four best."""
    drafter = ScriptedDrafter(tiny.random_logits(2), 2)
    tree = propose(DynamicTree(3, 5, 99), drafter).tree
    assert texts(tree) == literally(drafter.row, 3, 5, 99)
    assert drafted(tree) == 2 + 4 + 8


# ---- chains --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "sampling"), [("drawn", GREEDY), (BEST, WARM), (COUPLED, GREEDY)]
)
def test_chain_of_argmax_tokens(draft: str, sampling: Sampling) -> None:
    drafter, text = drafter_of(), TEXT
    for _ in range(4):
        text = (*text, int(drafter.row(text).argmax()))
    made = propose(Chain(4, draft), drafter, sampling=sampling)
    assert made.tree.ids.tolist() == [list(text[2:])]
    assert made.q_rows is None


def test_a_sampled_chain_carries_the_rows_it_was_drawn_from() -> None:
    """Warped as the target's will be, over the target's vocabulary; the leaf's row is empty."""
    drafter = drafter_of()
    draft = propose(Chain(4), drafter, sampling=WARM)
    assert draft.q_rows is not None
    assert draft.q_rows.shape == (1, 5, VOCAB)
    text = list(TEXT)
    for row, token in zip(draft.q_rows[0], draft.tree.ids[0, 1:].tolist(), strict=False):
        torch.testing.assert_close(row, WARM.probs(drafter.row(tuple(text))[None])[0])
        assert row[token] > 0
        text.append(token)
    assert not draft.q_rows[0, -1].any()


def test_a_sampled_chain_is_drawn_with_the_chances_of_its_rows() -> None:
    """800 first tokens against their row; four standard errors."""
    drafter, count = drafter_of(), 800
    row = WARM.probs(drafter.row(TEXT)[None])[0]
    texts, rooms = [TEXT] * count, [9] * count
    draft = tiny.propose(Chain(1), drafter, texts, rooms, WARM, range(count))
    shares = torch.bincount(draft.tree.ids[:, 1], minlength=VOCAB) / count
    assert ((shares - row).abs() <= 4 * (row * (1 - row) / count).sqrt()).all()


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0)], ids=["greedy", "warm"])
@pytest.mark.parametrize("least", [0.35, 0.4, 0.5])
def test_chain_ends_after_the_first_place_of_low_confidence(
    least: float, sampling: Sampling
) -> None:
    """By the largest probability there, whichever token is drawn (R2); the token is verified."""
    drafter, lengths = drafter_of(scale=2.0), set[int]()
    for seed in range(12):
        whole = propose(Chain(6), drafter, sampling=sampling, seed=seed).tree.ids[0].tolist()
        tokens = whole[:1]
        for token in whole[1:]:
            confidence = drafter.row((*TEXT, *tokens[1:])).softmax(-1).max()
            tokens.append(token)
            if confidence < least:
                break
        draft = propose(Chain(6, confidence=least), drafter, sampling=sampling, seed=seed)
        assert paths(draft.tree) == [tuple(tokens[1 : n + 1]) for n in range(1, len(tokens))]
        lengths.add(len(tokens) - 1)
    assert sampling.greedy or len(lengths) > 1


class Dropped(Chain):
    """Wrong on purpose: the unlikely guess itself is not verified (R2)."""

    def propose(self, *args: Any, **kwargs: Any) -> Draft:
        draft = super().propose(*args, **kwargs)
        assert draft.q_rows is not None
        assert isinstance(self.confidence, float)
        rows, ids = draft.q_rows[:, :-1], draft.tree.ids[:, 1:]
        likely = (rows.gather(2, ids[..., None])[..., 0] >= self.confidence).cumprod(-1)
        return Draft(Tree.chain(draft.tree.ids, likely.sum(-1)), draft.q_rows)


@pytest.mark.parametrize(
    ("kind", "least", "most"), [(Chain, 0.0, 1e-12), (Dropped, 0.005, 1.0)], ids=["kept", "dropped"]
)
def test_early_stop_is_exact_only_if_the_unlikely_token_is_verified(
    kind: type[Chain], least: float, most: float
) -> None:
    """Four tokens jointly, in float64: every random outcome, run once."""
    sampling, prompt, count = Sampling(1.0, 1.0, 2), [1, 3, 4, 2], 4
    noise, target = tiny.random_logits(TOKENS, seed=3, scale=1.5), mean_target(torch.float64)
    drafter = ScriptedDrafter(lambda text: noise(text).double(), TOKENS)
    decoder = Engine(target, drafter, kind(2, confidence=0.4), sampling=sampling)

    def run(rng: RandomSource) -> Text:
        inject_random_source(decoder, rng)
        return tuple(decoder.generate(prompt, count).ids)

    law: Law = {(): 1.0}
    for _ in range(count):
        longer: Law = {}
        for prefix, chance in law.items():
            row = sampling.probs(logits_after(target, [*prompt, *prefix])[None])[0]
            longer.update({(*prefix, t): chance * p for t, p in enumerate(row.tolist()) if p > 0})
        law = longer
    assert least <= distance(enumerate_law(run), law) < most


# ---- a batch -------------------------------------------------------------------------------------

CROWD: list[Text] = [(3, 1, 4), (5,), (6, 2, 0, 1, 1, 3), (2, 2)]
ROOMS = [99, 2, 3, 1]


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_drafts_of_a_batch_equal_single_drafts(policy: Policy, sampling: Sampling) -> None:
    """Whatever the rooms of the others; what only fills up is not real."""
    drafter = drafter_of(scale=2.0)
    draft = tiny.propose(policy, drafter, CROWD, ROOMS, sampling, range(4))
    checked(draft.tree)
    for row, (text, room) in enumerate(zip(CROWD, ROOMS, strict=True)):
        alone = tiny.propose(policy, drafter, [text], [room], sampling, [row])
        assert paths(draft.tree, row) == paths(alone.tree)
        assert max(map(len, paths(draft.tree, row))) <= room
        if alone.q_rows is not None:
            assert draft.q_rows is not None
            inner = drafted(alone.tree)  # rows of a chain's leaf and of what fills up are not read
            torch.testing.assert_close(draft.q_rows[row, :inner], alone.q_rows[0, :inner])


def test_prompt_at_its_depth_limit_gets_no_draft() -> None:
    for policy in POLICIES:
        tree = checked(tiny.propose(policy, drafter_of(), CROWD, [3, 0, 1, 0], seeds=range(4)).tree)
        assert [drafted(tree, row) > 0 for row in range(4)] == [True, False, True, False]


# ---- a reduced draft vocabulary ------------------------------------------------------------------


def reduced() -> ScriptedDrafter:
    """Proposes only 1, 4 and 6: its row has three entries."""
    drafter = ScriptedDrafter(tiny.random_logits(3), VOCAB)
    drafter.vocab = DraftVocab(torch.tensor([1, 4, 6]), VOCAB)
    return drafter


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("policy", POLICIES[:2], ids=str)
def test_drafted_tokens_are_ids_of_the_target(policy: Policy, sampling: Sampling) -> None:
    """The drafter gets target ids too: its texts hold no draft id."""
    heard: set[int] = set()
    drafter = reduced()
    row = drafter.row

    def listen(text: Text) -> torch.Tensor:
        heard.update(text[len(TEXT) :])
        return row(text)

    drafter.row = listen
    tree = propose(policy, drafter, sampling=sampling).tree
    assert set(tree.ids[0, 1:].tolist()) <= {1, 4, 6}
    assert heard <= {1, 4, 6}
    assert heard


@pytest.mark.parametrize("batch", [1, 3])
def test_rows_of_a_reduced_vocabulary_are_zero_elsewhere(batch: int) -> None:
    drafter, texts, rooms = reduced(), CROWD[:batch], [9] * batch
    rows = tiny.propose(Chain(3), drafter, texts, rooms, Sampling(1.0), range(batch)).q_rows
    assert rows is not None
    assert rows.shape == (batch, 4, VOCAB)
    assert not rows[..., [0, 2, 3, 5]].any()
    torch.testing.assert_close(rows[:, :3].sum(-1), torch.ones(batch, 3))


@pytest.mark.parametrize("build", [lambda: Chain(4), lambda: DynamicTree(4, 3, 10)])
def test_drafting_does_not_change_the_state(build: Callable[[], Policy]) -> None:
    """Called twice, a policy returns the same draft."""
    policy, drafter = build(), drafter_of()
    first, second = (propose(policy, drafter).tree.ids.tolist() for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Chain(0), "depth is at least 1"),
        (lambda: Chain(2, "sometimes"), "no draft 'sometimes'"),
        (lambda: Chain(2, confidence=1.5), "confidence between 0 and 1"),
        (lambda: DynamicTree(2, 2, 0), "at least 1"),
        (lambda: DynamicTree(2, 2, 4, gain=-1.0), "gain at least 0"),
        (lambda: StaticTree(()), "at least one node"),
        (lambda: StaticTree(((0,), (1, 0))), "has no parent"),
        (lambda: StaticTree(((1,),), "drawn"), "0, 1, 2"),
    ],
)
def test_invalid_policies_are_refused(make: Callable[[], Policy], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_paths_are_put_in_order() -> None:
    assert StaticTree(((0, 0), (1,), (0,))).paths == ((0,), (1,), (0, 0))
