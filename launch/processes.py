"""Processes of runs: commands, environments and output."""

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Protocol, runtime_checkable

import outrider

INTERRUPTED = 130  # exit code after Ctrl-C
ROOT = Path(outrider.__file__).parents[1]
POLL_SECONDS = 0.3  # between checks of a run


@runtime_checkable
class RunHandle(Protocol):
    """A started run: a local process, or a job in a queue."""

    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def wait(self) -> int: ...


def open_log(log: Path | None) -> AbstractContextManager[IO[bytes] | None]:
    """Open a log file for appending; None stays None."""
    if log is None:
        return nullcontext()
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("ab")


def train_command(ranks: int) -> list[str]:
    """Return the command that trains on so many local ranks; append overrides."""
    entry = str(ROOT / "train.py")
    if ranks == 1:
        return [sys.executable, entry]
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}",
        "--master_port=0", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", entry,
    ]  # fmt: skip


def clean_environment() -> dict[str, str]:
    """Return the environment without the variables that a launcher sets."""
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in launched}
