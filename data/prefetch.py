"""Prefetching of the data of later steps in threads."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Values of steps 0, 1, ..., each computed in a thread before it is needed.

    Up to `workers` threads call `make`, for steps before `stop`; with 0 nothing runs ahead.
    """

    def __init__(self, make: Callable[[int], T], workers: int, stop: int | None = None) -> None:
        self.make, self.workers, self.stop = make, workers, stop
        self._pool = ThreadPoolExecutor(workers, "prefetch") if workers else None
        self._pending: dict[int, Future[T]] = {}

    def get(self, step: int) -> T:
        """Return the value of a step (or raise the error of `make`) and start the next ones."""
        if self._pool is None:
            return self.make(step)
        future = self._pending.pop(step, None)
        for old in [s for s in self._pending if not step < s <= step + self.workers]:
            self._pending.pop(old).cancel()  # the caller jumped to another step
        for later in range(step + 1, step + 1 + self.workers):
            if later not in self._pending and (self.stop is None or later < self.stop):
                self._pending[later] = self._pool.submit(self.make, later)
        return self.make(step) if future is None else future.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
