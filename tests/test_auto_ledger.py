"""decode=auto never costs more than its bound, on a simulated clock."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from outrider.models.decode.auto.controller import MOST_WAIT
from outrider.models.decode.costs.live_costs import LiveCosts
from outrider.models.decode.engine import Engine
from outrider.models.decode.ledger import SLACK, Ledger
from outrider.models.decode.request import Request
from tests import simulated_clock, tiny
from tests.simulated_clock import (
    COUNT,
    EPS,
    LEVEL,
    PROMPT,
    READ,
    STEP,
    TEXTS,
    Clock,
    TimedDrafter,
    auto_engine,
    chance,
    guesses,
    plain_answer,
    table,
    timed_target,
)


@pytest.mark.parametrize(
    ("pace", "answers"), [(1.0, 1), (1.0, 2), (0.7, 1), (1.4, 1)],
    ids=["true costs", "second answer", "too low", "too high"],
)  # fmt: skip
@pytest.mark.parametrize("name", TEXTS)
def test_the_bound_holds_for_any_text(
    name: str, pace: float, answers: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the cost table is wrong by a third: the rounds correct it.

    A second answer begins with what the first one has taught, and with a ledger of its own.
    """
    target = timed_target(clock, monkeypatch)
    plain, seconds = plain_answer(target, clock)
    drafter = TimedDrafter(guesses(plain.ids, PROMPT, TEXTS[name]), clock)
    engine, _ = auto_engine(target, drafter, pace)
    for _ in range(answers):
        start = clock.now
        out = engine.generate(PROMPT, COUNT)
    assert out.ids == plain.ids
    assert clock.now - start <= (1 + EPS) * seconds + SLACK * STEP
    assert out.ledger is not None
    assert out.ledger.kept
    assert out.ledger.real == pytest.approx(clock.now - start, rel=0.01)
    assert len(out.choices) == len(out.accepted) == len(out.gains)


@pytest.mark.parametrize(
    ("level", "read", "answers"),
    [(LEVEL, READ, 40), (1.5 * STEP, READ, 40), (LEVEL, 0.5 * STEP, 80)],
)
def test_short_answers_share_what_drafts_in_vain_cost(
    level: float, read: float, answers: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound holds for many answers of twelve tokens together, with one c0 for all.

    Half of eps is enough: what drafts in vain cost is earned before a draft in a new text.
    """
    monkeypatch.setattr(simulated_clock, "LEVEL", level)
    monkeypatch.setattr(simulated_clock, "READ", read)
    target = timed_target(clock, monkeypatch)
    start = clock.now
    plain = Engine(target, None, None).generate(PROMPT, 12)
    seconds = clock.now - start
    drafter = TimedDrafter(guesses(plain.ids, PROMPT, lambda _: False), clock)
    engine, _ = auto_engine(target, drafter)
    engine.generate(PROMPT, 12)
    start = clock.now
    for _ in range(answers):
        assert engine.generate(PROMPT, 12).ids == plain.ids
    assert clock.now - start <= (1 + EPS / 2) * answers * seconds + SLACK * STEP


def test_a_pause_in_a_draft_does_not_delay_the_next_for_long(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter is wrong in one answer, in which a draft takes 95 steps, and right after it.

    A longer one would be left out as a pause of the machine.
    """
    target = timed_target(clock, monkeypatch)
    plain, _ = plain_answer(target, clock, 60)
    right = [False]
    drafter = TimedDrafter(guesses(plain.ids, PROMPT, lambda _: right[0]), clock)
    engine, auto = auto_engine(target, drafter)
    engine.generate(PROMPT, 60)
    assert auto.controller is not None
    step, paused = drafter.step, list[int]()

    def slow(*args: Any) -> Any:
        if not paused:
            clock.add(95 * STEP)
        paused.append(1)
        return step(*args)

    monkeypatch.setattr(drafter, "step", slow)
    while not paused:
        engine.generate(PROMPT, 60)
    right[0] = True
    outs = [engine.generate(PROMPT, 60) for _ in range(6)]
    assert sum(outs[-1].accepted) > 30


def test_a_pause_in_the_first_draft_is_no_cost_of_drafting(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes 400 steps, forty times c0, which 13,000 plain rounds would have to earn."""
    target = timed_target(clock, monkeypatch)
    plain, seconds = plain_answer(target, clock, 100)
    drafter = TimedDrafter(guesses(plain.ids, PROMPT, lambda _: True), clock)
    engine, auto = auto_engine(target, drafter)
    slow_drafts(drafter, 400 * STEP, range(1), monkeypatch)
    out = engine.generate(PROMPT, 100)
    assert sum(out.accepted) > 60
    assert out.ledger is not None
    assert out.ledger.kept
    assert out.ledger.real < seconds
    assert out.ledger.paused == pytest.approx(400 * STEP, rel=0.05)
    assert auto.controller is not None
    assert auto.controller.costs.ignored == 1


def test_drafts_that_always_take_long_are_a_cost(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred times as long as the table says, and always wrong: one counts as a pause."""
    target = timed_target(clock, monkeypatch)
    plain, seconds = plain_answer(target, clock)
    drafter = TimedDrafter(guesses(plain.ids, PROMPT, lambda _: False), clock)
    engine, _ = auto_engine(target, drafter)
    slow_drafts(drafter, 150 * STEP, range(1000), monkeypatch)
    start = clock.now
    assert engine.generate(PROMPT, COUNT).ids == plain.ids
    assert clock.now - start <= (1 + EPS) * seconds + SLACK * STEP + 2 * 150 * STEP


def slow_drafts(
    drafter: TimedDrafter, seconds: float, which: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the first level of these drafts take so much longer."""
    absorb, step, drafts = drafter.absorb, drafter.step, iter(range(10_000))
    begun = [False]

    def absorbed(*args: Any) -> Any:
        begun[0] = True
        return absorb(*args)

    def slow(*args: Any) -> Any:
        if begun[0] and next(drafts) in which:
            drafter.clock.add(seconds)
        begun[0] = False
        return step(*args)

    monkeypatch.setattr(drafter, "absorb", absorbed)
    monkeypatch.setattr(drafter, "step", slow)


def test_a_plain_round_after_a_draft_says_nothing_of_plain_decoding(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes 1.3 steps here, since the drafter has used the processor's caches."""
    target = timed_target(clock, monkeypatch)
    plain, seconds = plain_answer(target, clock)
    timed, rows = tiny.MeanTarget.forward, [1]

    def cold(self: Any, ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        before, rows[0] = rows[0], ids.numel() // len(ids)
        clock.add(0.3 * STEP * (before > rows[0] == 1))
        return timed(self, ids, *args, **kwargs)

    monkeypatch.setattr(tiny.MeanTarget, "forward", cold)
    drafter = TimedDrafter(guesses(plain.ids, PROMPT, lambda n: chance(n) < 0.8), clock)
    engine, _ = auto_engine(target, drafter)
    engine.generate(PROMPT, 100)
    out = engine.generate(PROMPT, COUNT)
    assert out.choices.count("plain") < 0.2 * len(out.choices)
    assert out.ledger is not None
    assert out.ledger.plain == pytest.approx(seconds, rel=0.03)


def test_a_prompt_that_was_read_for_good_drafts_delays_no_later_one(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated_clock, "READ", 0.1 * STEP)
    target = timed_target(clock, monkeypatch)
    plain, _ = plain_answer(target, clock, 100)
    drafter = TimedDrafter(guesses(plain.ids, PROMPT, lambda n: n % 4 > 0), clock)
    engine, _ = auto_engine(target, drafter)
    outs = [engine.generate(PROMPT, 100) for _ in range(3)]
    assert all(out.choices.count("plain") < 5 for out in outs[1:])


def test_without_eps_a_draft_is_tried_in_some_later_text(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = timed_target(clock, monkeypatch)
    plain, _ = plain_answer(target, clock, 60)
    drafter = TimedDrafter(guesses(plain.ids, PROMPT, lambda _: False), clock)
    engine, auto = auto_engine(target, drafter)
    auto.eps = 0.0
    auto.controller = None
    auto.use_costs(LiveCosts(table()))
    engine.generate(PROMPT, 60)
    calls = drafter.calls
    for _ in range(MOST_WAIT // 60 + 2):
        engine.generate(PROMPT, 60)
    assert drafter.calls > calls


@pytest.mark.parametrize("batch", [2, 4])
def test_the_bound_holds_for_a_batch(
    batch: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the throughput: one request is drafted well, the others badly."""
    target = timed_target(clock, monkeypatch)
    plain, _ = plain_answer(target, clock, 200)
    good = guesses(plain.ids, PROMPT, lambda n: True)
    bad = guesses(plain.ids, PROMPT, lambda n: False)
    drafter = TimedDrafter(lambda text: (good if len(text) % 2 else bad)(text), clock)
    requests = [Request(PROMPT, 200)] * batch
    start = clock.now
    Engine(target, None, None).generate_all(requests, batch)
    seconds, start = clock.now - start, clock.now
    engine, _ = auto_engine(target, drafter)
    outs = engine.generate_all(requests, batch)
    assert all(out.ids == plain.ids for out in outs)
    assert clock.now - start <= (1 + EPS) * seconds + SLACK * batch * STEP


# ---- clocks --------------------------------------------------------------------------------------


def test_a_clock_that_stands_still_ends_drafting_with_a_warning(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = timed_target(clock, monkeypatch)
    plain, _ = plain_answer(target, clock, 60)
    drafter = TimedDrafter(guesses(plain.ids, PROMPT, lambda n: True), clock)
    engine, _ = auto_engine(target, drafter)
    clock.runs = False
    with pytest.warns(UserWarning, match="clock stands still"):
        out = engine.generate(PROMPT, 60)
    assert out.ids == plain.ids
    assert set(out.choices[-10:]) == {"plain"}


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_clock_that_jumps_is_left_out_of_the_ledger(
    jump: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour of sleep is not a cost of drafting: drafts go on."""
    target = timed_target(clock, monkeypatch)
    plain, seconds = plain_answer(target, clock)
    drafter = TimedDrafter(guesses(plain.ids, PROMPT, lambda n: True), clock)
    engine, auto = auto_engine(target, drafter)
    for event in engine.run([Request(PROMPT, COUNT)], 1):
        if len(event.out.ids) > 100 and jump:
            target_forward = clock.add
            monkeypatch.setattr(clock, "add", _once(clock, target_forward, jump))
            jump = 0.0
    out = event.out
    assert out.ids == plain.ids
    assert out.ledger is not None
    assert 0 < out.ledger.real < seconds
    assert auto.controller is not None
    assert auto.controller.costs.ignored == 1
    assert sum(choice != "plain" for choice in out.choices[-20:]) > 10


def _once(clock: Clock, add: Callable[[float], None], jump: float) -> Callable[[float], None]:
    """Move the clock by `jump` at the next forward of the target, once."""
    done = [False]

    def moved(seconds: float) -> None:
        add(seconds)
        if not done[0] and seconds >= STEP:
            done[0] = True
            clock.now += jump

    return moved


def test_the_ledger_by_hand() -> None:
    """Ten plain rounds of 1 s earn 0.3 s; with c0 = 10 s a round may cost 0.95 of 10.3 s more."""
    ledger = Ledger(EPS, step=1.0)
    for _ in range(10):
        ledger.add(1.0, 1.0)
    assert ledger.missing(9.78) < 0 < ledger.missing(9.79)
    ledger.add(3.0, 1.0)
    assert (ledger.debt, ledger.bound) == pytest.approx((2.0, 1.03 * 11 + 10))
    for _ in range(30):
        ledger.add(1.0, 5.0)  # savings beyond c0 are not kept
    assert ledger.debt == -10
    assert ledger.kept
    ledger.add(200.0, 1.0)
    assert not ledger.kept
