"""Who is still there: asked when somebody does not answer.

Every rank notes its step, and from a thread of its own every few seconds the time, in the store
that the ranks met at. A rank whose wait for the others ends in an error reads what they noted: who
stands still, or is gone, has not been heard of for longest.

So it is with gloo. NCCL's watchdog ends a process whose wait is over, and no error comes up. The
thread therefore looks at the others' notes too, and says who has been silent before that happens.
A rank whose thread lives while its step hangs is not silent: of it NCCL's message alone tells.
"""

import sys
import threading
import time

import torch

LOST = ("gloo", "nccl", "timed out", "timeout", "connection closed", "connection reset")
TORN = ("connection closed", "connection reset", "broken pipe")  # somebody has ended
BEAT = 2.0  # seconds between signs of life
SOON = 0.2  # between notes of quick steps
LOOKS = 20  # at the others' notes while a wait lasts
ALARM = 0.75  # of a wait: who is silent for so long is named


class Roll:
    """The notes of all ranks; of a run of one process there are none."""

    def __init__(self, rank: int, world: int, wait: float) -> None:
        """
        Args:
            wait: seconds after which a rank gives the others up.
        """
        self.rank, self.world, self.wait, self.step = rank, world, wait, 0
        self.store = None
        self._over, self._noted = threading.Event(), 0.0
        self._seen = dict[int, tuple[str, float]]()  # last notes, and when they were new
        self._named = set[int]()
        if world > 1 and torch.distributed.is_initialized():
            store = torch.distributed.distributed_c10d._get_default_store()
            # a connection of its own: the group's may be held by somebody who waits
            self.store = store.clone() if hasattr(store, "clone") else store
            self._note()
            threading.Thread(target=self._beat, daemon=True).start()

    def here(self, step: int) -> None:
        """What this rank is about to do."""
        self.step = step
        if self.store is not None and time.monotonic() - self._noted > SOON:
            self._note()

    def close(self) -> None:
        """No more signs of life."""
        self._over.set()

    def missing(self, error: Exception) -> str:
        """What to say of a wait that ended in this error; "" if it is none."""
        text = str(error).lower()
        if self.world == 1 or not any(word in text for word in LOST):
            return ""
        torn = any(word in text for word in TORN)
        how = "lost the others" if torn else "waited for the others, and gave up,"
        head = f"Rank {self.rank} {how} at step {self.step}"
        try:
            seen = {rank: self._of(rank) for rank in range(self.world) if rank != self.rank}
        except (RuntimeError, ValueError):
            return f"{head}: {str(error).splitlines()[0]}"
        silent = {r: (step, age) for r, (step, age) in seen.items() if age > 4 * BEAT}
        said = [
            f"rank {rank} was last heard of {age:.0f} s ago, at step {step}"
            for rank, (step, age) in sorted((silent or seen).items(), key=lambda one: -one[1][1])
        ]
        return f"{head}: {'; '.join(said)}{'' if silent or torn else ' (all are alive)'}."

    def _beat(self) -> None:
        looked, apart = time.monotonic(), self.wait / LOOKS
        while not self._over.wait(min(BEAT, apart)):
            try:
                self._note()
                if time.monotonic() - looked >= apart:
                    looked = time.monotonic()
                    sys.stderr.write(self._silence(looked))
            except RuntimeError:  # the place where they met is gone, and soon this process too
                return

    def _silence(self, now: float) -> str:
        """What to say of ranks that have just become silent; the first of the others says it.

        A note is old when it has not changed for long here: clocks of machines may differ.
        """
        assert self.store is not None, "there is one where there are several ranks"
        others = [rank for rank in range(self.world) if rank != self.rank]
        if not self.store.check([f"outrider/{rank}" for rank in others]):
            return ""  # not all are there yet, and a read would wait for them
        for rank in others:
            note = self.store.get(f"outrider/{rank}").decode()
            if note != self._seen.get(rank, ("", 0.0))[0]:
                self._seen[rank] = note, now
        silent = {r for r, (_, since) in self._seen.items() if now - since > ALARM * self.wait}
        fresh, self._named = silent - self._named, silent
        if not fresh or min({*others, self.rank} - silent) != self.rank:
            return ""
        said = [
            f"rank {rank} has been silent for {now - self._seen[rank][1]:.0f} s, "
            f"since step {self._seen[rank][0].split()[0]}"
            for rank in sorted(fresh)
        ]
        return f"Rank {self.rank} is at step {self.step}: {'; '.join(said)}.\n"

    def _note(self) -> None:
        assert self.store is not None, "there is one where there are several ranks"
        self._noted = time.monotonic()
        self.store.set(f"outrider/{self.rank}", f"{self.step} {time.time()}")

    def _of(self, rank: int) -> tuple[int, float]:
        """Its step, and how many seconds ago it was heard of."""
        assert self.store is not None, "there is one where there are several ranks"
        step, when = self.store.get(f"outrider/{rank}").decode().split()
        return int(step), time.time() - float(when)
