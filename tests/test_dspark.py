"""What is particular to DSpark: the token before, its memory, the confidence head, the losses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models.drafters.dspark import Config, DSpark
from outrider.models.interface import Trace
from outrider.models.target.target import Target
from outrider.train.objective import Objective
from tests import test_drafter_contract as contract
from tests import tiny

KINDS = ("vanilla", "gated", "rnn")


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


@pytest.fixture
def trace(target: Target) -> Trace:
    target.set_taps((0, 1, 2))
    return tiny.packed_trace(target)


def built(target: Target, **changes: Any) -> DSpark:
    made = tiny.drafter("dspark", target, **{"markov_rank": 6, **changes})
    assert isinstance(made, DSpark)
    with torch.no_grad():  # large enough to see
        made.markov_head.markov_w1.weight.mul_(10)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_every_head_decodes_as_it_trains(kind: str, target: Target, trace: Trace) -> None:
    """The contract's tests of steps, trees and the newest token, for the other heads."""
    drafter = built(target, markov_head=kind).eval()
    contract.test_steps_repeat_the_unroll_at_every_row_and_depth(drafter, trace)
    contract.test_training_and_decoding_depend_on_the_newest_token_alike(drafter, trace)
    every: list[list[tuple[int, ...]]] = [[(4, 8), (9, 6)], [(4, 8), (9, 6), (9, 4)]]
    for paths in every:
        contract.test_every_branch_of_a_tree_repeats_the_unroll_of_its_own_text(
            drafter, trace, paths
        )


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_heads_are_their_formulas(kind: str, target: Target, trace: Trace) -> None:
    """At one row, depth by depth, with the text's tokens."""
    drafter, rank = built(target, markov_head=kind).eval(), 6
    head, at, state = drafter.markov_head, torch.tensor([tiny.LENGTH + 7]), torch.zeros(6)
    for guess in drafter.unroll(trace):
        row = guess.states(at)[0]
        slot, h = row[:32], drafter.norm(row[:32])
        e = head.markov_w1.weight[trace.ids[1, 7 + guess.depth]]
        added = e
        if kind == "gated":
            added = torch.sigmoid(head.gate_proj(torch.cat([h, e]))) * e
        if kind == "rnn":
            g, c, o = head.joint_proj(torch.cat([state, e, h])).split(rank)
            state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
            added = torch.tanh(o)
        expected = drafter.slot_logits(slot) + head.markov_w2.weight @ added
        torch.testing.assert_close(drafter.head(row), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["slot", "markov"])
def test_confidence_reads_the_token_before_and_not_the_drawn_one(
    kind: str, target: Target, trace: Trace
) -> None:
    """`head` and confidence have the same inputs: a slot and the node's own token (rule R2)."""
    drafter = built(target, confidence_head=kind).eval()
    state = contract.absorbed(drafter, trace, 1, 0, 8)
    ids, parents = torch.tensor([[4, 9]]), torch.zeros(1, 2, dtype=torch.long)
    with torch.no_grad():
        root = drafter.step_batch([state], 1, trace.ids[1:, 8:9], parents[:, :1])[1]
        logits, level = drafter.step_batch(root, 2, ids, parents)
        log_q = logits.log_softmax(-1)
        found = drafter.log_confidence(log_q, 2, drafter.node_hidden(level))
        other = drafter.log_confidence(log_q.flip(-1), 2, drafter.node_hidden(level))
    assert found.shape == (1, 2)
    assert (found < 0).all()
    assert torch.equal(found, other)
    same = torch.isclose(found[0, 0], found[0, 1], rtol=0, atol=1e-6)  # rows of one product
    assert bool(same) == (kind == "slot")


def test_the_confidence_term_is_a_cross_entropy_with_the_acceptance(
    target: Target, trace: Trace
) -> None:
    """By hand at every supervised row of depth 1; the acceptance carries no gradient."""
    drafter = built(target, confidence_head="markov", draft_vocab_size=None)
    drafter = drafter.eval()
    objective = Objective(drafter, target, weights=[1.0, 0.0, 0.0], loss=["confidence"])
    loss, _ = objective(trace, torch.ones(3))
    rows, (guess, *_) = trace.supervised_rows(1), list(drafter.unroll(trace))
    hidden = guess.states(rows)
    q = drafter.vocab.expand(drafter.head(hidden).softmax(-1))
    p = target.logits(trace.last.flatten(0, 1)[rows + 1]).softmax(-1)
    alpha = torch.minimum(p, q).sum(-1).detach()
    read = torch.cat([drafter.norm(hidden[:, :32]), hidden[:, -6:]], -1)
    c = drafter.confidence_head.proj(read)[:, 0].sigmoid()  # type: ignore[union-attr]
    expected = torch.nn.functional.binary_cross_entropy(c, alpha, reduction="sum")
    torch.testing.assert_close(loss, expected, atol=1e-3, rtol=1e-4)
    loss.backward()
    assert drafter.confidence_head.proj.weight.grad.any()  # type: ignore[union-attr]
    assert drafter.markov_head.markov_w2.weight.grad is None or not (
        drafter.markov_head.markov_w2.weight.grad.any()
    )


def test_the_three_terms_are_summed_and_divided_once(target: Target, trace: Trace) -> None:
    drafter = built(target, confidence_head="slot").eval()
    assert drafter.cfg.loss == ("0.1*ce", "1.8*tv", "confidence")
    counts = torch.tensor([float(trace.supervised_mask(d).sum()) for d in (1, 2, 3)])
    weights = [1.0, 0.5, 0.25]
    whole = Objective(drafter, target, weights=weights, loss=drafter.cfg.loss)(trace, counts)[0]
    parts: list[Tensor] = []
    for term in ("ce", "tv", "confidence"):
        objective = Objective(drafter, target, weights=weights, loss=[term])
        parts.append(objective(trace, counts)[0])
    torch.testing.assert_close(whole, 0.1 * parts[0] + 1.8 * parts[1] + parts[2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_head": "lstm"}, "vanilla or gated or rnn"),
        ({"markov_rank": 0}, "markov_rank"),
        ({"block_size": 1, "shifted": False}, "block_size = 1: its only slot"),
        ({"depths": 9, "block_size": 8}, "use block_size=9, or depths=8"),
        ({"taps": (2, 2)}, "each once"),
        ({"confidence_head": "yes"}, "none or slot or markov"),
        ({"confidence_head": "slot", "loss": ("ce",)}, "add confidence to the loss"),
        ({"loss": ("ce", "confidence")}, "confidence_head"),
    ],
)
def test_settings_that_contradict_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**changes)


@torch.no_grad()
def test_a_head_with_zero_w2_leaves_the_backbone_unchanged(target: Target, trace: Trace) -> None:
    """Warm start by identity: the same weights in dflash and dspark give the same logits."""
    drafter = built(target).eval()
    backbone = tiny.drafter("dflash", target, depths=3, shifted=True).eval()
    theirs = drafter.state_dict()
    backbone.load_state_dict({k: theirs[k] for k in backbone.state_dict()})
    drafter.markov_head.markov_w2.weight.zero_()
    for one, other in zip(drafter.unroll(trace), backbone.unroll(trace), strict=True):
        assert torch.equal(drafter.head(one.hidden), backbone.head(other.hidden))
