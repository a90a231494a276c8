"""What is made ahead of a step: the same, in order, and errors come where they belong."""

import threading

import pytest

from outrider.data.prefetch import Prefetcher


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_every_step_gets_its_value(workers: int) -> None:
    asked = list[int]()

    def make(step: int) -> int:
        asked.append(step)
        return 10 * step

    ahead = Prefetcher(make, workers, stop=8)
    assert [ahead.get(step) for step in range(8)] == [10 * step for step in range(8)]
    ahead.close()
    assert sorted(asked) == list(range(8)), "each once, and nothing behind the last"


def test_the_next_step_is_computed_ahead() -> None:
    begun = threading.Event()

    def make(step: int) -> int:
        if step == 1:
            begun.set()
        return step

    ahead = Prefetcher(make, 1)
    ahead.get(0)
    assert begun.wait(5)
    ahead.close()


def test_a_jump_to_another_step_returns_its_value() -> None:
    ahead = Prefetcher(lambda step: step, 2)
    assert [ahead.get(step) for step in (0, 1, 7, 8, 3)] == [0, 1, 7, 8, 3]
    ahead.close()


def test_an_error_is_raised_at_its_step() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise OSError("gone")
        return step

    ahead = Prefetcher(make, 1)
    assert [ahead.get(0), ahead.get(1)] == [0, 1]
    with pytest.raises(OSError, match="gone"):
        ahead.get(2)
    ahead.close()
