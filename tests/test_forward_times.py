"""Forward times: order of runs, cached rows, all drafters."""

import math
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models.cache.recurrent_states import RecurrentStates
from outrider.models.decode.costs import forward_times
from outrider.models.decode.costs.forward_times import SyntheticRounds, interleaved_ms
from outrider.models.decode.round_times import Stopwatch
from tests import tiny


def test_interleaved_times_exclude_warm_up_and_preparation() -> None:
    order: list[str] = []
    runs = [lambda: order.append("a"), lambda: order.append("b")]

    def pause() -> None:
        order.append("-")
        time.sleep(0.05)

    times = interleaved_ms(runs, [pause, lambda: None], 3, torch.device("cpu"))
    assert order == ["-", "a", "b"] * 4
    assert [len(each) for each in times] == [3, 3]
    assert all(0 <= ms < 50 for each in times for ms in each)  # what ran before is not counted


def test_target_is_timed_after_the_requested_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two prompts, 20 cached rows before every timed forward, warm-ups included."""
    target = tiny.target()
    real, shapes = target.forward, list[tuple[int, int, int]]()

    def forward(ids: Tensor, positions: Tensor, visible: Tensor, cache: Any) -> Any:
        (cached,) = set(cache.active_lengths)
        shapes.append((len(ids), ids.shape[1], cached))
        assert visible.shape[-1] == cached + ids.shape[1]
        return real(ids, positions, visible, cache)

    monkeypatch.setattr(target, "forward", forward)
    drafter = tiny.drafter("eagle3", target).eval()
    times = SyntheticRounds(drafter, target).target_ms([1, 16], batch=2, context=20, repeats=5)
    assert shapes == [(2, 20, 0), *[(2, 1, 20), (2, 1, 20), (2, 16, 20)] * 6]
    assert times[1] > 0
    assert times[16] > times[1] / 10


@pytest.mark.parametrize("family", ["lfm2", "jamba"])
def test_times_of_recurrent_layers_include_reading_accepted_rows_again(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each timed forward begins after the context, whose states are put back."""
    again, rewind = list[int](), RecurrentStates._rewind

    def counted(states: RecurrentStates, undo: Any, slots: Any, count: int) -> None:
        again.append(count)
        rewind(states, undo, slots, count)

    monkeypatch.setattr(RecurrentStates, "_rewind", counted)
    target = tiny.target(family)
    drafter = tiny.drafter("eagle3", target).eval()
    times = SyntheticRounds(drafter, target).target_ms([1, 4], batch=2, context=20, repeats=5)
    assert times[4] > times[1] / 10 > 0
    assert [count for count in again if count] == [2] * 6  # of 4 rows, in every timed forward


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["eagle", "eagle3", "hass", "mtp", "medusa", "draft_lm"])
def test_every_drafter_is_timed_for_all_shapes(name: str, batch: int) -> None:
    target = tiny.target()
    drafter = tiny.drafter(name, target).eval()
    times = SyntheticRounds(drafter, target).draft_ms([1, 4], [1, 3], batch, context=12, repeats=5)
    assert set(times) == {(1, 1), (1, 3), (4, 1), (4, 3)}
    assert all(ms > 0 for ms in times.values())
    assert times[4, 3] > times[1, 1] / 10


def test_moments_of_the_machine_do_not_change_what_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other programs interrupt ten forwards of fifteen; one is twice as fast."""

    def noisy(runs: Sequence[Any], *_: object) -> list[list[float]]:
        return [[*[900.0] * 10, *[i + 1.0] * 4, (i + 1) / 2] for i, _ in enumerate(runs)]

    monkeypatch.setattr(forward_times, "interleaved_ms", noisy)
    target = tiny.target()
    rows = min(forward_times.READ_ROWS, target.shape().max_positions - 1)
    rounds = SyntheticRounds(tiny.drafter("eagle3", target).eval(), target)
    assert rounds.target_ms([1, 4], batch=1, context=20, repeats=15) == {1: 1.0, 4: 2.0}
    assert rounds.draft_ms([1], [1, 3], 1, context=12, repeats=15) == {(1, 1): 1.0, (1, 3): 2.0}
    assert rounds.read_ms(15) == 1.0 / rows


def test_repetitions_end_after_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(Stopwatch, "clock", staticmethod(lambda: now[0]))

    def second() -> None:
        now[0] += 1.0

    def count(seconds: float) -> int:
        (times,) = interleaved_ms([second], [second], 15, torch.device("cpu"), seconds)
        return len(times)

    assert count(math.inf) == 15
    assert count(20.0) == 10  # two seconds each, with the warm-up
    assert count(1.0) == forward_times.LEAST
