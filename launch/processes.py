"""Processes of runs: commands, environments and output."""

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Protocol, runtime_checkable

import outrider

INTERRUPTED = 130  # exit code after Ctrl-C
ROOT = Path(outrider.__file__).parents[1]
IN_CHECKOUT = (ROOT / "pyproject.toml").is_file()
ENTRY = ["train.py"] if IN_CHECKOUT else ["-m", "outrider", "train"]  # a wheel has no scripts
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
    if ranks == 1:
        return [sys.executable, *locate_entry(ENTRY)]
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}",
        "--master_port=0", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0",
        *locate_entry(ENTRY),
    ]  # fmt: skip


def locate_entry(words: Sequence[str]) -> list[str]:
    """Replace the word train.py by its path in this checkout."""
    return [str(ROOT / word) if IN_CHECKOUT and [word] == ENTRY else word for word in words]


def clean_environment() -> dict[str, str]:
    """Return the environment without the variables that a launcher sets."""
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in launched}
