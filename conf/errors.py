"""Errors that a user can fix, and the exit code and message of each.

A `ConfigError` is raised before a model is loaded, a `RunError` for a file that the run reads or
writes: exit code 2, no traceback. A full disk is a `DiskFull`: exit code 1. `OUTRIDER_DEBUG=1`
restores the traceback. Every other exception is a bug and keeps its traceback.
"""

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space, quota, file size limit
RANK_0_HEAD_START = 3.0  # seconds before other ranks exit, so that rank 0 prints the error
FREE_SPACE = "Free some space and run the same command again; all saved files are complete."


class ConfigError(ValueError):
    """An invalid setting: the key and its value, the reason, the fix."""

    def __init__(self, key: str, value: object, why: str, fix: str) -> None:
        super().__init__(f"{key} = {value!r}\n  {why}\n  {fix}")
        self.key = key
        self.value = value
        self.why = why
        self.fix = fix


class RunError(RuntimeError):
    """An unusable file, model or service: the reason and the fix."""

    code = 2  # exit code of the process

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(f"{message}\n  {fix}")
        self.message = message
        self.fix = fix


class CorruptFile(RunError):
    """A file is missing, truncated, or differs from what was written."""


class DiskFull(RunError):
    """The disk is full, or a quota or the file size limit is reached."""

    code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message, FREE_SPACE)


@contextmanager
def exit_on_error(program: str) -> Iterator[None]:
    """Turn the errors of this module into a message on stderr and an exit code.

    A `ConfigError` is the same on every rank, so only rank 0 prints it. A `RunError` may occur on
    one rank only (a truncated file, a full disk), so every rank prints its own with its number.

    Raises:
        SystemExit: 2 after a ConfigError or RunError, 1 on a full disk, 130 after Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (ConfigError, RunError, OSError) as error:
        if isinstance(error, OSError):
            if error.errno not in DISK_FULL_ERRNOS:
                raise
            error = DiskFull(f"{error.filename or 'The output'} cannot grow: {error.strerror}.")
        if os.environ.get("OUTRIDER_DEBUG") == "1":
            raise
        rank = int(os.environ.get("RANK", "0"))
        _print_error(program, error, rank)
        if rank and isinstance(error, ConfigError):
            time.sleep(RANK_0_HEAD_START)  # launchers kill all ranks when the first exits
        raise SystemExit(getattr(error, "code", 2)) from None


def _print_error(program: str, error: ConfigError | RunError, rank: int) -> None:
    """Print one message in a single write, so that ranks do not interleave."""
    where = program if rank == 0 else f"{program} [rank {rank}]"
    kind = "config error" if isinstance(error, ConfigError) else "error"
    if kind == "config error" and rank > 0:
        return
    with suppress(OSError):  # stderr may be a file on the full disk
        sys.stderr.write(f"{where}: {kind}: {error}\n")
        sys.stderr.flush()
