"""Tests specific to HASS: its contexts, as literal matrices and as a second implementation."""

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models.drafters.hass import Config, Hass
from outrider.models.drafting.layers import apply_rotary
from outrider.models.interface import Trace
from outrider.models.target.target import Target
from outrider.train.objective import Objective
from tests import tiny

STEPS = 3

# Which version of the features a query of forward 3 may read, column by column (arXiv:2408.15766
# and its code): its own from version 2, the one before from version 1, all others as they are.
THIRD = {
    0: [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]],
    1: [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0]],
    2: [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]],
}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


def hass(target: Target, **changes: Any) -> Hass:
    drafter = tiny.drafter("hass", target, **changes)
    assert isinstance(drafter, Hass)
    return drafter


def masks(size: int, forward: int) -> list[Tensor]:
    """Per version 0..forward-1, which columns a query row reads."""
    row, column = torch.arange(size)[:, None], torch.arange(size)
    newest = forward - 1
    exact = [row - column == newest - version for version in range(1, forward)]
    return [row - column >= newest, *exact]


def test_masks_match_the_paper() -> None:
    for version, mask in enumerate(masks(5, 3)):
        assert mask.int().tolist() == THIRD[version]


@pytest.mark.parametrize("forward", [1, 2, 3, 4])
def test_masks_partition_the_causal_mask(forward: int) -> None:
    together = torch.stack([mask.int() for mask in masks(6, forward)]).sum(0)
    assert torch.equal(together, torch.ones(6, 6).tril().int())


class InPositions:
    """HASS in its own frame: columns are positions, every forward runs over the whole sequence.

    One document. Version 0 of the features is the target's; version n is, column by column, what
    forward n guessed one column before. A masked softmax over all versions side by side.
    """

    def __init__(self, drafter: Hass, last: Tensor, tokens: Tensor) -> None:
        self.drafter, self.block = drafter, drafter.decoder_layers[0]
        self.embedded = drafter.target.embed(tokens)  # x_{r+1} at column r
        self.versions = [last]
        self.predictions = [self.forward() for _ in range(STEPS)]

    def forward(self) -> Tensor:
        count, attn = len(self.versions), self.block.self_attn
        size = len(self.embedded)
        read = [self.drafter.layer_inputs(self.embedded, version)[1] for version in self.versions]
        positions = torch.arange(size)
        shape = (size, -1, attn.head_dim)
        q = apply_rotary(attn.q_proj(read[-1]).view(shape), positions, attn.theta)
        k = [apply_rotary(attn.k_proj(x).view(shape), positions, attn.theta) for x in read]
        v = [attn.v_proj(x).view(shape) for x in read]
        groups = q.shape[1] // k[0].shape[1]
        keys, values = (torch.cat(x).repeat_interleave(groups, 1) for x in (k, v))
        scores = torch.einsum("nhc,mhc->hnm", q, keys) / attn.head_dim**0.5
        mask = torch.cat(masks(size, count), dim=1)
        weights = scores.masked_fill(~mask, float("-inf")).nan_to_num().softmax(-1)
        out = self.block.finish(read[-1], torch.einsum("hnm,mhc->nhc", weights, values))
        self.versions.append(torch.cat([self.versions[-1][:1], out[:-1]]).detach())
        return out


@torch.no_grad()
def test_unroll_has_the_contexts_of_hass(target: Target) -> None:
    """Forward n + 1 at column r is depth n + 1 of the row t = r - n, where the draft began."""
    drafter, trace = hass(target).eval(), tiny.packed_trace(target)
    unrolled = {guess.depth: tiny.spread(guess, trace) for guess in drafter.unroll(trace)}
    compared = 0
    for row, start, stop in tiny.document_spans(trace):
        ids = trace.ids[row, start:stop]
        paper = InPositions(drafter, trace.last[row, start:stop][:-1], ids[1:])
        for n in range(STEPS):
            for r in range(n, stop - start - 1):
                t = start + r - n
                if trace.supervised_mask(n + 1)[row, t]:
                    ours = unrolled[n + 1][row, t]
                    torch.testing.assert_close(ours, paper.predictions[n][r], atol=1e-4, rtol=1e-4)
                    compared += 1
    assert compared == 78


def gradients(drafter: Hass, target: Target, trace: Trace, weights: list[float]) -> list[Tensor]:
    drafter.zero_grad()
    objective = Objective(drafter, target, weights=weights, loss=Config().loss)
    objective(trace, torch.ones(STEPS))[0].backward()
    return [p.grad.clone() for p in drafter.parameters() if p.grad is not None]


def test_steps_are_detached(target: Target) -> None:
    """Detached: the gradient of the last step is that of its own forward, with fixed inputs.

    So it equals the gradient when the states of the steps before are constants.
    """
    trace = tiny.packed_trace(target)
    drafter = hass(target, noise=0.0)
    found = gradients(drafter, target, trace, [0.0, 0.0, 1.0])
    with torch.no_grad():
        fixed = [guess.hidden for guess in drafter.unroll(trace)]
    replay = iter(fixed)
    drafter.next_state = lambda hidden: next(replay)  # type: ignore[method-assign]
    for a, b in zip(found, gradients(drafter, target, trace, [0.0, 0.0, 1.0]), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    through = gradients(hass(target, noise=0.0, detach=False), target, trace, [0.0, 0.0, 1.0])
    assert not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, through, strict=True))


def test_top_k_loss_adds_the_top_tokens(target: Target) -> None:
    """With K = V the top-K term is the soft cross-entropy again: 0.1 + w of it in all."""
    trace, losses = tiny.packed_trace(target), []
    drafter = tiny.drafter("hass", target, tiny.vocab(tiny.VOCAB), noise=0.0)
    for loss in (["soft_ce"], ["0.1*soft_ce", f"topk:{tiny.VOCAB}"]):
        objective = Objective(drafter, target, weights=[1.0, 1.0, 1.0], loss=loss)
        losses.append(objective(trace, torch.ones(STEPS))[0])
    torch.testing.assert_close(losses[1], 1.1 * losses[0])
