"""decode=auto of a hybrid on a simulated clock: rounds of the look-up alone, and of both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from outrider.models.decode.auto.policy import Auto
from outrider.models.decode.costs.factors import LOOK_UP
from outrider.models.decode.engine import Engine
from outrider.models.decode.ledger import SLACK
from outrider.models.decode.request import Output, Request
from outrider.models.drafters import hybrid
from outrider.models.drafters.hybrid import Hybrid
from outrider.models.drafting.lookup import Draft, LookupDrafter, LookupState, Text, TextIndex
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import Trace
from tests import tiny
from tests.simulated_clock import (
    COUNT,
    EPS,
    LEVEL,
    PROMPT,
    ROW,
    STEP,
    Clock,
    TimedDrafter,
    auto_engine,
    chance,
    guesses,
    timed_target,
)
from tests.test_hybrid import FixedPart, combine

Right = Callable[[int], bool]
SPAN = 4  # tokens of a draft of the look-up


class NoIndex(TextIndex):
    """The index of a look-up that follows a script."""

    def append(self, token: int) -> None:
        raise NotImplementedError

    def remove_last(self) -> None:
        raise NotImplementedError


class ScriptedLookup(LookupDrafter):
    """A look-up that drafts from some places on, and is right about the n-th token iff right(n)."""

    def __init__(self, text: Sequence[int], prompt: int, drafts: Right, right: Right) -> None:
        super(LookupDrafter, self).__init__(tiny_config(), tiny.mean_target(), full(), ())
        self.script, self.prompt, self.drafts, self.right = list(text), prompt, drafts, right

    clock, row_seconds = Clock(), 0.0

    def new_index(self) -> TextIndex:
        raise NotImplementedError

    def look_up(self, index: Any) -> Draft:
        raise NotImplementedError

    def absorb(self, state: Any, trace: Trace) -> Any:
        self.clock.add(self.row_seconds * trace.ids.shape[1])
        before = 1 if state is None else state.text.length
        return LookupState(NoIndex(), Text(length=before + trace.ids.shape[1]))

    def draft_after(self, state: Any) -> Draft:
        first, out = state.text.length - self.prompt, Draft()
        if not self.drafts(first):
            return out
        for n in reversed(range(first, first + SPAN)):
            at = n + self.prompt
            token = self.script[at] if at < len(self.script) else 0
            out = {token if self.right(n) else (token + 1) % tiny.TOKENS: (0.9, out)}
        return out


def tiny_config() -> Any:
    return hybrid.LOOKUP.parse({"name": "ngram"})


def full() -> Any:
    return DraftVocab.identity(tiny.TOKENS)


@dataclass
class Case:
    """A hybrid engine, and plain decoding of its answer."""

    engine: Engine
    auto: Auto
    trained: TimedDrafter
    plain: Output
    seconds: float


def hybrid_case(
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    drafts: Right,
    found: Right,
    guessed: Right,
    prompt: Sequence[int] = PROMPT,
    row_seconds: float = 0.0,
    count: int = COUNT,
) -> Case:
    """
    Args:
        drafts: where the look-up drafts.
        found, guessed: where the look-up and the trained drafter are right.
        row_seconds: of looking.
    """
    target, start = timed_target(clock, monkeypatch), clock.now
    plain = Engine(target, None, None).generate(prompt, count)
    seconds = clock.now - start
    trained = TimedDrafter(guesses(plain.ids, prompt, guessed), clock)
    part = FixedPart("drafter.lookup", "")
    part.drafter = lookup = ScriptedLookup([*prompt, *plain.ids], len(prompt), drafts, found)
    lookup.clock, lookup.row_seconds = clock, row_seconds
    with monkeypatch.context() as patch:
        patch.setattr(hybrid, "LOOKUP", part)
        patch.setattr(hybrid.Config, "__post_init__", lambda _: None)
        drafter = combine(monkeypatch, target, trained, levels=4, depths=8)
    assert isinstance(drafter, Hybrid)
    engine, auto = auto_engine(target, drafter)  # type: ignore[arg-type]
    return Case(engine, auto, trained, plain, seconds)


def never(n: int) -> bool:
    return False


def always(n: int) -> bool:
    return True


TEXTS: dict[str, tuple[Right, Right, Right]] = {
    "nothing is right": (always, never, never),
    "the look-up is wrong": (always, never, lambda n: chance(n) < 0.6),
    "the trained drafter is wrong": (lambda n: n % 7 == 0, always, never),
    "both change": (lambda n: n // 30 % 2 == 0, lambda n: n // 60 % 2 == 0, lambda n: n % 90 > 40),
}


@pytest.mark.parametrize("case", TEXTS)
def test_the_bound_holds(case: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    made = hybrid_case(clock, monkeypatch, *TEXTS[case])
    for _ in range(2):
        start = clock.now
        out = made.engine.generate(PROMPT, COUNT)
        assert out.ids == made.plain.ids
        assert clock.now - start <= (1 + EPS) * made.seconds + SLACK * STEP


def test_a_round_of_the_look_up_does_not_run_the_trained_drafter(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From token 200 on the look-up is always right: its rows wait until both draft again."""
    made = hybrid_case(
        clock, monkeypatch, lambda n: 200 <= n < 400, always, lambda n: chance(n) < 0.7
    )
    calls = list[int]()
    for event in made.engine.run([Request(PROMPT, COUNT)], 1):
        if 220 <= len(event.out.ids) < 390:
            calls.append(made.trained.calls)
    assert len(set(calls)) == 1
    assert made.trained.calls > calls[0]


def test_both_kinds_of_rounds_have_their_own_seconds(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look-up costs the rows that the target verifies; a level of both takes LEVEL more."""
    made = hybrid_case(
        clock, monkeypatch, lambda n: n // 50 % 2 == 0, always, lambda n: chance(n) < 0.8
    )
    made.engine.generate(PROMPT, COUNT)
    control = made.auto.controller
    assert control is not None
    for kind, level in ((LOOK_UP, ROW), ("", ROW + LEVEL)):
        costs = control.costs.chain_seconds(1, 64, 4, kind)
        slope = (costs[4].draft + costs[4].other - costs[1].draft - costs[1].other) / 3
        assert slope == pytest.approx(level, rel=0.1)


def test_a_look_up_is_used_at_once_where_the_trained_drafter_is_off(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trained drafter is never right; the look-up finds something from token 300 on."""
    made = hybrid_case(clock, monkeypatch, lambda n: n >= 300, always, never)
    waited = list[str]()
    for event in made.engine.run([Request(PROMPT, COUNT)], 1):
        if 300 <= len(event.out.ids) < 340:
            waited.append(event.out.choices[-1])
    assert made.auto.controller is not None
    assert waited.count("plain") <= 2
    assert len(waited) <= 12


def test_the_bound_holds_where_rows_become_dearer_while_look_ups_go_on(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trained drafter is off; verified rows take six times as long from token 300 on.

    Plain rounds are measured between look-ups: else the pace would follow these alone.
    """
    right: Right = lambda n: n < 300 or chance(n) < 0.55  # noqa: E731
    made = hybrid_case(clock, monkeypatch, lambda n: n >= 100, right, never, count=2500)
    start, extra = clock.now, 0.0
    real = tiny.MeanTarget.forward
    length = 0

    def dearer(self: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal extra
        if length > 300:
            extra += 5 * ROW * (ids.numel() - len(ids))
            clock.add(5 * ROW * (ids.numel() - len(ids)))
        return real(self, ids, *args, **kwargs)

    monkeypatch.setattr(tiny.MeanTarget, "forward", dearer)
    for event in made.engine.run([Request(PROMPT, 2500)], 1):
        length = len(event.out.ids)
    assert extra > 0
    assert clock.now - start <= (1 + EPS) * made.seconds + SLACK * STEP


@pytest.mark.parametrize("row_seconds", [5e-6, 2e-5])
def test_looking_at_a_long_prompt_is_planned_and_counted(
    row_seconds: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is right: the bound holds, and no look is taken for a pause of the machine."""
    prompt = [n * 7 % 5 for n in range(430)]
    made = hybrid_case(clock, monkeypatch, always, never, never, prompt, row_seconds)
    for _ in range(3):
        start = clock.now
        out = made.engine.generate(prompt, COUNT)
        assert out.ledger is not None
        assert out.ledger.paused == 0
        assert out.ledger.kept
        assert clock.now - start <= (1 + EPS) * made.seconds + SLACK * STEP


def test_a_look_at_a_prompt_does_not_make_later_looks_seem_dear(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [n * 7 % 5 for n in range(400)]
    made = hybrid_case(clock, monkeypatch, lambda n: n >= 100, always, never, prompt, 1.5e-5)
    for _ in range(3):
        start = clock.now
        made.engine.generate(prompt, COUNT)
        assert clock.now - start < 0.6 * made.seconds


def test_look_ups_do_not_hide_the_outcome_of_a_probe(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look-up for every third token; the trained drafter is never right, and seldom tried."""
    made = hybrid_case(clock, monkeypatch, lambda n: n % 3 == 0, lambda n: n % 3 == 0, never)
    before = made.trained.calls
    made.engine.generate(PROMPT, COUNT)
    assert made.trained.calls - before < 150
