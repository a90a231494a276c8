"""Trees of decode=auto: as many of the most probable nodes are kept as pay."""

import math
from collections.abc import Sequence
from itertools import product
from random import Random

import pytest
import torch
from torch import Tensor

from outrider.models.decode.acceptance import Acceptance, RequestAcceptance
from outrider.models.decode.auto.tree_growth import TreeGrowth
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.rules.rule_table import COUPLED
from tests import tiny
from tests.tiny import ScriptedDrafter, Text

V, DEPTH, TEXTS = 4, 3, [(3, 1, 2), (2, 2), (0, 1)]
ALL = V + V**2 + V**3


def estimates(random: Random, drawn: bool = False) -> list[RequestAcceptance]:
    """Estimates of three requests that have learnt different things."""
    shared = Acceptance(drawn=drawn)
    found = [RequestAcceptance(shared) for _ in TEXTS]
    for one in found:
        rate = random.random()
        for _ in range(30):
            one.add(random.randint(1, 3), float(random.random() < rate), random.random())
    return found


def probabilities(
    drafter: ScriptedDrafter, one: RequestAcceptance, text: Text
) -> dict[Text, float]:
    """Of every path: the first child as estimated, its siblings what it misses, in proportion."""
    found: dict[Text, float] = {(): 1.0}
    for depth in range(1, DEPTH + 1):
        for path in product(range(V), repeat=depth):
            row = drafter.row((*text, *path[:-1])).softmax(-1)
            q, most = float(row[path[-1]]), float(row.max())
            first = min(one.given(depth, most), 0.999)
            other = min((1 - first) * q / max(1 - most, 1e-3), first * q / most)
            found[path] = found[path[:-1]] * (first if q == most else other)
    return {path: chance for path, chance in found.items() if path}


def growth(
    requests: Sequence[RequestAcceptance], rate: float, rows: Sequence[float], draft: str = "best"
) -> TreeGrowth:
    return TreeGrowth(DEPTH, ALL, ALL, 0.0, draft, requests, rate, rows)


def test_the_kept_nodes_are_worth_most() -> None:
    """By the definition, over all numbers of nodes; rows of a batch have one number."""
    random, sizes = Random(0), set[int]()
    for seed in range(40):
        drafter = ScriptedDrafter(tiny.random_logits(V, seed, random.choice((0.5, 2.0, 5.0))), V)
        requests, rate = estimates(random), random.uniform(0.1, 5.0)
        rows = [1.0]
        for _ in range(ALL):
            rows.append(rows[-1] + random.choice((-0.1, 0.3, 1.0)))
        chances = [
            probabilities(drafter, one, text) for one, text in zip(requests, TEXTS, strict=True)
        ]
        ordered = [sorted(found.values(), reverse=True) for found in chances]
        worth = [
            sum(sum(values[:n]) for values in ordered) - rate * rows[n] for n in range(ALL + 1)
        ]
        best = max(range(ALL + 1), key=worth.__getitem__)
        policy = growth(requests, rate, rows)
        tree = tiny.propose(policy, drafter, TEXTS, [99] * 3, seeds=[0] * 3).tree
        assert tree.size == best + 1
        for i, found in enumerate(chances):
            likely = set(sorted(found, key=lambda path: -found[path])[:best])
            assert set(tiny.paths(tree, i)) == likely
        assert policy.dropped == [pytest.approx(sum(sum(v[best:]) for v in ordered), abs=1e-5)]
        sizes.add(best)
    assert 0 in sizes
    assert len(sizes) > 5


def test_rows_that_cost_nothing_leave_the_tree_whole() -> None:
    drafter = ScriptedDrafter(tiny.random_logits(V, 1, 2.0), V)
    free = growth(estimates(Random(1), drawn=True)[:1], 1.0, [-1e-3 * n for n in range(ALL + 1)])
    tree = tiny.propose(free, drafter, TEXTS[:1]).tree
    other = tiny.propose(DynamicTree(DEPTH, ALL, ALL), drafter, TEXTS[:1]).tree
    assert tiny.paths(tree) == tiny.paths(other)
    assert free.dropped == [0.0]


def test_no_node_is_kept_where_none_pays() -> None:
    """The levels were computed, and their confidence is known."""
    drafter = ScriptedDrafter(tiny.random_logits(V, 1, 2.0), V)
    dear = growth(estimates(Random(1))[:1], 1.0, [float(n) for n in range(ALL + 1)])
    tree = tiny.propose(dear, drafter, TEXTS[:1]).tree
    assert (tree.size, tree.levels) == (1, DEPTH)
    row = drafter.row(TEXTS[0]).softmax(-1)
    (root,) = dear.roots
    assert root is not None
    assert root.confidence == pytest.approx(float(row.max()))
    assert root.ids == row.argsort(descending=True).tolist()


def test_drawn_rows_keep_the_confidence_itself() -> None:
    """The estimates are those of drawn tokens; the tree has the most probable ones."""
    drafter = ScriptedDrafter(tiny.random_logits(V, 1, 2.0), V)
    rows = [0.05 * n for n in range(ALL + 1)]
    tree = tiny.propose(
        growth(estimates(Random(1), drawn=True)[:1], 1.0, rows), drafter, TEXTS[:1]
    ).tree
    q = drafter.row(TEXTS[0]).softmax(-1)
    chances: dict[Text, float] = {(token,): float(q[token]) for token in range(V)}
    for depth in range(2, DEPTH + 1):
        for path in product(range(V), repeat=depth):
            below = drafter.row((*TEXTS[0], *path[:-1])).softmax(-1)
            chances[path] = chances[path[:-1]] * float(below[path[-1]])
    assert set(tiny.paths(tree)) == {path for path, chance in chances.items() if chance > 0.05}


def test_coupled_trees_are_kept_whole() -> None:
    """Scores with noise are no probabilities."""
    drafter = ScriptedDrafter(tiny.random_logits(V, 1, 2.0), V)
    dear = growth(estimates(Random(1))[:1], 1.0, [float(n) for n in range(ALL + 1)], COUPLED)
    tree = tiny.propose(dear, drafter, TEXTS[:1]).tree
    assert len(tiny.paths(tree)) == ALL


def test_siblings_share_what_the_first_child_misses() -> None:
    """A level accepts one token at most, however flat its row is."""
    drafter = ScriptedDrafter(tiny.random_logits(V, 1, 0.01), V)
    (one, *_) = estimates(Random(1))
    for _ in range(200):
        one.add(1, 1.0, 0.3)
    policy = TreeGrowth(1, V, V, 0.0, "best", [one], 1.0, [float(n) for n in range(V + 1)])
    tiny.propose(policy, drafter, TEXTS[:1])
    assert 0.99 < policy.dropped[0] <= 1.0 + 1e-6


def test_a_row_without_numbers_drops_its_nodes_alone() -> None:
    rows = tiny.random_logits(V, 1, 2.0)

    def broken(text: Text) -> Tensor:
        return rows(text) if len(text) == len(TEXTS[0]) else torch.full((V,), float("nan"))

    policy = growth(estimates(Random(1))[:1], 0.01, [float(n) for n in range(ALL + 1)])
    tree = tiny.propose(policy, ScriptedDrafter(broken, V), TEXTS[:1]).tree
    assert 1 < tree.size <= V + 1
    assert max(map(len, tiny.paths(tree))) == 1
    assert math.isfinite(policy.dropped[0])
