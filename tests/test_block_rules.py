"""Block and traversal verification: exactness, acceptance against theory, and controls."""

import pytest
import torch
from torch import Tensor

from outrider.models.decode.rules import sibling_rules
from outrider.models.decode.rules.block_rules import block, leaves_first
from outrider.models.decode.rules.rule_table import bind_rule
from outrider.models.decode.rules.token_rules import (
    Accepted,
    deepest_path,
    draw_one,
    has_child,
    path_to,
    select_node,
)
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.tree import Tree
from tests.enumeration import (
    TOYS,
    Draft,
    Scripted,
    Toy,
    ToyRule,
    bias,
    by,
    check_ragged,
    enumerate_round,
    g_test,
    sampled_chain,
    sampled_tree,
    tokens_per_round,
    worst_bias,
)

RATIO = by(bind_rule("ratio", "drawn"))
BLOCK = by(bind_rule("block", "drawn"))
NONE_TWICE = by(bind_rule("without_replacement", "drawn"))
IID = by(bind_rule("independent", "independent"))
TRAVERSAL = {
    False: by(bind_rule("traversal", "drawn")),
    True: by(bind_rule("traversal", "independent")),
}
EACH_DRAW = pytest.mark.parametrize("replacement", [False, True], ids=["none twice", "independent"])

# ---- exactness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("toy", TOYS)
def test_block_verification_is_exact(toy: Toy, depth: int) -> None:
    assert bias(toy_of(toy, depth), sampled_chain(depth), BLOCK) < 1e-12


def toy_of(toy: Toy, levels: int) -> Toy:
    return Toy(toy.seed, toy.vocab, toy.warp, toy.likeness, levels=levels)


@EACH_DRAW
@pytest.mark.parametrize("widths", [(2,), (2, 1), (1, 2), (2, 1, 1)])
@pytest.mark.parametrize("toy", TOYS)
def test_traversal_verification_is_exact(
    toy: Toy, widths: tuple[int, ...], replacement: bool
) -> None:
    if len(widths) > 2 and (replacement or toy.vocab > 3):
        widths = widths[:2]  # too many drafts to visit them all in a second
    toy = toy_of(toy, len(widths))
    assert bias(toy, sampled_tree(widths, replacement), TRAVERSAL[replacement]) < 1e-12


def test_traversal_of_a_bushy_tree_is_exact() -> None:
    """Seven nodes: after a leaf is deleted its sibling is looked at, then their parent."""
    assert bias(Toy(16), sampled_tree((2, 2), replacement=False), TRAVERSAL[False]) < 1e-12
    shallow = Toy(16, length=1)
    assert bias(shallow, sampled_tree((2, 2), replacement=True), TRAVERSAL[True]) < 1e-12
    assert bias(shallow, sampled_tree((3, 1), replacement=False), TRAVERSAL[False]) < 1e-12


@EACH_DRAW
def test_a_chain_under_traversal_equals_block(replacement: bool) -> None:
    """Not only in distribution: the same probabilities and rows at every flip."""
    toy = Toy(17, levels=3)
    for rule in (BLOCK, TRAVERSAL[replacement]):
        step, tokens = enumerate_round(toy, sampled_chain(3), rule, toy.starts)
        if rule is BLOCK:
            wanted = step, tokens
    torch.testing.assert_close(step, wanted[0], rtol=0, atol=1e-14)
    torch.testing.assert_close(tokens, wanted[1], rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("widths", "rule", "replacement"),
    [((1, 1), BLOCK, True), ((2, 1), TRAVERSAL[True], True), ((2, 1), TRAVERSAL[False], False)],
    ids=["block", "traversal, independent", "traversal, none twice"],
)
def test_generator_source_follows_the_joint_distribution(
    widths: tuple[int, ...], rule: ToyRule, replacement: bool
) -> None:
    toy = Toy(11, warp=(2.5, 0, 1.0))
    assert g_test(toy, sampled_tree(widths, replacement), rule, 2000) > 1e-3


@EACH_DRAW
def test_ragged_batch_equals_single_trees(replacement: bool) -> None:
    toy = Toy(12, levels=3)
    chains = [sampled_chain(depth) for depth in (1, 2, 3)]
    check_ragged(toy, chains, BLOCK)
    shapes = [(1,), (1, 1), (2, 2), (3, 1), (2, 1, 1)]
    proposals = [sampled_tree(widths, replacement) for widths in shapes]
    check_ragged(toy, proposals, TRAVERSAL[replacement])


# ---- how much is accepted ------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "tokens"), [(RATIO, 10 / 9), (BLOCK, 11 / 9)])
def test_the_toy_example_of_the_paper(rule: ToyRule, tokens: float) -> None:
    """P = (1/3, 2/3) and q = (2/3, 1/3) after every text, two drafted tokens."""

    class Constant(Toy):
        @property
        def p(self) -> Tensor:
            return torch.tensor([1 / 3, 2 / 3], dtype=torch.float64).expand(8, 2)

        @property
        def q(self) -> Tensor:
            return torch.tensor([2 / 3, 1 / 3], dtype=torch.float64).expand(8, 2)

    toy = Constant(0, vocab=2, length=1)
    assert tokens_per_round(toy, sampled_chain(2), rule) == pytest.approx(1 + tokens, abs=1e-12)


GAINS = Toy(31, 3, likeness=0.6, length=1, levels=6)


@pytest.mark.parametrize(("gamma", "gain"), [(2, 0.8), (4, 4.6), (6, 9.5)])
def test_the_gain_over_token_by_token_grows_with_the_draft(gamma: int, gain: float) -> None:
    """Tokens per round in per cent more, in a toy where a token is accepted four times in five."""
    tokens, blocks = closed_form(GAINS, gamma)
    assert 100 * (blocks / tokens - 1) == pytest.approx(gain, abs=0.1)


@pytest.mark.parametrize("gamma", [2, 4])
def test_both_rules_accept_the_theoretical_number_of_tokens(gamma: int) -> None:
    """Enumerated over all flips, against E[prod min(1, p/q)] and E[r] over all prefixes."""
    tokens, blocks = closed_form(GAINS, gamma)
    assert tokens_per_round(GAINS, sampled_chain(gamma), RATIO) == pytest.approx(tokens, abs=1e-12)
    assert tokens_per_round(GAINS, sampled_chain(gamma), BLOCK) == pytest.approx(blocks, abs=1e-12)


def closed_form(toy: Toy, gamma: int) -> tuple[float, float]:
    """Tokens per round token by token, and by blocks: the sums over all drafted prefixes."""
    contexts, ones = torch.ones(1, dtype=torch.long), torch.ones(1, dtype=torch.float64)
    chance, lucky, share, tokens, blocks = ones, ones, ones, 1.0, 1.0
    for _ in range(gamma):
        ratios = toy.p[contexts] / toy.q[contexts]
        chance = (chance[:, None] * toy.q[contexts]).flatten()
        lucky = (lucky[:, None] * ratios.clamp(max=1)).flatten()
        share = (share[:, None] * ratios).clamp(max=1).flatten()
        contexts = (contexts[:, None] * toy.vocab + torch.arange(toy.vocab)).flatten()
        tokens += float((chance * lucky).sum())
        blocks += float((chance * share).sum())
    return tokens, blocks


@pytest.mark.parametrize("seed", range(8))
def test_block_and_traversal_never_accept_less(seed: int) -> None:
    toy = Toy(seed, length=1)
    chain, drawn = sampled_chain(2), sampled_tree((2, 1), replacement=False)
    iid = sampled_tree((2, 1), replacement=True)
    for propose, better, plain in [
        (chain, BLOCK, RATIO),
        (drawn, TRAVERSAL[False], NONE_TWICE),
        (iid, TRAVERSAL[True], IID),
    ]:
        more, less = (tokens_per_round(toy, propose, rule) for rule in (better, plain))
        assert more >= less - 1e-12


# ---- negative controls ---------------------------------------------------------------------------


def loose_block(first_failure: bool = False, tokenwise: bool = False) -> ToyRule:
    """Block verification a second time, with the two mistakes that were made in the field."""

    def verified(toy: Toy, draft: Draft, p_rows: Tensor, rng: RandomSource) -> Accepted:
        tree, q_rows = draft.tree, draft.q_rows
        assert q_rows is not None
        share, keep = torch.ones(len(p_rows), tree.size, dtype=torch.float64), []
        for node in range(tree.size):
            if node:
                p, q = (rows[:, node - 1] for rows in (p_rows, q_rows))
                token = tree.ids[:, node : node + 1]
                ratio = (p.gather(1, token) / q.gather(1, token))[:, 0]
                share[:, node] = (share[:, node - 1] * ratio).clamp(max=1)
            r = share[:, node]
            z = (r[:, None] * p_rows[:, node] - q_rows[:, node]).clamp(min=0).sum(-1)
            keep.append(r if node == tree.size - 1 else (z / (z + 1 - r)).nan_to_num(1.0))
        heads = rng.flip(torch.stack([torch.ones_like(share[:, 0]), *keep[1:]], dim=1))
        path, length = deepest_path(tree, heads)
        if not first_failure:
            last = (heads * tree.depths).argmax(-1)
            path, length = path_to(tree, last), select_node(tree.depths, last)
        last = path[:, -1]
        r = torch.ones_like(share[:, :1]) if tokenwise else select_node(share, last)[:, None]
        rest = (r * select_node(p_rows, last) - select_node(q_rows, last)).clamp(min=0)
        mass = rest.sum(-1, keepdim=True)
        rest = torch.where(mass > 0, rest / mass, select_node(p_rows, last))
        row = torch.where(has_child(tree, last)[:, None], rest, select_node(p_rows, last))
        return Accepted(path, length, draw_one(row, rng))

    return verified


def test_the_second_block_verification_is_exact_without_the_mistakes() -> None:
    assert worst_bias(sampled_chain(2), loose_block()) < 1e-12


def test_stopping_at_the_first_failure_is_caught() -> None:
    assert worst_bias(sampled_chain(2), loose_block(first_failure=True)) > 0.01


def test_token_residual_after_a_block_is_caught() -> None:
    """Only where a share is below 1 and something is left of it: a bad drafter, four tokens."""
    toys = [Toy(seed, 4, likeness=0.2) for seed in range(3)]
    assert max(bias(toy, sampled_chain(2), loose_block(tokenwise=True)) for toy in toys) > 0.01
    assert max(bias(toy, sampled_chain(2), loose_block()) for toy in toys) < 1e-12


def test_traversal_for_the_other_kind_of_siblings_is_caught() -> None:
    assert worst_bias(sampled_tree((2,), replacement=False), TRAVERSAL[True]) > 0.01


def test_traversal_without_renormalising_q_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sibling_rules, "remove_tokens", lambda q, tokens: q.scatter(1, tokens, 0.0))
    assert worst_bias(sampled_tree((2,), replacement=False), TRAVERSAL[False]) > 0.01


# ---- by hand -------------------------------------------------------------------------------------


def test_leaves_are_tested_before_parents_in_sibling_order() -> None:
    """Root 0; 1, 2 and 3 below it; 4 and 5 below 1; 6 below 2; 7 is not real, below 0."""
    parents = torch.tensor([[-1, 0, 0, 0, 1, 1, 2, 0]])
    depths = torch.tensor([[0, 1, 1, 1, 2, 2, 2, 1]])
    real = torch.tensor([[True] * 7 + [False]])
    tree = Tree.from_parents(torch.zeros_like(parents), parents, depths, 2, real)
    order = leaves_first(tree)[0, :7].argsort().tolist()
    assert order == [4, 5, 1, 6, 2, 3, 0]
    assert sorted(leaves_first(tree)[0, :7].tolist()) == list(range(7))


THIRD = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64).expand(1, 3, 2)
OTHER = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64).expand(1, 3, 2)


def test_surplus_is_carried_past_a_failed_flip() -> None:
    """Tokens 0 then 1: r = 1/2, then min(1, 1/2 * 2) = 1, so the whole chain is accepted."""
    rng = Scripted([1, 0, 1], [1])
    accepted = block(Tree.chain(torch.tensor([[0, 0, 1]])), THIRD, OTHER, rng)
    assert accepted.path.tolist() == [[0, 1, 2]]
    assert rng.requests[0] == pytest.approx([1.0, 0.0, 1.0])  # Z = max(1/2 p - q, 0) = 0
    assert rng.requests[1] == [pytest.approx([1 / 3, 2 / 3])]


def test_a_residual_without_mass_falls_back_to_p() -> None:
    """R9: p = q, every flip with its impossible result."""
    rng = Scripted([1, 0, 0], [1])
    accepted = block(Tree.chain(torch.tensor([[0, 0, 1]])), THIRD, THIRD, rng)
    assert accepted.length.tolist() == [0]
    assert rng.requests == [[1.0, 1.0, 1.0], [pytest.approx([1 / 3, 2 / 3])]]


def test_drafts_that_cannot_be_verified_losslessly_are_refused() -> None:
    ids, parents = torch.tensor([[0, 0, 0]]), torch.tensor([[-1, 0, 0]])
    pair = Tree.from_parents(ids, parents, torch.tensor([[0, 1, 1]]), levels=1)
    draft = Draft(pair, torch.tensor([[1, 2, 2]]), OTHER)
    with pytest.raises(ValueError, match="chains only"):
        BLOCK(GAINS, draft, THIRD, Scripted())
    with pytest.raises(ValueError, match="drawn twice"):
        TRAVERSAL[False](GAINS, draft, THIRD, Scripted())
    certain = torch.tensor([0.0, 1.0], dtype=torch.float64).expand(1, 3, 2)
    with pytest.raises(ValueError, match="q = 0"):
        TRAVERSAL[True](GAINS, draft._replace(q_rows=certain), THIRD, Scripted())
    with pytest.raises(ValueError, match="p = nan"):
        BLOCK(GAINS, draft._replace(tree=Tree.chain(ids)), THIRD * torch.nan, Scripted())
