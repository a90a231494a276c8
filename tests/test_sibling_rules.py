"""Siblings drawn by chance: their law, the two rules that verify them, and what breaks those."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from outrider.models.decode.rules import sibling_rules
from outrider.models.decode.rules.rule_table import bind_rule
from outrider.models.decode.rules.sibling_rules import draw_siblings, sibling_by_sibling
from outrider.models.decode.rules.token_rules import Accepted, ratio
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.tree import Tree
from tests.enumeration import (
    TOYS,
    Draft,
    Law,
    Propose,
    Scripted,
    Toy,
    ToyRule,
    bias,
    by,
    check_ragged,
    enumerate_law,
    g_test,
    law_of,
    sampled_chain,
    sampled_tree,
    tokens_per_round,
    top_k_tree,
    variation,
    worst_bias,
)

independent = partial(sibling_by_sibling, replacement=True)
without_replacement = partial(sibling_by_sibling, replacement=False)
IID = by(bind_rule("independent", "independent"))
NONE_TWICE = by(bind_rule("without_replacement", "drawn"))
MATCH = by(bind_rule("match", "best"))
TRAVERSAL = by(bind_rule("traversal", "drawn"))

# ---- drawing -------------------------------------------------------------------------------------


def law_of_siblings(row: list[float], count: int, replacement: bool) -> Law:
    """Token ids in the order drawn; -1 where there is no child."""

    def process(rng: RandomSource) -> tuple[int, ...]:
        ids, real = draw_siblings(torch.tensor([[row]]).double(), count, rng, replacement)
        return tuple(ids.masked_fill(~real, -1).flatten().tolist())

    return enumerate_law(process)


def test_siblings_without_replacement_follow_successive_draws() -> None:
    """By hand, of (1/2, 1/4, 1/4): first 0 (1/2), then 1 among 1 and 2 (1/2), and so on."""
    law = law_of_siblings([0.5, 0.25, 0.25], 2, replacement=False)
    expected = {(0, 1): 1 / 4, (0, 2): 1 / 4, (1, 0): 1 / 6, (1, 2): 1 / 12}
    expected |= {(2, 0): 1 / 6, (2, 1): 1 / 12}
    assert law == pytest.approx(expected)


def test_independent_siblings_may_repeat_a_token() -> None:
    law = law_of_siblings([0.75, 0.25], 2, replacement=True)
    assert law == pytest.approx({(0, 0): 9 / 16, (0, 1): 3 / 16, (1, 0): 3 / 16, (1, 1): 1 / 16})


def test_a_row_has_no_more_children_than_tokens() -> None:
    """And what is drawn in their place costs no chance."""
    law = law_of_siblings([0.75, 0.25, 0.0], 4, replacement=False)
    assert law == pytest.approx({(0, 1, -1, -1): 0.75, (1, 0, -1, -1): 0.25})


def test_many_rows_are_drawn_from_together() -> None:
    rows = torch.tensor([[[1.0, 0, 0], [0, 1.0, 0]], [[0, 0.5, 0.5], [0, 0, 1.0]]])
    ids, real = draw_siblings(rows, 2, FirstToken(), replacement=False)
    assert ids[..., 0].tolist() == [[0, 1], [1, 2]]
    assert real.tolist() == [[[True, False], [True, False]], [[True, True], [True, False]]]
    assert ids[1, 0].tolist() == [1, 2]


class FirstToken(RandomSource):
    """Always the first token that has any chance."""

    def flip(self, chances: Tensor) -> Tensor:
        raise AssertionError("drawing does not flip")

    def draw(self, rows: Tensor) -> Tensor:
        return (rows > 0).int().argmax(-1)


# ---- exactness -----------------------------------------------------------------------------------

SHAPES = [(2,), (2, 1), (1, 2), (3, 1)]


@pytest.mark.parametrize("widths", SHAPES)
@pytest.mark.parametrize("toy", TOYS)
def test_siblings_drawn_without_replacement_are_verified_exactly(
    toy: Toy, widths: tuple[int, ...]
) -> None:
    """Truncated rows run out of tokens, likeness 1 of residual, likeness 0 of acceptance."""
    assert bias(toy, sampled_tree(widths, replacement=False), NONE_TWICE) < 1e-12


@pytest.mark.parametrize("widths", SHAPES[:3])
@pytest.mark.parametrize("toy", TOYS)
def test_independent_siblings_are_verified_exactly(toy: Toy, widths: tuple[int, ...]) -> None:
    assert bias(toy, sampled_tree(widths, replacement=True), IID) < 1e-12


@pytest.mark.parametrize("rule", [independent, without_replacement])
def test_on_a_chain_both_rules_are_the_ratio_test(rule: Callable[..., Accepted]) -> None:
    toy = Toy(1)
    assert variation(law_of(toy, sampled_chain(2), by(rule)), toy.law()) < 1e-12
    tokens = [tokens_per_round(toy, sampled_chain(2), by(one)) for one in (rule, ratio)]
    assert tokens[0] == pytest.approx(tokens[1], abs=1e-12)


def test_a_bushy_tree_is_verified_exactly() -> None:
    """Two below each of two: every rule of the trees, seven nodes."""
    toy = Toy(15)
    assert bias(toy, sampled_tree((2, 2), replacement=False), NONE_TWICE) < 1e-12
    assert bias(replace(toy, length=1), sampled_tree((2, 2), replacement=True), IID) < 1e-12


@pytest.mark.parametrize(
    ("rule", "replacement"), [(IID, True), (NONE_TWICE, False)], ids=["independent", "none twice"]
)
def test_generator_source_follows_the_joint_distribution(rule: ToyRule, replacement: bool) -> None:
    toy = Toy(11, warp=(2.5, 0, 1.0))
    assert g_test(toy, sampled_tree((2, 1), replacement), rule, 2000) > 1e-3


def test_the_g_test_rejects_siblings_that_were_pruned() -> None:
    toy = Toy(11, warp=(2.5, 0, 1.0))
    pruned = resorted(sampled_tree((2,), replacement=False), 1)
    assert g_test(toy, pruned, NONE_TWICE, 1500) < 1e-6


@pytest.mark.parametrize(("rule", "replacement"), [(IID, True), (NONE_TWICE, False)])
def test_ragged_batch_equals_single_trees(rule: ToyRule, replacement: bool) -> None:
    shapes = [(1,), (1, 1), (2, 2), (3, 1), (2, 1, 1)]
    proposals = [sampled_tree(widths, replacement) for widths in shapes]
    check_ragged(Toy(12, levels=3), proposals, rule)
    check_ragged(Toy(12, levels=3, warp=(1.0, 2, 1.0)), proposals, rule)


# ---- negative controls ---------------------------------------------------------------------------


def test_one_rule_for_the_other_kind_of_siblings_is_caught() -> None:
    """Q neither loses the rejected token nor is renormalised; here it should."""
    assert worst_bias(sampled_tree((2,), replacement=False), IID) > 0.01


def test_a_row_that_is_not_renormalised_after_a_rejection_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sibling_rules, "remove_tokens", lambda q, tokens: q.scatter(1, tokens, 0.0))
    assert worst_bias(sampled_tree((2,), replacement=False), NONE_TWICE) > 0.01


def resorted(propose: Propose, count: int) -> Propose:
    """The likeliest of the root's children, likeliest first."""

    def sorting(toy: Toy, starts: Tensor, rng: RandomSource) -> Draft:
        tree, contexts, q_rows = propose(toy, starts, rng)
        chances = toy.q[starts].gather(1, tree.ids[:, 1:])
        order = chances.argsort(dim=-1, descending=True, stable=True)[:, :count] + 1
        nodes = torch.cat([torch.zeros_like(order[:, :1]), order], dim=1)
        assert q_rows is not None
        ids, parents, depths = (
            part.gather(1, nodes) for part in (tree.ids, tree.parents, tree.depths)
        )
        sorted_tree = Tree.from_parents(ids, parents, depths, 1)
        return Draft(sorted_tree, contexts.gather(1, nodes), q_rows[:, : count + 1])

    return sorting


@pytest.mark.parametrize("count", [1, 2], ids=["pruned", "sorted"])
@pytest.mark.parametrize(("rule", "replacement"), [(IID, True), (NONE_TWICE, False)])
def test_sampled_siblings_pruned_or_sorted_by_likelihood_are_caught(
    rule: ToyRule, replacement: bool, count: int
) -> None:
    """R3 broken."""
    assert worst_bias(resorted(sampled_tree((2,), replacement), count), rule) > 0.01


def test_top_k_tokens_verified_by_ratios_are_caught() -> None:
    """R1 and R3 broken: siblings chosen by rank, tested against the softmax rows."""

    def with_rows(toy: Toy, starts: Tensor, rng: RandomSource) -> Draft:
        draft = top_k_tree(2)(toy, starts, rng)
        return draft._replace(q_rows=toy.q[draft.contexts])

    assert worst_bias(with_rows, NONE_TWICE) > 0.01


# ---- by hand -------------------------------------------------------------------------------------

PAIR = Tree.from_parents(
    torch.tensor([[9, 0, 1]]), torch.tensor([[-1, 0, 0]]), torch.tensor([[0, 1, 1]]), levels=1
)
P = torch.tensor([[[0.25, 0.25, 0.5], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]])
Q = torch.tensor([[[0.5, 0.25, 0.25], [torch.nan] * 3, [torch.nan] * 3]])


def test_the_chances_of_independent_siblings() -> None:
    """0 is accepted with 1/2; then R = (0, 0, 1): 1 has no chance; then R is still (0, 0, 1)."""
    rng = Scripted([1, 0, 0], [2])
    assert independent(PAIR, P, Q, rng).next_ids.tolist() == [2]
    assert rng.requests == [[1.0, 0.5, 0.0], [[0.0, 0.0, 1.0]]]


def test_the_chances_of_siblings_without_replacement() -> None:
    """As (1/4, 1/2, 1/4) against (1/2, 1/4, 1/4): R = (0, 1, 0), then q = (0, 1/2, 1/2)."""
    rng = Scripted([1, 0, 0], [2])
    p = P.clone()
    p[0, 0] = torch.tensor([0.25, 0.5, 0.25])
    without_replacement(PAIR, p, Q, rng)
    assert rng.requests == [[1.0, 0.5, 1.0], [[0.0, 1.0, 0.0]]]


def test_the_first_sibling_whose_flip_succeeds_is_accepted() -> None:
    """And the token after it comes from its own row."""
    rng = Scripted([1, 1, 1], [0])
    accepted = independent(PAIR, P, Q, rng)
    assert (accepted.path.tolist(), accepted.length.tolist()) == ([[0, 1]], [1])
    assert rng.requests[1] == [[0.5, 0.5, 0.0]]


def test_siblings_that_cannot_have_been_drawn_are_refused() -> None:
    twice = replace(PAIR, ids=torch.tensor([[9, 1, 1]]))
    with pytest.raises(ValueError, match="token 1 of node 2 was drawn twice"):
        without_replacement(twice, P, Q, Scripted())
    independent(twice, P, Q, Scripted([1, 0, 0], [2]))
    with pytest.raises(ValueError, match="q = 0"):
        independent(PAIR, P, Q.roll(1, dims=2).scatter(2, torch.tensor([[[0]]]), 0.0), Scripted())
    with pytest.raises(ValueError, match="q = nan"):
        without_replacement(PAIR, P, Q.roll(1, dims=1), Scripted())


# ---- how much each rule keeps --------------------------------------------------------------------


def test_accepted_tokens_per_rule_are_in_the_known_order() -> None:
    """Depth 2, width 2, random models: accepted tokens on average, each rule with its drafts.

    The known numbers are 1.70 (independent), 1.74 (top-k), 1.87 (without replacement) and
    1.885 (traversal). Top-k tokens may be anywhere in this order, by how good the drafter is.
    """
    toys = [Toy(seed, likeness=0.8, length=1, sharpness=2.5) for seed in range(2)]
    cases: list[tuple[Propose, ToyRule]] = [
        (sampled_tree((2, 2), replacement=True), IID),
        (top_k_tree(2, 2), MATCH),
        (sampled_tree((2, 2), replacement=False), NONE_TWICE),
        (sampled_tree((2, 2), replacement=False), TRAVERSAL),
    ]
    accepted = [sum(tokens_per_round(toy, *case) - 1 for toy in toys) / len(toys) for case in cases]
    assert accepted == sorted(accepted)
    assert accepted == pytest.approx([1.70, 1.74, 1.87, 1.885], abs=0.035)


@pytest.mark.parametrize("seed", range(6))
def test_independent_siblings_never_accept_more(seed: int) -> None:
    toy = Toy(seed, length=1, levels=1)
    iid = tokens_per_round(toy, sampled_tree((2,), replacement=True), IID)
    once = tokens_per_round(toy, sampled_tree((2,), replacement=False), NONE_TWICE)
    one = tokens_per_round(toy, sampled_chain(1), by(ratio))
    assert one < iid < once
