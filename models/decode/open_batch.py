"""An open batch: requests join it and leave it between the rounds of an engine."""

from collections import deque
from collections.abc import Sequence

import torch

from outrider.models.decode.engine import Engine
from outrider.models.decode.request import Event, Request, same_length_batch

ROWS = 256  # the cache grows by multiples of it


class OpenBatch:
    """The running requests of an engine, whose numbers the caller chooses.

    The cache is allocated for `slots` requests and grows with the longest one. An answer is the one
    that `Engine.run` gives, whatever else runs (docs/decoding.md).
    """

    def __init__(self, engine: Engine, slots: int) -> None:
        self.engine, self.slots = engine, slots
        engine.start([], slots)

    def __len__(self) -> int:
        """Number of running requests."""
        return len(self.engine.active)

    @torch.inference_mode()
    def join(self, requests: Sequence[tuple[int, Request]]) -> list[Event]:
        """Read the prompts of numbered requests; return an event with each one's first token.

        `check_request` has accepted the requests.

        Raises:
            ValueError: more requests than free slots.
            RunError: as for `Engine.run`. No request of this batch can continue then.
        """
        if len(self) + len(requests) > self.slots:
            raise ValueError(f"{len(requests)} requests join {len(self)} of {self.slots}")
        rows = max((self.engine.rows_of(request) for _, request in requests), default=1)
        if rows > self.engine.cache.capacity:
            self.engine.cache.ensure_capacity(-(-rows // ROWS) * ROWS)
        waiting, events = deque(requests), list[Event]()
        while waiting:
            group = [*same_length_batch(waiting, len(waiting))]
            events += self.engine.admit(group)
        return events

    @torch.inference_mode()
    def advance(self) -> list[Event]:
        """Run a round; return an event with each request's new tokens.

        Raises:
            RunError: as for `Engine.run`. No request of this batch can continue then.
        """
        return list(self.engine.advance())

    @torch.inference_mode()
    def cancel(self, number: int) -> None:
        """End a running request; its slot is free."""
        for one in self.engine.active:
            if one.number == number:
                one.out.stop_reason = "cancelled"
        self.engine.release()
