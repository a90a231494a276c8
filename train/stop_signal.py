"""SIGINT and SIGTERM as a flag that the loop reads between steps."""

import signal
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """A context in which both signals set `received` instead of ending the process."""

    def __init__(self) -> None:
        self.received = False
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        self.received = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
