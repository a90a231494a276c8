"""decode=auto on a machine, or with a drafter, that becomes slower or faster: a simulated clock."""

from collections.abc import Callable

import pytest

from outrider.models.decode.costs import pace as pace_of_machine
from outrider.models.decode.engine import Engine
from outrider.models.decode.ledger import SLACK
from outrider.models.decode.policy import Chain
from outrider.models.decode.request import Output, Request
from tests import simulated_clock
from tests.simulated_clock import (
    COUNT,
    EPS,
    LEVEL,
    PROMPT,
    STEP,
    TEXTS,
    Clock,
    TimedDrafter,
    auto_engine,
    chance,
    guesses,
    taught_engine,
    timed_target,
)

PACES: dict[str, Callable[[int], float]] = {
    "slower": lambda n: 1.6 if n > 200 else 1.0,
    "faster": lambda n: 0.6 if n > 200 else 1.0,
    "back and forth": lambda n: 1.5 if n // 50 % 2 else 1.0,
    "drifting": lambda n: 1 + n / COUNT,
}


def paced_answer(
    engine: Engine, clock: Clock, pace: Callable[[int], float]
) -> tuple[Output, float]:
    """Decode on a machine whose pace depends on the tokens so far; return the seconds too."""
    start = clock.now
    for event in engine.run([Request(PROMPT, COUNT)], 1):
        clock.pace = pace(len(event.out.ids))
    clock.pace = 1.0
    return event.out, clock.now - start


@pytest.mark.parametrize("period", [15, 20, 33, 57, 200])
@pytest.mark.parametrize("pace_period", [30, 50, 77, 130])
@pytest.mark.parametrize("factor", [0.5, 1.5, 2.0])
def test_the_estimate_lags_where_machine_and_text_change_often(
    period: int, pace_period: int, factor: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are right and wrong for `period` tokens, by turns, and steps are dearer for others.

    Up to 1.75 c0 are needed.
    """
    equal, beyond = _alternating(period, pace_period, factor, clock, monkeypatch)
    assert equal
    assert beyond <= 1.75 * SLACK * STEP


def _alternating(
    period: int, pace_period: int, factor: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> tuple[bool, float]:
    """Return whether the answer is that of plain decoding, and the seconds beyond its 1 + EPS."""
    target = timed_target(clock, monkeypatch)

    def slowed(n: int) -> float:
        return factor if n // pace_period % 2 else 1.0

    plain, seconds = paced_answer(Engine(target, None, None), clock, slowed)
    right = guesses(plain.ids, PROMPT, lambda n: n // period % 2 == 0)
    engine, _ = auto_engine(target, TimedDrafter(right, clock))
    engine.generate(PROMPT, 100)
    out, taken = paced_answer(engine, clock, slowed)
    return out.ids == plain.ids, taken - (1 + EPS) * seconds


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("name", ["always wrong", "changes every 20 tokens", "a third at random"])
def test_the_bound_holds_while_the_machine_changes(
    name: str, pace: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T_plain is what plain decoding takes for the same tokens at the same time.

    It is estimated from rounds before, so that half a c0 more is needed while the pace jumps.
    """
    target = timed_target(clock, monkeypatch)
    plain_engine = Engine(target, None, None)
    plain, seconds = paced_answer(plain_engine, clock, PACES[pace])
    drafter = TimedDrafter(guesses(plain.ids, PROMPT, TEXTS[name]), clock)
    engine, _ = auto_engine(target, drafter)
    engine.generate(PROMPT, 100)
    out, taken = paced_answer(engine, clock, PACES[pace])
    assert out.ids == plain.ids
    assert taken <= (1 + EPS) * seconds + 1.5 * SLACK * STEP


@pytest.mark.parametrize("right", [0.7, 0.8])
@pytest.mark.parametrize("pace", PACES)
def test_good_drafts_go_on_while_the_machine_changes(
    pace: str, right: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = timed_target(clock, monkeypatch)
    plain, seconds = paced_answer(Engine(target, None, None), clock, PACES[pace])
    drafter = TimedDrafter(guesses(plain.ids, PROMPT, lambda n: chance(n) < right), clock)
    _, fixed = paced_answer(Engine(target, drafter, Chain(2)), clock, PACES[pace])
    assert fixed / 0.95 < 0.95 * seconds, "plain decoding would fail"
    engine, _ = auto_engine(target, drafter)
    engine.generate(PROMPT, 100)
    _, taken = paced_answer(engine, clock, PACES[pace])
    assert taken < fixed / 0.95


@pytest.mark.parametrize("times", [1.5, 2, 3, 4, 6, 10])
@pytest.mark.parametrize("right", [0.5, 0.6, 0.7, 0.85])
def test_the_estimate_lags_where_drafts_become_dearer(
    times: float, right: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 100 tokens a level takes so many times as long: the bound holds."""
    engine, plain, seconds = taught_engine(lambda n: chance(n) < right, clock, monkeypatch)
    start = clock.now
    for event in engine.run([Request(PROMPT, COUNT)], 1):
        if len(event.out.ids) >= 100:
            monkeypatch.setattr(simulated_clock, "LEVEL", times * LEVEL)
    assert event.out.ids == plain.ids
    assert clock.now - start <= (1 + EPS) * seconds + SLACK * STEP


def test_dearer_drafts_are_not_taken_for_a_slower_machine(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 200 tokens a level takes four times as long, so that no draft pays any more."""
    engine, plain, seconds = taught_engine(lambda n: chance(n) < 0.6, clock, monkeypatch)
    start = clock.now
    for event in engine.run([Request(PROMPT, COUNT)], 1):
        if len(event.out.ids) >= 200:
            monkeypatch.setattr(simulated_clock, "LEVEL", 4 * 3e-4)
    assert event.out.ids == plain.ids
    late = event.out.choices[-150:]
    assert sum(one == "plain" for one in late) > 140
    assert clock.now - start <= (1 + EPS) * seconds + 1.5 * SLACK * STEP


def test_the_estimate_lags_further_without_plain_rounds_that_set_the_pace(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the pace follows by a tenth per round, and no plain round comes forward."""
    monkeypatch.setattr(pace_of_machine, "DIFFERS", 1e9)
    cases = (10, 30, 2.0), (20, 50, 0.5), (20, 50, 2.0)
    beyond = [_alternating(*case, clock, monkeypatch)[1] for case in cases]
    assert max(beyond) > 2 * SLACK * STEP


def test_drafts_of_uneven_length_are_seldom_interrupted(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A level takes one or four times as long, for four rounds by turns; the machine is steady."""
    engine, plain, _ = taught_engine(lambda n: chance(n) < 0.85, clock, monkeypatch)
    for event in engine.run([Request(PROMPT, COUNT)], 1):
        uneven = LEVEL if len(event.out.choices) // 4 % 2 else 4 * LEVEL
        monkeypatch.setattr(simulated_clock, "LEVEL", uneven / 2)
    assert event.out.ids == plain.ids
    assert event.out.choices.count("plain") < 0.2 * len(event.out.choices)
