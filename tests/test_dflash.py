"""What is particular to block drafters: slots, anchors, one pass per round, settings."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.models import drafters
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.from_config import depth_warning
from outrider.models.decode.policy import Chain
from outrider.models.drafters.dflash import Config
from outrider.models.drafters.dspark import Config as DSparkConfig
from outrider.models.drafters.p_eagle import Config as PEagleConfig
from outrider.models.drafting.block.backbone import BlockDrafter
from outrider.models.drafting.block.config import spread_taps
from outrider.models.interface import Trace
from outrider.models.target.target import Target
from outrider.train.objective import Objective
from tests import test_drafter_contract as contract
from tests import tiny


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


def block(target: Target, **changes: Any) -> BlockDrafter:
    made = tiny.drafter("dflash", target, **changes)
    assert isinstance(made, BlockDrafter)
    return made


def states(drafter: BlockDrafter, trace: Trace, depth: int, rows: Tensor) -> Tensor:
    (guess,) = [g for g in drafter.unroll(trace) if g.depth == depth]
    return guess.states(rows)


# ---- slots ---------------------------------------------------------------------------------------


@torch.no_grad()
def test_shifted_and_unshifted_copies_are_offset_by_one_slot(target: Target) -> None:
    """Depth d of the shifted copy is slot d - 1, which is depth d - 1 of the other."""
    one = block(target).eval()
    other = block(target, depths=4, shifted=True).eval()
    other.load_state_dict(one.state_dict())
    trace, rows = tiny.packed_trace(target), torch.arange(24, 34)
    assert one.cfg.block_size == other.cfg.block_size == 4
    for depth in (1, 2, 3):
        torch.testing.assert_close(
            states(one, trace, depth, rows), states(other, trace, depth + 1, rows)
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"causal": True},
        {"window": 4},
        {"window": 5, "window_from": "anchor"},
        {"shifted": True},
        {"window": 4, "window_layers": (1,)},
    ],
    ids=str,
)
@torch.no_grad()
def test_every_flag_decodes_as_it_trains(changes: dict[str, Any], target: Target) -> None:
    """All slots of the block behind each row of the document of 14 rows, from pieces of 3 rows."""
    drafter, state = block(target, layers=2, **changes).eval(), None
    target.set_taps(drafter.taps)
    trace = tiny.packed_trace(target)
    for first in range(0, 12, 3):
        state = drafter.absorb(state, tiny.verified_rows(trace, 1, first, first + 3))
        t, root = first + 2, torch.zeros(1, dtype=torch.long)
        logits, drafted = drafter.step(state, 1, trace.ids[1, t + 1 : t + 2], root)
        for depth in range(1, drafter.max_depth + 1):
            if trace.supervised_mask(depth)[1, t]:
                trained = states(drafter, trace, depth, torch.tensor([tiny.LENGTH + t]))
                found = drafter.step(drafted, depth, root, root)[0] if depth > 1 else logits
                torch.testing.assert_close(found, drafter.head(trained), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_round_runs_the_block_once_whatever_the_depth(target: Target) -> None:
    drafter = block(target, depths=6).eval()
    runs = []
    drafter.norm.register_forward_hook(lambda *_: runs.append(1))
    for policy in (Chain(1), Chain(6), DynamicTree(depth=6, width=3, budget=20)):
        runs.clear()
        out = Engine(target, drafter, policy).generate([5, 6, 7], 12)
        assert len(runs) == sum(count > 0 for count in out.drafted)


def test_only_the_context_of_true_rows_is_kept(target: Target) -> None:
    """Steps leave the context's keys as they were, whatever was drafted."""
    drafter = block(target).eval()
    target.set_taps(drafter.taps)
    trace, root = tiny.packed_trace(target), torch.zeros(1, dtype=torch.long)
    with torch.no_grad():
        state = drafter.absorb(None, tiny.verified_rows(trace, 1, 0, 6))
        before = [rows.keys.rows.clone() for rows in state.rows]
        drafted = drafter.step(state, 1, trace.ids[1, 6:7], root)[1]
        after = drafter.absorb(drafted, tiny.verified_rows(trace, 1, 6, 8))
    assert [len(rows) for rows in after.rows] == [8, 8]
    kept = [rows.keys.rows[:6] for rows in after.rows]
    assert all(map(torch.equal, kept, before))
    assert all(rows.branch is None for rows in after.rows)


# ---- anchors -------------------------------------------------------------------------------------


def drawn(drafter: BlockDrafter, trace: Trace, step: int) -> list[int]:
    torch.manual_seed(step)  # as the training loop does in every step
    drafter.train().begin_step(step, 0.0)
    return torch.nonzero(drafter.trained_mask(trace, 1).flatten()).flatten().tolist()


def test_anchors_are_drawn_from_the_seed_of_the_step(target: Target) -> None:
    drafter, trace = block(target, anchors=0.3), tiny.packed_trace(target)
    assert drawn(drafter, trace, 3) == drawn(block(target, anchors=0.3), trace, 3)
    assert len({tuple(drawn(drafter, trace, step)) for step in range(5)}) > 1
    rows = drawn(drafter, trace, 3)
    for i, mask in enumerate(trace.supervised_mask(1)):
        count = sum(row // tiny.LENGTH == i for row in rows)
        assert count == math.ceil(0.3 * int(mask.sum()))
    assert all(trace.supervised_mask(1).flatten()[row] for row in rows)


def test_a_share_of_the_supervised_rows_may_be_drawn(target: Target) -> None:
    trace = tiny.packed_trace(target)
    every = int(trace.supervised_mask(1).sum())
    assert len(drawn(block(target, anchors=1.0), trace, 0)) == every
    assert len(drawn(block(target, anchors=0.5), trace, 0)) in (every // 2, every // 2 + 1)


def test_measuring_takes_every_supervised_row(target: Target) -> None:
    drafter, trace = block(target, anchors=0.1).eval(), tiny.packed_trace(target)
    for guess in drafter.unroll(trace):
        assert set(trace.supervised_rows(guess.depth).tolist()) <= set(guess.rows.tolist())


@torch.no_grad()
def test_other_anchors_do_not_change_a_guess(target: Target) -> None:
    drafter, trace = block(target, anchors=0.2), tiny.packed_trace(target)
    measured = {g.depth: g for g in drafter.eval().unroll(trace)}
    rows = torch.tensor(drawn(drafter, trace, 1))
    for guess in drafter.unroll(trace):
        assert guess.rows.tolist() == rows.tolist()
        expected = measured[guess.depth].states(rows)
        torch.testing.assert_close(guess.hidden, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["dflash", "dspark", "p_eagle"])
@torch.no_grad()
def test_guesses_of_drawn_anchors_are_those_of_decoding(name: str, target: Target) -> None:
    """In training, up to the order of sums; rows are absorbed in pieces of random size.

    Anchors include the second token of a document and the first token of an answer.
    """
    shares: dict[str, Any] = {"p_eagle": {"keep": 0.5}}.get(name, {"anchors": 0.3})
    drafter, seen = tiny.drafter(name, target, depths=4, **shares).train(), set[int]()
    target.set_taps(drafter.taps)
    trace, generator = tiny.packed_trace(target), torch.Generator().manual_seed(1)
    for seed in range(4):
        torch.manual_seed(seed)
        drafter.begin_step(seed, 0.0)
        guesses = {guess.depth: guess for guess in drafter.unroll(trace)}
        for row, start, stop in tiny.document_spans(trace):
            state, t = None, start - 1
            while (
                size := int(torch.randint(1, 4, (), generator=generator))
            ) and t + size < stop - 1:
                state = drafter.absorb(state, tiny.verified_rows(trace, row, t + 1, t + 1 + size))
                t += size
                text = trace.ids[row, t + 1 : min(stop - 1, t + 5)].tolist()
                for depth, logits in contract.walked(drafter, state, text).items():
                    at = torch.tensor([row * tiny.LENGTH + t])
                    if not torch.isin(at, guesses[depth].rows).all():
                        continue
                    if trace.supervised_mask(depth)[row, t]:
                        expected = drafter.head(guesses[depth].states(at))[0]
                        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
                        seen.add(t - start)
    assert {0, 1} <= seen
    assert len(seen) > 6


def test_a_depth_beyond_the_block_is_named(target: Target) -> None:
    warning = depth_warning(Chain(9), block(target))
    assert "decode.depth=9 is deeper than this drafter can draft: drafts end at depth 3" in warning
    assert not depth_warning(Chain(3), block(target))


def test_a_document_shorter_than_a_block_trains_the_slots_it_has(target: Target) -> None:
    """Five rows, eight slots: row 2 has labels at depths 1 only, and the loss is finite."""
    drafter = block(target, depths=7, anchors=1.0)
    trace = tiny.packed_trace(target)
    assert not any(trace.supervised_mask(d)[0, 16:21].any() for d in range(4, 8))
    losses = tiny.train_drafter(drafter.train(), target, trace, steps=2)
    assert all(torch.isfinite(torch.tensor(losses)))
    last = tiny.LENGTH - 1  # an anchor at the last token has no label
    assert all(not trace.supervised_mask(d)[1, last] for d in range(1, 8))


def test_gradients_equal_those_of_the_dense_mask(target: Target) -> None:
    trace = tiny.packed_trace(target)
    grads = []
    for attention in ("fast", "reference"):
        drafter = block(target, attention=attention, causal=True, window=6, anchors=1.0).train()
        sum(g.hidden.square().sum() for g in drafter.unroll(trace)).backward()  # type: ignore[union-attr]
        grads.append([p.grad for p in drafter.parameters() if p.grad is not None])
    torch.testing.assert_close(grads[0], grads[1], atol=1e-4, rtol=1e-4)


# ---- settings ------------------------------------------------------------------------------------


def test_depths_and_block_size_follow_each_other() -> None:
    assert Config(block_size=16).depths == 15
    assert Config(depths=4).block_size == 5
    assert Config(depths=4, shifted=True).block_size == 4
    assert Config(block_size=1, shifted=True).depths == 1
    assert Config(depths=4).adjusted == ("block_size=5",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "its only slot is the newest token's, which drafts nothing; use"),
        ({"block_size": 1026}, "block_size"),
        ({"depths": 4, "block_size": 4}, "drafts 3 tokens; use block_size=5, or depths=3"),
        ({"taps": (1, 1)}, "each once"),
        ({"taps": ()}, "needs one or more layers"),
        ({"window": 3}, "would not see itself"),
        ({"window_from": "row"}, "use slot or anchor"),
        ({"window_layers": (0,)}, "set drafter.window"),
        ({"window": 9, "window_layers": (0, 1)}, "use null for all"),
        ({"window": 9, "window_layers": (2,)}, "layers of 0 to 1"),
        ({"anchors": 1.5}, "anchors"),
        ({"anchors": 0.0}, "anchors"),
    ],
)
def test_settings_that_contradict_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, ConfigError)) as caught:
        Config(**changes)
    assert message in str(caught.value)


def test_settings_that_do_not_suit_the_target_are_refused(target: Target) -> None:
    shape = target.shape()
    for key, value, why in (
        ("mask_token_id", shape.vocab, "tokens 0 to 60"),
        ("block_size", shape.max_positions, "needs a context"),
    ):
        for kind in (Config, DSparkConfig, PEagleConfig):
            name = "depths" if kind is PEagleConfig and key == "block_size" else key
            with pytest.raises(ConfigError, match=rf"drafter.{name} = {value}[\s\S]*{why}") as one:
                drafters.check(kind(**{name: value}), shape)  # type: ignore[arg-type]
            assert one.value.fix


def test_the_mask_token_is_stored_with_the_weights(target: Target) -> None:
    """By default the last token, which is padding of the vocabulary in most models."""
    assert block(target).cfg.mask_token_id == tiny.VOCAB - 1
    assert block(target, mask_token_id=3).cfg.mask_token_id == 3


def test_default_taps_are_those_of_the_authors() -> None:
    assert spread_taps(36) == (1, 9, 17, 25, 33)
    assert spread_taps(8) == (1, 2, 3, 4, 5)
    assert spread_taps(4) == (0, 1, 2)
    assert spread_taps(1) == (0,)


# ---- losses weighted by survival -----------------------------------------------------------------


@pytest.mark.parametrize("term", ["dpace", "dpard:0.3"])
@pytest.mark.parametrize("path", ["fused", "stored", "plain"])
def test_survival_losses_equal_a_loop_over_anchors(
    term: str, path: Any, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one or two target rows: the depths of an anchor are in different chunks."""
    monkeypatch.setattr("outrider.train.teacher.CHUNK", 100)
    drafter, trace = block(target, draft_vocab_size=None).eval(), tiny.packed_trace(target)
    drafter.vocab = tiny.vocab(tiny.VOCAB)
    objective = Objective(drafter, target, weights=[1.0] * 3, loss=[term], path=path)
    loss = objective(trace, torch.ones(3))[0]
    floor = 0.5 if term == "dpace" else 0.3
    expected, guesses = torch.zeros(()), {g.depth: g for g in drafter.unroll(trace)}
    for row in range(trace.ids.numel()):
        values, survive = [], torch.ones(())
        products: list[Tensor] = []
        for depth in (1, 2, 3):
            if not trace.supervised_mask(depth).flatten()[row]:
                values.append(torch.zeros(()))
                products.append(torch.zeros(()))
                continue
            log_q = drafter.head(guesses[depth].states(torch.tensor([row])))[0].log_softmax(-1)
            p = target.logits(trace.last.flatten(0, 1)[row + depth]).softmax(-1)
            nats = -log_q[trace.next_ids.flatten()[row + depth]]
            chance, value = torch.exp(-nats), nats
            if term != "dpace":
                chance = torch.minimum(p, log_q.exp()).sum()
                value = -2 * torch.log((p * log_q.exp()).sqrt().sum())
            survive = survive * ((1 - floor) * chance + floor).detach()
            values.append(value)
            products.append(survive)
        for i, value in enumerate(values):
            expected = expected + value * sum(products[i:])
    torch.testing.assert_close(loss, expected, atol=1e-3, rtol=1e-4)
    grads = [torch.autograd.grad(x, drafter.fc.weight)[0] for x in (loss, expected)]
    torch.testing.assert_close(*grads, atol=1e-3, rtol=1e-3)
