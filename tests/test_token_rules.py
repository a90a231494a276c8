"""The verifiers emit exactly the target's law: enumerated, not estimated.

The tensor functions themselves run with a random source that visits every outcome of every flip
and draw with its exact probability, through several rounds, on random toy models whose rows depend
on the whole context. Each rule of `token_rules.py` that a published decoder broke is broken
here on purpose, and must be caught by the same enumeration. Siblings drawn by chance are in
test_sibling_rules.py, whole blocks in test_block_rules.py.
"""

from dataclasses import replace
from itertools import pairwise, product
from random import Random

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from outrider.models.decode.rules.rule_table import bind_rule
from outrider.models.decode.rules.token_rules import (
    Accepted,
    deepest_path,
    has_child,
    match,
    ratio,
    select_node,
)
from outrider.models.decode.sampling import GeneratorSource, RandomSource
from outrider.models.decode.tree import Tree, rerank
from tests.enumeration import (
    PLAIN,
    TOYS,
    WARPS,
    Branches,
    Draft,
    Propose,
    Scripted,
    Toy,
    ToyRule,
    Warp,
    argmax_chain,
    bias,
    by,
    check_ragged,
    enumerate_law,
    enumerate_round,
    g_test,
    law_of,
    reached,
    sampled_chain,
    sampled_tree,
    tokens_per_round,
    top_k_tree,
    variation,
    worst_bias,
)
from tests.trees import checked, greedy

MATCH = by(bind_rule("match", "best"))
SAMPLED = by(bind_rule("sampled", "independent"))
RATIO = by(bind_rule("ratio", "drawn"))
BLOCK = by(bind_rule("block", "drawn"))

# ---- exactness -----------------------------------------------------------------------------------


def dynamic_tree(toy: Toy, starts: Tensor, rng: RandomSource) -> Draft:
    """The four best nodes (root included) of the top-k tree, chosen as in EAGLE-2."""
    tree, contexts, _ = top_k_tree(2, 2)(toy, starts, rng)
    above = contexts.gather(1, tree.parents.clamp(min=0))
    logs = (
        toy.q[above].gather(2, tree.ids[..., None])[..., 0].log().masked_fill(tree.depths == 0, 0)
    )
    scores = torch.where(tree.ancestor_mask, logs[:, None], 0.0).sum(-1)
    best = rerank(scores, 4)
    parents = torch.searchsorted(best, tree.parents.gather(1, best)).masked_fill(best == 0, -1)
    ids, depths = tree.ids.gather(1, best), tree.depths.gather(1, best)
    return Draft(
        checked(Tree.from_parents(ids, parents, depths, 2)), contexts.gather(1, best), None
    )


@pytest.mark.parametrize("setting", WARPS)
@pytest.mark.parametrize("vocab", [3, 4])
@pytest.mark.parametrize("propose", [argmax_chain(2), top_k_tree(2, 1), dynamic_tree])
def test_matching_a_deterministic_tree_is_exact(
    propose: Propose, vocab: int, setting: Warp
) -> None:
    assert bias(Toy(1, vocab, setting), propose, MATCH) < 1e-12


@pytest.mark.parametrize("toy", TOYS)
def test_the_ratio_test_of_a_sampled_chain_is_exact(toy: Toy) -> None:
    assert bias(toy, sampled_chain(2), RATIO) < 1e-12


@pytest.mark.parametrize("setting", WARPS)
@pytest.mark.parametrize(
    "propose", [sampled_chain(2), sampled_tree((2, 1), True), sampled_tree((2, 1), False)]
)
def test_matching_is_exact_for_trees_drawn_in_any_way(propose: Propose, setting: Warp) -> None:
    """Repeated siblings included: only the first of them is followed."""
    assert bias(Toy(2, warp=setting), propose, SAMPLED) < 1e-12


def test_a_perfect_drafter_is_always_accepted() -> None:
    """Where p = q, the residual has no mass, and is never computed."""
    assert tokens_per_round(Toy(3, likeness=1.0), sampled_chain(2), RATIO) == pytest.approx(3)


def test_point_mass_rows_make_the_ratio_test_equal_to_matching() -> None:
    """R1: an argmax draft is a draw from a one-hot row."""

    def one_hot_chain(toy: Toy, starts: Tensor, rng: RandomSource) -> Draft:
        draft = argmax_chain(2)(toy, starts, rng)
        rows = torch.eye(toy.vocab, dtype=torch.float64)[draft.tree.ids.roll(-1, dims=1)]
        return draft._replace(q_rows=rows)

    toy = Toy(4)
    ratios, matches = law_of(toy, one_hot_chain, RATIO), law_of(toy, argmax_chain(2), MATCH)
    assert variation(ratios, matches) < 1e-12
    assert tokens_per_round(toy, one_hot_chain, RATIO) == pytest.approx(
        tokens_per_round(toy, argmax_chain(2), MATCH)
    )


def unlikely(draft: Draft) -> Tensor:
    """[B, N]: drafted tokens to which the drafter gave less than 0.4."""
    assert draft.q_rows is not None
    chances = draft.q_rows[:, :-1].gather(2, draft.tree.ids[:, 1:, None])[..., 0]
    return torch.cat([torch.zeros_like(draft.tree.real[:, :1]), chances < 0.4], dim=1)


def shortened(draft: Draft, gone: Tensor) -> Draft:
    """Chains without these nodes and what is below them."""
    real = ~(draft.tree.ancestor_mask & gone[:, None]).any(-1)
    return draft._replace(tree=replace(draft.tree, real=real, unpadded=False))


@pytest.mark.parametrize("rule", [RATIO, BLOCK, SAMPLED], ids=["ratio", "block", "sampled"])
@pytest.mark.parametrize("depth", [2, 3])
def test_stopping_after_an_unlikely_token_is_exact(rule: ToyRule, depth: int) -> None:
    """R2: the length may depend on the tokens before, so the unlikely one is still verified."""

    def stopping(toy: Toy, starts: Tensor, rng: RandomSource) -> Draft:
        draft = sampled_chain(depth)(toy, starts, rng)
        assert draft.tree.is_chain
        after_unlikely = unlikely(draft).gather(1, draft.tree.parents.clamp(min=0))
        return shortened(draft, after_unlikely)

    assert bias(Toy(5, levels=depth), stopping, rule) < 1e-12


# ---- negative controls: each breaks one rule, and is caught --------------------------------------


def test_a_softmax_row_for_an_argmax_draft_is_caught() -> None:
    """R1 broken: the token was not drawn from the row."""

    def with_rows(toy: Toy, starts: Tensor, rng: RandomSource) -> Draft:
        draft = argmax_chain(2)(toy, starts, rng)
        return draft._replace(q_rows=toy.q[draft.contexts])

    assert worst_bias(with_rows, RATIO) > 0.01


def test_a_row_from_before_the_truncation_is_caught() -> None:
    """R1 broken: drawn from a truncated row, verified with the whole one."""

    def truncated_draw(toy: Toy, starts: Tensor, rng: RandomSource) -> Draft:
        draft = sampled_chain(2)(replace(toy, warp=(1.0, 2, 1.0)), starts, rng)
        return draft._replace(q_rows=toy.q[draft.contexts])

    assert worst_bias(truncated_draw, RATIO) > 0.01


def test_dropping_an_unlikely_token_after_seeing_it_is_caught() -> None:
    """R2 broken: whether a token is verified depends on the token."""

    def dropping(toy: Toy, starts: Tensor, rng: RandomSource) -> Draft:
        draft = sampled_chain(2)(toy, starts, rng)
        return shortened(draft, unlikely(draft))

    assert worst_bias(dropping, RATIO) > 0.01


def redraw(toy: Toy, draft: Draft, p_rows: Tensor, rng: RandomSource) -> Accepted:
    path, length, next_ids = match(draft.tree, p_rows, rng)
    fresh = rng.draw(select_node(p_rows, path[:, -1])[:, None])[:, 0]
    return Accepted(path, length, torch.where(has_child(draft.tree, path[:, -1]), fresh, next_ids))


@pytest.mark.parametrize("propose", [argmax_chain(2), top_k_tree(2)])
def test_a_fresh_draw_after_a_mismatch_is_caught(propose: Propose) -> None:
    """R4 broken: the sample that failed to match is thrown away."""
    assert worst_bias(propose, redraw) > 0.01


def test_one_random_number_per_path_instead_of_per_node_is_caught() -> None:
    """R5 broken: every leaf's path is tested with its own draws, and the longer one accepted."""

    def best_path(toy: Toy, draft: Draft, p_rows: Tensor, rng: RandomSource) -> Accepted:
        tested = []
        for leaf in (1, 2):
            nodes = torch.tensor([0, leaf])
            alone = match(Tree.chain(draft.tree.ids[:, nodes]), p_rows[:, nodes], rng)
            tested.append(alone._replace(path=nodes[alone.path]))
        first = tested[0].length >= tested[1].length
        path, length, next_ids = (
            torch.where(first[:, None] if a.ndim == 2 else first, a, b)
            for a, b in zip(*tested, strict=True)
        )
        return Accepted(path, length, next_ids)

    assert worst_bias(top_k_tree(2), best_path) > 0.01


def test_the_deeper_of_two_repeated_siblings_is_caught() -> None:
    """R5 broken: the same text has two nodes, and the better of their two random numbers counts."""

    def deeper(toy: Toy, draft: Draft, p_rows: Tensor, rng: RandomSource) -> Accepted:
        return greedy(draft.tree, rng.draw(p_rows))

    assert worst_bias(sampled_tree((2, 1), True), deeper) > 0.01


def test_an_unwarped_bonus_token_is_caught() -> None:
    """Raw probabilities after the last acceptance: right only at temperature 1."""

    def raw_bonus(toy: Toy, draft: Draft, p_rows: Tensor, rng: RandomSource) -> Accepted:
        raw = replace(toy, warp=PLAIN).p[draft.contexts[:, -1:]]
        rule = MATCH if draft.q_rows is None else RATIO
        rows = torch.cat([p_rows[:, :-1], raw], dim=1)
        return rule(toy, draft, rows, rng)

    assert worst_bias(argmax_chain(2), raw_bonus, (0.5, 0, 1.0)) > 0.01
    assert worst_bias(sampled_chain(2), raw_bonus, (0.5, 0, 1.0)) > 0.01


class Tabled(RandomSource):
    """Uniforms written down for each prompt and node, the same at every call."""

    def __init__(self, uniforms: Tensor) -> None:
        self.uniforms = uniforms

    def flip(self, chances: Tensor) -> Tensor:
        raise AssertionError("matching does not flip")

    def draw(self, rows: Tensor) -> Tensor:
        return (rows.cumsum(-1) <= self.uniforms[:, : rows.shape[1], None]).sum(-1)


@pytest.mark.parametrize("fresh", [True, False])
def test_random_numbers_reused_across_rounds_are_caught(fresh: bool) -> None:
    """R6 broken: right one token at a time, wrong jointly.

    The outcome is constant between the ends of all rows' slices, so the two uniforms of a
    round (one draft, one bonus) are integrated exactly by the midpoints of those intervals.
    """
    toy = Toy(6, length=2)
    ends = toy.p[toy.starts].cumsum(-1)[:, :-1].flatten().tolist()
    pieces = [((a + b) / 2, b - a) for a, b in pairwise(sorted({0.0, 1.0, *ends}))]
    grid = torch.tensor(list(product(pieces, repeat=3)), dtype=torch.float64)
    marks, weights = grid[..., 0], grid[..., 1].prod(-1)
    contexts = torch.ones(len(grid), dtype=torch.long)
    for uniforms in (marks[:, :2], marks[:, 2:].expand(-1, 2) if fresh else marks[:, :2]):
        growing = contexts.clamp(max=toy.vocab**toy.length - 1)
        draft = argmax_chain(1)(toy, growing, Branches([]))
        after = reached(toy, draft, MATCH(toy, draft, toy.p[draft.contexts], Tabled(uniforms)))
        contexts = torch.where(growing == contexts, after, contexts)
    law = torch.zeros(2 * toy.vocab**toy.length, dtype=torch.float64)
    error = variation(law.index_add(0, contexts, weights)[toy.ends], toy.law())
    assert error < 1e-12 if fresh else error > 0.01


# ---- real random numbers -------------------------------------------------------------------------

FLAT = Toy(11, warp=(2.5, 0, 1.0))


@pytest.mark.parametrize(
    ("propose", "rule"),
    [
        (sampled_chain(2), RATIO),
        (sampled_chain(2), SAMPLED),
        (sampled_tree((2, 1), True), SAMPLED),
        (top_k_tree(2, 1), MATCH),
    ],
)
def test_generator_source_follows_the_joint_distribution(propose: Propose, rule: ToyRule) -> None:
    """27 cells of three tokens, all expected more than five times; the seeds are fixed."""
    assert g_test(FLAT, propose, rule, 2000) > 1e-3


def test_the_g_test_rejects_a_biased_verifier() -> None:
    """The redraw of R4, with fewer samples."""
    assert g_test(FLAT, argmax_chain(2), redraw, 1500) < 1e-6


def test_ragged_batch_equals_single_trees() -> None:
    check_ragged(Toy(12), [sampled_chain(1), sampled_chain(2)], RATIO)
    check_ragged(Toy(12), [argmax_chain(1), top_k_tree(2, 2), top_k_tree(3)], MATCH)


# ---- single rounds, by hand ----------------------------------------------------------------------


def bushy() -> Tree:
    """5 -> {1 -> {2, 3}, 4 -> {1}}; nodes 0; 1, 2; 3, 4, 5."""
    ids, parents = torch.tensor([[5, 1, 4, 2, 3, 1]]), torch.tensor([[-1, 0, 0, 1, 1, 2]])
    return Tree.from_parents(ids, parents, torch.tensor([[0, 1, 1, 2, 2, 2]]), levels=2)


@pytest.mark.parametrize(
    ("choice", "path", "length", "next_id"),
    [
        ([1, 3, 0, 7, 8, 9], [0, 1, 4], 2, 8),
        ([4, 3, 1, 7, 8, 9], [0, 2, 5], 2, 9),
        ([4, 3, 0, 7, 8, 9], [0, 2, 2], 1, 0),
        ([6, 3, 1, 7, 8, 9], [0, 0, 0], 0, 6),  # nothing below a rejected node counts
    ],
)
def test_greedy_follows_the_choices_from_the_root(
    choice: list[int], path: list[int], length: int, next_id: int
) -> None:
    accepted = greedy(bushy(), torch.tensor([choice]))
    assert accepted.path.tolist() == [path]
    assert accepted.length.tolist() == [length]
    assert accepted.next_ids.tolist() == [next_id]


def test_greedy_finds_the_longest_path_below_a_repeated_sibling() -> None:
    """Two siblings carry token 1; only the second one was continued with the right token."""
    ids, parents = torch.tensor([[5, 1, 1, 2, 3]]), torch.tensor([[-1, 0, 0, 1, 2]])
    tree = Tree.from_parents(ids, parents, torch.tensor([[0, 1, 1, 2, 2]]), levels=2)
    accepted = greedy(tree, torch.tensor([[1, 3, 3, 9, 8]]))
    assert (accepted.path.tolist(), accepted.next_ids.tolist()) == ([[0, 2, 4]], [8])


def test_deepest_path_prefers_depth_then_score_then_index() -> None:
    """A level more than the tree has only lengthens the path; a node not real ends it."""
    tree = replace(bushy(), levels=6)
    passed = torch.ones(1, 6, dtype=torch.bool)
    path, length = deepest_path(tree, passed)
    assert (path.tolist(), length.tolist()) == ([[0, 1, 3, 3, 3, 3, 3]], [2])
    scores = torch.tensor([[9.0, 9.0, 9.0, 1.0, 1.0, 2.0]])
    assert deepest_path(tree, passed, scores)[0].tolist() == [[0, 2, 5, 5, 5, 5, 5]]
    passed[0, [1, 5]] = False
    assert deepest_path(tree, passed)[0].tolist() == [[0, 2, 2, 2, 2, 2, 2]]
    nothing = replace(tree, real=tree.depths == 0, unpadded=False)
    assert deepest_path(nothing, torch.ones_like(passed))[1].tolist() == [0]


@pytest.mark.parametrize("propose", [argmax_chain(2), top_k_tree(2, 2), sampled_chain(2)])
def test_temperature_zero_is_greedy(propose: Propose) -> None:
    """R10: on one-hot rows the verifiers take the path and the token of `greedy`."""
    toy = Toy(12, vocab=4, warp=(0.0, 0, 1.0), likeness=0.7)
    rng = GeneratorSource([Random(0)] * len(toy.starts), 7)
    draft = propose(toy, toy.starts, rng)
    p_rows = toy.p[draft.contexts]
    wanted = greedy(draft.tree, p_rows.argmax(-1))
    accepted = (MATCH if draft.q_rows is None else RATIO)(toy, draft, p_rows, rng)
    assert 0 < float(wanted.length.double().mean()) < 2
    for part, other in zip(accepted, wanted, strict=True):
        assert torch.equal(part, other)


def test_match_follows_the_samples_and_emits_the_first_mismatch() -> None:
    """One draw for all nodes; node 4 is a leaf: its sample 0 is the bonus token."""
    rows = torch.full((1, 6, 7), 1 / 7)
    for answers, path, next_id in [
        ([1, 3, 1, 5, 0, 5], [0, 1, 4], 0),
        ([1, 4, 1, 5, 0, 5], [0, 1, 1], 4),
        ([6, 3, 1, 5, 0, 5], [0, 0, 0], 6),
    ]:
        accepted = match(bushy(), rows, Scripted(answers))
        assert (accepted.path.tolist(), accepted.next_ids.tolist()) == ([path], [next_id])


P_ROWS = torch.tensor([[[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [0.0, 0.5, 0.5]]])
Q_ROWS = torch.tensor([[[0.25, 0.5, 0.25], [0.5, 0.25, 0.25], [torch.nan] * 3]])
CHAIN = Tree.chain(torch.tensor([[2, 1, 0]]))  # p/q is 1/2 for token 1 and 1/4 for token 0


@pytest.mark.parametrize(
    ("heads", "path", "next_id", "row"),
    [
        ([1, 0, 1], [0, 0, 0], 0, [1.0, 0.0, 0.0]),
        ([1, 1, 0], [0, 1, 1], 1, [0.0, 1.0, 0.0]),
        ([1, 1, 1], [0, 1, 2], 2, [0.0, 0.5, 0.5]),
    ],
)
def test_ratio_probabilities_and_residuals(
    heads: list[int], path: list[int], next_id: int, row: list[float]
) -> None:
    """Residuals by hand: (.25, -.25, 0) and (-.375, .5, -.125) leave one token each.

    The last node has no child, and its row of q is never read.
    """
    rng = Scripted(heads, [next_id])
    accepted = ratio(CHAIN, P_ROWS, Q_ROWS, rng)
    assert (accepted.path.tolist(), accepted.next_ids.tolist()) == ([path], [next_id])
    assert rng.requests == [[1.0, 0.5, 0.25], [row]]


def test_a_residual_without_mass_falls_back_to_p() -> None:
    """R9: p = q, and a flip with its impossible result."""
    rng = Scripted([1, 0, 0], [1])
    ratio(CHAIN, P_ROWS, P_ROWS.clone(), rng)
    assert rng.requests[1] == [[0.5, 0.25, 0.25]]


# ---- what is refused -----------------------------------------------------------------------------


def test_drafts_that_cannot_be_verified_losslessly_are_refused() -> None:
    rng = Scripted()
    with pytest.raises(ValueError, match="chains only"):
        ratio(bushy(), torch.full((1, 6, 7), 1 / 7), torch.full((1, 6, 7), 1 / 7), rng)
    wrong = Q_ROWS.clone()
    wrong[0, 0] = torch.tensor([0.5, 0.0, 0.5])
    with pytest.raises(ValueError, match=r"token 1 of node 1 has p = 0\.25 and q = 0"):
        ratio(CHAIN, P_ROWS, wrong, rng)
    with pytest.raises(ValueError, match="p = nan"):
        ratio(CHAIN, torch.full((1, 3, 3), torch.nan), Q_ROWS, rng)
    with pytest.raises(ValueError, match="q = nan"):
        ratio(CHAIN, P_ROWS, Q_ROWS.roll(1, dims=1), rng)


def test_a_nan_that_no_token_touches_is_refused_by_the_draw() -> None:
    """The fallback of a residual without mass must not hide it."""
    hidden = P_ROWS.clone()
    hidden[0, 0, 2] = torch.nan
    with pytest.raises(ValueError, match="finite"):
        ratio(CHAIN, hidden, Q_ROWS, AlwaysTails())


class AlwaysTails(GeneratorSource):
    def __init__(self) -> None:
        super().__init__([Random(0)], 3)

    def flip(self, chances: Tensor) -> Tensor:
        return torch.zeros_like(chances, dtype=torch.bool)


def test_rows_that_do_not_fit_the_tree_are_refused() -> None:
    """By our own checks, or before them by the shape checker when the tests run with one."""
    rng = Scripted()
    with pytest.raises((ValueError, TypeCheckError)):
        match(CHAIN, P_ROWS[:, :2], rng)
    with pytest.raises((ValueError, TypeCheckError)):
        ratio(CHAIN, P_ROWS, Q_ROWS[:, :2], rng)
    with pytest.raises((ValueError, TypeCheckError)):
        ratio(CHAIN, P_ROWS, Q_ROWS[..., :2], rng)


# ---- the enumeration itself ----------------------------------------------------------------------


def test_branches_visit_every_outcome_of_a_batch_of_one_with_its_chance() -> None:
    """Two flips at once, then a draw that depends on them; what cannot happen is not visited."""

    def process(rng: RandomSource) -> tuple[int, ...]:
        heads = rng.flip(torch.tensor([[0.25, 1.0]]))
        row = (
            torch.tensor([[[0.5, 0.0, 0.5]]]) if heads[0, 0] else torch.tensor([[[0.0, 1.0, 0.0]]])
        )
        return (*heads[0].int().tolist(), int(rng.draw(row)))

    assert enumerate_law(process) == {(1, 1, 0): 0.125, (1, 1, 2): 0.125, (0, 1, 1): 0.75}


def test_one_round_from_many_contexts_is_one_round_from_each() -> None:
    """The batch is only a way to be fast: prompt by prompt the law is the same."""
    toy = Toy(14)
    together = enumerate_round(toy, sampled_chain(2), RATIO, toy.starts)
    for start in toy.starts.tolist():

        def alone(rng: RandomSource, start: int = start) -> tuple[int, ...]:
            draft = sampled_chain(2)(toy, torch.tensor([start]), rng)
            accepted = RATIO(toy, draft, toy.p[draft.contexts], rng)
            return (int(reached(toy, draft, accepted)),)

        for (after,), chance in enumerate_law(alone).items():
            assert float(together.step[start, after]) == pytest.approx(chance, abs=1e-12)
