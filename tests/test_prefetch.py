"""What is made ahead of a step: the same, in order, and errors come where they belong."""

import threading

import pytest

from outrider.data.prefetch import Ahead


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_every_step_gets_its_own(workers: int) -> None:
    asked = list[int]()

    def make(step: int) -> int:
        asked.append(step)
        return 10 * step

    ahead = Ahead(make, workers, stop=8)
    assert [ahead.take(step) for step in range(8)] == [10 * step for step in range(8)]
    ahead.close()
    assert sorted(asked) == list(range(8)), "each once, and nothing behind the last"


def test_the_next_step_is_made_while_this_one_is_used() -> None:
    begun = threading.Event()

    def make(step: int) -> int:
        if step == 1:
            begun.set()
        return step

    ahead = Ahead(make, 1)
    ahead.take(0)
    assert begun.wait(5)
    ahead.close()


def test_a_run_that_goes_somewhere_else_gets_what_it_asks_for() -> None:
    ahead = Ahead(lambda step: step, 2)
    assert [ahead.take(step) for step in (0, 1, 7, 8, 3)] == [0, 1, 7, 8, 3]
    ahead.close()


def test_an_error_is_raised_at_its_step() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise OSError("gone")
        return step

    ahead = Ahead(make, 1)
    assert [ahead.take(0), ahead.take(1)] == [0, 1]
    with pytest.raises(OSError, match="gone"):
        ahead.take(2)
    ahead.close()
