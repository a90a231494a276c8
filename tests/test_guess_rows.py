"""Guesses at some rows: what a drafter yields, what the objective compares, what a step counts."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from outrider.models import drafters
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import Batch, Guess, Trace
from outrider.models.target.target import Target
from outrider.train.metric_sums import MetricSums
from outrider.train.objective import Objective
from outrider.train.step_data import trained_counts
from tests import tiny
from tests.tiny import FixedDrafter

# per depth; 3 and 14 are not supervised
ROWS: tuple[list[int], ...] = ([0, 3, 5, 6, 24, 28], [1, 9, 14, 27, 44], [])


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


@pytest.fixture(scope="module")
def trace(target: Target) -> Trace:
    return tiny.packed_trace(target)


class SomeRows(FixedDrafter):
    """A drafter that guesses at ROWS only."""

    def unroll(self, trace: Trace) -> Iterator[Guess]:
        for guess, rows in zip(super().unroll(trace), ROWS, strict=True):
            some = torch.tensor(rows, dtype=torch.long)
            yield Guess(guess.depth, some, guess.hidden[some])

    def trained_mask(self, trace: Trace, depth: int) -> Tensor:
        rows = torch.zeros_like(trace.answer).flatten()
        rows[ROWS[depth - 1]] = True
        return trace.supervised_mask(depth) & rows.view_as(trace.answer)


def step(
    drafter: FixedDrafter, target: Target, trace: Trace, path: str, measure: bool = True
) -> tuple[Tensor, MetricSums, list[Tensor | None]]:
    """Loss, sums and the gradient of the states of every depth."""
    drafter.states = [state.detach().clone().requires_grad_() for state in drafter.states]
    objective = Objective(drafter, target, weights=[1.0, 0.8, 0.64], path=path)  # type: ignore[arg-type]
    loss, sums = objective(trace, torch.tensor([7.0, 5.0, 3.0]), measure)
    loss.backward()
    return loss.detach(), sums, [state.grad for state in drafter.states]


@pytest.mark.parametrize("path", ["fused", "stored", "plain"])
def test_guesses_at_some_rows_cost_what_they_cost_among_all(
    target: Target, trace: Trace, path: str
) -> None:
    """The reference is supervised at these rows only, by an answer mask per depth."""
    generator = torch.Generator().manual_seed(2)
    states = [torch.randn(trace.last.shape, generator=generator) for _ in ROWS]
    drafter = SomeRows(states, DraftVocab.identity(tiny.VOCAB), target)
    loss, sums, grads = step(drafter, target, trace, path)
    total = torch.zeros(())
    for depth, weight, divide in ((1, 1.0, 7.0), (2, 0.8, 5.0)):
        mask = drafter.trained_mask(trace, depth)
        about = mask.roll(depth + 1, 1)  # the tokens that these rows predict
        alone = dataclasses.replace(trace, answer=about)
        only = FixedDrafter([states[depth - 1]] * depth, DraftVocab.identity(tiny.VOCAB), target)
        objective = Objective(only, target, weights=[0.0] * (depth - 1) + [weight])
        part, own = objective(alone, torch.full((depth,), divide), True)
        assert sums.rows[depth - 1] == own.rows[depth - 1] == mask.sum() > 2
        torch.testing.assert_close(sums.loss[depth - 1], own.loss[depth - 1])
        torch.testing.assert_close(sums.alpha[depth - 1], own.alpha[depth - 1])
        total = total + part.detach()
        grad = grads[depth - 1]
        assert grad is not None
        assert torch.equal(grad.any(-1), mask)
    torch.testing.assert_close(loss, total)
    assert sums.rows[2] == 0


def test_the_length_is_predicted_only_where_every_supervised_row_has_a_guess(
    target: Target, trace: Trace
) -> None:
    states = [torch.randn_like(trace.last) for _ in ROWS]
    _, some, _ = step(SomeRows(states, tiny.vocab(), target), target, trace, "fused")
    _, every, _ = step(FixedDrafter(states, tiny.vocab(), target), target, trace, "fused")
    assert not {"accept_length", "accept_length_sampling"} & some.means().keys()
    assert every.means()["accept_length"] >= 1
    some.add(every)  # another micro-batch of the same step
    assert "accept_length" not in some.means()


def test_a_step_counts_the_rows_that_are_trained(target: Target, trace: Trace) -> None:
    batch = Batch(trace.ids, trace.answer, trace.document, trace.positions)
    states = [torch.randn_like(trace.last) for _ in ROWS]
    drafter = SomeRows(states, tiny.vocab(), target)
    _, sums, _ = step(drafter, target, trace, "fused", measure=False)
    assert trained_counts(drafter, batch, 3).tolist() == sums.rows.tolist()
    every = FixedDrafter(states, tiny.vocab(), target)
    assert trained_counts(every, batch, 3).tolist() == [31, 26, 21]


def test_states_of_rows_that_were_not_computed_are_refused() -> None:
    guess = Guess(2, torch.tensor([1, 4, 6]), torch.tensor([[10.0], [40.0], [60.0]]))
    assert guess.states(torch.tensor([6, 1])).flatten().tolist() == [60.0, 10.0]
    for row in (0, 5, 7):
        with pytest.raises(ValueError, match="depth 2"):
            guess.states(torch.tensor([1, row]))


@pytest.mark.parametrize("name", drafters.trained_names())
@torch.no_grad()
def test_every_drafter_guesses_at_the_rows_of_the_loss_in_order(name: str, target: Target) -> None:
    drafter = tiny.drafter(name, target, DraftVocab.identity(tiny.VOCAB)).eval()
    trace = tiny.packed_trace(target)
    for guess in drafter.unroll(trace):
        assert (guess.rows.diff() > 0).all()
        assert set(trace.supervised_rows(guess.depth).tolist()) <= set(guess.rows.tolist())
        assert guess.hidden.shape[0] == len(guess.rows)
