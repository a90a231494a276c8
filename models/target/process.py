"""Distributed environment of a process: rank, device, CPU threads, process group."""

import os
import platform
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch

from outrider.conf.errors import RunError
from outrider.conf.quantities import format_count
from outrider.conf.schema import LaunchConfig

THREADS = "OUTRIDER_THREADS"  # threads of each rank; launchers default to one
POLL = 2.0  # seconds between two looks of `wait_until`
TRUE = ("1", "t", "true", "y", "yes", "on")  # how accelerate reads a variable


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def device() -> torch.device:
    """Return the device of this rank; it needs no process group.

    Raises:
        RunError: there are more ranks on this machine than GPUs.
    """
    wants_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in TRUE
    if wants_cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= count:
        message = f"Rank {number} of this machine has no GPU: it sees {format_count(count, 'GPU')}."
        raise RunError(
            message, "Start one process per GPU, or set ACCELERATE_USE_CPU=true to use the CPU."
        )
    return torch.device("cuda", number)


def processor() -> str:
    """Return the name of the processor."""
    file = Path("/proc/cpuinfo")  # of Linux
    lines = file.read_text().splitlines() if file.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def available_cores() -> int:
    return len(os.sched_getaffinity(0))


def set_threads() -> int:
    """Give each rank its share of the cores, and return its number of threads.

    Launchers set OMP_NUM_THREADS=1 by default, which wastes cores. Another value, or one set
    without a launcher, is the user's choice and is kept.
    """
    launched = "LOCAL_WORLD_SIZE" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
    if threads := os.environ.get(THREADS):
        torch.set_num_threads(int(threads))
    elif launched and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, available_cores() // local_world_size()))
    return torch.get_num_threads()


def init_group(launch: LaunchConfig) -> None:
    """Create the process group before accelerate does; sharding the target needs it."""
    if world_size() == 1 or torch.distributed.is_initialized():
        return
    if device().type == "cuda":
        torch.cuda.set_device(device())
    torch.distributed.init_process_group(backend(), timeout=timedelta(minutes=launch.wait))


def backend() -> str:
    return "nccl" if device().type == "cuda" else "gloo"


def destroy_group() -> None:
    """Destroy the process group; rank 0 continues alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def wait_until(
    condition: Callable[[], tuple[bool, object]], minutes: float, what: str, poll: float = POLL
) -> None:
    """Wait for another process; raise RunError if it makes no progress.

    Args:
        condition: returns (done, progress), such as the number of shards in a folder.
        minutes: deadline since `progress` last changed (`launch.wait`); then RunError is raised.
        what: what is missing, for the message: "rank 0's answers in FOLDER".
        poll: seconds between two calls of `condition`.
    """
    done, progress = condition()
    since = time.monotonic()
    while not done:
        if time.monotonic() - since > 60 * minutes:
            raise RunError(
                f"Waited {minutes:g} minutes (launch.wait) for {what}, without progress.",
                "Check that the process writing it is running; raise launch.wait if it is slow.",
            )
        time.sleep(poll)
        done, latest = condition()
        if latest != progress:
            progress, since = latest, time.monotonic()
