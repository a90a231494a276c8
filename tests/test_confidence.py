"""Confidence: largest probability or output of the drafter, calibrated; never of the draw."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.conf.files import write_json
from outrider.conf.tensor_files import fingerprint
from outrider.eval.calibration import depth_summaries, reliability
from outrider.eval.calibration_file import FILE, FORMAT, attach_calibration
from outrider.models.decode.draft_context import DraftContext
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Draft
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.tree import Tree
from outrider.models.drafting.calibration import Bin, Calibration
from outrider.models.interface import Trace
from tests import test_drafter_contract as contract
from tests import tiny
from tests.enumeration import Law, distance, enumerate_law
from tests.test_auto_exact import toy_target
from tests.test_token_before import Slots, built
from tests.tiny import Row, ScriptedDrafter, ScriptState, Text, inject_random_source

TEXT: Text = (3, 1, 4)
CHANCES = torch.tensor([0.6, 0.3, 0.1]).log()


def accuracies(calibration: Calibration, confidences: list[float], depth: int = 1) -> list[float]:
    found = calibration.log_accuracy(torch.tensor(confidences).log(), depth).exp()
    return [round(x, 4) for x in found.tolist()]


class Scripted(ScriptedDrafter):
    """A drafter whose confidence is a function of the text before the token."""

    def __init__(
        self, confidences: dict[Text, float], size: int = 3, row: Row = lambda _: CHANCES
    ) -> None:
        super().__init__(row, size)
        self.confidences = confidences

    def node_hidden(self, states: Sequence[ScriptState]) -> Tensor:
        chances = [
            [[self.confidences.get(branch, 1.0)] for branch in state.branches] for state in states
        ]
        return torch.tensor(chances)

    def log_confidence(self, log_q: Tensor, depth: int, hidden: Tensor | None) -> Tensor:
        assert hidden is not None
        return hidden[..., 0].log()


# ---- calibration ---------------------------------------------------------------------------------


def test_accuracy_is_linear_between_bins_and_constant_outside() -> None:
    """(3 + 1) / (6 + 2) = 0.5 at 0.2, and (7 + 1) / (8 + 2) = 0.8 at 0.8."""
    calibration = Calibration([[Bin(0.2, 6, 0.5), Bin(0.8, 8, 7 / 8)]])
    assert accuracies(calibration, [0.01, 0.2, 0.5, 0.6, 0.8, 1.0]) == [
        0.5, 0.5, 0.65, 0.7, 0.8, 0.8,
    ]  # fmt: skip


def test_bins_in_the_wrong_order_are_pooled() -> None:
    """6/8, 2/10 and 6/12 of pairs (right + 1, guesses + 2): all three pool to 14/30."""
    bins = [Bin(0.3, 6, 5 / 6), Bin(0.5, 8, 1 / 8), Bin(0.7, 10, 0.5), Bin(0.9, 8, 1.0)]
    expected = [(6 + 2) / (8 + 10)] * 2 + [6 / 12, 9 / 10]
    found = accuracies(Calibration([bins]), [0.3, 0.5, 0.7, 0.9])
    assert found == [round(x, 4) for x in expected]
    pooled = [Bin(0.3, 6, 5 / 6), Bin(0.5, 8, 5 / 8), Bin(0.7, 10, 0.1)]
    assert accuracies(Calibration([pooled]), [0.3, 0.5, 0.7]) == [round(14 / 30, 4)] * 3


def test_one_bin_and_depths_beyond_the_measured() -> None:
    calibration = Calibration([[Bin(0.5, 2, 0.5)], [Bin(0.4, 8, 0.0)]])
    assert accuracies(calibration, [0.1, 0.9]) == [0.5, 0.5]
    assert accuracies(calibration, [0.1], 2) == accuracies(calibration, [0.1], 7) == [0.1]
    with pytest.raises(ValueError, match="every depth"):
        Calibration([[Bin(0.5, 2, 0.5)], []])


def test_calibration_is_used_by_the_weights_it_was_measured_with(tmp_path: Path) -> None:
    """Beside the drafter, or in the folder of its run."""
    target = tiny.target()
    drafter, other = tiny.drafter("eagle3", target), tiny.drafter("eagle3", target)
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    sums = reliability(drafter.eval(), target, [tiny.packed_trace(target)], tiny.DEPTHS)
    about = {"report": "eval", "drafter": fingerprint(drafter.state_dict())}
    (tmp_path / "drafter").mkdir()
    attach_calibration(drafter, tmp_path / "drafter")
    assert drafter.calibration is None
    content = {"format": FORMAT, **about, "depths": depth_summaries(sums)}
    write_json(tmp_path / FILE, content)
    for one in (drafter, other):
        attach_calibration(one, tmp_path / "drafter")
    assert drafter.calibration is not None
    assert other.calibration is None


# ---- policies ------------------------------------------------------------------------------------


def test_chain_ends_after_a_place_of_low_confidence() -> None:
    """The drafter's own: after its second token, although every token is as probable."""
    drafter = Scripted({(): 0.9, (0,): 0.4, (0, 0): 0.9})
    lengths = {}
    for least in (0.3, 0.5, 0.95):
        tree = tiny.propose(Chain(4, confidence=least), drafter, [TEXT]).tree
        lengths[least] = int(tree.real.sum()) - 1
    assert lengths == {0.3: 4, 0.5: 2, 0.95: 1}


def test_dynamic_tree_multiplies_confidences_along_a_path() -> None:
    """Children of a node of confidence c have c, c / 2, c / 6: the ratios of .6 .3 .1.

    Below the root .6 .3; below 0, .02 .01; below 1, .9 .45 of .3. The best four: 0, 1, 10, 11.
    """
    drafter = Scripted({(): 0.6, (0,): 0.02, (1,): 0.9})
    tree = tiny.propose(DynamicTree(depth=2, width=2, budget=4), drafter, [TEXT]).tree
    assert set(tiny.paths(tree)) == {(0,), (1,), (1, 0), (1, 1)}
    plain = ScriptedDrafter(lambda _: CHANCES, 3)
    tree = tiny.propose(DynamicTree(depth=2, width=2, budget=4), plain, [TEXT]).tree
    assert set(tiny.paths(tree)) == {(0,), (1,), (0, 0), (0, 1)}


def test_calibration_changes_greedy_drafts_and_no_others() -> None:
    """Measured accuracies: 0.6 at depth 1, but 0.02 at depth 2."""
    drafter = ScriptedDrafter(lambda _: CHANCES, 3)
    policy, chain = DynamicTree(depth=2, width=3, budget=4), Chain(3, confidence=0.5)
    drafter.calibration = Calibration([[Bin(0.6, 8, 5 / 8)], [Bin(0.6, 98, 1 / 98)]])
    tree = tiny.propose(policy, drafter, [TEXT]).tree
    assert set(tiny.paths(tree)) == {(0,), (1,), (2,), (0, 0)}
    assert tiny.propose(chain, drafter, [TEXT]).tree.real.sum() == 1 + 2
    warm = Sampling(1.0)
    tree = tiny.propose(policy, drafter, [TEXT], sampling=warm).tree
    assert set(tiny.paths(tree)) == {(0,), (1,), (0, 0), (0, 1)}
    assert tiny.propose(chain, drafter, [TEXT], sampling=warm).tree.real.sum() == 1 + 3


def test_confidence_of_the_drafter_keeps_the_distribution() -> None:
    """Four tokens jointly; drafts end at every length, by what was drawn before."""
    target, drafter = contract.five_token_pair("eagle3")
    kind = type(drafter)

    class Own(kind):  # type: ignore[misc, valid-type]
        def node_hidden(self, states: Sequence[object]) -> Tensor:
            return torch.stack([state.hidden for state in states])  # type: ignore[attr-defined]

        def log_confidence(self, log_q: Tensor, depth: int, hidden: Tensor | None) -> Tensor:
            assert hidden is not None
            return (8 * hidden[..., 0]).sigmoid().log()

    drafter.__class__ = Own
    sampling = Sampling(0.8, 1.0, 2)
    engine = Engine(target, drafter, Chain(2, confidence=0.5), sampling=sampling)
    lengths = set[int]()

    def run(rng: RandomSource) -> Text:
        inject_random_source(engine, rng)
        out = engine.generate(contract.PROMPT, contract.BUDGET)
        lengths.update(out.drafted)
        return tuple(out.ids)

    law = contract.plain_distribution(target, sampling)
    assert distance(enumerate_law(run), law) < 1e-5
    assert {1, 2} <= lengths


class CutBefore(Chain):
    """DSpark's rule: the first token of low confidence is not verified; its place decides."""

    def propose(self, context: DraftContext) -> Draft:
        draft = Chain(self.depth).propose(context)
        return Draft(Tree.chain(draft.tree.ids, self.kept(context, draft)), draft.q_rows)

    def kept(self, context: DraftContext, draft: Draft) -> Tensor:
        tokens = draft.tree.ids[0, 1:].tolist()
        assert isinstance(context.drafter, Scripted)
        table = context.drafter.confidences
        chances = [table.get(tuple(tokens[:k]), 1.0) for k in range(len(tokens))]
        assert isinstance(self.confidence, float)
        return self.count([chance >= self.confidence for chance in chances])

    def count(self, above: list[bool]) -> Tensor:
        return torch.tensor([next((k for k, one in enumerate(above) if not one), len(above))])


class StaleBudget(CutBefore):
    """A length fixed before the draft, by how the last round ended."""

    def kept(self, context: DraftContext, draft: Draft) -> Tensor:
        accepted = context.requests[0].out.accepted
        return torch.tensor([1 if accepted and accepted[-1] == 0 else self.depth])


class DroppedAfterSeeing(CutBefore):
    """Wrong on purpose: the drawn token decides whether it is verified."""

    def kept(self, context: DraftContext, draft: Draft) -> Tensor:
        assert draft.q_rows is not None
        ids = draft.tree.ids[0, 1:]
        return self.count([float(q[x]) >= 0.3 for q, x in zip(draft.q_rows[0], ids, strict=False)])


@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [
        (Chain, 0.0, 1e-12), (CutBefore, 0.0, 1e-12), (StaleBudget, 0.0, 1e-12),
        (DroppedAfterSeeing, 0.005, 1.0),
    ],
)  # fmt: skip
def test_a_cut_is_exact_unless_it_depends_on_the_token_that_is_dropped(
    kind: type[Chain], least: float, most: float
) -> None:
    """Three tokens, drafts of two, four tokens jointly in float64, over every random outcome.

    The confidence of depth 2 depends on the token that was drawn at depth 1.
    """
    target, noise = toy_target(), tiny.random_logits(3, seed=5, scale=1.5)
    target.model.double()
    drafter = Scripted({(0,): 0.2, (1,): 0.9, (2,): 0.4}, row=lambda text: noise(text).double())
    engine = Engine(target, drafter, kind(2, confidence=0.5), sampling=Sampling(1.0))
    prompt, lengths = [1, 2, 0], set[tuple[int, ...]]()

    def run(rng: RandomSource) -> Text:
        inject_random_source(engine, rng)
        out = engine.generate(prompt, 4)
        lengths.add(tuple(out.drafted))
        return tuple(out.ids)

    law: Law = {(): 1.0}
    for _ in range(4):
        rows = {text: tiny.logits_after(target, [*prompt, *text]).softmax(-1) for text in law}
        law = {
            (*text, token): chance * float(rows[text][token])
            for text, chance in law.items()
            for token in range(3)
        }
    assert least <= distance(enumerate_law(run), law) < most
    assert len(lengths) > 2


# ---- measuring -----------------------------------------------------------------------------------


class Confident(Slots):
    """A drafter with an output for its confidence, from slot and token before."""

    def log_confidence(self, log_q: Tensor, depth: int, hidden: Tensor | None) -> Tensor:
        assert hidden is not None
        return (math.log(depth) - hidden.sum(-1)).sigmoid().log().to(log_q)


@torch.no_grad()
def test_reliability_is_that_of_the_drafters_own_confidence() -> None:
    target = tiny.target()
    trace: Trace = tiny.packed_trace(target)
    drafter = built("markov", target, of=Confident)
    sums = reliability(drafter, target, [trace], tiny.DEPTHS)
    for guess in drafter.unroll(trace):
        hidden = tiny.spread(guess, trace)
        rows = torch.stack([trace.supervised_mask(d) for d in range(guess.depth + 1)]).all(0)
        expected = (math.log(guess.depth) - hidden[rows].sum(-1)).sigmoid().sum()
        found = sums[guess.depth - 1].sum(0)
        assert found[0] == rows.sum()
        torch.testing.assert_close(found[1].float(), expected, atol=1e-4, rtol=1e-4)
