"""Best-first trees: the most probable paths of all, for drafters that guess a block in one pass."""

import heapq
from itertools import product
from typing import Any

import pytest
import torch

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError
from outrider.models.decode.draft_context import DraftContext
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.from_config import policy_of
from outrider.models.decode.policy import Draft
from outrider.models.decode.sampling_params import Sampling
from outrider.models.drafting.drafter import Drafter, State
from outrider.train.settings import parse
from tests import test_drafter_contract as contract
from tests import tiny
from tests.enumeration import distance
from tests.tiny import ScriptedDrafter, Text

BLOCK = ("dflash", "dspark", "p_eagle")
TEXT = (3, 1, 4)
Scores = dict[Text, float]


def best_first(depth: int, nodes: int) -> DynamicTree:
    return DynamicTree(depth, nodes, nodes)


def most_probable(scores: Scores, nodes: int) -> set[Text]:
    return set(sorted(scores, key=lambda path: -scores[path])[:nodes])


def all_paths(drafter: ScriptedDrafter, depth: int, text: Text = TEXT) -> Scores:
    """Sums of log-probabilities, by the row of every prefix."""
    scores: Scores = {(): 0.0}
    for length in range(1, depth + 1):
        for path in product(range(len(drafter.vocab)), repeat=length):
            row = drafter.row((*text, *path[:-1])).log_softmax(-1)
            scores[path] = scores[path[:-1]] + float(row[path[-1]])
    return {path: score for path, score in scores.items() if path}


# ---- the choice of nodes -------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("nodes", [1, 2, 5, 9, 30, 200])
def test_nodes_are_the_most_probable_paths_of_all(nodes: int, scale: float) -> None:
    """Rows depend on the whole path; 5 + 25 + 125 of them."""
    for seed in range(4):
        drafter = ScriptedDrafter(tiny.random_logits(5, seed, scale), 5)
        tree = tiny.propose(best_first(3, nodes), drafter, [TEXT]).tree
        found = tiny.paths(tree)
        assert len(found) == len(set(found)) == min(nodes, 155)
        assert set(found) == most_probable(all_paths(drafter, 3), nodes)


def test_a_narrower_tree_misses_some() -> None:
    """The control: width 3 is not best-first."""
    misses = 0
    for seed in range(10):
        drafter = ScriptedDrafter(tiny.random_logits(5, seed, 0.3), 5)
        tree = tiny.propose(DynamicTree(3, 3, 12), drafter, [TEXT]).tree
        misses += set(tiny.paths(tree)) != most_probable(all_paths(drafter, 3), 12)
    assert misses == 10


def heap_order(marginals: list[list[float]], nodes: int) -> set[Text]:
    """DDTree's own algorithm: pop the best, push its next sibling and its first child.

    Paths are of ranks; every depth's log-probabilities are sorted.
    """
    heap: list[tuple[float, Text]] = [(-marginals[0][0], (0,))]
    out = set[Text]()
    while heap and len(out) < nodes:
        score, path = heapq.heappop(heap)
        out.add(path)
        row = marginals[len(path) - 1]
        if path[-1] + 1 < len(row):
            sibling = score + row[path[-1]] - row[path[-1] + 1]
            heapq.heappush(heap, (sibling, (*path[:-1], path[-1] + 1)))
        if len(path) < len(marginals):
            heapq.heappush(heap, (score - marginals[len(path)][0], (*path, 0)))
    return out


@pytest.mark.parametrize("nodes", [1, 4, 12, 40])
def test_products_of_marginals_have_the_nodes_of_the_heap(nodes: int) -> None:
    """A row per depth, whatever the tokens before it."""
    rows = [tiny.random_logits(6, depth, 1.5)(()) for depth in range(4)]
    drafter = ScriptedDrafter(lambda text: rows[len(text) - len(TEXT)], 6)
    ordered = [row.log_softmax(-1).sort(descending=True) for row in rows]
    ranks = heap_order([part.values.tolist() for part in ordered], nodes)
    expected = {tuple(int(ordered[d].indices[k]) for d, k in enumerate(path)) for path in ranks}
    assert set(tiny.paths(tiny.propose(best_first(4, nodes), drafter, [TEXT]).tree)) == expected


def test_levels_expand_only_nodes_that_may_be_kept() -> None:
    """Those among the best so far; of two prompts as many as the one that has more."""
    sizes, nodes, texts = list[int](), 20, [TEXT, (2, 2)]

    class Counted(ScriptedDrafter):
        def step(self, state: State, depth: int, ids: Any, parents: Any) -> Any:
            sizes.append(len(ids))
            return super().step(state, depth, ids, parents)

    drafter = Counted(tiny.random_logits(5, 1, 2.0), 5)
    expected = list[list[int]]()
    for text in texts:
        scores = all_paths(drafter, 4, text)
        counts = [1]
        for length in (1, 2, 3):
            known = {path: score for path, score in scores.items() if len(path) <= length}
            counts.append(sum(len(path) == length for path in most_probable(known, nodes)))
        sizes.clear()
        tree = tiny.propose(best_first(4, nodes), drafter, [text]).tree
        assert sizes == counts
        assert set(tiny.paths(tree)) == most_probable(scores, nodes)
        expected.append(counts)
    sizes.clear()
    tree = tiny.propose(best_first(4, nodes), drafter, texts, [99] * 2, seeds=[0] * 2).tree
    assert sizes[::2] == sizes[1::2] == [max(pair) for pair in zip(*expected, strict=True)]
    for i, text in enumerate(texts):
        assert set(tiny.paths(tree, i)) == most_probable(all_paths(drafter, 4, text), nodes)


# ---- block drafters ------------------------------------------------------------------------------


class Recorded(DynamicTree):
    """Keep the drafter's states before, and the tree after, every proposal."""

    def propose(self, context: DraftContext) -> Draft:
        states = list(context.states)
        draft = super().propose(context)
        rounds = self.__dict__.setdefault("rounds", [])
        rounds.append((states[0], draft.tree, context.depth_limits[0]))
        return draft


def paths_of(drafter: Drafter, state: State, root: int, depth: int) -> Scores:
    """Score all paths by the drafter's own steps over whole levels."""
    scores: Scores = {}
    level, above, parents = [()], [0.0], [0]
    for length in range(1, depth + 1):
        ids = torch.tensor([path[-1] if path else root for path in level])
        logits, state = drafter.step(state, length, ids, torch.tensor(parents))
        rows = logits.float().log_softmax(-1)
        targets = drafter.vocab.target_ids.tolist()
        deeper = [
            ((*path, token), score + float(rows[i, j]), i)
            for i, (path, score) in enumerate(zip(level, above, strict=True))
            for j, token in enumerate(targets)
        ]
        level, above, parents = (list(part) for part in zip(*deeper, strict=True))
        scores |= dict(zip(level, above, strict=True))
    return scores


@pytest.mark.parametrize("name", BLOCK)
@torch.no_grad()
def test_trees_of_block_drafters_have_the_most_probable_paths(name: str) -> None:
    """Of a half trained drafter over six tokens: marginals, or given the token before (dspark)."""
    target = tiny.target()
    drafter = tiny.drafter(name, target, tiny.vocab(6)).eval()
    policy = Recorded(3, 11, 11)
    Engine(target, drafter, policy).generate([5, 6, 7], 12)
    rounds = policy.__dict__["rounds"]
    for state, tree, limit in rounds:
        scores = paths_of(drafter, state, int(tree.ids[0, 0]), min(3, limit))
        found = tiny.paths(tree)
        assert len(found) == min(11, len(scores))
        kept, best = (
            sorted(scores[p] for p in paths) for paths in (found, most_probable(scores, 11))
        )
        torch.testing.assert_close(torch.tensor(kept), torch.tensor(best))
    assert len(rounds) > 3


@pytest.mark.parametrize("name", BLOCK)
def test_greedy_output_equals_plain_decoding(name: str) -> None:
    """Half trained, so that some drafts are right; one prompt and a batch."""
    half = tiny.half_trained(name, "llama")
    engine, accepted = Engine(half.target, half.drafter, best_first(3, 9)), 0
    for prompt, answer in zip(tiny.PROMPTS, half.answers, strict=True):
        out = engine.generate(prompt, tiny.ANSWER)
        assert out.ids == answer
        accepted += sum(out.accepted)
    assert accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCK)
def test_sampling_has_exactly_the_distribution_of_plain_sampling(name: str) -> None:
    """Four tokens jointly; for dflash, an engine with an unwarped bonus is the control."""
    target, drafter = contract.five_token_pair(name)
    sampling, policy = Sampling(0.8, 1.0, 2), best_first(2, 3)
    law = contract.plain_distribution(target, sampling)
    found = contract.emitted_distribution(Engine(target, drafter, policy, sampling=sampling))
    assert distance(found, law) < 1e-5
    if name == "dflash":
        wrong = tiny.RawBonus(target, drafter, policy, sampling=sampling)
        assert distance(contract.emitted_distribution(wrong), law) > 0.01


# ---- settings ------------------------------------------------------------------------------------


def decode_with(*words: str) -> Any:
    return parse(compose(["decode=best_first_tree", *words])).decode


def test_the_setting_builds_the_tree() -> None:
    assert policy_of(decode_with("decode.nodes=12", "decode.depth=5")) == DynamicTree(5, 12, 12)
    coupled = policy_of(decode_with("decode.temperature=1", "decode.verify=coupled"))
    assert coupled.draft == "coupled"


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("decode.width=3", "as wide as its nodes allow"),
        ("decode.draft=drawn", "must not sample its tokens"),
        ("decode.depth=17", "at least 17 nodes"),
    ],
)
def test_settings_that_contradict_are_refused(word: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode_with(word)
    assert text in str(caught.value)
