"""What a round decided, read on the host, against the rule in tensors."""

import pytest
import torch

from outrider.models.decode.rules import round_outcome
from outrider.models.decode.rules.round_outcome import greedy_outcomes, outcomes
from outrider.models.decode.tree import Tree
from tests.enumeration import any_trees
from tests.trees import greedy

SOUND = torch.tensor([[0.0, -1.5], [3e38, -3e38], [1e-45, -0.0], [1.0, 2.0]])  # per prompt


@pytest.fixture(params=["CPU", "GPU"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the host part by part, or all in one table."""
    if request.param == "GPU":
        monkeypatch.setattr(round_outcome, "_separately", round_outcome._in_one_transfer)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("guesses", [0, 1, 3])
def test_chain_outcomes_equal_the_rule(guesses: int, whole: bool) -> None:
    """Two tokens only, so that chains agree now and then, up to every length."""
    dice = torch.Generator().manual_seed(guesses)
    lengths = set()
    for _ in range(20):
        ids, choice = torch.randint(0, 2, (2, 4, guesses + 1), generator=dice)
        drafted = torch.randint(0, guesses + 1, (4,), generator=dice)
        tree = Tree.chain(ids, None if whole else drafted)
        actual = greedy_outcomes(tree, choice, SOUND)
        assert actual == outcomes(tree, greedy(tree, choice), SOUND)
        lengths |= {len(each.tokens) for each in actual}
    assert lengths == set(range(1, guesses + 2))


@pytest.mark.parametrize("whole", [True, False])
def test_tree_outcomes_equal_the_rule(whole: bool) -> None:
    """Three tokens only, so that siblings repeat, paths tie, and some lead to the last level."""
    dice = torch.Generator().manual_seed(0)
    lengths = set()
    for _ in range(60):
        ids, choice = torch.randint(0, 3, (2, 4, 12), generator=dice)
        tree = any_trees(ids, whole, dice)
        actual = greedy_outcomes(tree, choice, SOUND)
        assert actual == outcomes(tree, greedy(tree, choice), SOUND)
        lengths |= {len(each.tokens) for each in actual}
    assert lengths >= {1, 2, 3, 4, 5}


def test_tree_outcome_has_path_leaf_and_depth() -> None:
    """The root 5 with the children 7 and 8, and 9 below 7: a path that ends there, or above."""
    parents, depths = torch.tensor([[-1, 0, 0, 1]]), torch.tensor([[0, 1, 1, 2]])
    tree = Tree.from_parents(torch.tensor([[5, 7, 8, 9]]), parents, depths, 2)
    (all_the_way,) = outcomes(tree, greedy(tree, torch.tensor([[7, 9, 0, 4]])), SOUND[:1])
    assert all_the_way == ([7, 9, 4], [0, 1, 3], True, 2, None)
    (half,) = outcomes(tree, greedy(tree, torch.tensor([[7, 6, 0, 4]])), SOUND[:1])
    assert half == ([7, 6], [0, 1], False, 2, None)


def test_padding_nodes_are_not_children() -> None:
    parents, depths = torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 1, 2]])
    real = torch.tensor([[True, True, False]])
    tree = Tree.from_parents(torch.tensor([[5, 7, 9]]), parents, depths, 2, real)
    (actual,) = outcomes(tree, greedy(tree, torch.tensor([[7, 9, 4]])), SOUND[:1])
    assert actual == ([7, 9], [0, 1], True, 1, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_nan_logits_raise(bad: float, dtype: torch.dtype) -> None:
    ids = torch.zeros(4, 2, dtype=torch.long)
    chain, lead = Tree.chain(ids), SOUND.clone().to(dtype)
    tree = Tree.from_parents(ids, torch.tensor([[-1, 0]] * 4), torch.tensor([[0, 1]] * 4), 1)
    lead[2, 1] = bad
    for drawn in (chain, tree):
        with pytest.raises(FloatingPointError):
            greedy_outcomes(drawn, ids, lead)
        with pytest.raises(FloatingPointError):
            outcomes(drawn, greedy(drawn, ids), lead)
