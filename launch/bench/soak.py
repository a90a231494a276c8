"""`outrider bench soak`: fault injection into a run of several ranks.

A run trains without faults. The same run is started, interrupted by a fault at a random moment and
started again, until every fault has been injected. Weights and logs must be bit-equal, no process
may be left, and a run that a signal stopped must have saved its last step. docs/training.md
describes the kinds of fault.
"""

import dataclasses
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import psutil
from rich.table import Table

from outrider.conf.console import Console
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.fields import option
from outrider.conf.files import folder_lock, remove_folder, write
from outrider.conf.options import parse_words
from outrider.conf.tensor_files import read_tensors
from outrider.launch.bench.common import save_result
from outrider.launch.processes import ENTRY, clean_environment, open_log, train_command
from outrider.train.checkpoint import list_checkpoints, step_of

TIMEOUT = 300.0  # seconds, for anything that a run does by itself
GRACE = 30.0  # seconds in which the ranks of an ended launcher end
SMALL_DISK = 10**9  # bytes of a disk that may be filled
MARKER, FILLER = ".outrider-soak", "filler"  # in `dir`: made by this benchmark; fills the disk
RUN = [
    "drafter=eagle3", "target=tiny", "data.max_length=128", "data.max_samples=60",
    "train.batch_tokens=512", "train.save_every=2", "train.eval_every=4", "train.log_every=1",
    "train.keep_last=3", "drafter.depths=2", "train.quick_eval=false", "launch.wait=0.25",
]  # fmt: skip
ON_CPU = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}  # sums in one order: equal bits
Launcher: TypeAlias = "subprocess.Popen[bytes]"
Kind = Literal[
    "kill a rank", "kill all", "kill in a save", "kill in a test", "terminate", "terminate a rank",
    "terminate all", "interrupt", "interrupt twice", "truncate", "flip a bit", "stall", "no room",
    "full disk",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `outrider bench soak`."""

    faults: int = option(20, "faults to inject", "[1, inf)")
    ranks: int = option(2, "processes of the run", "[1, 1024]")
    launch: str = option("ddp", "how ranks share the work: ddp, zero1, zero2, zero3")
    seed: int = option(0, "of the faults and their times")
    kinds: tuple[Kind, ...] = option(get_args(Kind), "kinds of fault, all equally often")
    dir: str = option("runs/soak", "folder of the two runs: new, empty, or of an earlier soak")
    out: str = option("", "JSON file for the result")


def soak(words: list[str]) -> int:
    """Run the benchmark. Returns 0 if the two runs are equal, and every fault ended as it should.

    Raises:
        ConfigError: `dir` holds files that no soak made.
    """
    options, console = parse_words(Options, words), Console()
    folder = Path(options.dir)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARKER).is_file():
        why, fix = "The folder is not empty and no soak made it.", "Choose a new or empty folder."
        raise ConfigError("dir", options.dir, why, fix)
    write(folder / MARKER, b"")
    with folder_lock(folder):
        for name in ("whole", "hurt"):
            remove_folder(folder / name)
            (folder / f"{name}.txt").unlink(missing_ok=True)
        return _compare_runs(options, folder, console)


def _compare_runs(options: Options, folder: Path, console: Console) -> int:
    small = shutil.disk_usage(folder).total <= SMALL_DISK
    if "full disk" in options.kinds and not small:
        console.print("full disk: left out, because the folder is on a large disk")
    schedule = _schedule(options, small)
    steps = 7 * options.faults + 8  # a fault costs 1 to 7 steps
    whole, faulty = (FaultyRun(options, folder / name, steps) for name in ("whole", "hurt"))
    console.print(f"{steps} steps on {options.ranks} ranks ({options.launch}), without faults")
    whole.finish()
    faults = [_inject(faulty, name, console) for name in schedule]
    faulty.finish()
    signals = [fault for fault in faults if fault["fault"].startswith(("terminate", "interrupt"))]
    verdicts = {
        "weights_equal": whole.weights() == faulty.weights(),
        "log_equal": whole.log_lines() == faulty.log_lines(),
        "no_process_left": not any(fault["left"] for fault in faults),
        "signals_saved": not any(fault["unsaved"] for fault in signals),
    }
    console.print(_table(faults))
    for name, holds in verdicts.items():
        console.print(f"{name.replace('_', ' ')}: {'yes' if holds else 'NO'}")
    details = {"options": dataclasses.asdict(options), "steps": steps, "faults": faults}
    save_result(options.out, {**details, **verdicts})
    return int(not all(verdicts.values()))


def _schedule(options: Options, small_disk: bool) -> list[Kind]:
    """Return the kinds of fault equally often, in random order; a large disk is not filled."""
    kinds = [kind for kind in options.kinds if small_disk or kind != "full disk"]
    if not kinds:
        why = f"A full disk needs a disk of at most {SMALL_DISK:,} bytes, which is filled."
        raise ConfigError("dir", options.dir, why, "docs/training.md shows how to mount one.")
    names = kinds * -(-options.faults // len(kinds))
    random.Random(options.seed).shuffle(names := names[: options.faults])
    return names


def _inject(run: "FaultyRun", name: Kind, console: Console) -> dict[str, Any]:
    start, process = time.monotonic(), run.start()
    ranks = list[psutil.Process]()
    try:
        run.advance(process)
        ranks, moment = run.ranks(process), time.monotonic()
        FAULTS[name](run, process)
        code = run.wait(process)
        left = _count_left(ranks)
    finally:
        run.kill(process, ranks or run.ranks(process))
        (run.folder.parent / FILLER).unlink(missing_ok=True)
    end, step, unsaved = time.monotonic(), run.step(), run.unsaved()
    outcome = f"ended with {code} after {end - moment:.1f} s, {unsaved} steps not saved"
    console.print(f"{name} at step {step}: {outcome}")
    seconds = {"seconds": end - start, "seconds_to_end": end - moment}
    counts = {"code": code, "unsaved": unsaved, "left": left}
    return {"fault": name, "step": step, **counts, **seconds}


def _table(faults: list[dict[str, Any]]) -> Table:
    head = ("fault", "times", "at steps", "exit codes", "steps not saved", "seconds to its end")
    table = Table(*head, title=f"{len(faults)} faults")
    for name in dict.fromkeys(fault["fault"] for fault in faults):
        group = [fault for fault in faults if fault["fault"] == name]
        lists = [[fault[key] for fault in group] for key in ("step", "code", "unsaved")]
        seconds = [f"{fault['seconds_to_end']:.1f}" for fault in group]
        texts = (", ".join(map(str, values)) for values in (*lists, seconds))
        table.add_row(name, str(len(group)), *texts)
    return table


class FaultyRun:
    """A training run into which faults can be injected."""

    def __init__(self, options: Options, folder: Path, steps: int) -> None:
        self.folder, self.log = folder, folder.with_suffix(".txt")
        self.random = random.Random(f"{options.seed} moments")
        self.command = [
            *train_command(options.ranks), *RUN, f"train.max_steps={steps}",
            f"launch={options.launch}", f"run.dir={folder}",
        ]  # fmt: skip

    def start(self) -> Launcher:
        with open_log(self.log) as file:
            return subprocess.Popen(
                self.command, stdout=file, stderr=file, start_new_session=True,
                env={**clean_environment(), **ON_CPU},
            )  # fmt: skip

    def finish(self) -> None:
        """Train to the end; RunError: the run failed."""
        if code := self.start().wait():
            raise RunError(f"The run {self.folder} ended with {code}.", f"See {self.log}.")

    def log_lines(self) -> list[dict[str, Any]]:
        """Return the complete lines of the metrics log, without speeds, which differ."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.is_file() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]

    def step(self) -> int:
        return max((row["step"] for row in self.log_lines()), default=0)

    def unsaved(self) -> int:
        """Return the number of trained steps after the newest checkpoint."""
        rows, saved = self.log_lines(), list_checkpoints(self.folder / "checkpoints")
        done = max((row["step"] + 1 for row in rows if row["kind"] == "train"), default=0)
        return done - (step_of(saved[-1]) if saved else 0)

    def weights(self) -> dict[str, list[float]]:
        tensors = read_tensors(self.folder / "drafter" / "model.safetensors", None, "")
        return {name: tensor.double().flatten().tolist() for name, tensor in tensors.items()}

    def ranks(self, process: Launcher) -> list[psutil.Process]:
        try:
            children = psutil.Process(process.pid).children(recursive=True)
            return [child for child in children if " ".join(ENTRY) in " ".join(child.cmdline())]
        except psutil.Error:
            return []

    def wait_for(self, condition: Callable[[], bool], process: Launcher) -> None:
        """Wait until the condition holds; RunError: not within TIMEOUT, or the run ended."""
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            if process.poll() is not None or time.monotonic() > deadline:
                why = f"The run ended ({process.poll()}) or made no progress."
                raise RunError(why, f"See {self.log}.")
            time.sleep(0.005)

    def advance(self, process: Launcher) -> None:
        """Wait until the run is 1 to 3 steps beyond its last logged step, then a random time."""
        goal = self.step() + self.random.randint(1, 3)
        self.wait_for(lambda: self.step() >= goal, process)
        time.sleep(0.2 * self.random.random())

    def wait(self, process: Launcher) -> int:
        """Return the exit code; RunError: the run did not end within TIMEOUT."""
        try:
            return process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            why = f"The run {self.folder} did not end within {TIMEOUT:.0f} s."
            raise RunError(why, f"See {self.log}.") from None

    def kill(self, process: Launcher, ranks: list[psutil.Process] | None = None) -> None:
        """Kill the launcher, then the ranks; a living launcher would terminate them by SIGTERM."""
        ranks = self.ranks(process) if ranks is None else ranks
        process.kill()
        for rank in ranks:
            with suppress(psutil.Error):
                rank.kill()
        _count_left(ranks)


def _count_left(ranks: list[psutil.Process]) -> int:
    """Wait for all to end, GRACE seconds at most; return how many still run. A zombie has ended."""

    def runs(rank: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return bool(rank.status() != psutil.STATUS_ZOMBIE)
        return False

    deadline = time.monotonic() + GRACE
    while (left := sum(map(runs, ranks))) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _kill_in_a_save(run: FaultyRun, process: Launcher) -> None:
    run.wait_for(lambda: any((run.folder / "checkpoints").glob(".step-*")), process)
    run.kill(process)


def _kill_in_a_test(run: FaultyRun, process: Launcher) -> None:
    """Directly after the last step before an evaluation."""
    run.wait_for(lambda: run.step() % 4 == 3, process)
    time.sleep(0.1 * run.random.random())
    run.kill(process)


def _damage(run: FaultyRun, process: Launcher, change: Callable[[bytes], bytes]) -> None:
    """Kill all, then change the tensors or the progress of the newest of several checkpoints."""
    folder = run.folder / "checkpoints"
    run.wait_for(lambda: len(list_checkpoints(folder)) > 1, process)
    run.kill(process)
    newest = list_checkpoints(folder)[-1] / run.random.choice(["state.safetensors", "state.json"])
    newest.write_bytes(change(newest.read_bytes()))


def _truncate(run: FaultyRun, process: Launcher) -> None:
    _damage(run, process, lambda data: data[: -run.random.randint(1, 1000)])


def _flip_a_bit(run: FaultyRun, process: Launcher) -> None:
    def flip(data: bytes) -> bytes:
        at, bit = run.random.randrange(len(data)), run.random.randrange(8)
        return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]

    _damage(run, process, flip)


def _no_room(run: FaultyRun, process: Launcher) -> None:
    for rank in run.ranks(process):
        resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (2**16, 2**16))


def _fill_disk(run: FaultyRun, process: Launcher) -> None:
    """Until the run ends, a file takes the free space except for a part of a checkpoint."""
    folder, filler = run.folder / "checkpoints", run.folder.parent / FILLER
    run.wait_for(lambda: bool(list_checkpoints(folder)), process)
    size = (list_checkpoints(folder)[-1] / "state.safetensors").stat().st_size
    spare = run.random.randint(size // 100, size)
    with filler.open("wb") as file:
        while process.poll() is None:  # removed checkpoints free space
            used, free = filler.stat().st_size, shutil.disk_usage(folder).free
            if free > spare:
                with suppress(OSError):  # the run took it
                    os.posix_fallocate(file.fileno(), used, free - spare)
            time.sleep(0.01)


def _stop_all(run: FaultyRun, process: Launcher) -> None:
    for one in (process, *run.ranks(process)):
        one.terminate()


def _interrupt_twice(run: FaultyRun, process: Launcher) -> None:
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.5 * run.random.random())
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)


FAULTS: dict[Kind, Callable[[FaultyRun, Launcher], None]] = {
    "kill a rank": lambda run, process: run.random.choice(run.ranks(process)).kill(),
    "kill all": FaultyRun.kill,
    "kill in a save": _kill_in_a_save,
    "kill in a test": _kill_in_a_test,
    "terminate": lambda _run, process: process.terminate(),
    "terminate a rank": lambda run, process: run.random.choice(run.ranks(process)).terminate(),
    "terminate all": _stop_all,
    "interrupt": lambda _run, process: os.killpg(process.pid, signal.SIGINT),
    "interrupt twice": _interrupt_twice,
    "truncate": _truncate,
    "flip a bit": _flip_a_bit,
    "stall": lambda run, process: run.random.choice(run.ranks(process)).suspend(),
    "no room": _no_room,
    "full disk": _fill_disk,
}
