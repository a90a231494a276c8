"""Predicted acceptance length: a random walk by hand, and equality with decoding."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models import drafters
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.sampling_params import Sampling
from outrider.models.drafting.drafter import Drafter
from outrider.models.interface import Trace
from outrider.models.target.target import Target
from outrider.train import acceptance_forecast
from outrider.train.objective import Objective
from tests import tiny
from tests.enumeration import Context, enumerate_law

PROMPT, BUDGET, DEPTH = [1, 2, 0, 2], 4, 2


def trace_of(answer: list[int], document: list[int]) -> Trace:
    ids = torch.zeros(1, len(answer), dtype=torch.long)
    empty = torch.zeros(1, len(answer), 1)
    return Trace(
        ids, ids, torch.tensor([answer]).bool(), torch.tensor([document]), ids, empty, empty
    )


def test_answer_span_starts_after_its_first_token() -> None:
    """Document 0: a prompt, an answer, a turn of the user, an answer. Document 1: one answer."""
    answer = [0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1]
    document = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, -1]
    assert acceptance_forecast.answer_spans(trace_of(answer, document)) == [
        acceptance_forecast.AnswerSpan(0, 1, 2),
        acceptance_forecast.AnswerSpan(0, 5, 1),
        acceptance_forecast.AnswerSpan(0, 8, 1),  # no row predicts x_8, which opens the document
    ]


def test_expected_rounds_by_hand() -> None:
    """Three tokens after the first, one guess per round, always accepted with chance 1/2.

    From row 0: one token (1/2) or two. Rounds from the end: r(3) = 0, r(2) = 1,
    r(1) = 1 + r(2)/2 + 0 = 3/2, r(0) = 1 + r(1)/2 + r(2)/2 = 9/4.
    """
    trace = trace_of([0, 1, 1, 1, 1], [0] * 5)
    chances = torch.full((1, 1, 5), 0.5)
    tokens, rounds = acceptance_forecast.expected_rounds(chances, trace)
    assert (tokens, round(rounds, 6)) == (3.0, 2.25)


@pytest.mark.parametrize(("chance", "rounds"), [(0.0, 9.0), (1.0, 3.0)])
def test_expected_rounds_at_certain_acceptance(chance: float, rounds: float) -> None:
    """Nine tokens: one at a time, or two guesses and one more each time."""
    trace = trace_of([0] + [1] * 10, [0] * 11)
    assert acceptance_forecast.expected_rounds(torch.full((2, 1, 11), chance), trace) == (
        9.0,
        rounds,
    )


def test_no_answers_give_no_rounds() -> None:
    assert acceptance_forecast.expected_rounds(
        torch.ones(2, 1, 3), trace_of([0, 0, 0], [0, 0, 0])
    ) == (
        0.0,
        0.0,
    )


# ---- equality with decoding ----------------------------------------------------------------------


def pair(name: str) -> tuple[Target, Drafter]:
    size: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    target = tiny.target(vocab_size=3, pad_token_id=0, **size, **heads)
    changes = {"depths": DEPTH, "exit_layer": 1}
    return target, tiny.drafter(name, target, tiny.vocab(2, 3), **changes).eval()


def predicted_rounds(target: Target, drafter: Drafter, answers: list[tuple[int, ...]]) -> Tensor:
    """Tokens, greedy rounds, sampled rounds of each answer after PROMPT."""
    target.set_taps(drafter.taps)
    objective = Objective(drafter, target, weights=[1.0] * DEPTH)
    rounds = []
    for answer in answers:
        ids = torch.tensor([[*PROMPT, *answer]])
        mask = torch.arange(ids.shape[1])[None] >= len(PROMPT)
        trace = target.trace(ids, mask, ids * 0, torch.arange(ids.shape[1])[None])
        with torch.no_grad():
            rounds.append(objective(trace, torch.ones(DEPTH), measure=True)[1].rounds)
    return torch.stack(rounds)


@pytest.mark.slow
@pytest.mark.parametrize("name", drafters.trained_names())
def test_sampled_rounds_match_enumeration(name: str) -> None:
    """E[rounds] of the engine, enumerated over its random numbers, equals the prediction.

    The prediction is summed over all texts of V = 3; the draft vocabulary has two tokens.
    """
    target, drafter = pair(name)
    decoder = Engine(target, drafter, Chain(DEPTH), sampling=Sampling(1.0))

    def run(rng: RandomSource) -> Context:
        tiny.inject_random_source(decoder, rng)
        out = decoder.generate(PROMPT, BUDGET)
        return (out.rounds, *out.ids)

    distribution = enumerate_law(run)
    observed = [outcome[0] for outcome in distribution]
    decoded = sum(chance * outcome[0] for outcome, chance in distribution.items())
    answers = list(itertools.product(range(3), repeat=BUDGET))
    by_text: dict[tuple[int, ...], float] = {}
    for outcome, chance in distribution.items():
        by_text[outcome[1:]] = by_text.get(outcome[1:], 0.0) + chance
    weights = torch.tensor([by_text.get(answer, 0.0) for answer in answers]).double()
    numbers = predicted_rounds(target, drafter, answers)
    assert min(observed) < max(observed)
    assert decoded == pytest.approx(float(weights @ numbers[:, 2]), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", drafters.trained_names())
def test_held_out_alpha_of_training_predicts_tau_within_five_percent(name: str) -> None:
    """Half-trained drafters: held-out text, then decoding at temperature 1.

    Decoded text has the target's distribution, so the texts need not be the same.
    """
    target, _, drafter = tiny.half_trained(name, "llama")
    sampling, prompt, count, depth = Sampling(1.0), list(tiny.PROMPTS[0]), 40, 3
    plain = Engine(target, None, None, sampling=sampling, seed=1)
    texts = [plain.generate(prompt, count).ids for _ in range(60)]
    target.set_taps(drafter.taps)
    ids = torch.tensor([[*prompt, *text] for text in texts])
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    row = torch.arange(len(ids))[:, None].expand_as(ids)
    trace = target.trace(ids, positions >= len(prompt), row, positions)
    objective = Objective(drafter, target, weights=[1.0] * depth)
    with torch.no_grad():
        sums = objective(trace, torch.ones(depth), measure=True)[1]
    fast = Engine(target, drafter, Chain(depth), sampling=sampling, seed=2)
    outputs = [fast.generate(prompt, count) for _ in range(60)]
    tau = sum(len(out.ids) - 1 for out in outputs) / sum(out.rounds for out in outputs)
    assert tau > 1.1
    assert sums.means()["accept_length_sampling"] == pytest.approx(tau, rel=0.05)


@pytest.mark.parametrize("name", drafters.trained_names())
def test_greedy_rounds_match_decoding(name: str) -> None:
    """On the target's own greedy text, for a drafter that is sometimes right."""
    target, answers, drafter = tiny.half_trained(name, "llama")
    depths = 3
    objective = Objective(drafter, target, weights=[1.0] * depths)
    for prompt, answer in zip(tiny.PROMPTS, answers, strict=True):
        out = Engine(target, drafter, Chain(depths)).generate(prompt, tiny.ANSWER)
        target.set_taps(drafter.taps)
        ids = torch.tensor([[*prompt, *answer]])
        mask = torch.arange(ids.shape[1])[None] >= len(prompt)
        trace = target.trace(ids, mask, ids * 0, torch.arange(ids.shape[1])[None])
        with torch.no_grad():
            sums = objective(trace, torch.ones(depths), measure=True)[1]
        assert sums.rounds[:2].tolist() == [len(answer) - 1, out.rounds]
