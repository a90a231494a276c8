"""Wall-clock time of the parts of a decoding round."""

import time
from dataclasses import dataclass

import torch


@dataclass
class RoundTimes:
    """Seconds spent in the parts of the rounds."""

    prefill: float = 0.0
    draft: float = 0.0  # the drafter: its steps, and absorbing verified rows
    target: float = 0.0  # the target's forward and its head
    verify: float = 0.0
    commit: float = 0.0  # compacting the cache, bookkeeping
    rounds: float = 0.0  # all rounds, start to end; more than the sum of the parts
    prompt: float = 0.0  # the part of prefill in which the drafter reads the prompt

    def add(self, other: "RoundTimes", share: float = 1.0) -> None:
        """Add a share of the times of a round."""
        times = self.__dict__
        for name, seconds in other.__dict__.items():
            times[name] += share * seconds


class Stopwatch:
    """Lap times; synchronises with the device, so that a lap includes the work started in it.

    Attributes:
        clock: seconds since some moment.
    """

    clock = staticmethod(time.perf_counter)

    def __init__(self, device: torch.device, synchronise: bool = True) -> None:
        """Without `synchronise`, only the sum of many laps is meaningful on a GPU."""
        self.device, self._cuda = device, synchronise and device.type == "cuda"
        self.latest = self._now()

    def lap(self) -> float:
        """Return the seconds since the previous lap."""
        now = self._now()
        seconds, self.latest = now - self.latest, now
        return seconds

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize(self.device)
        return self.clock()
