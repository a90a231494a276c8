"""Rules for a CPU: the distributions of the tensor rules, and equal results for equal flips."""

from random import Random

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from outrider.models.decode.rules import token_rules, token_rules_cpu
from outrider.models.decode.rules.round_outcome import RoundOutcome, outcomes
from outrider.models.decode.rules.token_rules import Accepted
from outrider.models.decode.rules.token_rules_cpu import CpuRule
from outrider.models.decode.sampling import GeneratorSource, RandomSource
from outrider.models.decode.tree import Tree
from tests.enumeration import (
    PLAIN,
    TOYS,
    Draft,
    Propose,
    Scripted,
    Toy,
    ToyRule,
    any_trees,
    argmax_chain,
    bias,
    check_ragged,
    g_test,
    padded,
    sampled_chain,
    sampled_tree,
    top_k_tree,
    worst_bias,
)


def as_it_is(rows: Tensor) -> Tensor:
    """The tests' rows are warped already."""
    return rows


def by(rule: CpuRule) -> ToyRule:
    """A rule for a CPU, in the form of the enumeration's rules."""

    def toy_rule(toy: Toy, draft: Draft, p_rows: Tensor, rng: RandomSource) -> Accepted:
        results = rule(draft.tree, p_rows, as_it_is, draft.q_rows, rng)
        most = draft.tree.levels + 1
        paths = torch.tensor([(result.path + result.path[-1:] * most)[:most] for result in results])
        lengths = torch.tensor([len(result.path) - 1 for result in results])
        return Accepted(paths, lengths, torch.tensor([result.next_id for result in results]))

    return toy_rule


MATCH, RATIO = by(token_rules_cpu.match), by(token_rules_cpu.ratio)


def ragged(*proposals: Propose) -> Propose:
    """Trees of unequal shape turn and turn about, filled up to one size."""

    def propose(toy: Toy, starts: Tensor, rng: RandomSource) -> Draft:
        drafts = [one(toy, starts, rng) for one in proposals]
        size = 1 + max(draft.tree.size for draft in drafts)
        levels = max(draft.tree.levels for draft in drafts)
        grown = [padded(draft, size, levels) for draft in drafts]
        whose = torch.arange(len(starts)) % len(grown)

        def mixed(parts: list[Tensor]) -> Tensor:
            return torch.stack(parts)[whose, torch.arange(len(starts))]

        trees = [draft.tree for draft in grown]
        ids, parents, depths, real = (
            mixed([getattr(tree, name) for tree in trees])
            for name in ("ids", "parents", "depths", "real")
        )
        tree = Tree.from_parents(ids, parents, depths, levels, real)
        return Draft(tree, mixed([draft.contexts for draft in grown]), None)

    return propose


# ---- exactness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize(
    "propose",
    [
        argmax_chain(2),
        top_k_tree(2, 1),
        sampled_tree((2, 1), True),  # siblings that repeat a token
        ragged(argmax_chain(1), top_k_tree(2, 1)),
    ],
    ids=["chain", "tree", "repeated", "ragged"],
)
def test_matching_is_exact(propose: Propose, toy: Toy) -> None:
    assert bias(toy, propose, MATCH) < 1e-12


@pytest.mark.parametrize("toy", TOYS)
def test_the_ratio_test_is_exact(toy: Toy) -> None:
    assert bias(toy, sampled_chain(2), RATIO) < 1e-12


@pytest.mark.parametrize(
    ("propose", "toy_rule"),
    [(top_k_tree(2, 1), MATCH), (sampled_chain(2), RATIO)],
    ids=["match", "ratio"],
)
def test_whole_texts_follow_plain_sampling(propose: Propose, toy_rule: ToyRule) -> None:
    assert g_test(Toy(6, sharpness=0.5), propose, toy_rule, 2000) > 1e-3


def test_outcomes_do_not_depend_on_the_batch() -> None:
    check_ragged(Toy(11), [argmax_chain(1), top_k_tree(2, 1), top_k_tree(2, 2)], MATCH)


# ---- negative controls ---------------------------------------------------------------------------


def test_a_softmax_row_for_an_argmax_draft_is_caught() -> None:
    """R1 broken."""

    def with_rows(toy: Toy, starts: Tensor, rng: RandomSource) -> Draft:
        draft = argmax_chain(2)(toy, starts, rng)
        return draft._replace(q_rows=toy.q[draft.contexts])

    assert worst_bias(with_rows, RATIO) > 0.01


def test_rows_of_another_node_are_caught() -> None:
    """Each row is that of the node before it."""

    def shifted(rule: ToyRule) -> ToyRule:
        return lambda toy, draft, p_rows, rng: rule(toy, draft, p_rows.roll(1, dims=1), rng)

    assert worst_bias(top_k_tree(2, 1), shifted(MATCH)) > 0.01
    assert worst_bias(sampled_chain(2), shifted(RATIO)) > 0.01


def test_unwarped_rows_are_caught() -> None:
    """Right only at temperature 1."""

    def raw(rule: ToyRule) -> ToyRule:
        def toy_rule(toy: Toy, draft: Draft, _p_rows: Tensor, rng: RandomSource) -> Accepted:
            return rule(toy, draft, Toy(toy.seed, warp=PLAIN).p[draft.contexts], rng)

        return toy_rule

    assert worst_bias(top_k_tree(2, 1), raw(MATCH), (0.5, 0, 1.0)) > 0.01
    assert worst_bias(sampled_chain(2), raw(RATIO), (0.5, 0, 1.0)) > 0.01


# ---- against the rules in tensors ----------------------------------------------------------------


def rng_of(seed: int, prompts: int, most: int = 9) -> GeneratorSource:
    return GeneratorSource([Random(seed * 100 + prompt) for prompt in range(prompts)], most)


def chains(
    rng: torch.Generator, prompts: int, whole: bool
) -> tuple[Tree, Tensor, Tensor, list[int]]:
    """Tokens drawn from rows of q, p and q (p often 0; q too, after real nodes), and depths."""
    p, q = (2 * torch.randn(2, prompts, 4, 5, generator=rng, dtype=torch.float64)).softmax(-1)
    if torch.rand(1, generator=rng) < 0.5:  # long drafts are accepted too
        p = (p + 9 * q) / 10
    p = p.masked_fill(p < 0.1, 0.0)
    guesses = q.flatten(0, 1).multinomial(1, generator=rng).view(prompts, 4).roll(1, dims=1)
    deep = torch.full((prompts,), 3) if whole else torch.randint(0, 4, (prompts,), generator=rng)
    q = q.masked_fill((torch.arange(4) >= deep[:, None])[..., None], 0.0)
    tree = Tree.chain(guesses, None if whole else deep)
    return tree, p / p.sum(-1, keepdim=True), q, deep.tolist()


@pytest.mark.parametrize("prompts", [1, 4])
@pytest.mark.parametrize("whole", [True, False])
def test_the_ratio_test_is_the_same_with_equal_random_numbers(whole: bool, prompts: int) -> None:
    generator = torch.Generator().manual_seed(prompts)
    lengths = set()
    for seed in range(40):
        tree, p, q, _ = chains(generator, prompts, whole)
        wanted = token_rules.ratio(tree, p, q, rng_of(seed, prompts))
        actual = token_rules_cpu.ratio(tree, p, as_it_is, q, rng_of(seed, prompts))
        assert actual == outcomes(tree, wanted, p.amax(2))
        lengths |= {len(new.tokens) for new in actual}
    assert lengths == {1, 2, 3, 4}


def test_ratio_in_a_batch_equals_single_chains() -> None:
    generator = torch.Generator().manual_seed(2)
    for seed in range(40):
        tree, p, q, depths = chains(generator, 4, whole=False)
        actual = token_rules_cpu.ratio(tree, p, as_it_is, q, rng_of(seed, 4))
        for i, deep in enumerate(depths):
            mine = slice(i, i + 1), slice(0, deep + 1)
            rng = GeneratorSource([Random(seed * 100 + i)], 9)
            alone = token_rules_cpu.ratio(
                Tree.chain(tree.ids[mine]), p[mine], as_it_is, q[mine], rng
            )
            assert alone == actual[i : i + 1]


def test_the_ratio_test_takes_a_chain_in_any_form() -> None:
    tree, p, q, _ = chains(torch.Generator().manual_seed(3), 4, whole=True)
    nodes = torch.arange(4).expand(4, -1)
    grown = Tree.from_parents(tree.ids, nodes - 1, nodes, 3)
    actual = token_rules_cpu.ratio(grown, p, as_it_is, q, rng_of(0, 4))
    plainly = token_rules_cpu.ratio(tree, p, as_it_is, q, rng_of(0, 4))
    assert [new.tokens for new in actual] == [new.tokens for new in plainly]


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_match_equals_the_reference_on_deterministic_rows(whole: bool, chain: bool) -> None:
    """Rows of one token each; three tokens only, so that siblings repeat, and paths tie."""
    generator = torch.Generator().manual_seed(1)
    lengths = set()
    for _ in range(60):
        ids = torch.randint(0, 3, (4, 9), generator=generator)
        drafted = None if whole else torch.randint(0, 9, (4,), generator=generator)
        tree = Tree.chain(ids, drafted) if chain else any_trees(ids, whole, generator)
        rows = torch.eye(3)[torch.randint(0, 3, (4, 9), generator=generator)]
        wanted = outcomes(tree, token_rules.match(tree, rows, rng_of(0, 4)), rows.amax(2))
        assert token_rules_cpu.match(tree, rows, as_it_is, None, rng_of(0, 4)) == wanted
        lengths |= {len(new.tokens) for new in wanted}
    assert lengths >= {1, 2, 3}


# ---- what is read, and what is refused -----------------------------------------------------------

TREE = Tree.from_parents(  # the root 5 with the children 1 and 2, and 3 below 1
    torch.tensor([[5, 1, 2, 3]]), torch.tensor([[-1, 0, 0, 1]]), torch.tensor([[0, 1, 1, 2]]), 2
)


@pytest.mark.parametrize(
    ("drawn", "tokens", "path", "leaf"),
    [
        ([4], [4], [0], False),
        ([2, 0], [2, 0], [0, 2], True),
        ([1, 3, 6], [1, 3, 6], [0, 1, 3], True),
        ([1, 2], [1, 2], [0, 1], False),  # a child of the root's is none of node 1's
    ],
)
def test_match_draws_only_after_visited_nodes(
    drawn: list[int], tokens: list[int], path: list[int], leaf: bool
) -> None:
    """Each node's row names the node."""
    rows = torch.arange(4.0)[None, :, None].expand(1, 4, 7)
    warped: list[int] = []

    def warp(rows: Tensor) -> Tensor:
        warped.append(int(rows[0, 0]))
        return rows

    rng = Scripted(*([token] for token in drawn))
    assert token_rules_cpu.match(TREE, rows, warp, None, rng) == [
        RoundOutcome(tokens, path, leaf, 2)
    ]
    assert warped == path


def test_only_visited_rows_must_have_mass() -> None:
    rows = torch.full((1, 4, 7), torch.nan)
    rows[0, 0] = torch.eye(7)[2]
    with pytest.raises(ValueError, match="finite"):
        token_rules_cpu.match(TREE, rows, as_it_is, None, rng_of(0, 1))
    rows[0, 2] = torch.eye(7)[6]
    (actual,) = token_rules_cpu.match(TREE, rows, as_it_is, None, rng_of(0, 1))
    assert actual.tokens == [2, 6]


CHAIN = Tree.chain(torch.tensor([[2, 1, 0]]))
P_ROWS = torch.tensor([[[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [0.0, 0.5, 0.5]]])
Q_ROWS = torch.tensor([[[0.25, 0.5, 0.25], [0.5, 0.25, 0.25], [torch.nan] * 3]])


def test_a_residual_without_mass_falls_back_to_p() -> None:
    """R9: p = q, and a flip with its impossible result."""
    rng = Scripted([1, 0, 0], [1])
    token_rules_cpu.ratio(CHAIN, P_ROWS, as_it_is, P_ROWS.clone(), rng)
    assert rng.requests == [[1.0, 1.0, 1.0], [[0.5, 0.25, 0.25]]]


@pytest.mark.parametrize(
    ("p_rows", "q_rows", "why"),
    [
        (P_ROWS, None, "the rows it was drawn from"),
        (P_ROWS, torch.eye(3)[torch.full((1, 3), 2)], r"token 1 of node 1 has p = 0\.25 and q = 0"),
        (torch.full((1, 3, 3), torch.nan), Q_ROWS, "p = nan"),
        (P_ROWS, Q_ROWS.roll(1, dims=1), "q = nan"),
    ],
)
def test_tokens_that_cannot_have_been_drawn_are_refused(
    p_rows: Tensor, q_rows: Tensor | None, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        token_rules_cpu.ratio(CHAIN, p_rows, as_it_is, q_rows, Scripted())


def test_a_nan_that_no_token_touches_is_refused_by_the_draw() -> None:
    hidden = P_ROWS.clone()
    hidden[0, 0, 2] = torch.nan

    class Tails(GeneratorSource):
        def flip_host(self, chances: list[list[float]]) -> list[list[bool]]:
            return [[True, *[False] * (len(row) - 1)] for row in chances]

    with pytest.raises(ValueError, match="finite"):
        token_rules_cpu.ratio(CHAIN, hidden, as_it_is, Q_ROWS, Tails([Random(0)], 3))


@pytest.mark.parametrize("shape", [(1, 2, 3), (1, 3, 2), (1, 3, 4)])
def test_rows_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    """By our own checks, or before them by the shape checker when the tests run with one."""
    rows = torch.ones(shape)
    with pytest.raises((ValueError, TypeCheckError)):
        token_rules_cpu.ratio(CHAIN, P_ROWS, as_it_is, rows, rng_of(0, 1))
    if shape[1] != 3:
        with pytest.raises((ValueError, TypeCheckError)):
            token_rules_cpu.match(CHAIN, rows, as_it_is, None, rng_of(0, 1))


def test_the_ratio_test_of_a_tree_is_refused() -> None:
    rows = torch.full((1, 4, 7), 1 / 7)
    with pytest.raises(ValueError, match="chains only"):
        token_rules_cpu.ratio(TREE, rows, as_it_is, rows, Scripted())
