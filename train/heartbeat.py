"""Rank heartbeats: name the silent rank when a collective times out.

Every rank writes its step, and a thread of it every few seconds the time, to the store of the
process group. When a wait ends in an error (gloo), a rank reports those longest out of date. NCCL's
watchdog ends the process instead, so the thread also reports silent ranks before the timeout. A
rank whose thread runs while its step hangs is not silent: only NCCL's own message names it.
"""

import sys
import threading
import time
from typing import Any

import torch

from outrider.conf.shown_text import for_terminal

TIMEOUTS = ("gloo", "nccl", "timed out", "timeout", "connection closed", "connection reset")
CLOSED = ("connection closed", "connection reset", "broken pipe")  # another process ended
INTERVAL = 2.0  # seconds between heartbeats of the thread
MIN_INTERVAL = 0.2  # seconds between heartbeats of quick steps
CHECKS = 20  # of the other ranks during one timeout
ALARM = 0.75  # share of the timeout after which a silent rank is reported


class Heartbeat:
    """Heartbeats of one rank; nothing is written in a run of one process."""

    def __init__(self, rank: int, world: int, wait: float) -> None:  # wait: timeout, seconds
        self.rank, self.world, self.wait, self.step = rank, world, wait, 0
        self.store: Any = None
        self._closed, self._last_write = threading.Event(), 0.0
        self._entries = dict[int, tuple[str, float]]()  # by rank: last entry, and when it changed
        self._reported = set[int]()
        if world > 1 and torch.distributed.is_initialized():
            store = torch.distributed.distributed_c10d._get_default_store()
            # a separate connection: the group's may be blocked by a wait
            self.store = store.clone() if hasattr(store, "clone") else store
            self._write()
            threading.Thread(target=self._run, daemon=True).start()

    def beat(self, step: int) -> None:
        """Write the step that this rank is about to take."""
        self.step = step
        if self.store is not None and time.monotonic() - self._last_write > MIN_INTERVAL:
            self._write()

    def close(self) -> None:
        self._closed.set()

    def explain_timeout(self, error: Exception) -> str:
        """Return a message for a wait that ended in this error; "" for other errors."""
        text = str(error).lower()
        if self.world == 1 or not any(word in text for word in TIMEOUTS):
            return ""
        closed = any(word in text for word in CLOSED)
        cause = "lost the others" if closed else "waited for the others until the timeout"
        head = f"Rank {self.rank} {cause} at step {self.step}"
        try:
            entries = {rank: self._read(rank) for rank in range(self.world) if rank != self.rank}
        except (RuntimeError, ValueError):
            return f"{head}: {str(error).splitlines()[0]}"
        silent = {r: (step, age) for r, (step, age) in entries.items() if age > 4 * INTERVAL}
        oldest_first = sorted((silent or entries).items(), key=lambda item: -item[1][1])
        parts = [
            f"rank {rank} was last heard of {age:.0f} s ago, at step {step}"
            for rank, (step, age) in oldest_first
        ]
        return f"{head}: {'; '.join(parts)}{'' if silent or closed else ' (all are alive)'}."

    def _run(self) -> None:
        last_check, interval = time.monotonic(), self.wait / CHECKS
        while not self._closed.wait(min(INTERVAL, interval)):
            try:
                self._write()
                if time.monotonic() - last_check >= interval:
                    last_check = time.monotonic()
                    sys.stderr.write(for_terminal(self._check_others(last_check)))
            except RuntimeError:  # the store is gone, and this process will end
                return

    def _check_others(self, now: float) -> str:
        """Return a message about ranks that became silent, on the first rank that is not.

        Silent: the entry has not changed for long by this rank's clock, as clocks may differ.
        """
        others = [rank for rank in range(self.world) if rank != self.rank]
        if not self.store.check([f"outrider/{rank}" for rank in others]):
            return ""  # a rank has not started; reading its entry would block
        for rank in others:
            entry = self.store.get(f"outrider/{rank}").decode()
            if entry != self._entries.get(rank, ("", 0.0))[0]:
                self._entries[rank] = entry, now
        silent = {r for r, (_, last) in self._entries.items() if now - last > ALARM * self.wait}
        new, self._reported = silent - self._reported, silent
        if not new or min({*others, self.rank} - silent) != self.rank:
            return ""
        parts = [
            f"rank {rank} has been silent for {now - self._entries[rank][1]:.0f} s, "
            f"since step {self._entries[rank][0].split()[0]}"
            for rank in sorted(new)
        ]
        return f"Rank {self.rank} is at step {self.step}: {'; '.join(parts)}.\n"

    def _write(self) -> None:
        self._last_write = time.monotonic()
        self.store.set(f"outrider/{self.rank}", f"{self.step} {time.time()}")

    def _read(self, rank: int) -> tuple[int, float]:
        """Return a rank's step and the age of its entry in seconds."""
        step, written = self.store.get(f"outrider/{rank}").decode().split()
        return int(step), time.time() - float(written)
