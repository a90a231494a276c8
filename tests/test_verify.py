"""The verifiers emit exactly the target's law: enumerated, not estimated.

The tensor functions themselves run under coins that visit every outcome of every flip and draw
with its exact probability, through several rounds, on random toy models whose distributions
depend on the whole context. Each rule of `verify.py` that a published decoder broke is broken
here on purpose, and must be caught by the same enumeration.
"""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from jaxtyping import TypeCheckError
from scipy.stats import power_divergence
from torch import Tensor

from outrider.eval.decode.sampling import Coins, GeneratorCoins
from outrider.eval.decode.tree import Tree
from outrider.eval.decode.verify import Accepted, greedy, match, ratio, verify
from tests.enumeration import (
    PLAIN,
    ROOT,
    Branches,
    Context,
    Draft,
    Judge,
    Law,
    Propose,
    Replayed,
    Scripted,
    Toy,
    Warp,
    argmax_chain,
    bias,
    chain_of,
    decode,
    distance,
    dynamic_tree,
    law_of,
    lossless,
    node_context,
    sampled_chain,
    stacked,
    top_tree,
)

# --- exactness ------------------------------------------------------------------------------

WARPS = [PLAIN, (0.5, 0, 1.0), (1.5, 2, 1.0), (0.8, 0, 0.7), (1.2, 3, 0.8)]


@pytest.mark.parametrize("setting", WARPS)
@pytest.mark.parametrize("vocab", [3, 4])
@pytest.mark.parametrize("propose", [argmax_chain, top_tree, dynamic_tree])
def test_matching_a_deterministic_tree_is_exact(
    propose: Propose, vocab: int, setting: Warp
) -> None:
    """Joint law of four tokens, two to four rounds."""
    assert bias(Toy(1, vocab, setting), propose, length=4) < 1e-12


@pytest.mark.parametrize(
    "toy",
    [Toy(seed, 3, setting) for seed, setting in enumerate(WARPS)]
    + [Toy(7, 4, (0.8, 3, 0.9)), Toy(8, likeness=0.0), Toy(9, likeness=0.9)],
)
def test_the_ratio_test_of_a_sampled_chain_is_exact(toy: Toy) -> None:
    """Joint law of three tokens, one to three rounds, drafts enumerated as well."""
    assert bias(toy, sampled_chain) < 1e-12


def test_a_perfect_drafter_is_always_accepted_and_exact() -> None:
    """Where p = q, the residual has no mass, and is never asked for."""
    toy = Toy(3, likeness=1.0)
    tree, q_rows = sampled_chain(toy, (ROOT,), 2, Branches([]))
    p_rows = torch.stack([toy.p(node_context((ROOT,), tree, n)) for n in range(3)])
    assert verify(tree, p_rows, q_rows, Branches([])).path.tolist() == [0, 1, 2]
    assert bias(toy, sampled_chain) < 1e-12


def test_point_mass_rows_make_the_ratio_test_equal_to_matching() -> None:
    """R1: an argmax draft is a draw from a one-hot row."""

    def one_hot_chain(toy: Toy, said: Context, room: int, coins: Coins) -> Draft:
        tree, _ = argmax_chain(toy, said, room, coins)
        return tree, torch.eye(toy.vocab, dtype=torch.float64)[tree.ids[1:]]

    toy = Toy(4)
    assert distance(law_of(toy, one_hot_chain), law_of(toy, argmax_chain)) < 1e-12


def test_stopping_after_an_unlikely_token_is_exact() -> None:
    """R2: the length may depend on the tokens before, so the last one is still verified."""
    assert bias(Toy(5), stop_after_unlikely) < 1e-12


def stop_after_unlikely(toy: Toy, said: Context, room: int, coins: Coins) -> Draft:
    tree, rows = sampled_chain(toy, said, room, coins)
    if len(tree) == 3 and rows is not None and rows[0, tree.tokens[1]] < 0.4:
        return Tree.chain(tree.ids[:2]), rows[:1]
    return tree, rows


# --- negative controls: each breaks one rule, and is caught ----------------------------------

SEEDS = range(3)


def worst_bias(
    propose: Propose, judge: Judge = lossless, setting: Warp = PLAIN, length: int = 3
) -> float:
    """Of a few random toys: one toy might hide a bias by chance."""
    return max(bias(Toy(seed, warp=setting), propose, judge, length) for seed in SEEDS)


def test_a_softmax_row_for_an_argmax_draft_is_caught() -> None:
    """R1 broken: the token was not drawn from the row."""

    def argmax_with_rows(toy: Toy, said: Context, room: int, coins: Coins) -> Draft:
        tree, _ = argmax_chain(toy, said, room, coins)
        rows = [toy.q(node_context(said, tree, n)) for n in range(len(tree) - 1)]
        return tree, stacked(rows, toy)

    assert worst_bias(argmax_with_rows) > 0.01


def test_a_row_from_before_the_warp_is_caught() -> None:
    """R1 broken: drawn from a truncated row, verified with the whole one."""

    def truncated_draw(toy: Toy, said: Context, room: int, coins: Coins) -> Draft:
        tree, _ = sampled_chain(replace(toy, warp=(1.0, 2, 1.0)), said, room, coins)
        rows = [toy.q(node_context(said, tree, n)) for n in range(len(tree) - 1)]
        return tree, stacked(rows, toy)

    assert worst_bias(truncated_draw) > 0.01


def test_dropping_an_unlikely_token_after_seeing_it_is_caught() -> None:
    """R2 broken: whether a token is verified depends on the token."""

    def drop_unlikely(toy: Toy, said: Context, room: int, coins: Coins) -> Draft:
        tree, rows = sampled_chain(toy, said, room, coins)
        assert rows is not None
        likely = 0
        while likely < len(rows) and rows[likely, tree.tokens[likely + 1]] >= 0.4:
            likely += 1
        return Tree.chain(tree.ids[: likely + 1]), rows[:likely]

    assert worst_bias(drop_unlikely) > 0.01


def test_keeping_the_likelier_of_two_sampled_siblings_is_caught() -> None:
    """R3 broken: siblings sorted by probability, the second one pruned."""

    def better_sibling(toy: Toy, said: Context, room: int, coins: Coins) -> Draft:
        row = toy.q(said)
        siblings = sorted((coins.draw(row), coins.draw(row)), key=lambda token: -row[token])
        drafted = (*said, *siblings[: min(1, room)])
        return chain_of(said, drafted), row[None][: len(drafted) - len(said)]

    assert worst_bias(better_sibling, length=2) > 0.01


def redraw(
    toy: Toy, said: Context, tree: Tree, p_rows: Tensor, q_rows: Tensor | None, coins: Coins
) -> Accepted:
    path, next_id = match(tree, p_rows, coins)
    if tree.children(int(path[-1])):
        next_id = coins.draw(p_rows[path[-1]])
    return Accepted(path, next_id)


def test_a_fresh_draw_after_a_mismatch_is_caught() -> None:
    """R4 broken: the sample that failed to match is thrown away."""
    assert worst_bias(argmax_chain, redraw) > 0.01
    assert worst_bias(top_tree, redraw, length=2) > 0.01


def test_one_coin_per_path_instead_of_per_node_is_caught() -> None:
    """R5 broken: every leaf's path is tested with its own draws, and the longest one taken."""

    def best_path(
        toy: Toy, said: Context, tree: Tree, p_rows: Tensor, q_rows: Tensor | None, coins: Coins
    ) -> Accepted:
        tested = []
        for nodes in tree.paths():
            alone = match(Tree.chain(tree.ids[nodes]), p_rows[nodes], coins)
            tested.append(Accepted(torch.tensor(nodes)[alone.path], alone.next_id))
        return max(tested, key=lambda accepted: len(accepted.path))

    assert worst_bias(top_tree, best_path, length=2) > 0.01


def test_an_unwarped_bonus_token_is_caught() -> None:
    """Raw probabilities after the last acceptance: right only at temperature 1."""

    def raw_bonus(
        toy: Toy, said: Context, tree: Tree, p_rows: Tensor, q_rows: Tensor | None, coins: Coins
    ) -> Accepted:
        raw = replace(toy, warp=PLAIN).p(node_context(said, tree, len(tree) - 1))
        return verify(tree, torch.cat([p_rows[:-1], raw[None]]), q_rows, coins)

    assert worst_bias(argmax_chain, raw_bonus, (0.5, 0, 1.0)) > 0.01
    assert worst_bias(sampled_chain, raw_bonus, (0.5, 0, 1.0)) > 0.01


def test_coins_reused_across_rounds_are_caught() -> None:
    """R6 broken: right one token at a time, wrong jointly.

    The outcome is constant between the ends of all rows' slices, so the two uniforms of a
    round (one draft, one bonus) are integrated exactly by the midpoints of those intervals.
    """
    toy, length = Toy(6), 2
    contexts = [(ROOT, *said) for n in range(length) for said in product(range(3), repeat=n)]
    ends = {end for context in contexts for end in toy.p(context).cumsum(0)[:-1].tolist()}
    grid = sorted({0.0, 1.0, *ends})
    pieces = [((a + b) / 2, b - a) for a, b in pairwise(grid)]

    def decoded(coins: Replayed) -> Context:
        def propose(toy: Toy, said: Context, room: int, coins: Coins) -> Draft:
            assert isinstance(coins, Replayed)
            coins.next_round()
            return argmax_chain(toy, said, min(1, room), coins)

        return decode(toy, propose, length, coins)

    def integrate(fresh: bool) -> Law:
        law: defaultdict[Context, float] = defaultdict(float)
        for (u, du), (v, dv), (w, dw) in product(pieces, repeat=3):
            renew = iter([[u, v], [w, w]]) if fresh else None
            law[decoded(Replayed([u, v], renew))] += du * dv * dw
        return law

    assert distance(integrate(fresh=True), toy.law(length)) < 1e-12
    assert distance(integrate(fresh=False), toy.law(length)) > 0.01


# --- the coins of a real run ------------------------------------------------------------------


def g_test(toy: Toy, propose: Propose, judge: Judge, samples: int) -> float:
    """p-value of the likelihood-ratio test of the joint law of three tokens."""
    coins = GeneratorCoins(torch.Generator().manual_seed(0))
    counts = Counter(decode(toy, propose, 3, coins, judge) for _ in range(samples))
    law = toy.law(3)
    observed = [counts[said] for said in law]
    expected = [samples * chance for chance in law.values()]
    return float(power_divergence(observed, expected, lambda_="log-likelihood").pvalue)


@pytest.mark.parametrize("propose", [sampled_chain, top_tree])
def test_generator_coins_follow_the_joint_law(propose: Propose) -> None:
    """27 cells, all expected more than five times; the seed is fixed."""
    toy, samples = Toy(11, warp=(2.5, 0, 1.0)), 1000
    assert min(toy.law(3).values()) * samples > 5
    assert g_test(toy, propose, lossless, samples) > 1e-3


def test_the_g_test_rejects_a_biased_verifier() -> None:
    """The redraw of R4, at a fraction of the sample."""
    assert g_test(Toy(11, warp=(2.5, 0, 1.0)), argmax_chain, redraw, 300) < 1e-6


# --- single rounds, by hand -------------------------------------------------------------------


def bushy() -> Tree:
    """5 -> {1 -> {2, 3}, 4 -> {1}}; nodes 0; 1, 2; 3, 4, 5."""
    return Tree(
        torch.tensor([5, 1, 4, 2, 3, 1]),
        torch.tensor([-1, 0, 0, 1, 1, 2]),
        torch.tensor([0, 1, 1, 2, 2, 2]),
    )


@pytest.mark.parametrize(
    ("choice", "path", "next_id"),
    [
        ([1, 3, 0, 7, 8, 9], [0, 1, 4], 8),
        ([4, 3, 1, 7, 8, 9], [0, 2, 5], 9),
        ([4, 3, 0, 7, 8, 9], [0, 2], 0),
        ([6, 3, 1, 7, 8, 9], [0], 6),  # nothing below a rejected node counts
    ],
)
def test_greedy_follows_the_choices_from_the_root(
    choice: list[int], path: list[int], next_id: int
) -> None:
    accepted = greedy(bushy(), torch.tensor(choice))
    assert (accepted.path.tolist(), accepted.next_id) == (path, next_id)


def test_greedy_finds_the_longest_path_below_a_repeated_sibling() -> None:
    """Two siblings carry token 1; only the second one was continued with the right token."""
    tree = Tree(
        torch.tensor([5, 1, 1, 2, 3]),
        torch.tensor([-1, 0, 0, 1, 2]),
        torch.tensor([0, 1, 1, 2, 2]),
    )
    accepted = greedy(tree, torch.tensor([1, 3, 3, 9, 8]))
    assert (accepted.path.tolist(), accepted.next_id) == ([0, 2, 4], 8)


@pytest.mark.parametrize("propose", [argmax_chain, top_tree, sampled_chain])
def test_temperature_zero_is_greedy(propose: Propose) -> None:
    """R10: on one-hot rows the verifiers take the path and the token of `greedy`."""
    toy = Toy(12, vocab=4, warp=(0.0, 0, 1.0), likeness=0.7)
    for said in product(range(4), repeat=2):
        tree, q_rows = propose(toy, said, 2, Branches([]))
        p_rows = torch.stack([toy.p(node_context(said, tree, n)) for n in range(len(tree))])
        wanted = greedy(tree, p_rows.argmax(-1))
        accepted = verify(tree, p_rows, q_rows, GeneratorCoins(torch.Generator()))
        assert accepted.path.tolist() == wanted.path.tolist()
        assert accepted.next_id == wanted.next_id


def test_matching_descends_where_the_sample_goes_and_emits_what_missed() -> None:
    """Node 4 is a leaf: its sample 0 is the bonus token."""
    rows = torch.full((6, 7), 1 / 7)
    for answers, path, next_id in [((1, 3, 0), [0, 1, 4], 0), ((1, 4), [0, 1], 4), ((6,), [0], 6)]:
        coins = Scripted(*answers)
        accepted = match(bushy(), rows, coins)
        assert (accepted.path.tolist(), accepted.next_id) == (path, next_id)
        assert coins.answers == []


P_ROWS = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [0.0, 0.5, 0.5]])
Q_ROWS = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]])
CHAIN = Tree.chain(torch.tensor([2, 1, 0]))  # p/q is 1/2 for token 1 and 1/4 for token 0


@pytest.mark.parametrize(
    ("answers", "path", "next_id", "asked"),
    [
        ((False, 0), [0], 0, [0.5, [1.0, 0.0, 0.0]]),
        ((True, False, 1), [0, 1], 1, [0.5, 0.25, [0.0, 1.0, 0.0]]),
        ((True, True, 2), [0, 1, 2], 2, [0.5, 0.25, [0.0, 0.5, 0.5]]),
    ],
)
def test_the_ratio_test_asks_for_the_right_chances_and_residuals(
    answers: tuple[int, ...], path: list[int], next_id: int, asked: list[float | list[float]]
) -> None:
    """Residuals by hand: (.25, -.25, 0) and (-.375, .5, -.125) leave one token each."""
    coins = Scripted(*answers)
    accepted = ratio(CHAIN, P_ROWS, Q_ROWS, coins)
    assert (accepted.path.tolist(), accepted.next_id) == (path, next_id)
    assert coins.asked == asked


def test_a_residual_without_mass_falls_back_to_p() -> None:
    """R9: p = q, and a coin that lands on its impossible side."""
    coins = Scripted(False, 1)
    ratio(CHAIN, P_ROWS, P_ROWS[:2].clone(), coins)
    assert coins.asked == [1.0, [0.5, 0.25, 0.25]]


def test_what_cannot_be_verified_losslessly_is_refused() -> None:
    coins = Scripted()
    with pytest.raises(ValueError, match="chains only"):
        ratio(bushy(), torch.full((6, 7), 1 / 7), torch.full((5, 7), 1 / 7), coins)
    with pytest.raises(ValueError, match="token 1 of node 1"):
        ratio(CHAIN, P_ROWS, torch.tensor([[0.5, 0.0, 0.5], [0.5, 0.25, 0.25]]), coins)
    with pytest.raises(ValueError, match="p = nan"):
        ratio(CHAIN, torch.full((3, 3), torch.nan), Q_ROWS, coins)


def test_rows_that_do_not_fit_the_tree_are_refused() -> None:
    """By our own checks, or before them by the shape checker when the tests run with one."""
    coins = Scripted()
    with pytest.raises((ValueError, TypeCheckError)):
        match(CHAIN, P_ROWS[:2], coins)
    with pytest.raises((ValueError, TypeCheckError)):
        ratio(CHAIN, P_ROWS, P_ROWS, coins)
    with pytest.raises((ValueError, TypeCheckError)):
        ratio(CHAIN, P_ROWS, Q_ROWS[:, :2], coins)
    with pytest.raises((ValueError, TypeCheckError)):
        greedy(CHAIN, torch.tensor([1, 0]))
