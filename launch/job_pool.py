"""Runs as processes of their own: several at a time, on devices of their own, again if they fail.

A process of its own, so that memory and settings of one run never touch the next. It is started
here, or on a machine that Slurm chooses (slurm.py). Whoever stops a sweep stops its runs: they are
told, they save, and the same command continues them.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, Protocol, runtime_checkable

import outrider
from outrider.conf.sweeps import SweepConfig

INTERRUPTED = 130
ROOT = Path(outrider.__file__).parents[1]
LOOK = 0.3  # seconds between looks at a run
THREADS = "OUTRIDER_THREADS"  # of each rank; a launcher that is told nothing says one
GRACE = 300  # seconds that torchrun gives ranks to save

Watch = Callable[[], bool]  # whether a run is to be stopped now


@runtime_checkable
class Started(Protocol):
    """A run under way: a process here, or a job in a queue."""

    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def wait(self) -> int: ...


class Crew:
    """Places for runs, and the runs in them. As a context it passes SIGTERM on to them."""

    def __init__(self, sweep: SweepConfig) -> None:
        self.sweep, self.stopped = sweep, False
        self._running: set[Started] = set()
        self._places: queue.Queue[int] = queue.Queue()
        for place in range(sweep.jobs):
            self._places.put(place)

    @property
    def alone(self) -> bool:
        """One run at a time, here: what it says may go to the terminal."""
        return self.sweep.jobs == 1 and self.sweep.by == "local"

    def __enter__(self) -> "Crew":
        def told(_number: int, _frame: FrameType | None) -> None:
            self.stop()

        if threading.current_thread() is threading.main_thread():
            self._before: Any = signal.signal(signal.SIGTERM, told)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _e: BaseException | None, _at: TracebackType | None
    ) -> None:
        if kind is not None:
            self.stop()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)

    def stop(self) -> None:
        """Tell all runs to save and end; none is started any more."""
        self.stopped = True
        for process in list(self._running):
            process.terminate()

    def run(
        self, verb: str, words: list[str], log: Path | None = None, watch: Watch | None = None
    ) -> int:
        """Wait for a place, run to the end there, try again if it failed and that was asked for.

        Args:
            log: what it says goes there; None: to the terminal.
            watch: asked now and then; True stops the run, which saves and ends with INTERRUPTED.

        Returns:
            The exit code; INTERRUPTED too where the sweep was stopped before it began.
        """
        place = self._places.get()
        try:
            for _ in range(self.sweep.retries + 1):
                if self.stopped:
                    return INTERRUPTED
                code = self._once(verb, words, place, log, watch)
                if code in (0, INTERRUPTED):
                    break
            return code
        finally:
            self._places.put(place)

    def _once(
        self, verb: str, words: list[str], place: int, log: Path | None, watch: Watch | None
    ) -> int:
        process = self._start(verb, words, place, log)
        self._running.add(process)
        if self.stopped:  # meanwhile
            process.terminate()
        try:
            return self._awaited(process, watch)
        finally:
            self._running.discard(process)

    def _start(self, verb: str, words: list[str], place: int, log: Path | None) -> Started:
        command, told = self.command(verb, words), self.told(place)
        if self.sweep.by == "slurm":
            from outrider.launch.slurm import submit

            return submit(self.sweep, command, told, log)
        with opened(log) as output:
            return subprocess.Popen(
                command, env={**os.environ, **told},
                stdout=output, stderr=None if output is None else subprocess.STDOUT,
            )  # fmt: skip

    def _awaited(self, process: Started, watch: Watch | None) -> int:
        told = False
        try:
            while process.poll() is None:
                time.sleep(LOOK)
                if watch is not None and not told and watch():
                    told = True
                    process.terminate()
        except KeyboardInterrupt:  # the run was told too, and saves; a second one ends the waiting
            self.stop()
            process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        code = process.returncode
        return INTERRUPTED if told or self.stopped or code is None else code

    def command(self, verb: str, words: list[str]) -> list[str]:
        """One process, or a launcher of several."""
        if self.sweep.processes == 1 or verb != "train":
            return [sys.executable, "-m", "outrider.launch.cli", verb, *words]
        return [*train_on(self.sweep.processes), *words]

    def told(self, place: int) -> dict[str, str]:
        """What a run finds in its environment beside the rest: its GPUs, its share of the cores."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        group = os.environ.get("WANDB_RUN_GROUP", Path(self.sweep.dir).name)
        told = {"PYTHONPATH": path, "WANDB_RUN_GROUP": group}
        told["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = os.environ.get(
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE)
        )
        if self.sweep.devices:
            told["CUDA_VISIBLE_DEVICES"] = self.sweep.devices[place]
        if (share := self._threads()) is not None:
            told["OMP_NUM_THREADS"] = told[THREADS] = str(share)
        return told

    def _threads(self) -> int | None:
        """Of each rank, where it shares cores with others; None where it need not be told."""
        if self.sweep.by == "slurm":
            return max(1, self.sweep.cores // self.sweep.processes)
        if self.sweep.jobs == 1:
            return None
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        return max(1, cores // (self.sweep.jobs * self.sweep.processes))


@contextmanager
def opened(log: Path | None) -> Iterator[IO[bytes] | None]:
    """A file to append to, or nothing."""
    if log is None:
        yield None
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        yield file


def train_on(ranks: int) -> list[str]:
    """The command that trains here, on so many ranks; overrides follow."""
    entry = str(ROOT / "train.py")
    if ranks == 1:
        return [sys.executable, entry]
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}",
        "--master_port=0", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", entry,
    ]  # fmt: skip


def bare() -> dict[str, str]:
    """The environment without what a launcher has told this process."""
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in launched}
