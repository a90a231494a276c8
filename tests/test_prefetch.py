"""Prefetcher: values in order, each computed once, errors raised at their step."""

import threading

import pytest

from outrider.data.prefetch import Prefetcher


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_every_step_gets_its_value(workers: int) -> None:
    computed = list[int]()

    def make(step: int) -> int:
        computed.append(step)
        return 10 * step

    prefetcher = Prefetcher(make, workers, stop=8)
    assert [prefetcher.get(step) for step in range(8)] == [10 * step for step in range(8)]
    prefetcher.close()
    assert sorted(computed) == list(range(8)), "each step once, none after `stop`"


def test_the_next_step_is_computed_in_advance() -> None:
    started = threading.Event()

    def make(step: int) -> int:
        if step == 1:
            started.set()
        return step

    prefetcher = Prefetcher(make, 1)
    prefetcher.get(0)
    assert started.wait(5)
    prefetcher.close()


def test_a_jump_to_another_step_returns_its_value() -> None:
    prefetcher = Prefetcher(lambda step: step, 2)
    assert [prefetcher.get(step) for step in (0, 1, 7, 8, 3)] == [0, 1, 7, 8, 3]
    prefetcher.close()


def test_an_error_is_raised_at_its_step() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise OSError("gone")
        return step

    prefetcher = Prefetcher(make, 1)
    assert [prefetcher.get(0), prefetcher.get(1)] == [0, 1]
    with pytest.raises(OSError, match="gone"):
        prefetcher.get(2)
    prefetcher.close()
