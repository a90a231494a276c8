"""Trees of one shape: every node against a literal re-statement, and the output distribution."""

from random import Random
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Draft, Policy
from outrider.models.decode.rules.rule_table import BEST, DRAWN, INDEPENDENT, bind_rule
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.static_tree import StaticTree
from outrider.models.decode.tree_shapes import Paths, parse
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
SIZE = 11  # of a larger vocabulary, so that ranks may be skipped
GREEDY, WARM = Sampling(), Sampling(0.8, 1.0, 4)
WIDE = parse([(0,), (1,), (5,), (0, 0), (0, 3), (1, 1), (5, 0), (0, 3, 2), (1, 1, 0), (1, 1, 4)])
DENSE = parse([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (0, 0, 1), (2, 0, 0)])


def propose(
    shape: Paths,
    drafter: ScriptedDrafter,
    room: int = 99,
    sampling: Sampling = GREEDY,
    draft: str = BEST,
) -> Draft:
    """For one prompt, with the random numbers of seed 0."""
    return tiny.propose(StaticTree(shape, draft), drafter, [TEXT], [room], sampling)


def scripted_drafter(size: int = VOCAB, seed: int = 0, scale: float = 1.0) -> ScriptedDrafter:
    return ScriptedDrafter(tiny.random_logits(size, seed, scale), size)


# ---- best drafts ---------------------------------------------------------------------------------


def literally(row: Row, text: Text, shape: Paths, room: int) -> list[Text]:
    """The tokens of every path of ranks; what a vocabulary has no rank for is not there."""
    guesses: list[Text] = []
    for path in shape:
        tokens: Text = ()
        for rank in path:
            ranked = row(text + tokens).sort(descending=True, stable=True).indices.tolist()
            tokens = (*tokens, *ranked[rank : rank + 1])
        if len(tokens) == len(path) <= room:
            guesses.append(tokens)
    return guesses


ranks = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def shapes(draw: st.DrawFn) -> Paths:
    """Some paths, and all nodes above them."""
    tips = draw(st.lists(ranks, min_size=1, max_size=6))
    return parse({tip[:depth] for tip in tips for depth in range(1, len(tip) + 1)})


@settings(max_examples=60)
@given(shape=shapes(), seed=st.integers(0, 99), room=st.integers(1, 5), size=st.integers(2, 8))
def test_every_node_is_the_token_of_its_ranks(
    shape: Paths, seed: int, room: int, size: int
) -> None:
    drafter = scripted_drafter(size, seed)
    tree = checked(propose(shape, drafter, room).tree)
    assert paths(tree) == literally(drafter.row, TEXT, shape, room)
    assert tree.ids[0, 0] == TEXT[-1]
    assert tree.size - 1 <= len(shape)


def test_nodes_are_stored_in_the_order_of_the_shape() -> None:
    tree = propose(WIDE, scripted_drafter(SIZE)).tree
    assert tree.depths.tolist() == [[0, *map(len, WIDE)]]
    assert tree.parents.tolist() == [[-1, 0, 0, 0, 1, 1, 2, 3, 5, 6, 6]]
    assert tree.real.all()
    grown = [
        [j == i or j in above for j in range(11)]
        for i, above in enumerate(
            [[], [0], [0], [0], [0, 1], [0, 1], [0, 2], [0, 3], [0, 1, 5], [0, 2, 6], [0, 2, 6]]
        )
    ]
    assert tree.ancestor_mask.tolist() == [grown]


@pytest.mark.parametrize("room", [1, 2, 3])
def test_no_level_beyond_the_depth_limit_is_drafted(room: int) -> None:
    tree = propose(WIDE, scripted_drafter(SIZE), room).tree
    assert tree.size == 1 + sum(len(path) <= room for path in WIDE)
    assert tree.levels == room


def test_nodes_beyond_a_tiny_vocabulary_are_not_real() -> None:
    """Three tokens: ranks 5, 3 and 4 are not there, and nothing below them."""
    tree = checked(propose(WIDE, scripted_drafter(3)).tree)
    there = [max(path) < 3 for path in WIDE]
    assert tree.real.tolist() == [[True, *there]]


# ---- sampled siblings ----------------------------------------------------------------------------


class ByHand(NamedTuple):
    """What a literal draft came to: tokens of the nodes that are there, and their parents' rows."""

    nodes: list[Text]
    rows: dict[Text, Tensor]


def by_hand(row: Row, shape: Paths, sampling: Sampling, replacement: bool, most: int) -> ByHand:
    """One uniform per node with children and rank, level by level; the cumulative law inverted.

    Every call of the random source takes `most` numbers and uses the first ones.
    """
    generator = Random(0)
    rows: dict[Text, Tensor] = {}
    drawn: dict[Text, list[int]] = {}  # by path of ranks: tokens of the children, in order
    tokens: dict[Text, Text] = {(): ()}  # path of ranks -> tokens
    for depth in range(1, len(shape[-1]) + 1):
        level = [path for path in shape if len(path) == depth]
        parents = [node for node in [(), *shape] if any(path[:-1] == node for path in level)]
        left = {}
        for node in parents:
            text = TEXT + tokens.get(node, (0,) * len(node))
            left[node] = sampling.probs(row(text)[None])[0]
            rows[node], drawn[node] = left[node].clone(), []
        for _ in range(1 + max(path[-1] for path in level)):
            uniforms = [generator.random() for _ in range(most)]
            for node, uniform in zip(parents, uniforms, strict=False):
                if not left[node].any():
                    continue
                ends = left[node].double().cumsum(0)
                token = int((ends <= uniform * ends[-1]).sum())
                drawn[node].append(token)
                if not replacement:
                    left[node][token] = 0.0
        for path in level:
            children = drawn[path[:-1]]
            if path[:-1] in tokens and path[-1] < len(children):
                tokens[path] = (*tokens[path[:-1]], children[path[-1]])
    return ByHand([tokens[path] for path in shape if path in tokens], rows)


@pytest.mark.parametrize("kind", [DRAWN, INDEPENDENT])
@pytest.mark.parametrize("top_k", [3, 4, 7])
def test_siblings_are_stored_in_the_order_drawn(kind: str, top_k: int) -> None:
    """Rank k is the k-th draw (R3); the row of a node is what its first child was drawn from."""
    sampling = Sampling(0.8, 1.0, top_k)
    for seed in range(6):
        drafter = scripted_drafter(seed=seed, scale=2.0)
        hand = by_hand(drafter.row, DENSE, sampling, kind == INDEPENDENT, len(DENSE) + 1)
        tree, q_rows = propose(DENSE, drafter, sampling=sampling, draft=kind)
        assert paths(checked(tree)) == hand.nodes
        assert q_rows is not None
        for node, row in hand.rows.items():
            place = [(), *DENSE].index(node)
            torch.testing.assert_close(q_rows[0, place], row)


def test_no_more_siblings_are_real_than_tokens_have_mass() -> None:
    """Two tokens, three children in the shape: the third is not there, nor is anything below it."""
    tree, q_rows = propose(DENSE, scripted_drafter(), sampling=Sampling(1.0, 1.0, 2), draft=DRAWN)
    gone = [path[0] == 2 for path in DENSE]
    assert checked(tree).real.tolist() == [[True, *(not away for away in gone)]]
    assert q_rows is not None
    assert len({path for path in paths(tree) if len(path) == 1}) == 2


def test_only_nodes_with_children_have_rows() -> None:
    tree, q_rows = propose(DENSE, scripted_drafter(), sampling=WARM, draft=DRAWN)
    assert q_rows is not None
    inner = [node in {path[:-1] for path in DENSE} for node in [(), *DENSE]]
    assert (q_rows[0].sum(-1) > 0.99).tolist() == inner
    assert q_rows.any(-1)[0].tolist() == inner
    assert tree.size == len(inner)


def test_best_drafts_have_no_rows() -> None:
    assert propose(DENSE, scripted_drafter(), sampling=WARM).q_rows is None
    assert propose(DENSE, scripted_drafter(), sampling=GREEDY, draft=DRAWN).q_rows is None


@pytest.mark.parametrize("batch", [1, 2])
def test_rows_of_a_reduced_vocabulary_are_zero_elsewhere(batch: int) -> None:
    drafter = ScriptedDrafter(tiny.random_logits(3), VOCAB)
    drafter.vocab = DraftVocab(torch.tensor([1, 4, 6]), VOCAB)
    policy, texts = StaticTree(DENSE, DRAWN), [TEXT, (2, 0)][:batch]
    draft = tiny.propose(policy, drafter, texts, [9] * batch, WARM, range(batch))
    assert draft.q_rows is not None
    assert draft.q_rows.shape == (batch, len(DENSE) + 1, VOCAB)
    assert not draft.q_rows[..., [0, 2, 3, 5]].any()
    assert set(draft.tree.ids[:, 1:].unique().tolist()) <= {1, 4, 6}


# ---- a batch -------------------------------------------------------------------------------------

CROWD: list[Text] = [(3, 1, 4), (5,), (6, 2, 0, 1, 1, 3), (2, 2)]


@pytest.mark.parametrize(
    ("sampling", "draft"), [(GREEDY, BEST), (WARM, BEST), (WARM, DRAWN), (WARM, INDEPENDENT)]
)
def test_drafts_of_a_batch_equal_single_drafts(sampling: Sampling, draft: str) -> None:
    policy, drafter = StaticTree(DENSE, draft), scripted_drafter(scale=2.0)
    rooms = [99, 2, 3, 1]
    made = tiny.propose(policy, drafter, CROWD, rooms, sampling, range(4))
    checked(made.tree)
    for row, (text, room) in enumerate(zip(CROWD, rooms, strict=True)):
        alone = tiny.propose(policy, drafter, [text], [room], sampling, [row])
        assert paths(made.tree, row) == paths(alone.tree)
        if alone.q_rows is not None:
            assert made.q_rows is not None
            inner = [i for i, node in enumerate([(), *DENSE]) if len(node) < room]
            inner = [i for i in inner if i < alone.tree.size]
            torch.testing.assert_close(made.q_rows[row, inner], alone.q_rows[0, inner])


# ---- the output distribution ---------------------------------------------------------------------

PAIR, SMALL = parse([(0,), (1,)]), parse([(0,), (1,), (0, 0)])
PROMPT = [1, 3, 4, 2]
TWO, THREE = Sampling(0.8, 1.0, 2), Sampling(0.8, 1.0, 3)
LAWS = [
    (SMALL, BEST, "match"),
    (SMALL, DRAWN, "without_replacement"),
    (SMALL, DRAWN, "traversal"),
    (SMALL, INDEPENDENT, "independent"),
    (PAIR, DRAWN, "sampled"),
    (PAIR, DRAWN, "without_replacement"),
    (PAIR, INDEPENDENT, "traversal"),
]


def decoder(policy: Policy, rule: str, sampling: Sampling) -> Engine:
    """In float64; the drafter is unlike the target."""
    noise = tiny.random_logits(TOKENS, seed=3, scale=1.5)
    drafter = ScriptedDrafter(lambda text: noise(text).double(), TOKENS)
    apply_rule = bind_rule(rule, policy.draft)
    return Engine(mean_target(torch.float64), drafter, policy, sampling=sampling, rule=apply_rule)


def law_of(of: Engine, count: int) -> Law:
    """The exact joint distribution of so many tokens: every random outcome, run once."""

    def run(rng: RandomSource) -> Text:
        inject_random_source(of, rng)
        return tuple(of.generate(PROMPT, count).ids)

    return enumerate_law(run)


def plain_law(sampling: Sampling, count: int) -> Law:
    law: Law = {(): 1.0}
    for _ in range(count):
        longer: Law = {}
        for text, chance in law.items():
            row = sampling.probs(logits_after(mean_target(torch.float64), [*PROMPT, *text])[None])[
                0
            ]
            longer.update({(*text, t): chance * p for t, p in enumerate(row.tolist()) if p > 0})
        law = longer
    return law


@pytest.mark.parametrize(("shape", "draft", "rule"), LAWS)
def test_output_distribution_equals_plain_sampling(shape: Paths, draft: str, rule: str) -> None:
    """One token by the prompt's forward, and one more than the tree is deep."""
    policy = StaticTree(shape, draft)
    count, sampling = policy.levels + 2, THREE if shape is PAIR else TWO
    found = law_of(decoder(policy, rule, sampling), count)
    assert distance(found, plain_law(sampling, count)) < 1e-12


class Sorted(StaticTree):
    """Wrong on purpose: drawn siblings, the likelier one first (R3)."""

    def propose(self, *args: object, **kwargs: object) -> Draft:
        draft: Draft = super().propose(*args, **kwargs)  # type: ignore[arg-type]
        tree, rows = draft
        assert rows is not None
        chance = rows[:, :1].gather(2, tree.ids[:, None, 1:])[:, 0]
        order = chance.sort(descending=True, stable=True).indices
        tree.ids[:, 1:] = tree.ids[:, 1:].gather(1, order)
        return draft


@pytest.mark.parametrize(
    ("kind", "least", "most"), [(StaticTree, 0.0, 1e-12), (Sorted, 0.005, 1.0)]
)
def test_siblings_in_another_order_are_biased(
    kind: type[StaticTree], least: float, most: float
) -> None:
    """The control of the test above."""
    of = decoder(kind(PAIR, DRAWN), "without_replacement", THREE)
    assert least <= distance(law_of(of, 3), plain_law(THREE, 3)) < most
