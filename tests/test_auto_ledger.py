"""decode=auto never costs more than its bound, on a clock that only the models move.

The clock moves by a known time for every forward of the target and every call of the drafter, so
that the time of plain decoding is known exactly, and not only by the controller's own estimate.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.models.decode.auto.controller import MOST_WAIT
from outrider.models.decode.auto.deferred import Deferred, DeferredDrafter
from outrider.models.decode.auto.policy import Auto
from outrider.models.decode.costs.live_costs import LiveCosts
from outrider.models.decode.costs.round_costs import MeasuredTimes, TimeGrid
from outrider.models.decode.engine import Engine
from outrider.models.decode.ledger import SLACK, Ledger
from outrider.models.decode.policy import Chain
from outrider.models.decode.request import Output, Request
from outrider.models.decode.round_times import Stopwatch
from outrider.models.drafting.drafter import Absorbed, Drafter
from outrider.models.interface import Trace
from outrider.models.target.target import Target
from tests import tiny
from tests.tiny import ScriptedDrafter, Text

STEP, ROW, LEVEL, READ = 1e-3, 1e-4, 3e-4, 2e-5  # seconds: of a forward, a row more, a level, a row
EPS, COUNT = 0.03, 600


class Clock:
    """A clock that the models move; `pace` is by how much the machine is slowed down."""

    def __init__(self) -> None:
        self.now, self.pace = 0.0, 1.0
        self.runs = True

    def add(self, seconds: float) -> None:
        self.now += seconds * self.pace * self.runs

    def read(self) -> float:
        self.add(1e-7)
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(Stopwatch, "clock", staticmethod(clock.read))
    return clock


class TimedDrafter(ScriptedDrafter):
    """A drafter that takes time, and counts its calls."""

    def __init__(self, row: Callable[[Text], Tensor], clock: Clock) -> None:
        super().__init__(row, tiny.TOKENS)
        self.clock, self.calls = clock, 0

    def absorb(self, state: Any, trace: Trace) -> Any:
        self.calls += 1
        self.clock.add(READ * trace.ids.shape[1])
        return super().absorb(state, trace)

    def step(self, *args: Any) -> Any:
        self.calls += 1
        self.clock.add(LEVEL)
        return super().step(*args)


def timed_target(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Target:
    """The target without layers, whose forward takes STEP and ROW for every further row."""
    target = tiny.mean_target()
    real, shape = tiny.MeanTarget.forward, target.shape()._replace(max_positions=4096)

    def forward(self: Any, ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        clock.add(STEP + ROW * (ids.numel() - len(ids)))
        return real(self, ids, *args, **kwargs)

    monkeypatch.setattr(tiny.MeanTarget, "forward", forward)
    monkeypatch.setattr(tiny.MeanTarget, "shape", lambda _: shape)
    return target


def table(pace: float = 1.0) -> MeasuredTimes:
    """The true costs, in milliseconds, times `pace`."""
    ms = 1000 * pace
    verified: dict[tuple[int, ...], float]
    drafted: dict[tuple[int, ...], float]
    verified = {(n, b, 64): ms * (STEP + ROW * b * (n - 1)) for n in (1, 33) for b in (1, 4)}
    drafted = {
        (w, d, b, 64): ms * b * (LEVEL * d + 3 * READ)
        for w in (1, 4)
        for d in (1, 8)
        for b in (1, 4)
    }
    return MeasuredTimes(
        "simulated",
        TimeGrid({"tokens": (1, 33), "batch": (1, 4), "context": (64,)}, verified),
        TimeGrid({"width": (1, 4), "depth": (1, 8), "batch": (1, 4), "context": (64,)}, drafted),
        read=ms * READ,
    )


def auto_engine(
    target: Target, drafter: TimedDrafter, pace: float = 1.0, **settings: Any
) -> tuple[Engine, Auto]:
    auto = Auto(eps=EPS, **settings)
    engine = Engine(target, drafter, auto)
    auto.use_costs(LiveCosts(table(pace)))
    auto.prepare = lambda *_: None  # type: ignore[method-assign]
    return engine, auto


def guesses(answer: Sequence[int], prompt: Sequence[int], right: Callable[[int], bool]) -> Any:
    """Certain of every token; right about the n-th of the answer iff right(n)."""
    text = [*prompt, *answer]

    def row(prefix: Text) -> Tensor:
        logits = torch.zeros(tiny.TOKENS)
        at = len(prefix)
        token = text[at] if at < len(text) else 0
        if not right(at - len(prompt)):
            token = (token + 1) % tiny.TOKENS
        logits[token] = 12.0
        return logits

    return row


def chance(n: int) -> float:
    """A number between 0 and 1 without a pattern."""
    return (n * 7919 + n * n * 31) % 997 / 997


PROMPT = [1, 2, 3]
TEXTS: dict[str, Callable[[int], bool]] = {
    "always wrong": lambda n: False,
    "always right": lambda n: True,
    "changes every 200 tokens": lambda n: n // 200 % 2 == 0,
    "changes every 20 tokens": lambda n: n // 20 % 2 == 0,
    "wrong at first": lambda n: n > 300,
    "every third": lambda n: n % 3 == 0,
    "a third at random": lambda n: chance(n) < 0.3,
    "half at random": lambda n: chance(n) < 0.5,
}


def plain_answer(target: Target, clock: Clock, count: int = COUNT) -> tuple[Output, float]:
    start = clock.now
    out = Engine(target, None, None).generate(PROMPT, count)
    return out, clock.now - start


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
    monkeypatch.setattr(sys.modules[__name__], "LEVEL", level)
    monkeypatch.setattr(sys.modules[__name__], "READ", read)
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


def test_dearer_drafts_are_not_taken_for_a_slower_machine(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 200 tokens a level takes four times as long, so that no draft pays any more."""
    target = timed_target(clock, monkeypatch)
    plain, seconds = plain_answer(target, clock)
    drafter = TimedDrafter(guesses(plain.ids, PROMPT, lambda n: chance(n) < 0.6), clock)
    engine, _ = auto_engine(target, drafter)
    engine.generate(PROMPT, 100)
    start = clock.now
    for event in engine.run([Request(PROMPT, COUNT)], 1):
        if len(event.out.ids) >= 200:
            monkeypatch.setattr(sys.modules[__name__], "LEVEL", 4 * 3e-4)
    assert event.out.ids == plain.ids
    late = event.out.choices[-150:]
    assert sum(one == "plain" for one in late) > 140
    assert clock.now - start <= (1 + EPS) * seconds + 1.5 * SLACK * STEP


def test_a_prompt_that_was_read_for_good_drafts_delays_no_later_one(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "READ", 0.1 * STEP)
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
    assert auto.controller is not None
    assert auto.controller.shared.levels[1].mean < 0.4


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
            clock.now += 0.0
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


# ---- the parts -----------------------------------------------------------------------------------


def test_the_ledger_by_hand() -> None:
    """Ten plain rounds of 1 s earn 0.3 s; with c0 = 10 s a round may cost 10.3 s more."""
    ledger = Ledger(EPS, step=1.0)
    for _ in range(10):
        ledger.add(1.0, 1.0)
    assert ledger.missing(10.29) < 0 < ledger.missing(10.31)
    ledger.add(3.0, 1.0)
    assert (ledger.debt, ledger.bound) == pytest.approx((2.0, 1.03 * 11 + 10))
    for _ in range(30):
        ledger.add(1.0, 5.0)  # savings beyond 50 s are not kept
    assert ledger.debt == -50
    assert ledger.kept
    ledger.add(200.0, 1.0)
    assert not ledger.kept


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
