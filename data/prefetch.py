"""Reading what later steps need while this one trains."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """Answers for steps 0, 1, ..., each made in a thread before it is asked for.

    Args:
        make: what a step needs; called from several threads, each step once as a rule.
        workers: threads, and steps that are under way at most; 0: nothing is done ahead.
        stop: steps behind this one are not needed.
    """

    def __init__(self, make: Callable[[int], T], workers: int, stop: int | None = None) -> None:
        self.make, self.workers, self.stop = make, workers, stop
        self._pool = ThreadPoolExecutor(workers, "ahead") if workers else None
        self._under_way: dict[int, Future[T]] = {}

    def take(self, step: int) -> T:
        """What this step needs; the next ones are begun.

        Raises:
            Exception: whatever `make` raised.
        """
        if self._pool is None:
            return self.make(step)
        mine = self._under_way.pop(step, None)
        for old in [s for s in self._under_way if not step < s <= step + self.workers]:
            self._under_way.pop(old).cancel()  # of a run that went somewhere else
        for later in range(step + 1, step + 1 + self.workers):
            if later not in self._under_way and (self.stop is None or later < self.stop):
                self._under_way[later] = self._pool.submit(self.make, later)
        return self.make(step) if mine is None else mine.result()

    def close(self) -> None:
        """Nothing more is needed."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
