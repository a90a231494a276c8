"""An engine's script as a process group: time limit, lines of progress, and the end of its log."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from outrider.conf.errors import RunError
from outrider.conf.shown_text import for_terminal

START = 600.0  # seconds for imports, compilation and conversion, on a busy machine
SLOWER = 10.0  # times as long as Outrider may take to read the models and decode the prompts
POLL, LINE = 0.2, 60.0  # seconds between looks at the process; between lines of progress
LAST_LINES, LAST_BYTES = 12, 1 << 14  # of the log in a message
PATIENCE = 5.0  # seconds between the request to end and the kill


def time_limit(own_seconds: float) -> float:
    """Return the seconds that an engine may take.

    Args:
        own_seconds: that Outrider took to write the target and to decode the same prompts.
    """
    return START + SLOWER * own_seconds


def run_script(
    name: str, words: Sequence[str], log: Path, limit: float, note: Callable[[str], object],
    environment: Mapping[str, str], fix: str,
) -> None:  # fmt: skip
    """Run a command in the folder of its log until it ends.

    Args:
        name: of the engine, for messages.
        limit: seconds; then the command and all processes that it started are ended.
        note: called once a minute with the time and the last line of the log.

    Raises:
        RunError: it fails, or does not end in time; with the end of its log.
    """
    start, last = time.monotonic(), 0.0
    with log.open("wb") as stream:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
            cwd=log.parent, env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip
    try:
        while process.poll() is None:
            seconds = time.monotonic() - start
            if seconds > limit:
                message = f"{name} did not end within {_format(limit)}, which is {_format(START)}"
                message += f" and {SLOWER:g} times what Outrider took. {_end_of(log)}"
                raise RunError(message, fix)
            if seconds - last > LINE:
                last = seconds
                line = "".join(_last_lines(log)[-1:])[:160]
                note(f"{name}: {_format(seconds)} of at most {_format(limit)}; {line}".strip("; "))
            time.sleep(POLL)
    finally:
        _end_group(process)
    if process.returncode:
        raise RunError(f"{name} does not decode with this folder. {_end_of(log)}", fix)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and those that it started, also where it has ended itself."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, kind)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)


def _last_lines(log: Path) -> list[str]:
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - LAST_BYTES))
        text = stream.read().decode(errors="replace")
    return [for_terminal(line) for line in text.strip().splitlines()[-LAST_LINES:]]


def _end_of(log: Path) -> str:
    lines = _last_lines(log)
    return "\n  ".join(["The end of its log:", *lines]) if lines else "It printed nothing."


def _format(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
