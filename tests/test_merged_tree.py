"""Merged drafts: the trie, the policy, and the rule that verifies every draw of a node."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError
from outrider.models.decode.engine import Engine
from outrider.models.decode.from_config import check_decode, policy_of, rule_of
from outrider.models.decode.request import Request
from outrider.models.decode.rules.multi_step import multi_step
from outrider.models.decode.rules.rule_table import BEST, INDEPENDENT, MERGED, bind_rule
from outrider.models.decode.sampling import GeneratorSource
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.tree import Tree
from outrider.models.decode.tries.policy import MergedTree, shared_out
from outrider.models.decode.tries.trie import NO_DRAW, Trie, tree_of
from outrider.train.settings import parse
from tests import tiny
from tests.enumeration import TOYS, Draft, Propose, Toy, bias, by, tokens_per_round, worst_bias
from tests.test_lookup import REPEATING
from tests.tries import RowsOf, other_rows, own_rows, supported, tries

RULE = by(multi_step)
LOW, HIGH = supported(own_rows, 0), supported(other_rows, 1, 2)  # without a common token
DRAFTERS: dict[str, list[RowsOf]] = {
    "one": [own_rows],
    "one, twice": [own_rows, own_rows],
    "two": [own_rows, other_rows],
    "two, one of them twice": [own_rows, other_rows, own_rows],
    "without a common token": [LOW, HIGH],
    "without a common token, twice": [HIGH, LOW, HIGH],
}


# ---- the rule ------------------------------------------------------------------------------------


@pytest.mark.parametrize("toy", TOYS, ids=str)
@pytest.mark.parametrize("drafters", ["two", "without a common token"])
def test_merged_drafts_have_the_law_of_the_target(drafters: str, toy: Toy) -> None:
    """Joint law of three tokens, by all outcomes of all draws."""
    assert bias(toy, tries(DRAFTERS[drafters], 1), RULE) < 1e-12


@pytest.mark.parametrize("drafters", DRAFTERS)
def test_draws_that_repeat_a_token_are_exact(drafters: str) -> None:
    """At two levels: below a node that was drawn twice come two draws."""
    toy = Toy(3, length=2)
    depth = 1 if len(DRAFTERS[drafters]) > 2 else 2
    assert bias(toy, tries(DRAFTERS[drafters], depth), RULE) < 1e-12


def changed(propose: Propose, change: Callable[[Draft], Draft]) -> Propose:
    return lambda toy, starts, rng: change(propose(toy, starts, rng))


def without_multiplicity(draft: Draft) -> Draft:
    """A mistake: a node is tested once, with the row that it was first drawn from."""
    assert draft.tree.draws is not None
    draws = draft.tree.draws.clone()
    for draw in range(1, draws.shape[1]):
        repeats = (draws[:, :draw] == draws[:, draw : draw + 1]).any(1)
        draws[repeats, draw] = NO_DRAW
    return draft._replace(tree=draft.tree.with_draws(draws))


def likeliest_first(draft: Draft) -> Draft:
    """A mistake: draws are tested in the order of their probability (R3)."""
    assert draft.tree.draws is not None
    assert draft.q_rows is not None
    token = draft.tree.ids.gather(1, draft.tree.draws)
    order = draft.q_rows.gather(2, token[..., None])[..., 0].argsort(1, descending=True)
    rows = draft.q_rows.gather(1, order[..., None].expand_as(draft.q_rows))
    return Draft(draft.tree.with_draws(draft.tree.draws.gather(1, order)), draft.contexts, rows)


def mean_row(draft: Draft) -> Draft:
    """A mistake: all draws are tested with the mean of the rows (R1)."""
    assert draft.q_rows is not None
    return draft._replace(q_rows=draft.q_rows.mean(1, keepdim=True).expand_as(draft.q_rows))


@pytest.mark.parametrize("mistake", [without_multiplicity, likeliest_first, mean_row])
def test_mistakes_have_another_law(mistake: Callable[[Draft], Draft]) -> None:
    propose = tries(DRAFTERS["two, one of them twice"], 1)
    assert worst_bias(propose, RULE) < 1e-12
    assert worst_bias(changed(propose, mistake), RULE) > 1e-2


def test_a_second_drafter_adds_accepted_tokens() -> None:
    toy = Toy(5, likeness=0.3)
    one, two = (
        tokens_per_round(toy, tries(DRAFTERS[name], 1), RULE)
        for name in ("one", "without a common token")
    )
    assert two > one > 1


def test_many_rounds_at_once_have_the_law_of_the_target() -> None:
    """Real random numbers: 20,000 prompts, each with the counts that its law predicts."""
    toy, count = Toy(2, length=1), 20_000
    rng = GeneratorSource([Random(seed) for seed in range(count)], 8)
    starts = torch.ones(count, dtype=torch.long)
    rows = [toy.q[starts], other_rows(toy)[starts]]
    drawn = torch.cat([rng.draw(row[:, None]) for row in rows], 1)
    same = drawn[:, 0] == drawn[:, 1]
    draws = torch.stack([torch.ones(count).long(), torch.where(same, 1, 2)], 1)
    ids = torch.cat([starts[:, None], drawn], 1)
    parents = torch.tensor([[-1, 0, 0]]).expand(count, -1)
    real = torch.stack([~same & False, ~same & False, same], 1).logical_not()
    tree = Tree.from_parents(ids, parents, parents.clamp(min=0) + (parents == 0).long(), 1, real)
    p_rows = toy.p[torch.cat([starts[:, None], starts[:, None] * 3 + drawn], 1)]
    accepted = multi_step(tree.with_draws(draws), p_rows, torch.stack(rows, 1), rng)
    first = torch.where(accepted.length > 0, ids.gather(1, accepted.path[:, -1:])[:, 0],
                        accepted.next_ids)  # fmt: skip
    expected = toy.p[1] * count
    squares = (first.bincount(minlength=3) - expected).square() / expected
    assert float(squares.sum()) < 13.8  # chi-square, two degrees of freedom: p > 0.001


def small(draws: list[int] | None, q: list[list[float]]) -> tuple[Tree, Tensor, Tensor]:
    ids, parents = torch.tensor([[0, 1, 2]]), torch.tensor([[-1, 0, 0]])
    tree = Tree.from_parents(ids, parents, torch.tensor([[0, 1, 1]]), 1)
    tree = tree if draws is None else tree.with_draws(torch.tensor([draws]))
    return tree, torch.full((1, 3, 3), 1 / 3), torch.tensor([q])


@pytest.mark.parametrize(
    ("draws", "q", "message"),
    [
        (None, [[0.2, 0.4, 0.4]], "needs the draws"),
        ([1, 2], [[0.2, 0.4, 0.4]], "one row per draw"),
        ([1, 2], [[0.2, 0.4, 0.4], [0.5, 0.5, 0.0]], "drawn from"),
        ([1, 2], [[0.2, 0.4, 0.4], [0.5, 0.5, float("nan")]], "drawn from"),
    ],
)
def test_drafts_that_cannot_be_verified_are_refused(
    draws: list[int] | None, q: list[list[float]], message: str
) -> None:
    rng = GeneratorSource([Random(0)], 8)
    with pytest.raises(ValueError, match=message):
        multi_step(*small(draws, q), rng)


def test_other_rules_refuse_merged_drafts() -> None:
    for name in ("independent", "traversal", "block", "match"):
        with pytest.raises(ValueError, match="use one of multi_step"):
            bind_rule(name, MERGED)
    with pytest.raises(ValueError, match="was made for 'independent' drafts"):
        Engine(
            tiny.mean_target(), None, MergedTree(2, 2), sampling=Sampling(1.0),
            rule=bind_rule("independent", INDEPENDENT),
        )  # fmt: skip


# ---- the trie ------------------------------------------------------------------------------------


def test_chains_share_the_nodes_of_their_beginnings() -> None:
    """The example of the module: cat sat, dog ran, cat sat."""
    cat, sat, dog, ran = 5, 6, 7, 8
    trie = Trie([3], 3)
    trie.grow([cat, dog, cat])
    assert (trie.places(), trie.parent_places()) == ([0, 1, 0], [0, 0])
    trie.grow([sat, ran, sat])
    assert trie.ids == [3, cat, dog, sat, ran]
    assert trie.parents == [-1, 0, 0, 1, 2]
    assert trie.depths == [0, 1, 1, 2, 2]
    assert trie.draws == [1, 2, 1, 3, 4, 3]
    assert (trie.frontier, trie.parent_places()) == ([3, 4], [0, 1])


def test_chains_end_where_their_node_has_no_children() -> None:
    trie = Trie([3], 3)
    trie.grow([5, 7, 5])
    trie.end_chains([True, False])
    trie.grow([6, 8, 9])
    assert trie.ids == [3, 5, 7, 8]
    assert trie.draws == [1, 2, 1, NO_DRAW, 3, NO_DRAW]
    other = Trie([4], 3)
    other.grow([1, 1, 1])
    other.grow([2, 2, 2])
    tree = tree_of([trie, other], torch.device("cpu"))
    assert tiny.paths(tree, 0) == [(5,), (7,), (7, 8)]
    assert tiny.paths(tree, 1) == [(1,), (1, 2)]
    assert tree.draws is not None
    assert tree.draws.tolist() == [trie.draws, [1, 1, 1, 2, 2, 2]]


# ---- the policy ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "weights", "chains"),
    [
        (3, [1.0], [0, 0, 0]),
        (4, [0.5, 0.5], [0, 0, 1, 1]),
        (3, [0.5, 0.5], [0, 0, 1]),
        (4, [0.9, 0.1], [0, 0, 0, 0]),
        (5, [0.2, 0.3, 0.5], [0, 1, 1, 2, 2]),
    ],
)
def test_chains_are_shared_out_by_weight(
    count: int, weights: list[float], chains: list[int]
) -> None:
    assert shared_out(count, weights) == chains


def test_greedy_chains_of_one_drafter_begin_with_its_best_tokens() -> None:
    row = tiny.random_logits(9)
    draft = tiny.propose(MergedTree(2, 3, BEST), tiny.ScriptedDrafter(row, 9), [(1, 2)])
    best = row((1, 2)).topk(3).indices.tolist()
    assert {path[0] for path in tiny.paths(draft.tree)} == {*best}
    for path in tiny.paths(draft.tree):
        if len(path) == 2:
            assert path[1] == int(row((1, 2, path[0])).argmax())


@pytest.mark.parametrize("draft", [MERGED, BEST])
def test_a_draft_is_no_deeper_than_a_request_has_room(draft: str) -> None:
    scripted = tiny.ScriptedDrafter(tiny.random_logits(9), 9)
    policy, warm = MergedTree(3, 2, draft), Sampling(1.0)
    tree = tiny.propose(policy, scripted, [(1, 2), (3,)], (1, 3), warm, (0, 1)).tree
    assert [max(map(len, tiny.paths(tree, row))) for row in (0, 1)] == [1, 3]


@pytest.mark.parametrize("name", ["eagle3", "medusa", "ngram", "suffix", "hybrid"])
@pytest.mark.parametrize("draft", [MERGED, BEST])
def test_every_drafter_can_draft_chains_that_are_merged(name: str, draft: str) -> None:
    """Greedily equal to plain decoding; sampled, equal in a batch and alone."""
    target = tiny.target()
    vocab = tiny.vocab(tiny.VOCAB)
    drafter = tiny.drafter(name, target, vocab, draft_vocab_size=None).requires_grad_(False)
    prompts = [REPEATING, [11], REPEATING[:5]]
    requests = [Request(prompt, 14 + n, n) for n, prompt in enumerate(prompts)]
    plain = [out.ids for out in Engine(target, None, None).generate_all(requests, 1)]
    for sampling in (Sampling(), Sampling(1.0, repetition_penalty=1.2)):
        engine = Engine(target, drafter, MergedTree(3, 2, draft), sampling=sampling)
        alone, together = (engine.generate_all(requests, batch) for batch in (1, 3))
        assert [out.ids for out in together] == [out.ids for out in alone]
        assert sampling.temperature or [out.ids for out in alone] == plain


# ---- settings ------------------------------------------------------------------------------------


def test_the_settings_make_the_policy_and_its_rule() -> None:
    decode = parse(compose(["decode=merged_tree", "decode.temperature=1"])).decode
    policy = policy_of(decode)
    assert policy == MergedTree(4, 3)
    assert rule_of(decode, policy).name == "multi_step"
    greedy = policy_of(replace(decode, temperature=0.0))
    assert greedy == MergedTree(4, 3, BEST)


@pytest.mark.parametrize(
    ("changes", "key", "why"),
    [
        ({"width": 3}, "decode.width", "as many chains as decode.nodes holds"),
        ({"draft": "drawn"}, "decode.draft", "independent draws"),
        ({"nodes": 3}, "decode.nodes", "at least 4 nodes"),
        ({"verify": "independent"}, "decode.verify", "several rows"),
        ({"gain": 0.5}, "decode.gain", "Only decode=dynamic_tree"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    changes: dict[str, Any], key: str, why: str
) -> None:
    decode = parse(compose(["decode=merged_tree", "decode.temperature=1"])).decode
    with pytest.raises(ConfigError, match=why) as caught:
        check_decode(replace(decode, **changes))
    assert caught.value.key == key
