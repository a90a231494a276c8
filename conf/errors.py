"""Errors that a user can fix, and the exit code and message of each.

They are printed without a traceback, unless `OUTRIDER_DEBUG=1`. Every other exception is a bug.
"""

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from outrider.conf.shown_text import for_terminal

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space, quota, file size limit
RANK_0_HEAD_START = 3.0  # seconds before other ranks exit, so that rank 0 prints the error
SHOWN = 500  # characters of a value in a message
FREE_SPACE = "Free some space and run the same command again; all saved files are complete."


class ConfigError(ValueError):
    """An invalid setting, found before a model is loaded: key and value, reason, fix."""

    def __init__(self, key: str, value: object, why: str, fix: str) -> None:
        super().__init__(f"{key} = {_abbreviate(value)}\n  {why}\n  {fix}")
        self.key, self.value, self.why, self.fix = key, value, why, fix


def _abbreviate(value: object) -> str:
    """Return the representation of a value, its first SHOWN characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more digits than Python converts, endless depth
        return f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


class RunError(RuntimeError):
    """An unusable file, model or service: the reason and the fix."""

    code = 2  # exit code of the process

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(f"{message}\n  {fix}")
        self.message, self.fix = message, fix


class RunStopped(RunError):
    """A signal stopped the run, which is saved. The command line has printed it."""

    code = 130


class CorruptFile(RunError):
    """Missing, truncated or modified file."""


class DiskFull(RunError):
    """Full disk, or an exceeded quota or file size limit."""

    code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message, FREE_SPACE)


class UnusablePlace(RunError):
    """A file or folder that the system does not let this user read or write."""

    code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message, "Choose another place, or change its permissions.")


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turn the panic of a library in Rust, which is no `Exception`, into a `RunError`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        fix = "Check the tokenizer and the other files that were given."
        raise RunError(f"A library failed on its input: {error}.", fix) from error


@contextmanager
def exit_on_error(program: str) -> Iterator[None]:
    """Turn the errors of this module into a message on stderr and an exit code.

    A `ConfigError` is the same on every rank, so only rank 0 prints it. A `RunError` may occur on
    one rank only (a truncated file, a full disk), so every rank prints its own with its number.

    Raises:
        SystemExit: 2 after a ConfigError or RunError, 1 on a full disk or unusable place, 130 after
            Ctrl-C or a stopped run.
    """
    try:
        with panics_as_errors():
            yield
    except (KeyboardInterrupt, RunStopped):
        raise SystemExit(130) from None
    except (ConfigError, RunError, OSError) as error:
        if isinstance(error, OSError):
            place = error.filename if error.filename is not None else "A file or stream"
            if error.errno in DISK_FULL_ERRNOS:
                error = DiskFull(f"{place} cannot grow: {error.strerror}.")
            elif error.errno is None or isinstance(error, ConnectionError | TimeoutError):
                raise  # of a library or the network
            else:
                error = UnusablePlace(f"{place}: {error.strerror}.")
        if os.environ.get("OUTRIDER_DEBUG") == "1":
            raise
        rank = int(os.environ.get("RANK", "0"))
        if rank and isinstance(error, ConfigError):
            time.sleep(RANK_0_HEAD_START)  # launchers kill all ranks when the first exits
        else:
            kind = "config error" if isinstance(error, ConfigError) else "error"
            where = f"{program} [rank {rank}]" if rank else program
            with suppress(OSError):  # stderr may be a file on the full disk
                sys.stderr.write(f"{where}: {kind}: {for_terminal(error)}\n")  # one write per rank
                sys.stderr.flush()
        raise SystemExit(getattr(error, "code", 2)) from None
