"""Work behind the run's back: one piece at a time, and no error is lost."""

import threading
from collections.abc import Callable


class Behind:
    """A thread that writes what the run has handed over, while the run goes on."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Start it once the piece before is done.

        Raises:
            Exception: what the piece before ended with.
        """
        self.wait()
        self._thread = threading.Thread(target=self._do, args=(work,))
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is left to do.

        Raises:
            Exception: what the piece ended with.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # said by the next `begin` or `wait`
            self._error = error
