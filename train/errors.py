"""Errors a user can cause and mend, and how a command ends because of them.

A `ConfigError` is found before a model is loaded; a `RunError` is found in what the run
reads (a checkpoint, a data file). Both end the process with code 2 and no traceback;
`OUTRIDER_DEBUG=1` brings the traceback back. Anything else is a bug and keeps its traceback.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(f"{message}\n  {fix}")
        self.message = message
        self.fix = fix


class Damaged(RunError):
    """A file is missing, cut off, or not what was written."""


@contextmanager
def exit_on_error(program: str) -> Iterator[None]:
    """End the process as a user expects it: a message and exit 2, never a traceback.

    Serves as `with exit_on_error("train.py"):` and as a decorator. A `ConfigError` is the same
    on every rank, so only rank 0 prints it. A `RunError` may strike one rank alone (a torn
    file, a full disk), so every rank prints its own, marked with its number.

    Raises:
        SystemExit: 2 after a ConfigError or RunError, 130 after Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (ConfigError, RunError, OSError) as error:
        if isinstance(error, OSError):
            if error.errno != errno.ENOSPC:
                raise
            error = RunError(f"The disk is full: {error.filename or ''}", FULL)
        if os.environ.get("OUTRIDER_DEBUG") == "1":
            raise
        _print(program, error, rank=int(os.environ.get("RANK", "0")))
        raise SystemExit(2) from None


def _print(program: str, error: ConfigError | RunError, rank: int) -> None:
    """One message on stderr, in one write so that ranks do not interleave."""
    if isinstance(error, ConfigError):
        if rank == 0:
            sys.stderr.write(f"{program}: config error: {error}\n")
    else:
        where = program if rank == 0 else f"{program} [rank {rank}]"
        sys.stderr.write(f"{where}: error: {error}\n")
    sys.stderr.flush()
