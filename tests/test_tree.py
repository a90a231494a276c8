"""Trees as data, and EAGLE-2's choice of nodes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.models.decode.tree import Tree, rerank
from tests.trees import checked


def trees_of(*trees: list[int]) -> Tree:
    """A batch of trees with these parents; token ids are 10 times the node number."""
    depths: list[list[int]] = []
    for parents in trees:
        depths.append([])
        for parent in parents:
            depths[-1].append(0 if parent < 0 else depths[-1][parent] + 1)
    parents_of = torch.tensor(trees)
    ids = 10 * torch.arange(parents_of.shape[1]).expand_as(parents_of)
    return Tree.from_parents(ids, parents_of, torch.tensor(depths), max(map(max, depths)))


def random_parents(size: int) -> st.SearchStrategy[list[int]]:
    """Parents-first trees."""
    return st.tuples(st.just(-1), *(st.integers(0, i - 1) for i in range(1, size))).map(list)


def random_batches() -> st.SearchStrategy[list[list[int]]]:
    """One to three trees of one size, 1..12 nodes."""
    return st.integers(1, 12).flatmap(
        lambda size: st.lists(random_parents(size), min_size=1, max_size=3)
    )


# ---- trees ---------------------------------------------------------------------------------------


def test_ancestor_mask_of_the_worked_example() -> None:
    expected = [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 0, 1, 0],
        [1, 1, 0, 1],
    ]
    assert trees_of([-1, 0, 0, 1]).ancestor_mask[0].int().tolist() == expected


def test_siblings_cousins_and_descendants_are_masked() -> None:
    """Root, children 1 and 2; 3 and 4 below 1; 5 below 2; 6 below 5. Beside it, a chain."""
    expected = [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1, 1],
    ]
    tree = trees_of([-1, 0, 0, 1, 1, 2, 5], [-1, 0, 1, 2, 3, 4, 5])
    assert tree.ancestor_mask[0].int().tolist() == expected
    assert torch.equal(tree.ancestor_mask[1], torch.ones(7, 7).tril().bool())


def test_ancestor_mask_of_a_chain_is_causal() -> None:
    chain = checked(Tree.chain(torch.tensor([[7, 8, 9, 7], [1, 2, 3, 4]])))
    assert torch.equal(chain.ancestor_mask, torch.ones(2, 4, 4).tril().bool())
    assert chain.parents.tolist() == [[-1, 0, 1, 2]] * 2
    assert chain.depths.tolist() == [[0, 1, 2, 3]] * 2
    assert chain.ids.tolist() == [[7, 8, 9, 7], [1, 2, 3, 4]]
    assert bool(chain.real.all())
    assert (chain.size, chain.levels) == (4, 3)


def test_chain_equals_the_grown_tree() -> None:
    chain = Tree.chain(torch.tensor([[0, 10, 20, 30]]))
    grown = trees_of([-1, 0, 1, 2])
    for name in ("ids", "parents", "depths", "ancestor_mask", "real"):
        assert torch.equal(getattr(chain, name), getattr(grown, name))
    assert chain.levels == grown.levels


def test_chains_of_unequal_length_are_padded() -> None:
    """The root is real even where nothing was drafted."""
    chain = Tree.chain(torch.tensor([[5, 6, 7]] * 3), torch.tensor([2, 0, 1]))
    assert chain.real.tolist() == [[True, True, True], [True, False, False], [True, True, False]]


def test_a_lone_root_is_a_tree() -> None:
    root = checked(Tree.chain(torch.tensor([[5]])))
    assert root.ancestor_mask.tolist() == [[[True]]]
    assert (root.size, root.levels) == (1, 0)


@settings(max_examples=60)
@given(batch=random_batches())
def test_ancestor_mask_is_the_path_from_the_root(batch: list[list[int]]) -> None:
    tree = checked(trees_of(*batch))
    for parents, matrix in zip(batch, tree.ancestor_mask.tolist(), strict=True):
        for node, row in enumerate(matrix):
            climbed = {node}
            while parents[min(climbed)] >= 0:
                climbed.add(parents[min(climbed)])
            assert {j for j, seen in enumerate(row) if seen} == climbed


def test_more_levels_than_there_are_change_nothing() -> None:
    tree = trees_of([-1, 0, 0, 1])
    deeper = checked(Tree.from_parents(tree.ids, tree.parents, tree.depths, levels=9))
    assert torch.equal(deeper.ancestor_mask, tree.ancestor_mask)


# ---- the choice of nodes -------------------------------------------------------------------------


def kept_of(scores: list[float], budget: int) -> list[int]:
    best: list[int] = rerank(torch.tensor([scores]), budget)[0].tolist()
    return best


def test_a_tie_between_parent_and_child_keeps_the_parent() -> None:
    """A certain child (log 1 = 0) ties with its parent; sorting by score alone may orphan it.

    The pool is level by level, as a drafter makes it: 0, 1 below the root; 2, 3 below 0; 4 below 1.
    """
    scores = [-2.0, -1.0, -3.0, -4.0, -1.0]
    assert [kept_of(scores, budget) for budget in (1, 2, 3)] == [[1], [1, 4], [0, 1, 4]]


def test_every_prompt_has_its_own_choice() -> None:
    scores = torch.tensor([[-2.0, -1.0, -3.0], [-1.0, -2.0, -1.0]])
    assert rerank(scores, 2).tolist() == [[0, 1], [0, 2]]


def test_ties_prefer_the_lower_index() -> None:
    assert kept_of([-1.0] * 50, 7) == [0, 1, 2, 3, 4, 5, 6]


def test_nan_scores_are_chosen_last() -> None:
    nan, never = float("nan"), float("-inf")
    assert kept_of([0.0, nan, -2.0, nan, -9.0, never], 3) == [0, 2, 4]
    assert kept_of([0.0, nan, -2.0, nan, -9.0, never], 5) == [0, 1, 2, 3, 4]


def test_impossible_candidates_still_form_a_tree() -> None:
    """Minus infinity ties with itself."""
    infinite = float("-inf")
    assert kept_of([-1.0, infinite, infinite, infinite], 3) == [0, 1, 2]


def test_a_large_budget_keeps_all_candidates() -> None:
    assert kept_of([0.0, -1.0], 9) == [0, 1]


def level_by_level(parents: list[int]) -> list[int]:
    """The same tree with its nodes renumbered by depth."""
    depths = trees_of(parents).depths[0].tolist()
    order = sorted(range(len(parents)), key=lambda node: (depths[node], node))
    place = {node: index for index, node in enumerate(order)} | {-1: -1}
    return [place[parents[node]] for node in order]


def path_scores(tree: Tree, steps: list[float]) -> Tensor:
    return (tree.ancestor_mask[0] * torch.tensor(steps[: tree.size])).sum(-1)


@settings(max_examples=150)
@given(
    parents=st.integers(1, 12).flatmap(random_parents).map(level_by_level),
    steps=st.lists(st.sampled_from([0.0, -1.0]), min_size=12, max_size=12),
    budget=st.integers(1, 12),
)
def test_the_choice_is_the_sorted_one_and_connected_under_many_ties(
    parents: list[int], steps: list[float], budget: int
) -> None:
    """Steps of 0 or -1 nat make ties everywhere; the reference is a plain sort by three keys."""
    tree = trees_of(parents)
    scores, depths = path_scores(tree, steps), tree.depths[0].tolist()
    by_rank = sorted(range(len(parents)), key=lambda i: (-float(scores[i]), depths[i], i))
    wanted = by_rank[:budget]
    best = rerank(scores[None], budget)
    assert best[0].tolist() == sorted(wanted)
    assert {parents[node] for node in wanted} <= {-1, *wanted}
    above = torch.searchsorted(best, tree.parents.gather(1, best)).masked_fill(best == 0, -1)
    chosen = tree.ids.gather(1, best), above, tree.depths.gather(1, best)
    checked(Tree.from_parents(*chosen, levels=tree.levels))


def test_half_precision_scores_are_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        rerank(torch.tensor([[-1.0]]).half(), budget=1)
