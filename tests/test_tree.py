"""Trees as data, and EAGLE-2's choice of nodes."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from outrider.eval.decode.tree import Tree, rerank


def tree_of(parents: list[int]) -> Tree:
    """A tree with these parents; token ids are 10 times the node number."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    nodes = torch.arange(len(parents))
    return Tree(10 * nodes, torch.tensor(parents), torch.tensor(depths))


def random_parents() -> st.SearchStrategy[list[int]]:
    """Parents-first trees of 1..12 nodes."""
    return st.integers(1, 12).flatmap(
        lambda n: st.tuples(st.just(-1), *(st.integers(0, i - 1) for i in range(1, n))).map(list)
    )


def test_the_mask_of_the_worked_example_is_the_documented_matrix() -> None:
    expected = [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 0, 1, 0],
        [1, 1, 0, 1],
    ]
    assert tree_of([-1, 0, 0, 1]).mask().int().tolist() == expected


def test_the_mask_of_a_bushy_tree_hides_siblings_cousins_and_descendants() -> None:
    """Root, children 1 and 2; 3 and 4 below 1; 5 below 2; 6 below 5."""
    expected = [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1, 1],
    ]
    assert tree_of([-1, 0, 0, 1, 1, 2, 5]).mask().int().tolist() == expected


def test_the_mask_of_a_chain_is_the_causal_mask() -> None:
    chain = Tree.chain(torch.tensor([7, 8, 9, 7]))
    assert torch.equal(chain.mask(), torch.ones(4, 4).tril().bool())
    assert chain.parents.tolist() == [-1, 0, 1, 2]
    assert chain.depths.tolist() == [0, 1, 2, 3]
    assert chain.tokens == [7, 8, 9, 7]
    assert not chain.branches


def test_a_lone_root_is_a_tree() -> None:
    root = Tree.chain(torch.tensor([5]))
    assert len(root) == 1
    assert root.mask().tolist() == [[True]]
    assert root.paths() == [[0]]
    assert root.children(0) == []


@settings(deadline=None, max_examples=60)
@given(parents=random_parents())
def test_the_mask_holds_exactly_the_nodes_on_the_path_from_the_root(parents: list[int]) -> None:
    tree = tree_of(parents)
    for node, row in enumerate(tree.mask().tolist()):
        climbed = {node}
        while parents[min(climbed)] >= 0:
            climbed.add(parents[min(climbed)])
        assert {j for j, seen in enumerate(row) if seen} == climbed
        assert tree.path(node) == sorted(climbed)


def test_children_keep_their_stored_order_and_paths_end_in_the_leaves() -> None:
    tree = tree_of([-1, 0, 0, 1, 0, 1])
    assert tree.children(0) == [1, 2, 4]
    assert tree.children(1) == [3, 5]
    assert tree.children(5) == []
    assert tree.paths() == [[0, 2], [0, 1, 3], [0, 4], [0, 1, 5]]
    assert tree.branches


@pytest.mark.parametrize(
    ("parents", "depths", "message"),
    [
        ([0, 0], [0, 1], "parents[0] = -1"),
        ([-1, 0], [1, 2], "depths[0] = 0"),
        ([], [], "parents[0] = -1"),
        ([-1, -1], [0, 0], "node 1 has parent -1"),
        ([-1, 2, 0], [0, 2, 1], "node 1 has parent 2"),
        ([-1, 1], [0, 1], "node 1 has parent 1"),
        ([-1, 0, 1], [0, 1, 3], "node 2 has depth 3, but its parent 1 has depth 1"),
    ],
)
def test_a_tree_that_is_not_one_is_refused(
    parents: list[int], depths: list[int], message: str
) -> None:
    ids = torch.zeros(len(parents), dtype=torch.long)
    columns = torch.tensor(parents, dtype=torch.long), torch.tensor(depths, dtype=torch.long)
    with pytest.raises(ValueError, match=re.escape(message)):
        Tree(ids, *columns)


def test_columns_of_unequal_length_are_refused() -> None:
    """By our own check, or before it by the shape checker when the tests run with one."""
    with pytest.raises((ValueError, TypeCheckError)):
        Tree(torch.tensor([1, 2]), torch.tensor([-1]), torch.tensor([0]))


def test_a_tie_between_parent_and_child_keeps_the_parent() -> None:
    """A certain child (log 1 = 0) ties with its parent; whoever sorts by score alone may orphan it.

    The pool is level-major, as a drafter makes it: 0 and 1 below the root; 2, 3 below 0; 4 below 1.
    """
    scores = torch.tensor([-2.0, -1.0, -3.0, -4.0, -1.0])
    parents = torch.tensor([-1, -1, 0, 0, 1])
    depths = torch.tensor([1, 1, 2, 2, 2])
    assert rerank(scores, parents, depths, budget=1).tolist() == [1]
    assert rerank(scores, parents, depths, budget=2).tolist() == [1, 4]
    assert rerank(scores, parents, depths, budget=3).tolist() == [0, 1, 4]


def test_ties_prefer_the_shallow_node_even_when_it_is_stored_later() -> None:
    """Depth first: 0 -> 1 -> 2 is stored before its equally probable uncle 3."""
    scores = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    parents = torch.tensor([-1, 0, 1, -1])
    depths = torch.tensor([1, 2, 3, 1])
    kept = [rerank(scores, parents, depths, budget).tolist() for budget in (1, 2, 3, 4)]
    assert kept == [[0], [0, 3], [0, 1, 3], [0, 1, 2, 3]]


def test_ties_at_one_depth_prefer_the_lower_index() -> None:
    scores = torch.full((50,), -1.0)
    kept = rerank(scores, torch.full((50,), -1), torch.ones(50, dtype=torch.long), budget=7)
    assert kept.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_impossible_candidates_still_form_a_tree() -> None:
    """Minus infinity ties with itself."""
    infinite = float("-inf")
    scores = torch.tensor([infinite, infinite, -1.0, infinite])
    kept = rerank(scores, torch.tensor([-1, 0, -1, 1]), torch.tensor([1, 2, 1, 3]), budget=3)
    assert kept.tolist() == [0, 1, 2]


def test_a_large_budget_keeps_everything() -> None:
    kept = rerank(torch.tensor([0.0, -1.0]), torch.tensor([-1, 0]), torch.tensor([0, 1]), 9)
    assert kept.tolist() == [0, 1]


@settings(deadline=None, max_examples=150)
@given(parents=random_parents(), data=st.data())
def test_the_choice_is_the_sorted_one_and_connected_under_many_ties(
    parents: list[int], data: st.DataObject
) -> None:
    """Steps of 0 or -1 nat make ties everywhere; the reference is a plain sort by three keys."""
    steps = data.draw(st.lists(st.sampled_from([0.0, -1.0]), min_size=12, max_size=12))
    budget = data.draw(st.integers(1, 12))
    tree = tree_of(parents)
    scores = [sum(steps[node] for node in tree.path(leaf)) for leaf in range(len(parents))]
    depths = tree.depths.tolist()
    wanted = sorted(range(len(parents)), key=lambda i: (-scores[i], depths[i], i))[:budget]
    kept = rerank(torch.tensor(scores), tree.parents, tree.depths, budget)
    assert kept.tolist() == sorted(wanted)
    assert {parents[node] for node in wanted} <= {-1, *wanted}
    above = torch.searchsorted(kept, tree.parents[kept]) - (tree.parents[kept] < 0).long()
    Tree(tree.ids[kept], above, tree.depths[kept])  # refuses whatever is not a tree


@pytest.mark.parametrize(
    ("scores", "parents", "depths", "message"),
    [
        ([-2.0, -1.0], [-1, 0], [1, 2], "candidate 1 (score -1, depth 2)"),
        ([float("nan")], [-1], [1], "candidate 0 (score nan"),
        ([-1.0, -2.0], [-1, 0], [1, 3], "candidate 1 (score -2, depth 3)"),
        ([-2.0, -1.0], [1, -1], [2, 1], "candidate 0 (score -2, depth 2)"),
    ],
)
def test_candidates_that_could_be_orphaned_are_refused(
    scores: list[float], parents: list[int], depths: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        rerank(torch.tensor(scores), torch.tensor(parents), torch.tensor(depths), budget=1)


def test_half_precision_scores_and_empty_budgets_are_refused() -> None:
    parents, depths = torch.tensor([-1]), torch.tensor([1])
    with pytest.raises(ValueError, match="float32"):
        rerank(torch.tensor([-1.0]).half(), parents, depths, budget=1)
    with pytest.raises(ValueError, match="budget=0"):
        rerank(torch.tensor([-1.0]), parents, depths, budget=0)
