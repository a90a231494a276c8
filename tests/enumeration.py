"""Exact distributions of random decoding: every branch of toy models, by enumeration.

The process under test runs as it is; only its random source is replaced by `Branches`, which
replays it once for every path through its flips and draws and multiplies the exact probabilities.

One round of the rules is replayed for all contexts and all drafts at once, as one batch, and gives
the chance to go from any context to any other. Whole texts are the powers of that matrix. A
context is one number: 1 is the empty text, and a token v after context c makes c * V + v.

Shape letters: B prompts of a batch, N nodes, V vocabulary, K choices, C contexts.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy.stats import power_divergence
from torch import Tensor

from outrider.models.decode.rules.sibling_rules import draw_siblings
from outrider.models.decode.rules.token_rules import Accepted
from outrider.models.decode.sampling import GeneratorSource, RandomSource
from outrider.models.decode.tree import Tree
from outrider.models.decode.warping import warp

Context = tuple[int, ...]
Law = dict[Context, float]
Warp = tuple[float, int, float]  # temperature, top_k, top_p
PLAIN: Warp = (1.0, 0, 1.0)
PARTS = (
    "ids",
    "parents",
    "depths",
    "ancestor_mask",
    "real",
)  # of a tree, each with a row per prompt


class Branches(RandomSource):
    """A random source that follows a script of branches, then always the first possible one.

    All prompts of a batch take the same branch, each at its own chance; a branch is possible if
    it is for one of them.
    """

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.trail: list[tuple[int, int]] = []  # (chosen branch, number of branches)
        self.chances = torch.ones(1, dtype=torch.float64)

    @property
    def chance(self) -> float:
        """Of the path through a batch of one."""
        return float(self.chances)

    def flip(self, chances: Tensor) -> Tensor:
        sides = torch.stack([1 - chances, chances], dim=-1)
        return self.draw(sides).bool()

    def draw(self, rows: Tensor) -> Tensor:
        return torch.stack([self._choose(weights) for weights in rows.unbind(1)], dim=1)

    def _choose(self, weights: Tensor) -> Tensor:
        before = self.chances[:, None].to(weights.device)
        chances = before * (weights / weights.sum(-1, keepdim=True))
        possible = (chances > 0).any(0).nonzero()[:, 0].tolist()
        step = len(self.trail)
        branch = self.script[step] if step < len(self.script) else 0
        self.trail.append((branch, len(possible)))
        self.chances = chances[:, possible[branch]]
        return torch.full((len(weights),), possible[branch], device=weights.device)


class Scripted(RandomSource):
    """A random source with given results; `requests` holds the arguments."""

    def __init__(self, *answers: list[int]) -> None:
        self.answers = list(answers)
        self.requests: list[Any] = []  # chances, or rows, of the only prompt

    def flip(self, chances: Tensor) -> Tensor:
        self.requests.append(chances[0].tolist())
        return torch.tensor([self.answers.pop(0)]).bool()

    def draw(self, rows: Tensor) -> Tensor:
        self.requests.append(rows[0].tolist())
        return torch.tensor([self.answers.pop(0)])


def every_path(process: Callable[[Branches], None]) -> None:
    """Call the process once for every outcome of its random numbers."""
    script: list[int] = []
    while True:
        rng = Branches(script)
        process(rng)
        trail = rng.trail
        while trail and trail[-1][0] + 1 == trail[-1][1]:
            trail.pop()
        if not trail:
            return
        script = [branch for branch, _ in trail]
        script[-1] += 1


def enumerate_law(process: Callable[[RandomSource], Context]) -> Law:
    """The exact law of a random process on a batch of one prompt."""
    law: defaultdict[Context, float] = defaultdict(float)

    def add(rng: Branches) -> None:
        context = process(rng)
        law[context] += rng.chance

    every_path(add)
    return law


def distance(law: Law, other: Law) -> float:
    """Total variation: half the sum of absolute differences."""
    return sum(abs(law.get(key, 0.0) - other.get(key, 0.0)) for key in {*law, *other}) / 2


# ---- toy models ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Toy:
    """Random target and drafter over a tiny vocabulary; every context has its own rows."""

    seed: int
    vocab: int = 3
    warp: Warp = PLAIN
    likeness: float = 0.5  # 1: the drafter is the target; 0: they are independent
    length: int = 3  # tokens of a whole text
    levels: int = 2  # how far a draft may look beyond
    sharpness: float = 1.5

    @cached_property
    def p(self) -> Tensor:
        """The target's warped rows after all contexts, [C, V] in float64."""
        return self._rows(1.0)

    @cached_property
    def q(self) -> Tensor:
        """The drafter's."""
        return self._rows(self.likeness)

    @property
    def ends(self) -> Tensor:
        """The contexts that are whole texts."""
        first = self.vocab**self.length
        return torch.arange(first, 2 * first)

    @property
    def starts(self) -> Tensor:
        """The contexts at which a round can begin, shortest first."""
        spans = [torch.arange(self.vocab**n, 2 * self.vocab**n) for n in range(self.length)]
        return torch.cat(spans)

    def law(self) -> Tensor:
        """Plain decoding, by the chain rule: the reference, [C], on whole texts."""
        law = torch.zeros(len(self.p), dtype=torch.float64)
        law[1] = 1.0
        for context in self.starts.tolist():
            law[context * self.vocab : (context + 1) * self.vocab] = law[context] * self.p[context]
        return law[self.ends]

    def _rows(self, likeness: float) -> Tensor:
        count = 2 * self.vocab ** (self.length + self.levels)
        target, own = np.random.default_rng(self.seed).normal(size=(2, count, self.vocab))
        logits = torch.from_numpy(self.sharpness * (likeness * target + (1 - likeness) * own))
        return warp(logits, *self.warp)


class Draft(NamedTuple):
    """Trees, the contexts of their nodes, and the rows drawn from."""

    tree: Tree
    contexts: Tensor  # [B, N]
    q_rows: Tensor | None


Propose = Callable[[Toy, Tensor, RandomSource], Draft]
ToyRule = Callable[[Toy, Draft, Tensor, RandomSource], Accepted]


def by(toy_rule: Callable[[Tree, Tensor, Any, RandomSource], Accepted]) -> ToyRule:
    """A rule, in a form in which the tests can also state wrong ones that see the toy."""
    return lambda toy, draft, p_rows, rng: toy_rule(draft.tree, p_rows, draft.q_rows, rng)


WARPS: list[Warp] = [PLAIN, (0.5, 0, 1.0), (1.5, 2, 1.0), (0.8, 0, 0.7), (1.2, 3, 0.8)]
TOYS = [Toy(seed, 3, setting) for seed, setting in enumerate(WARPS)] + [
    Toy(7, 4, (0.8, 3, 0.9)),
    Toy(8, likeness=0.0),
    Toy(9, likeness=0.9),
    Toy(10, likeness=1.0),
]


# ---- rounds --------------------------------------------------------------------------------------


class Round(NamedTuple):
    """What one round does.

    Attributes:
        step: step[c, e] is the chance to be at context e after a round that began at c; whole
            texts stay, and a text is cut where it is whole.
        tokens: tokens emitted on average by a round that begins at c, before any cut.
    """

    step: Tensor
    tokens: Tensor


def enumerate_round(toy: Toy, propose: Propose, toy_rule: ToyRule, starts: Tensor) -> Round:
    """One round from each of these contexts: every draft, every outcome of every draw."""
    drafts = list(every_draft(toy, propose, starts))
    chances = torch.cat([chance for _, chance in drafts])
    draft = stack([draft for draft, _ in drafts])
    begun = draft.contexts[:, 0]
    p_rows = toy.p[draft.contexts]
    step = torch.zeros(len(toy.p), len(toy.p), dtype=torch.float64)
    step[toy.ends, toy.ends] = 1.0
    tokens = torch.zeros(len(toy.p), dtype=torch.float64)

    def add(rng: Branches) -> None:
        accepted = toy_rule(toy, draft, p_rows, rng)
        weights = chances * rng.chances
        step.index_put_((begun, reached(toy, draft, accepted)), weights, accumulate=True)
        tokens.index_add_(0, begun, weights * (accepted.length + 1))

    every_path(add)
    return Round(step, tokens)


def every_draft(toy: Toy, propose: Propose, starts: Tensor) -> Iterator[tuple[Draft, Tensor]]:
    found: list[tuple[Draft, Tensor]] = []

    def add(rng: Branches) -> None:
        draft = propose(toy, starts, rng)
        chances = rng.chances.expand(len(starts))
        found.append((pick(draft, chances > 0), chances[chances > 0]))

    every_path(add)
    yield from found


def reached(toy: Toy, draft: Draft, accepted: Accepted) -> Tensor:
    """The context after the emitted tokens, cut where the text is whole."""
    after = draft.contexts.gather(1, accepted.path[:, -1:])[:, 0]
    after = after * toy.vocab + accepted.next_ids
    for _ in range(toy.levels + 1):
        after = torch.where(after >= 2 * toy.vocab**toy.length, after // toy.vocab, after)
    return after


def law_of(toy: Toy, propose: Propose, toy_rule: ToyRule) -> Tensor:
    """The joint law of the whole text, as rounds emit it."""
    step = enumerate_round(toy, propose, toy_rule, toy.starts).step
    law = torch.zeros(len(toy.p), dtype=torch.float64)
    law[1] = 1.0
    for _ in range(toy.length):
        law = law @ step
    return law[toy.ends]


def bias(toy: Toy, propose: Propose, toy_rule: ToyRule) -> float:
    """Total variation between the law of the rounds and that of plain decoding."""
    return variation(law_of(toy, propose, toy_rule), toy.law())


def worst_bias(propose: Propose, toy_rule: ToyRule, setting: Warp = PLAIN) -> float:
    """Of a few random toys: one toy might hide a bias by chance."""
    return max(bias(Toy(seed, warp=setting), propose, toy_rule) for seed in range(3))


def variation(law: Tensor, other: Tensor) -> float:
    return float((law - other).abs().sum()) / 2


def tokens_per_round(toy: Toy, propose: Propose, toy_rule: ToyRule) -> float:
    """Emitted by the first round on average, the next token included."""
    first = torch.ones(1, dtype=torch.long)
    return float(enumerate_round(toy, propose, toy_rule, first).tokens[1])


def pick(draft: Draft, rows: Tensor) -> Draft:
    """Some of the prompts of a batch."""
    tree, contexts, q_rows = draft
    parts: dict[str, Any] = {name: getattr(tree, name)[rows] for name in PARTS}
    parts["draws"] = None if tree.draws is None else tree.draws[rows]
    chosen = Tree(**parts, levels=tree.levels, is_chain=tree.is_chain, unpadded=tree.unpadded)
    return Draft(chosen, contexts[rows], None if q_rows is None else q_rows[rows])


def stack(drafts: list[Draft]) -> Draft:
    """One batch of trees of one size."""
    trees = [draft.tree for draft in drafts]
    parts: dict[str, Any] = {
        name: torch.cat([getattr(tree, name) for tree in trees]) for name in PARTS
    }
    draws = [tree.draws for tree in trees if tree.draws is not None]
    parts["draws"] = torch.cat(draws) if draws else None
    straight, whole = (
        all(flags) for flags in zip(*((t.is_chain, t.unpadded) for t in trees), strict=True)
    )
    tree = Tree(
        **parts, levels=max(tree.levels for tree in trees), is_chain=straight, unpadded=whole
    )
    contexts = torch.cat([draft.contexts for draft in drafts])
    rows = [draft.q_rows for draft in drafts if draft.q_rows is not None]
    return Draft(tree, contexts, torch.cat(rows) if rows else None)


# ---- drafts --------------------------------------------------------------------------------------


def sampled_tree(widths: tuple[int, ...], replacement: bool) -> Propose:
    """Every node at depth d has widths[d] children, drawn from the drafter's row."""

    def propose(toy: Toy, starts: Tensor, rng: RandomSource) -> Draft:
        def below(rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
            return draw_siblings(rows, width, rng, replacement)

        draft = grow(toy, starts, widths, below)
        return draft._replace(q_rows=toy.q[draft.contexts])

    return propose


def top_k_tree(*widths: int) -> Propose:
    """Every node at depth d has the drafter's top widths[d] tokens below it: no rows, by R1."""

    def below(rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
        best = rows.topk(width).indices
        return best, torch.ones_like(best, dtype=torch.bool)

    return lambda toy, starts, rng: grow(toy, starts, widths, below)


def sampled_chain(depth: int) -> Propose:
    return sampled_tree((1,) * depth, replacement=True)


def argmax_chain(depth: int) -> Propose:
    return top_k_tree(*(1,) * depth)


Below = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def grow(toy: Toy, starts: Tensor, widths: tuple[int, ...], below: Below) -> Draft:
    """Level by level; `below` gives the children of each row of the drafter, and which are real."""
    batch, first = len(starts), 0
    contexts, real = [starts[:, None]], [torch.ones(batch, 1, dtype=torch.bool)]
    parents, depths = [torch.tensor([-1])], [torch.tensor([0])]
    for depth, width in enumerate(widths, start=1):
        ids, live = below(toy.q[contexts[-1]], width)
        last = torch.arange(first, first + contexts[-1].shape[1])
        parents.append(last.repeat_interleave(width))
        depths.append(torch.full_like(parents[-1], depth))
        first += len(last)
        contexts.append((contexts[-1][..., None] * toy.vocab + ids).flatten(1))
        real.append((real[-1][..., None] & live).flatten(1))
    nodes = torch.cat(contexts, dim=1)
    shape = (batch, -1)
    if set(widths) == {1} and bool(torch.cat(real, dim=1).all()):  # as the engine draws chains
        return Draft(Tree.chain(nodes % toy.vocab), nodes, None)
    tree = Tree.from_parents(
        nodes % toy.vocab,
        torch.cat(parents).expand(shape),
        torch.cat(depths).expand(shape),
        len(widths),
        torch.cat(real, dim=1),
    )
    return Draft(tree, nodes, None)


# ---- whole batches with real random numbers ------------------------------------------------------


def sample(toy: Toy, propose: Propose, toy_rule: ToyRule, count: int) -> Tensor:
    """How often each whole text comes out, of `count` prompts decoded side by side."""
    rng = GeneratorSource([Random(seed) for seed in range(count)], 8)
    contexts = torch.ones(count, dtype=torch.long)
    while bool((contexts < toy.vocab**toy.length).any()):
        growing = contexts.clamp(max=toy.vocab**toy.length - 1)  # finished texts decode on, unused
        draft = propose(toy, growing, rng)
        after = reached(toy, draft, toy_rule(toy, draft, toy.p[draft.contexts], rng))
        contexts = torch.where(contexts < toy.vocab**toy.length, after, contexts)
    return (contexts[:, None] == toy.ends).sum(0)


def g_test(
    toy: Toy, propose: Propose, toy_rule: ToyRule, count: int, law: Tensor | None = None
) -> float:
    """p-value of the likelihood-ratio test of the joint law of a whole text.

    Args:
        law: None: that of plain sampling.
    """
    expected = count * (toy.law() if law is None else law)
    assert float(expected.min()) > 5, "too few samples for the test to hold"
    observed = sample(toy, propose, toy_rule, count)
    return float(power_divergence(observed, expected, lambda_="log-likelihood").pvalue)


# ---- batches of unequal trees --------------------------------------------------------------------


def padded(draft: Draft, size: int, levels: int) -> Draft:
    """The same trees among more nodes: what is added hangs below the root, and is not real.

    Its tokens are those of the root's children, and its rows are the root's, so that
    taking an added node for a sibling gives a wrong result.
    """
    tree, contexts, q_rows = draft
    more = size - tree.size
    one = min(1, tree.size - 1)

    def filled(part: Tensor, value: Tensor | int) -> Tensor:
        tail = torch.as_tensor(value, dtype=part.dtype).expand(len(part), more)
        return torch.cat([part, tail], dim=1)

    grown = Tree.from_parents(
        filled(tree.ids, tree.ids[:, one : one + 1]),
        filled(tree.parents, 0),
        filled(tree.depths, 1),
        levels,
        filled(tree.real, 0),
    )
    tail = contexts[:, :1].expand(-1, more)
    rows = None if q_rows is None else torch.cat([q_rows, q_rows[:, :1].expand(-1, more, -1)], 1)
    return Draft(grown, torch.cat([contexts, tail], dim=1), rows)


def any_trees(ids: Tensor, whole: bool, dice: torch.Generator) -> Tree:
    """Trees of these tokens, every node below any one before it."""
    batch, size = ids.shape
    parents, depths = torch.full_like(ids, -1), torch.zeros_like(ids)
    real = torch.rand(batch, size, generator=dice) < (1.0 if whole else 0.8)
    real[:, 0] = True
    for node in range(1, size):
        above = parents[:, node : node + 1] = torch.randint(0, node, (batch, 1), generator=dice)
        depths[:, node] = depths.gather(1, above)[:, 0] + 1
        real[:, node] &= real.gather(1, above)[:, 0]  # a real node has real ancestors
    return Tree.from_parents(ids, parents, depths, size - 1, None if whole else real)


def check_ragged(toy: Toy, proposals: list[Propose], toy_rule: ToyRule) -> None:
    """Trees of unequal shape in one batch get what each of them gets alone."""
    starts = toy.starts[:4]
    rng = GeneratorSource([Random(9) for _ in starts], 16)
    drafts = [propose(toy, starts, rng) for propose in proposals]
    size = max(draft.tree.size for draft in drafts)
    levels = max(draft.tree.levels for draft in drafts)
    batch = stack([padded(draft, size + 1, levels) for draft in drafts])
    alone = [pick(d, torch.tensor([row])) for d in drafts for row in range(len(starts))]
    for seed in range(25):
        every = apply_rule(toy, batch, toy_rule, range(seed, seed + len(alone)))
        for row, draft in enumerate(alone):
            one = apply_rule(toy, draft, toy_rule, [seed + row])
            length = int(one.length)
            assert every.length[row] == length
            assert every.next_ids[row] == one.next_ids[0]
            assert every.path[row, : length + 1].tolist() == one.path[0, : length + 1].tolist()
            assert bool((every.path[row, length:] == every.path[row, length]).all())


def apply_rule(toy: Toy, draft: Draft, toy_rule: ToyRule, seeds: Iterable[int]) -> Accepted:
    rng = GeneratorSource([Random(seed) for seed in seeds], 16)
    return toy_rule(toy, draft, toy.p[draft.contexts], rng)


def coupled_acceptance(
    p: Float[Tensor, "*rows V"], q: Float[Tensor, "*rows V"]
) -> Float[Tensor, "*rows"]:
    """Return the probability that p and q draw the same token from shared Gumbel noise.

    Token x wins in both iff e_y >= e_x m_y for all y, with exponential noise e and
    m_y = max(p_y / p_x, q_y / q_x); integrated over e_x that is 1 / sum_y m_y. The result lies
    between (1 - TV) / (1 + TV) and 1 - TV. Memory: V times that of a row.

    Source: Daliri, Musco, Suresh 2024, section 3, arXiv:2408.07978.
    """
    support = (p > 0) & (q > 0)
    one = torch.ones_like(p)
    ratios = (row[..., None, :] / torch.where(support, row, one)[..., None] for row in (p, q))
    total = torch.maximum(*ratios).sum(-1)  # over y, for every x
    return torch.where(support, 1 / total, 0 * one).sum(-1)
