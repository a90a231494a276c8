"""Errors a user can cause and mend, and how a command ends because of them.

A `ConfigError` is found before a model is loaded; a `RunError` is found in what the run
reads (a checkpoint, a data file). Both end the process with code 2 and no traceback. A full disk is
nobody's mistake: `NoRoom`, code 1. `OUTRIDER_DEBUG=1` brings the traceback back. Anything else is
a bug and keeps its traceback.
"""

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space, quota used up, file may not grow
SPEAK = 3.0  # seconds that the others give rank 0 to say what is wrong
FULL = "Make room and give the same command again; what was saved is whole."


class ConfigError(ValueError):
    """A setting the user can change: which key, what is wrong, what to do."""

    def __init__(self, key: str, value: object, why: str, fix: str) -> None:
        super().__init__(f"{key} = {value!r}\n  {why}\n  {fix}")
        self.key = key
        self.value = value
        self.why = why
        self.fix = fix


class RunError(RuntimeError):
    """Something the run was given to read or write is not usable: what, and what to do."""

    code = 2  # of the process that ends with it

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(f"{message}\n  {fix}")
        self.message = message
        self.fix = fix


class Damaged(RunError):
    """A file is missing, cut off, or not what was written."""


class NoRoom(RunError):
    """The disk is full, a quota is used up, or files may not grow further."""

    code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message, FULL)


@contextmanager
def exit_on_error(program: str) -> Iterator[None]:
    """End the process as a user expects it: a message and an exit code, never a traceback.

    Serves as `with exit_on_error("train.py"):` and as a decorator. A `ConfigError` is the same
    on every rank, so only rank 0 prints it. A `RunError` may strike one rank alone (a torn
    file, a full disk), so every rank prints its own, marked with its number.

    Raises:
        SystemExit: 2 after a ConfigError or RunError, 1 on a full disk, 130 after Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (ConfigError, RunError, OSError) as error:
        if isinstance(error, OSError):
            if error.errno not in NO_ROOM:
                raise
            error = NoRoom(f"{error.filename or 'The output'} cannot grow: {error.strerror}.")
        if os.environ.get("OUTRIDER_DEBUG") == "1":
            raise
        rank = int(os.environ.get("RANK", "0"))
        _print(program, error, rank)
        if rank and isinstance(error, ConfigError):
            time.sleep(SPEAK)  # launchers end all ranks with the first, even one that would speak
        raise SystemExit(getattr(error, "code", 2)) from None


def _print(program: str, error: ConfigError | RunError, rank: int) -> None:
    """One message on stderr, in one write so that ranks do not interleave."""
    where = program if rank == 0 else f"{program} [rank {rank}]"
    kind = "config error" if isinstance(error, ConfigError) else "error"
    if kind == "config error" and rank > 0:
        return
    with suppress(OSError):  # it may go into a file on the disk that is full
        sys.stderr.write(f"{where}: {kind}: {error}\n")
        sys.stderr.flush()
