"""First weights of block drafters: the linear fit."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models.drafting import closed_form_init
from outrider.models.drafting.block import BlockDrafter
from outrider.models.interface import Trace
from outrider.models.target.target import Target
from outrider.train.objective import Objective
from tests import tiny
from tests.test_drafter_contract import absorbed


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


def block(target: Target, name: str = "dflash", **changes: Any) -> BlockDrafter:
    made = tiny.drafter(name, target, **changes)
    assert isinstance(made, BlockDrafter)
    return made


def traces(target: Target, count: int) -> list[Trace]:
    return [tiny.packed_trace(target, seed=seed) for seed in range(1, count)]


# ---- the linear fit ------------------------------------------------------------------------------


def first_losses(target: Target, name: str, init: str) -> Tensor:
    """Nats of every depth on text that the fit has not read."""
    drafter = block(target, name, init=init)
    drafter.initialise(target, iter(traces(target, 40)))
    objective = Objective(drafter.eval(), target, weights=[1.0] * tiny.DEPTHS)
    with torch.no_grad():
        sums = objective(tiny.packed_trace(target, seed=0), torch.ones(tiny.DEPTHS))[1]
    return sums.loss / sums.rows


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_the_linear_fit_beats_random_weights_at_every_depth(name: str, target: Target) -> None:
    linear, random = (first_losses(target, name, init) for init in ("linear", "random"))
    assert bool((linear < random - 0.03).all())


@pytest.mark.parametrize(
    ("name", "changes"), [("dflash", {}), ("dspark", {}), ("dspark", {"markov_head": "rnn"})]
)
@torch.no_grad()
def test_fresh_drafters_guess_what_the_regression_predicts(
    name: str, changes: dict[str, Any], target: Target
) -> None:
    """One layer: the states are the embedded slots and the regression on what the heads read."""
    drafter, text = block(target, name, init="linear", layers=1, **changes), traces(target, 12)
    drafter.initialise(target, iter(text))
    read = list[Tensor]()
    layer = drafter.decoder_layers[0]
    layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    drafter.train().begin_step(0, 0.0)
    features, teacher, found = list[Tensor](), list[Tensor](), list[Tensor]()
    embedded = target.embed(torch.tensor(tiny.VOCAB - 1))
    for trace in text:
        read.clear()
        guesses = {guess.depth: guess for guess in drafter.unroll(trace)}
        rows = torch.nonzero(trace.supervised_mask(1).flatten()).flatten()
        kept = torch.isin(rows, torch.nonzero(trace.supervised_mask(3).flatten()).flatten())
        kept &= trace.supervised_mask(2).flatten()[rows]
        slots = drafter.drafted(read[0].unflatten(0, (-1, drafter.cfg.block_size)))[kept]
        hidden = torch.stack([guesses[d].states(rows[kept]) for d in (1, 2, 3)], dim=1)
        ahead = [trace.last.flatten(0, 1)[rows[kept] + d] for d in (1, 2, 3)]
        features, found = [*features, slots], [*found, hidden[..., : embedded.shape[-1]]]
        teacher.append(torch.stack(ahead, dim=1))
    x, y, states = (torch.cat(part).flatten(0, 1).double() for part in (features, teacher, found))
    shared = embedded.expand(len(y), -1).clone()
    if drafter.cfg.shifted:  # the first slot embeds the anchor
        kept_rows = [_full(trace) for trace in text]
        anchors = [t.next_ids.flatten()[r] for t, r in zip(text, kept_rows, strict=True)]
        shared[:: tiny.DEPTHS] = target.embed(torch.cat(anchors))
    rest = y / y.std(0) - shared
    moments = x.mT @ x / len(x)
    moments.diagonal().add_(closed_form_init.RIDGE * moments.diagonal().mean())
    weight = torch.linalg.solve(moments, x.mT @ rest / len(x))
    torch.testing.assert_close(states, shared + x @ weight, atol=2e-3, rtol=2e-3)
    guess = next(drafter.unroll(text[0]))
    logits = drafter.slot_logits(guess.hidden[:, : embedded.shape[-1]])
    assert torch.equal(drafter.head(guess.hidden), logits)  # a head for the token before is silent


def _full(trace: Trace) -> Tensor:
    masks = torch.stack([trace.supervised_mask(depth) for depth in (1, 2, 3)])
    return torch.nonzero(masks.all(0).flatten()).flatten()


@torch.no_grad()
def test_heads_read_the_row_at_their_lag() -> None:
    """Head size 64: of slot 2 the heads with lags 1 to 4 read a mask slot, anchor, c_t, c_t-1."""
    target = tiny.target(head_dim=64)
    drafter = block(target, init="linear", layers=1)
    drafter.initialise(target, iter(traces(target, 12)))
    layer, read = drafter.decoder_layers[0], list[Tensor]()
    layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    trace = tiny.packed_trace(target)
    root = torch.zeros(1, dtype=torch.long)
    drafter.step(absorbed(drafter.eval(), trace, 1, 0, 9), 1, trace.ids[1, 9:10], root)
    context = drafter.context(trace)[tiny.LENGTH : tiny.LENGTH + 9]
    slots = layer.input_layernorm(drafter.embed_block(trace.ids[1, 9:10]))[0]
    values = layer.self_attn.v_proj(torch.cat([context, slots])).unflatten(-1, (-1, 64))
    heads = read[-1].unflatten(-1, (-1, 64))[2]  # of slot 2, at row 9 + 2
    groups = len(heads) // values.shape[1]
    for head, out in enumerate(heads):
        expected = values[9 + 2 - (head + 1), head // groups]
        assert float((out - expected).norm() / expected.norm()) < 0.1


def test_text_without_whole_blocks_leaves_random_weights(target: Target) -> None:
    drafter, trace = block(target, init="linear"), tiny.packed_trace(target)
    silent = dataclasses.replace(trace, answer=torch.zeros_like(trace.answer))
    before = drafter.fc.weight.clone()
    assert "no answer as long as a block" in drafter.initialise(target, [silent])
    assert torch.equal(drafter.fc.weight, before)
    assert "linear fit" in drafter.initialise(target, [silent, *traces(target, 4)])
    assert all(p.isfinite().all() for p in drafter.parameters())
