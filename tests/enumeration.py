"""Exact laws of random decoding: coins that visit every branch, and toy models to decode.

The process under test runs as it is; only its coins are exchanged for `Branches`, which replays
it once for every path through its flips and draws and adds up the exact probabilities.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from outrider.eval.decode.sampling import Coins, warp
from outrider.eval.decode.tree import Tree, rerank
from outrider.eval.decode.verify import Accepted, verify

Context = tuple[int, ...]
Law = dict[Context, float]
Warp = tuple[float, int, float]  # temperature, top_k, top_p
PLAIN: Warp = (1.0, 0, 1.0)
ROOT = 0  # the token already committed before the first round


class Branches:
    """Coins that follow a script of branch numbers, then always the first possible branch."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.trail: list[tuple[int, int]] = []  # (branch taken, branches there were)
        self.chance = 1.0

    def flip(self, chance: float) -> bool:
        return self._choose([chance, 1 - chance]) == 0

    def draw(self, probs: Tensor) -> int:
        return self._choose(probs.tolist())

    def _choose(self, weights: list[float]) -> int:
        possible = [branch for branch, weight in enumerate(weights) if weight > 0]
        step = len(self.trail)
        taken = self.script[step] if step < len(self.script) else 0
        self.trail.append((taken, len(possible)))
        self.chance *= weights[possible[taken]] / sum(weights)
        return possible[taken]


class Scripted:
    """Coins whose answers are written down; `asked` is what they were asked."""

    def __init__(self, *answers: int | bool) -> None:
        self.answers = list(answers)
        self.asked: list[float | list[float]] = []

    def flip(self, chance: float) -> bool:
        self.asked.append(chance)
        return bool(self.answers.pop(0))

    def draw(self, probs: Tensor) -> int:
        self.asked.append(probs.tolist())
        return int(self.answers.pop(0))


class Replayed:
    """Coins with one uniform per level, the same in every round (or renewed, if asked)."""

    def __init__(self, table: list[float], renew: Iterator[list[float]] | None = None) -> None:
        self.table, self.renew, self.level = table, renew, 0

    def flip(self, chance: float) -> bool:
        raise AssertionError("matching does not flip")

    def draw(self, probs: Tensor) -> int:
        self.level += 1
        return int((probs.cumsum(0) <= self.table[self.level - 1]).sum())

    def next_round(self) -> None:
        self.level = 0
        if self.renew is not None:
            self.table = next(self.renew)


def enumerate_law(process: Callable[[Coins], Context]) -> Law:
    """The exact law of a random process: every path through its coins, visited once."""
    law: defaultdict[Context, float] = defaultdict(float)
    script: list[int] = []
    while True:
        coins = Branches(script)
        law[process(coins)] += coins.chance
        trail = coins.trail
        while trail and trail[-1][0] + 1 == trail[-1][1]:
            trail.pop()
        if not trail:
            return law
        script = [taken for taken, _ in trail]
        script[-1] += 1


def distance(law: Law, other: Law) -> float:
    """Total variation: half the sum of absolute differences."""
    return sum(abs(law.get(key, 0.0) - other.get(key, 0.0)) for key in {*law, *other}) / 2


@dataclass(frozen=True)
class Toy:
    """Random target and drafter over a tiny vocabulary; every context has its own rows."""

    seed: int
    vocab: int = 3
    warp: Warp = PLAIN
    likeness: float = 0.5  # 1: the drafter is the target; 0: it knows nothing of it

    def p(self, context: Context) -> Tensor:
        """The target's warped row after a context, in float64."""
        return _row(self, 1.0, context)

    def q(self, context: Context) -> Tensor:
        """The drafter's."""
        return _row(self, self.likeness, context)

    def law(self, length: int) -> Law:
        """Plain decoding, by the chain rule: the reference, in floats."""
        law: Law = {(): 1.0}
        for _ in range(length):
            law = {
                (*said, token): chance * p
                for said, chance in law.items()
                for token, p in enumerate(self.p((ROOT, *said)).tolist())
            }
        return law


@cache
def _row(toy: Toy, likeness: float, context: Context) -> Tensor:
    target, own = np.random.default_rng([toy.seed, *context]).normal(size=(2, toy.vocab))
    logits = torch.from_numpy(1.5 * (likeness * target + (1 - likeness) * own))
    return warp(logits[None], *toy.warp)[0]


Draft = tuple[Tree, Tensor | None]
Propose = Callable[[Toy, Context, int, Coins], Draft]
Judge = Callable[[Toy, Context, Tree, Tensor, Tensor | None, Coins], Accepted]


def node_context(committed: Context, tree: Tree, node: int) -> Context:
    return committed + tuple(tree.tokens[step] for step in tree.path(node)[1:])


def lossless(
    toy: Toy, said: Context, tree: Tree, p_rows: Tensor, q_rows: Tensor | None, coins: Coins
) -> Accepted:
    return verify(tree, p_rows, q_rows, coins)


def decode(
    toy: Toy, propose: Propose, length: int, coins: Coins, judge: Judge = lossless
) -> Context:
    """Rounds of draft and verify until `length` tokens are out; drafts never overshoot."""
    said: Context = (ROOT,)
    while len(said) <= length:
        tree, q_rows = propose(toy, said, length - len(said), coins)
        p_rows = torch.stack([toy.p(node_context(said, tree, n)) for n in range(len(tree))])
        path, next_id = judge(toy, said, tree, p_rows, q_rows, coins)
        said = (*node_context(said, tree, int(path[-1])), next_id)
    return said[1:]


def law_of(toy: Toy, propose: Propose, judge: Judge = lossless, length: int = 3) -> Law:
    return enumerate_law(lambda coins: decode(toy, propose, length, coins, judge))


def bias(toy: Toy, propose: Propose, judge: Judge = lossless, length: int = 3) -> float:
    return distance(law_of(toy, propose, judge, length), toy.law(length))


def sampled_chain(toy: Toy, said: Context, room: int, coins: Coins) -> Draft:
    """Up to two tokens, each drawn from the drafter's row, with the rows."""
    drafted, rows = said, []
    for _ in range(min(2, room)):
        rows.append(toy.q(drafted))
        drafted = (*drafted, coins.draw(rows[-1]))
    return chain_of(said, drafted), stacked(rows, toy)


def argmax_chain(toy: Toy, said: Context, room: int, coins: Coins) -> Draft:
    """Up to two tokens, each the drafter's favourite: no rows, by R1."""
    drafted = said
    for _ in range(min(2, room)):
        drafted = (*drafted, int(toy.q(drafted).argmax()))
    return chain_of(said, drafted), None


def top_tree(toy: Toy, said: Context, room: int, coins: Coins) -> Draft:
    """Every node down to depth two has the drafter's two favourites below it."""
    tree, _ = grow(toy, said, min(2, room))
    return tree, None


def dynamic_tree(toy: Toy, said: Context, room: int, coins: Coins) -> Draft:
    """The four best nodes (root included) of the tree of favourites, chosen as in EAGLE-2."""
    tree, scores = grow(toy, said, min(2, room))
    kept = rerank(scores, tree.parents, tree.depths, budget=4)
    parents = torch.searchsorted(kept, tree.parents[kept])
    parents[0] = -1
    return Tree(tree.ids[kept], parents, tree.depths[kept]), None


def grow(toy: Toy, said: Context, depth: int) -> tuple[Tree, Tensor]:
    ids, parents, depths, scores = [said[-1]], [-1], [0], [0.0]
    contexts, node = [said], 0
    while node < len(ids):
        best = toy.q(contexts[node]).topk(2)
        children = zip(best.indices.tolist(), best.values.log().tolist(), strict=True)
        for token, score in children if depths[node] < depth else ():
            ids.append(token)
            parents.append(node)
            depths.append(depths[node] + 1)
            scores.append(scores[node] + score)
            contexts.append((*contexts[node], token))
        node += 1
    tree = Tree(torch.tensor(ids), torch.tensor(parents), torch.tensor(depths))
    return tree, torch.tensor(scores, dtype=torch.float64)


def stacked(rows: list[Tensor], toy: Toy) -> Tensor:
    return torch.stack(rows) if rows else torch.empty(0, toy.vocab, dtype=torch.float64)


def chain_of(said: Context, drafted: Context) -> Tree:
    return Tree.chain(torch.tensor(drafted[len(said) - 1 :]))
