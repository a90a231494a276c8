"""Where the time of an answer goes."""

import time
from dataclasses import dataclass

import torch


@dataclass
class Clock:
    """Seconds spent in the parts of the rounds; the whole is measured on its own."""

    prefill: float = 0.0
    draft: float = 0.0  # the drafter: its steps, and taking in verified rows
    target: float = 0.0  # the target's forward and its head
    verify: float = 0.0
    commit: float = 0.0  # thinning the cache, bookkeeping
    rounds: float = 0.0  # all rounds, first to last; what no part claims is overhead too

    def add(self, other: "Clock", share: float = 1.0) -> None:
        """The time of a round; of a batch's round each prompt bears its share."""
        mine = self.__dict__
        for name, seconds in other.__dict__.items():
            mine[name] += share * seconds


class Stopwatch:
    """Lap times; waits for the device, so that work is booked where it was ordered."""

    def __init__(self, device: torch.device, exact: bool = True) -> None:
        """
        Args:
            exact: False does not wait: only the sum of many laps is then true.
        """
        self.device, self._cuda = device, exact and device.type == "cuda"
        self.start = self.then = self._now()

    def lap(self) -> float:
        """Seconds since the lap before."""
        now = self._now()
        seconds, self.then = now - self.then, now
        return seconds

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
