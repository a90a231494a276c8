"""`outrider bench soak`: fault injection into a run of several ranks.

A run trains without faults. The same run is started, interrupted by a fault at a random moment and
started again, until every fault has been injected. Weights and logs must be bit-equal.

    kill a rank      kill -9 of one rank; the launcher ends the others
    kill all         kill -9 of the launcher and all ranks
    kill in a save   the same while a checkpoint is being written
    kill in a test   the same while held-out text is evaluated
    terminate        SIGTERM to the launcher: the ranks save and exit
    truncate         kill -9 of all, then the newest checkpoint is truncated
    stall            SIGSTOP of one rank: the others time out and name it
    no room          a limit on file sizes: the next save fails
"""

import dataclasses
import json
import random
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import psutil
from rich.table import Table

from outrider.conf.compose import parse_words
from outrider.conf.console import Console
from outrider.conf.errors import RunError
from outrider.conf.fields import option
from outrider.conf.files import read_tensors
from outrider.launch.bench.machine import save_result
from outrider.launch.processes import clean_environment, open_log, train_command

TIMEOUT = 300.0  # seconds, for anything that a run does by itself
RUN = [
    "drafter=eagle3", "target=tiny", "data.max_length=128", "data.max_samples=60",
    "train.batch_tokens=512", "train.save_every=2", "train.eval_every=4", "train.log_every=1",
    "train.keep_last=3", "drafter.depths=2", "train.quick_eval=false", "launch.wait=0.25",
]  # fmt: skip
Launcher: TypeAlias = "subprocess.Popen[bytes]"


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `outrider bench soak`."""

    faults: int = option(20, "faults to inject", "[1, inf)")
    ranks: int = option(2, "processes of the run", "[1, 1024]")
    launch: str = option("ddp", "how ranks share the work: ddp, zero1, zero2, zero3")
    seed: int = option(0, "of the faults and their times")
    dir: str = option("runs/soak", "folder of the two runs; its content is removed first")
    out: str = option("", "JSON file for the result")


def soak(words: list[str]) -> int:
    """Run the benchmark. Returns 0 if the two runs are equal."""
    options, console = parse_words(Options, words), Console()
    folder = Path(options.dir)
    shutil.rmtree(folder, ignore_errors=True)
    steps = 7 * options.faults + 8  # a fault costs 1 to 7 steps
    whole, faulty = (FaultyRun(options, folder / name, steps) for name in ("whole", "hurt"))
    console.print(f"{steps} steps on {options.ranks} ranks ({options.launch}), without faults")
    whole.finish()
    faults = [_inject(faulty, name, console) for name in _schedule(options)]
    faulty.finish()
    equal = {
        "weights_equal": whole.weights() == faulty.weights(),
        "log_equal": whole.log_lines() == faulty.log_lines(),
    }
    console.print(_table(faults))
    verdicts = ("bit-equal" if one else "NOT EQUAL" for one in equal.values())
    console.print("weights {}, log {}".format(*verdicts))
    details = {"options": dataclasses.asdict(options), "steps": steps, "faults": faults}
    save_result(options.out, {**details, **equal})
    return int(not all(equal.values()))


def _schedule(options: Options) -> list[str]:
    """Return all kinds of fault equally often, in random order."""
    names = list(FAULTS) * -(-options.faults // len(FAULTS))
    random.Random(options.seed).shuffle(names := names[: options.faults])
    return names


def _inject(run: "FaultyRun", name: str, console: Console) -> dict[str, Any]:
    start = time.monotonic()
    process = run.start()
    try:
        run.advance(process)
        FAULTS[name](run, process)
    except BaseException:
        run.kill(process)
        raise
    code, step = run.wait(process), run.step()
    console.print(f"{name} at step {step}: ended with {code}", highlight=False)
    return {"fault": name, "step": step, "code": code, "seconds": time.monotonic() - start}


def _table(faults: list[dict[str, Any]]) -> Table:
    head = ("fault", "times", "at steps", "exit codes", "seconds")
    table = Table(*head, title=f"{len(faults)} faults")
    for name in dict.fromkeys(fault["fault"] for fault in faults):
        group = [fault for fault in faults if fault["fault"] == name]
        steps = ", ".join(str(fault["step"]) for fault in group)
        codes = ", ".join(dict.fromkeys(str(fault["code"]) for fault in group))
        seconds = sum(fault["seconds"] for fault in group)
        table.add_row(name, str(len(group)), steps, codes, f"{seconds:.0f}")
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
                env={**clean_environment(), "OMP_NUM_THREADS": "1"},
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

    def weights(self) -> dict[str, list[float]]:
        tensors = read_tensors(self.folder / "drafter" / "model.safetensors", None, "")
        return {name: tensor.double().flatten().tolist() for name, tensor in tensors.items()}

    def ranks(self, process: Launcher) -> list[psutil.Process]:
        try:
            children = psutil.Process(process.pid).children(recursive=True)
            return [child for child in children if "train.py" in " ".join(child.cmdline())]
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
        """Return the exit code; no process of the run is left."""
        ranks = self.ranks(process)
        try:
            return process.wait(TIMEOUT)
        finally:
            self.kill(process, ranks)

    def kill(self, process: Launcher, ranks: list[psutil.Process] | None = None) -> None:
        """Kill the launcher, then the ranks; a living launcher would terminate them by SIGTERM."""
        ranks = self.ranks(process) if ranks is None else ranks
        process.kill()
        for rank in ranks:
            with suppress(psutil.Error):
                rank.kill()
        psutil.wait_procs(ranks, timeout=30)


def _kill_in_a_save(run: FaultyRun, process: Launcher) -> None:
    run.wait_for(lambda: any((run.folder / "checkpoints").glob(".step-*")), process)
    run.kill(process)


def _kill_in_a_test(run: FaultyRun, process: Launcher) -> None:
    """Directly after the last step before an evaluation."""
    run.wait_for(lambda: run.step() % 4 == 3, process)
    time.sleep(0.1 * run.random.random())
    run.kill(process)


def _truncate(run: FaultyRun, process: Launcher) -> None:
    folder = run.folder / "checkpoints"
    run.wait_for(lambda: len(list(folder.glob("step-*"))) > 1, process)
    run.kill(process)
    newest = max(folder.glob("step-*")) / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[: -run.random.randint(1, 1000)])


def _no_room(run: FaultyRun, process: Launcher) -> None:
    for rank in run.ranks(process):
        resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (2**16, 2**16))


FAULTS: dict[str, Callable[[FaultyRun, Launcher], None]] = {
    "kill a rank": lambda run, process: run.random.choice(run.ranks(process)).kill(),
    "kill all": FaultyRun.kill,
    "kill in a save": _kill_in_a_save,
    "kill in a test": _kill_in_a_test,
    "terminate": lambda _run, process: process.terminate(),
    "truncate": _truncate,
    "stall": lambda run, process: run.random.choice(run.ranks(process)).suspend(),
    "no room": _no_room,
}
