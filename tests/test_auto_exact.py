"""decode=auto is lossless: every outcome of toy decodings is enumerated.

Targets have three tokens, drafts are sampled, and every choice of the controller is real: costs by
a clock that the test moves, acceptance as it is learnt. Published mistakes are negative controls.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models.decode.auto.chain_growth import ChainGrowth
from outrider.models.decode.auto.controller import Controller
from outrider.models.decode.auto.outcomes import Round
from outrider.models.decode.auto.policy import Auto
from outrider.models.decode.auto.tree_growth import TreeGrowth
from outrider.models.decode.costs.live_costs import LiveCosts
from outrider.models.decode.costs.round_costs import MeasuredTimes, TimeGrid
from outrider.models.decode.draft_context import DraftContext
from outrider.models.decode.dynamic_tree import Candidates
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Draft
from outrider.models.decode.request import Request
from outrider.models.decode.round_times import Stopwatch
from outrider.models.decode.rules.rule_table import BEST, DRAWN
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.tree import Tree
from outrider.models.target.target import Target
from tests import tiny
from tests.enumeration import Context, Law, distance, enumerate_law
from tests.families import small_model
from tests.tiny import MeanTarget, ScriptedDrafter, inject_random_source, random_logits

V, LENGTH = 3, 4  # the first token, and room for a draft of two
WARM = Sampling(temperature=1.0)


def toy_target() -> Target:
    small = {"num_hidden_layers": 1, "hidden_size": 16, "vocab_size": V}
    model = small_model("llama", num_attention_heads=2, num_key_value_heads=1, **small)
    with torch.no_grad():
        model.get_parameter("lm_head.weight").mul_(30.0)
    return MeanTarget(model)


def wide_target() -> Target:
    small = {"num_hidden_layers": 1, "hidden_size": 16, "vocab_size": 61}
    return MeanTarget(small_model("llama", num_attention_heads=2, num_key_value_heads=1, **small))


TARGET = toy_target()


def law_of_plain(prompt: Sequence[int], length: int = LENGTH) -> Law:
    """The exact law of `length` tokens by the chain rule."""
    law: Law = {(): 1.0}
    for _ in range(length):
        longer: Law = {}
        for text, chance in law.items():
            row = tiny.logits_after(TARGET, [*prompt, *text]).double().softmax(-1)
            for token in range(V):
                longer[(*text, token)] = chance * float(row[token])
        law = longer
    return law


def times(row: float, level: float) -> MeasuredTimes:
    """A step of 1 ms, `row` more per verified row and `level` per level of a draft."""
    verified, drafted = dict[tuple[int, ...], float](), dict[tuple[int, ...], float]()
    for b in (1, 2):
        verified |= {(n, b, 64): 1 + row * b * (n - 1) for n in (1, 9)}
        drafted |= {(w, d, b, 64): level * d for w in (1, 4) for d in (1, 8)}
    return MeasuredTimes(
        "a toy",
        TimeGrid({"tokens": (1, 9), "batch": (1, 2), "context": (64,)}, verified),
        TimeGrid({"width": (1, 4), "depth": (1, 8), "batch": (1, 2), "context": (64,)}, drafted),
    )


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves by 0.1 ms whenever it is read."""
    now = [0.0]

    def read() -> float:
        now[0] += 1e-4
        return now[0]

    monkeypatch.setattr(Stopwatch, "clock", staticmethod(read))


def policy(draft: str, budget: int, row: float, level: float, depth: int = 2) -> Auto:
    auto = Auto(depth=depth, budget=budget, width=2, draft=draft, first_plain=0, eps=1.0)
    auto.costs_given = times(row, level)  # type: ignore[attr-defined]
    return auto


class Toy(Engine):
    """An engine whose costs are given."""

    def __init__(self, auto: Auto, draft_seed: int = 1, scale: float = 1.5) -> None:
        drafter = ScriptedDrafter(random_logits(V, draft_seed, scale), V)
        super().__init__(TARGET, drafter, auto, sampling=WARM)
        auto.use_costs(LiveCosts(auto.costs_given))  # type: ignore[attr-defined]
        auto.prepare = lambda *_: None  # type: ignore[method-assign]


def law_of(
    make: Callable[[], Auto],
    prompt: Sequence[int],
    shapes: set[str] | None = None,
    draft_seed: int = 1,
    scale: float = 1.5,
) -> Law:
    """The law of decode=auto, by every path through its random numbers."""

    def process(rng: RandomSource) -> Context:
        engine = Toy(make(), draft_seed, scale)
        inject_random_source(engine, rng)
        out = engine.generate(prompt, LENGTH)
        if shapes is not None:
            shapes.update(out.choices)
        return tuple(out.ids)

    return enumerate_law(process)


@pytest.mark.parametrize(
    ("rule", "row", "level"),
    [("auto", 0.01, 0.01), ("auto", 0.3, 0.02), ("auto", 0.05, 0.3), ("block", 0.01, 0.01)],
)
def test_chains_have_the_law_of_the_target(
    rule: str, row: float, level: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cheap rows, dear rows, dear levels: other choices, one law."""
    default = Auto.default_rule
    monkeypatch.setattr(Auto, "default_rule", lambda self: default(self, rule))
    shapes: set[str] = set()
    law = law_of(lambda: policy(DRAWN, 2, row, level), [2, 0], shapes)
    assert distance(law, law_of_plain([2, 0])) < 1e-6
    assert any(shape.startswith("chain") for shape in shapes)


def test_lengths_depend_on_what_is_drawn_before() -> None:
    """Else the proof above would show nothing: all lengths occur among the outcomes of one law."""
    shapes: set[str] = set()
    law = law_of(lambda: policy(DRAWN, 2, 0.4, 0.001), [2, 0], shapes)
    assert {"plain", "chain 1", "chain 2"} <= shapes
    assert distance(law, law_of_plain([2, 0])) < 1e-6


@pytest.mark.parametrize("draft", [BEST, DRAWN])
def test_trees_have_the_law_of_the_target(draft: str) -> None:
    shapes: set[str] = set()
    law = law_of(lambda: policy(draft, 4, 0.001, 0.2), [1, 2], shapes)
    assert distance(law, law_of_plain([1, 2])) < 1e-6
    assert any(shape.startswith("tree") for shape in shapes)


@pytest.mark.parametrize("draft", [BEST, DRAWN])
def test_trees_whose_size_depends_on_the_rows_have_the_law_of_the_target(
    draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees of three, two and no nodes: the drafter is sure of some alone."""
    sizes = set[int]()

    def recorded(factor: float) -> type[TreeGrowth]:
        class Recorded(TreeGrowth):
            def select(self, candidates: Candidates) -> Candidates:
                found = TreeGrowth.select(replace(self, rate=factor * self.rate), candidates)
                sizes.add(found.budget)
                return found

        return Recorded

    for factor in (0.1, 1.0, 6.0, 30.0):
        monkeypatch.setattr(Auto, "tree_growth", recorded(factor))
        law = law_of(partial(policy, draft, 4, 0.08, 0.1), [1, 2], draft_seed=2, scale=5.0)
        assert distance(law, law_of_plain([1, 2])) < 1e-6
    assert sizes >= {0, 2, 3}


# ---- a batch of two ------------------------------------------------------------------------------


class JointBranches(RandomSource):
    """`Branches` where every prompt of a batch branches on its own."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.trail, self.chance = script, list[tuple[int, int]](), 1.0

    def flip(self, chances: Tensor) -> Tensor:
        return self.draw(torch.stack([1 - chances, chances], dim=-1)).bool()

    def draw(self, rows: Tensor) -> Tensor:
        return torch.tensor([[self._choose(row) for row in prompt] for prompt in rows])

    def _choose(self, weights: Tensor) -> int:
        shares = (weights.double() / weights.double().sum()).tolist()
        possible = [i for i, share in enumerate(shares) if share > 0]
        step = len(self.trail)
        branch = self.script[step] if step < len(self.script) else 0
        self.trail.append((branch, len(possible)))
        self.chance *= shares[possible[branch]]
        return possible[branch]


def scripts() -> Iterator[JointBranches]:
    """Yield a source for every path; each is used before the next is made."""
    script: list[int] = []
    while True:
        rng = JointBranches(script)
        yield rng
        trail = rng.trail
        while trail and trail[-1][0] + 1 == trail[-1][1]:
            trail.pop()
        if not trail:
            return
        script = [branch for branch, _ in trail]
        script[-1] += 1


def joint_law(make: Callable[[], Auto], prompts: Sequence[Sequence[int]]) -> dict[Any, float]:
    law: dict[Any, float] = defaultdict(float)
    for rng in scripts():
        engine = Toy(make())
        inject_random_source(engine, rng)
        outs = engine.generate_all([Request(prompt, 2) for prompt in prompts], 2)
        law[tuple(tuple(out.ids) for out in outs)] += rng.chance
    return law


def plain_joint(prompts: Sequence[Sequence[int]]) -> dict[Any, float]:
    first, second = (law_of_plain(prompt, 2) for prompt in prompts)
    return {(a, b): first[a] * second[b] for a, b in product(first, second)}


def test_a_batch_of_two_has_the_joint_law_of_two_targets() -> None:
    """Budgets of two tokens leave room for one draft token; both requests decide about it."""
    prompts = [[2, 0], [1, 1]]
    for row in (0.01, 0.2):
        law = joint_law(lambda row=row: policy(DRAWN, 2, row, 0.01), prompts)  # type: ignore[misc]
        assert distance(law, plain_joint(prompts)) < 1e-6


# ---- negative controls ---------------------------------------------------------------------------


class DropsUnlikely(ChainGrowth):
    """A published mistake: a token is dropped after it was drawn, for its own probability."""

    def propose(self, context: DraftContext) -> Draft:
        draft = super().propose(context)
        return _kept(draft, [_survivors(draft, row, 0.4) for row in range(len(draft.tree.ids))])


class AllBudgets(ChainGrowth):
    """A published mistake: the best of all budgets by confidences of the drawn tokens."""

    def propose(self, context: DraftContext) -> Draft:
        draft = super().propose(context)
        if draft.q_rows is None:
            return draft
        counts = []
        for row in range(len(draft.tree.ids)):
            tokens, survival, best = 1.0, 1.0, (1.0, 0)
            for depth, q in enumerate(_own_probabilities(draft, row), start=1):
                survival *= q
                tokens += survival
                best = max(best, (tokens / (1 + 0.35 * depth), depth))
            counts.append(best[1])
        return _kept(draft, counts)


def _own_probabilities(draft: Draft, row: int) -> list[float]:
    assert draft.q_rows is not None
    tokens = draft.tree.ids[row, 1:].tolist()
    return [float(draft.q_rows[row, i, token]) for i, token in enumerate(tokens)]


def _survivors(draft: Draft, row: int, least: float) -> int:
    if draft.q_rows is None:
        return 0
    likely = [q >= least for q in _own_probabilities(draft, row)]
    return [*likely, False].index(False)


def _kept(draft: Draft, counts: list[int]) -> Draft:
    if draft.q_rows is None:
        return draft
    return Draft(Tree.chain(draft.tree.ids, torch.tensor(counts)), draft.q_rows)


@pytest.mark.parametrize("mistake", [DropsUnlikely, AllBudgets])
def test_published_mistakes_are_detected(
    mistake: type[ChainGrowth], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Auto, "growth", mistake)
    law = law_of(lambda: policy(DRAWN, 2, 0.01, 0.01), [1, 2])
    assert distance(law, law_of_plain([1, 2])) > 1e-2


# ---- chains of drawn tokens ----------------------------------------------------------------------


def test_chains_of_drawn_tokens_go_deeper_than_their_probabilities_say() -> None:
    """The drafter's rows are the target's, and nearly flat: every drawn token is accepted."""
    target = toy_target()
    with torch.no_grad():
        target.model.get_parameter("lm_head.weight").div_(100.0)
    drafter = ScriptedDrafter(lambda text: tiny.logits_after(target, text), V)
    auto = policy(DRAWN, 6, 0.01, 0.05, depth=6)
    engine = Engine(target, drafter, auto, sampling=WARM)
    auto.use_costs(LiveCosts(times(0.01, 0.05)))
    auto.prepare = lambda *_: None  # type: ignore[method-assign]
    out = engine.generate([1, 2, 0], 50)
    assert out.accepted == out.drafted
    assert sum(depth == 6 for depth in out.drafted) > len(out.drafted) / 2


@pytest.mark.parametrize("counts", [True, False])
def test_trees_without_nodes_are_not_planned_again(
    counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flat rows of a drafter: what was expected of the nodes counts. The control forgets it."""
    empty = 0
    settle = Controller.settle

    def counted(self: Controller, last: Round, read: tuple[int, float]) -> None:
        nonlocal empty
        empty += last.is_tree and last.label == "plain"
        assert last.kind == "tree" or not last.is_tree
        if not counts:
            last.dropped = last.choice.tokens - len(last.requests)
        settle(self, last, read)

    monkeypatch.setattr(Controller, "settle", counted)
    monkeypatch.setattr(LiveCosts, "observe", lambda self, kind, table, *_, **__: table)
    target, vocab = wide_target(), 61
    auto = policy(DRAWN, 15, 0.02, 0.15, depth=4)
    auto.width = 4
    drafter = ScriptedDrafter(random_logits(vocab, 1, 0.01), vocab)
    engine = Engine(target, drafter, auto, sampling=WARM)
    auto.use_costs(LiveCosts(times(0.02, 0.15)))
    auto.prepare = lambda *_: None  # type: ignore[method-assign]
    for seed in range(4):
        engine.generate_all([Request([1, 2, 0], 120, seed)], 1)
    assert (empty < 5) is counts
