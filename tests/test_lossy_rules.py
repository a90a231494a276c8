"""Rules that change the distribution: how, and within which bounds."""

import pytest
import torch
from torch import Tensor

from outrider.models.decode.rules import token_rules
from outrider.models.decode.rules.lossy_rules import lenience, typical
from outrider.models.decode.rules.rule_table import RULES, bind_rule
from outrider.models.decode.rules.token_rules import Accepted, deepest_path
from outrider.models.decode.tree import Tree
from tests.enumeration import (
    Draft,
    Scripted,
    Toy,
    ToyRule,
    argmax_chain,
    bias,
    by,
    check_ragged,
    g_test,
    law_of,
    sampled_chain,
    tokens_per_round,
    top_k_tree,
)

TYPICAL = by(bind_rule("lossy_typical", "best"))


def lenient(factor: float) -> ToyRule:
    return by(bind_rule("lossy_lenience", "drawn", factor=factor))


# ---- lenience ------------------------------------------------------------------------------------


def test_lenience_one_is_lossless_and_less_is_not() -> None:
    toy = Toy(1)
    assert bias(toy, sampled_chain(2), lenient(1.0)) < 1e-12
    assert bias(toy, sampled_chain(2), lenient(0.5)) > 0.01


@pytest.mark.parametrize("factor", [0.9, 0.6, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_no_probability_exceeds_p_over_the_factor(seed: int, factor: float) -> None:
    """Token for token after every text, so texts of three tokens at most by the cube of it."""
    toy = Toy(seed, likeness=0.2)
    law = law_of(toy, sampled_chain(2), lenient(factor))
    first, plain = (one.view(3, 9).sum(-1) for one in (law, toy.law()))
    assert bool((law <= toy.law() / factor**3 + 1e-12).all())
    assert bool((first <= plain / factor + 1e-12).all())
    assert float((first / plain).max()) > 1.01


def test_a_smaller_factor_accepts_more() -> None:
    toy = Toy(2, likeness=0.2)
    factors = (1.0, 0.8, 0.5, 0.2)
    accepted = [tokens_per_round(toy, sampled_chain(2), lenient(factor)) for factor in factors]
    assert accepted == sorted(accepted)
    assert accepted[-1] > accepted[0] + 0.3


def test_the_bound_is_broken_by_a_wrong_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn from p, not from max(p - l q, 0): what was accepted too often is drawn once more."""
    monkeypatch.setattr(token_rules, "residual", lambda p, q: (p, p.sum(-1)))
    toy, factor = Toy(0, likeness=0.2), 0.9
    law = law_of(toy, sampled_chain(2), lenient(factor))
    assert float((law - toy.law() / factor**3).max()) > 1e-3


def test_lenience_probabilities_and_residuals() -> None:
    p = torch.tensor([[[0.9, 0.1], [0.5, 0.5]]], dtype=torch.float64)
    q = torch.tensor([[[0.1, 0.9], [0.5, 0.5]]], dtype=torch.float64)
    rng = Scripted([1, 0], [0])
    lenience(Tree.chain(torch.tensor([[0, 1]])), p, q, rng, 0.5)
    assert rng.requests[0] == pytest.approx([1.0, 0.1 / 0.45])
    assert rng.requests[1] == [pytest.approx([1.0, 0.0])]  # max(.9 - .05, 0) and max(.1 - .45, 0)


@pytest.mark.parametrize(
    "rule", [lenient(0.5), by(bind_rule("lossy_typical", "drawn"))], ids=["lenience", "typical"]
)
def test_generator_source_follows_the_lossy_distribution(rule: ToyRule) -> None:
    """The law that enumeration finds, which is not that of plain sampling."""
    toy, propose = Toy(11, warp=(2.5, 0, 1.0)), sampled_chain(2)
    assert g_test(toy, propose, rule, 5000, law_of(toy, propose, rule)) > 1e-3
    assert g_test(toy, propose, rule, 5000) < 1e-6


# ---- typical acceptance --------------------------------------------------------------------------


def chain_and_rows() -> tuple[Tree, Tensor]:
    """exp(-H) is 0.37.. for the first row and 1/4 for the flat one."""
    p = torch.tensor([[[0.7, 0.2, 0.06, 0.04], [0.25, 0.25, 0.25, 0.25], [0.1, 0.0, 0.9, 0.0]]])
    return Tree.chain(torch.tensor([[0, 1, 3]])), p


@pytest.mark.parametrize(
    ("epsilon", "delta", "length"),
    [
        (0.09, 0.3, 2),  # 0.2 > min(.09, .3 * .43) and 1/4 > min(.09, .3 / 4)
        (0.3, 0.3, 2),  # 0.2 > .3 * .43, the bar that a flat row lowers
        (0.3, 1.0, 0),  # 0.2 < .3 < .43
        (0.15, 2.0, 2),
        (0.19, 9.0, 2),
        (0.21, 9.0, 0),
    ],
)
def test_tokens_above_the_threshold_are_accepted(epsilon: float, delta: float, length: int) -> None:
    tree, p = chain_and_rows()
    accepted = typical(tree, p, Scripted([2]), epsilon, delta)
    assert accepted.length.tolist() == [length]


def test_the_next_token_is_drawn_from_the_row_at_the_end() -> None:
    """Not the argmax, and no other random number is used."""
    tree, p = chain_and_rows()
    rng = Scripted([0])
    assert typical(tree, p, rng).next_ids.tolist() == [0]
    assert rng.requests == [[pytest.approx([0.1, 0.0, 0.9, 0.0])]]


def test_of_the_longest_paths_the_most_probable_is_accepted() -> None:
    ids, parents = torch.tensor([[0, 1, 2, 0, 0]]), torch.tensor([[-1, 0, 0, 1, 2]])
    tree = Tree.from_parents(ids, parents, torch.tensor([[0, 1, 1, 2, 2]]), levels=2)
    rows = torch.tensor([[[0.2, 0.3, 0.5], [0.4, 0.3, 0.3], [0.5, 0.25, 0.25]]])
    p = torch.cat([rows, rows[:, :2]], dim=1)
    assert typical(tree, p, Scripted([0])).path.tolist() == [[0, 2, 4]]  # .5 * .5 over .3 * .4
    p[0, 0] = torch.tensor([0.2, 0.6, 0.2])
    assert typical(tree, p, Scripted([0])).path.tolist() == [[0, 1, 3]]  # .6 * .4 over .2 * .5


def test_certain_rows_are_greedy_and_others_are_not_lossless() -> None:
    assert bias(Toy(3, warp=(0.0, 0, 1.0)), argmax_chain(2), TYPICAL) < 1e-12
    assert bias(Toy(3), argmax_chain(2), TYPICAL) > 0.01


def test_the_threshold_is_of_the_parents_row() -> None:
    """With epsilon high, a threshold from the child's own row would decide otherwise."""

    def own_threshold(toy: Toy, draft: Draft, p_rows: Tensor, rng: Scripted) -> Accepted:
        entropy = torch.special.entr(p_rows).sum(-1)
        above = draft.tree.parents.clamp(min=0)
        chances = p_rows.gather(1, above[..., None].expand_as(p_rows))
        p = chances.gather(2, draft.tree.ids[..., None])[..., 0]
        path, length = deepest_path(draft.tree, p > (0.5 * (-entropy).exp()).clamp(max=0.9))
        return Accepted(path, length, path[:, 0])

    ids = torch.tensor([[0, 1]])
    p = torch.tensor([[[0.34, 0.33, 0.33], [1.0, 0.0, 0.0]]])  # bars .5 / 3 and .5
    draft = Draft(Tree.chain(ids), ids, None)
    assert own_threshold(Toy(0), draft, p, Scripted()).length.tolist() == [0]
    assert typical(draft.tree, p, Scripted([0]), 0.9, 0.5).length.tolist() == [1]


def test_ragged_batch_equals_single_trees() -> None:
    check_ragged(Toy(12), [sampled_chain(1), sampled_chain(2)], lenient(0.5))
    check_ragged(Toy(12), [argmax_chain(1), top_k_tree(2, 2), top_k_tree(3)], TYPICAL)


def test_lossy_rules_have_lossy_names() -> None:
    for name, rule in RULES.items():
        assert name.startswith("lossy_") == rule.lossy


@pytest.mark.parametrize("factor", [0.0, -1.0, 1.5, float("nan")])
def test_a_factor_out_of_range_is_refused(factor: float) -> None:
    tree, p = chain_and_rows()
    with pytest.raises(ValueError, match="0 < factor <= 1"):
        lenience(tree, p, p, Scripted(), factor)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.3), (1.0, 0.3), (0.1, 0.0)])
def test_typical_parameters_out_of_range_are_refused(epsilon: float, delta: float) -> None:
    tree, p = chain_and_rows()
    with pytest.raises(ValueError, match="0 < epsilon < 1"):
        typical(tree, p, Scripted(), epsilon, delta)
