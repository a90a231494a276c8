"""What decode=auto drafts in each round, on a simulated clock, and the parts of its rounds."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.models.decode.auto.controller import LEAST_WAIT
from outrider.models.decode.auto.deferred import Deferred, DeferredDrafter
from outrider.models.decode.auto.policy import Auto
from outrider.models.decode.costs.live_costs import LiveCosts
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.decode.request import Output, Request
from outrider.models.drafting.drafter import Absorbed, Drafter
from outrider.models.interface import Trace
from outrider.models.target.target import Target
from tests import tiny
from tests.simulated_clock import (
    COUNT,
    PROMPT,
    STEP,
    Clock,
    TimedDrafter,
    auto_engine,
    chance,
    guesses,
    plain_answer,
    table,
    timed_target,
)
from tests.tiny import ScriptedDrafter, Text


def test_good_drafts_are_nearly_as_fast_as_the_best_chain(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = timed_target(clock, monkeypatch)
    plain, seconds = plain_answer(target, clock)
    drafter = TimedDrafter(guesses(plain.ids, PROMPT, lambda n: chance(n) < 0.8), clock)
    best = seconds
    for depth in range(1, 9):
        start = clock.now
        Engine(target, drafter, Chain(depth)).generate(PROMPT, COUNT)
        best = min(best, clock.now - start)
    engine, _ = auto_engine(target, drafter)
    engine.generate(PROMPT, 100)  # what is learnt stays for the next answer
    start = clock.now
    engine.generate(PROMPT, COUNT)
    assert best < 0.8 * seconds
    assert clock.now - start < best / 0.95


def test_wrong_drafts_are_turned_off_and_cost_nothing(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last 300 rounds at most three are probes; the drafter is called in these alone."""
    target = timed_target(clock, monkeypatch)
    plain, _ = plain_answer(target, clock)
    drafter = TimedDrafter(guesses(plain.ids, PROMPT, lambda n: False), clock)
    engine, _ = auto_engine(target, drafter)
    calls, seconds, outs = list[int](), list[float](), list[Output]()
    for event in engine.run([Request(PROMPT, COUNT)], 1):
        calls.append(drafter.calls)
        seconds.append(clock.now)
        outs.append(event.out)
    out = outs[-1]
    late = out.choices[-300:]
    assert sum(choice != "plain" for choice in late) <= 3
    for i, choice in enumerate(out.choices):
        if choice == "plain":
            assert calls[i + 1] == calls[i]
            assert seconds[i + 1] - seconds[i] == pytest.approx(STEP, rel=0.01)


def test_a_change_of_the_text_is_found(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    target = timed_target(clock, monkeypatch)
    plain, _ = plain_answer(target, clock)
    drafter = TimedDrafter(guesses(plain.ids, PROMPT, lambda n: n > 200), clock)
    engine, _ = auto_engine(target, drafter)
    out = engine.generate(PROMPT, COUNT)
    assert sum(out.accepted) > 0.5 * (COUNT - 456)  # found within 256 tokens


def test_levels_that_are_not_submitted_are_learnt_from(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter is right and certain about every other token, and has no opinion on the rest.

    The second level is not submitted, so that no outcome is seen. Its estimate falls all the same:
    else it would be drafted in vain in later rounds.
    """
    target = timed_target(clock, monkeypatch)
    plain, _ = plain_answer(target, clock)
    certain = guesses(plain.ids, PROMPT, lambda n: n % 2 == 1)

    def text(prefix: Text) -> Tensor:
        row: Tensor = certain(prefix)
        return row if (len(prefix) - len(PROMPT)) % 2 else 0.01 * row

    drafter = TimedDrafter(text, clock)
    engine, auto = auto_engine(target, drafter)
    out = engine.generate(PROMPT, COUNT)
    assert out.ids == plain.ids
    assert set(out.choices[50:]) <= {"plain", "chain 1"}
    assert sum(out.drafted) <= sum(out.steps) == drafter.levels
    assert auto.controller is not None
    assert auto.controller.shared.levels[1].mean < 0.4


def test_missed_rows_are_read_as_if_never_missed(clock: Clock) -> None:
    """States of a drafter with taps, after rounds that it skipped, equal those without."""
    target = tiny.target()
    of = tiny.drafter("eagle3", target).eval()
    seen: dict[str, list[Tensor]] = {}

    class Recorder(DeferredDrafter):
        def step_batch(self, states: Any, depth: int, ids: Any, parents: Any) -> Any:
            logits, new = super().step_batch(states, depth, ids, parents)
            if depth == 1:
                seen.setdefault("late", []).append(logits)
            return logits, new

    auto = Auto(depth=2, budget=2, first_plain=7, eps=1.0)

    def wrap(drafter: Drafter, target: Target) -> Recorder:
        return Recorder(drafter, lambda _: auto.settle(), target.device)

    auto.wrap = wrap  # type: ignore[method-assign]
    auto.prepare = lambda *_: None  # type: ignore[method-assign]
    engine = Engine(target, of, auto)
    auto.use_costs(LiveCosts(table()))
    prompt = [5, 40, 17, 23, 9]
    out = engine.generate(prompt, 12)
    assert out.choices[:7] == ["plain"] * 7
    assert out.choices[7].startswith("chain")
    text = [*prompt, *out.ids[:8]]
    target.set_taps(of.taps)
    rows = torch.tensor([text])
    trace = target.trace(
        rows, torch.zeros_like(rows).bool(), torch.zeros_like(rows),
        torch.arange(len(text))[None],
    )  # fmt: skip
    state = of.absorb(None, tiny.slice_trace(trace, slice(0, 1), slice(0, len(text) - 1)))
    logits, _ = of.step(state, 1, rows[0, -1:], torch.zeros(1, dtype=torch.long))
    torch.testing.assert_close(seen["late"][0][0], logits, atol=1e-4, rtol=1e-4)


def test_reading_changes_no_earlier_state() -> None:
    """A dialogue goes back to a state of an earlier turn, which shares its rows."""
    scripted, cpu = ScriptedDrafter(tiny.random_logits(5), 5), torch.device("cpu")
    drafter = DeferredDrafter(scripted, lambda _: None, cpu)
    rows = torch.tensor([[1, 2]])
    zeros = torch.zeros_like(rows)
    positions, states = torch.tensor([[0, 1]]), zeros[..., None].float()
    first = Trace(rows, rows + 1, zeros.bool(), zeros, positions, states[..., :0], states)
    (state,) = drafter.absorb_batch([None], [first])
    assert isinstance(state, Deferred)
    assert (state.absorbed, state.rows) == (Absorbed(), 2)
    drafter.step_batch([state], 1, torch.tensor([[3]]), torch.tensor([[0]]))
    assert (state.waiting, state.rows) == ((), 0)
    read: Any = state.absorbed.state
    assert read.text == (1, 2, 3)


@pytest.mark.parametrize("name", ["kangaroo", "layerskip", "lookahead", "sparse_kv"])
def test_a_drafter_that_cannot_be_skipped_is_refused(name: str) -> None:
    target = tiny.target()
    drafter = tiny.drafter(name, target, tiny.vocab(tiny.VOCAB), draft_vocab_size=None)
    with pytest.raises(ConfigError, match="cannot be turned off"):
        Engine(target, drafter, Auto())


def test_a_batch_of_zero_is_refused() -> None:
    target = tiny.mean_target()
    drafter = ScriptedDrafter(tiny.random_logits(tiny.TOKENS), tiny.TOKENS)
    with pytest.raises(ValueError, match="batch=0"):
        Engine(target, drafter, Auto()).generate_all([Request([1], 4)], 0)


@pytest.mark.parametrize("settings", [{"depth": 0}, {"budget": 0}, {"width": 0}, {"eps": -0.1}])
def test_contradictory_limits_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least"):
        Auto(**settings)


def test_no_warning_in_ordinary_rounds(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    target = timed_target(clock, monkeypatch)
    plain, _ = plain_answer(target, clock, 40)
    drafter = TimedDrafter(guesses(plain.ids, PROMPT, lambda n: True), clock)
    engine, _ = auto_engine(target, drafter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.generate(PROMPT, 40).ids == plain.ids


def test_one_text_in_vain_delays_no_draft_after_texts_in_which_drafts_paid(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four answers; the third is drafted wrongly, and ends right after a draft in vain."""
    target = timed_target(clock, monkeypatch)
    plain, _ = plain_answer(target, clock, 60)
    right = [True]
    drafter = TimedDrafter(guesses(plain.ids, PROMPT, lambda _: right[0]), clock)
    engine, _ = auto_engine(target, drafter)
    for right[0], tokens in ((True, 60), (True, 60), (False, 36), (True, 60)):
        out = engine.generate(PROMPT, tokens)
        assert out.ids == plain.ids[:tokens]
    assert out.choices[: LEAST_WAIT + 1] != ["plain"] * (LEAST_WAIT + 1)
    assert sum(out.accepted) > 30
