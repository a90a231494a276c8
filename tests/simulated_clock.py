"""decode=auto on a clock that only the models move.

The clock moves by a known time for every forward of the target and every call of the drafter, so
that the time of plain decoding is known exactly, and not only by the controller's own estimate.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models.decode.auto.policy import Auto
from outrider.models.decode.costs.live_costs import LiveCosts
from outrider.models.decode.costs.round_costs import MeasuredTimes, TimeGrid
from outrider.models.decode.engine import Engine
from outrider.models.decode.request import Output
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


class TimedDrafter(ScriptedDrafter):
    """A drafter that takes time, and counts its calls, and the levels that it drafts."""

    def __init__(self, row: Callable[[Text], Tensor], clock: Clock) -> None:
        super().__init__(row, tiny.TOKENS)
        self.clock, self.calls, self.levels = clock, 0, 0

    def absorb(self, state: Any, trace: Trace) -> Any:
        self.calls += 1
        self.clock.add(READ * trace.ids.shape[1])
        return super().absorb(state, trace)

    def step(self, *args: Any) -> Any:
        self.calls += 1
        self.levels += 1
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


def taught_engine(
    right: Callable[[int], bool], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> tuple[Engine, Output, float]:
    """Return an engine that has decoded 100 tokens, and plain decoding's answer and seconds.

    Its drafts are certain, and right about the n-th token iff right(n).
    """
    target = timed_target(clock, monkeypatch)
    plain, seconds = plain_answer(target, clock)
    engine, _ = auto_engine(target, TimedDrafter(guesses(plain.ids, PROMPT, right), clock))
    engine.generate(PROMPT, 100)
    return engine, plain, seconds


def plain_answer(target: Target, clock: Clock, count: int = COUNT) -> tuple[Output, float]:
    start = clock.now
    out = Engine(target, None, None).generate(PROMPT, count)
    return out, clock.now - start
