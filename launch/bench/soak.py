"""`outrider bench soak`: a run of several ranks is hurt again and again, and must not notice.

    outrider bench soak faults=20 ranks=2 launch=zero2

First the run is made undisturbed. Then the same run is started, hurt at a random moment, and
started again with the same command, until every fault has been injected; then it may finish. Its
weights and its log must equal the undisturbed run's bit for bit.

    kill a rank      kill -9 of one rank; the launcher ends the others
    kill all         kill -9 of the launcher and all ranks
    kill in a save   the same while a checkpoint is being written
    kill in a test   the same while held-out text is measured
    terminate        SIGTERM to the launcher: the ranks save and leave
    truncate         kill -9 of all, then the newest checkpoint is cut short
    stall            SIGSTOP of one rank: the others wait, give up, and say for whom they waited
    no room          files may grow no further: the next save fails
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
from typing import Any, NamedTuple

import psutil
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from outrider.conf.compose import plain
from outrider.conf.errors import RunError
from outrider.conf.fields import key, read
from outrider.conf.files import read_tensors, write_json
from outrider.launch.job_pool import bare, train_on

PATIENCE = 300.0  # seconds for anything a run should do by itself
RUN = [
    "drafter=eagle3", "target=tiny", "data.max_length=128", "data.max_samples=60",
    "train.batch_tokens=512", "train.save_every=2", "train.eval_every=4", "train.log_every=1",
    "train.keep_last=3", "drafter.depths=2", "train.quick_eval=false", "launch.wait=0.25",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """What `outrider bench soak` takes."""

    faults: int = key(20, "faults to inject", "[1, inf)")
    ranks: int = key(2, "processes of the run", "[1, inf)")
    launch: str = key("ddp", "how they share the work: ddp, zero1, zero2, zero3")
    seed: int = key(0, "of the faults and their moments")
    dir: str = key("runs/soak", "the two runs lie there; what is there is removed")
    out: str = key("", "json file for the result")


class Blow(NamedTuple):
    """One fault: what it was, where it struck, how the run ended, where it went on."""

    fault: str
    step: int
    code: int
    seconds: float


def soak(words: list[str]) -> int:
    """The bench. Returns 0 if nothing was lost."""
    options = read(Options, plain(OmegaConf.from_dotlist(list(words))), "")
    folder, console = Path(options.dir), Console()
    shutil.rmtree(folder, ignore_errors=True)
    steps = 7 * options.faults + 8  # a fault takes it 1 to 7 steps further
    whole, hurt = Hurt(options, folder / "whole", steps), Hurt(options, folder / "hurt", steps)
    console.print(f"{steps} steps on {options.ranks} ranks ({options.launch}), undisturbed")
    if code := whole.start().wait():
        raise RunError(f"The undisturbed run ended with {code}.", f"Look into {whole.log}.")
    blows = [_blow(hurt, name, console) for name in _schedule(options)]
    if code := hurt.start().wait():
        raise RunError(f"The hurt run ended with {code}.", f"Look into {hurt.log}.")
    result = {
        "options": dataclasses.asdict(options),
        "steps": steps,
        "faults": [blow._asdict() for blow in blows],
        "weights_equal": whole.weights() == hurt.weights(),
        "log_equal": whole.lines() == hurt.lines(),
    }
    console.print(_table(blows))
    said = ("bit-equal" if result[what] else "NOT EQUAL" for what in ("weights_equal", "log_equal"))
    console.print("weights {}, log {}".format(*said))
    if options.out:
        write_json(Path(options.out), result)
    return int(not (result["weights_equal"] and result["log_equal"]))


def _schedule(options: Options) -> list[str]:
    """Every fault as often as the others, in random order."""
    names = list(FAULTS) * -(-options.faults // len(FAULTS))
    random.Random(options.seed).shuffle(names := names[: options.faults])
    return names


def _blow(run: "Hurt", name: str, console: Console) -> Blow:
    began = time.monotonic()
    process = run.start()
    try:
        run.advance(process)
        FAULTS[name](run, process)
    except BaseException:
        run.kill(process)
        raise
    code = run.ended(process)
    step = run.step()
    console.print(f"{name} at step {step}: ended with {code}", highlight=False)
    return Blow(name, step, code, time.monotonic() - began)


def _table(blows: list[Blow]) -> Table:
    table = Table(title=f"{len(blows)} faults")
    for head in ("fault", "times", "at steps", "exit codes", "seconds"):
        table.add_column(head)
    for name in dict.fromkeys(blow.fault for blow in blows):
        these = [blow for blow in blows if blow.fault == name]
        cells = (str(len(these)), ", ".join(str(b.step) for b in these))
        codes = ", ".join(str(c) for c in dict.fromkeys(b.code for b in these))
        table.add_row(name, *cells, codes, f"{sum(b.seconds for b in these):.0f}")
    return table


class Hurt:
    """A run that is started, looked at, and hurt."""

    def __init__(self, options: Options, folder: Path, steps: int) -> None:
        self.folder, self.log = folder, folder.with_suffix(".txt")
        self.chance = random.Random(f"{options.seed} moments")
        self.command = [
            *train_on(options.ranks), *RUN, f"train.max_steps={steps}",
            f"launch={options.launch}", f"run.dir={folder}",
        ]  # fmt: skip

    def start(self) -> "subprocess.Popen[bytes]":
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as file:
            return subprocess.Popen(
                self.command, stdout=file, stderr=file, start_new_session=True,
                env={**bare(), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    # ---- looking ----

    def lines(self) -> list[dict[str, Any]]:
        """What the log says of losses; speeds differ from run to run."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.is_file() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in found]

    def step(self) -> int:
        return max((line["step"] for line in self.lines()), default=0)

    def weights(self) -> dict[str, list[float]]:
        tensors = read_tensors(self.folder / "drafter" / "model.safetensors", None, "")
        return {name: tensor.double().flatten().tolist() for name, tensor in tensors.items()}

    def ranks(self, process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
        try:
            children = psutil.Process(process.pid).children(recursive=True)
            return [child for child in children if "train.py" in " ".join(child.cmdline())]
        except psutil.Error:
            return []

    # ---- waiting ----

    def until(self, true: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
        """
        Raises:
            RunError: it does not become true, or the run ends by itself.
        """
        late = time.monotonic() + PATIENCE
        while not true():
            if process.poll() is not None or time.monotonic() > late:
                why = f"The run ended by itself ({process.poll()}) or stood still."
                raise RunError(why, f"Look into {self.log}.")
            time.sleep(0.005)

    def advance(self, process: "subprocess.Popen[bytes]") -> None:
        """Some steps further than it ever was, and a moment into what comes then."""
        goal = self.step() + self.chance.randint(1, 3)
        self.until(lambda: self.step() >= goal, process)
        time.sleep(0.2 * self.chance.random())

    def ended(self, process: "subprocess.Popen[bytes]") -> int:
        """Its exit code; nothing of it is left."""
        ranks = self.ranks(process)
        try:
            return process.wait(PATIENCE)
        finally:
            process.kill()
            for rank in ranks:
                with suppress(psutil.Error):
                    rank.kill()
            psutil.wait_procs(ranks, timeout=30)

    # ---- hurting ----

    def kill(self, process: "subprocess.Popen[bytes]") -> None:
        """The launcher first, or it would clean up."""
        ranks = self.ranks(process)
        process.kill()
        for rank in ranks:
            with suppress(psutil.Error):
                rank.kill()
        psutil.wait_procs(ranks, timeout=30)


def _kill_a_rank(run: Hurt, process: "subprocess.Popen[bytes]") -> None:
    run.chance.choice(run.ranks(process)).kill()


def _kill_all(run: Hurt, process: "subprocess.Popen[bytes]") -> None:
    run.kill(process)


def _kill_in_a_save(run: Hurt, process: "subprocess.Popen[bytes]") -> None:
    place = run.folder / "checkpoints"
    run.until(lambda: any(place.glob(".step-*")), process)
    run.kill(process)


def _kill_in_a_test(run: Hurt, process: "subprocess.Popen[bytes]") -> None:
    """Right behind the last step before an evaluation."""
    run.until(lambda: run.step() % 4 == 3, process)
    time.sleep(0.1 * run.chance.random())
    run.kill(process)


def _terminate(_run: Hurt, process: "subprocess.Popen[bytes]") -> None:
    process.terminate()


def _truncate(run: Hurt, process: "subprocess.Popen[bytes]") -> None:
    run.until(lambda: len(list((run.folder / "checkpoints").glob("step-*"))) > 1, process)
    run.kill(process)
    newest = max((run.folder / "checkpoints").glob("step-*")) / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[: -run.chance.randint(1, 1000)])


def _stall(run: Hurt, process: "subprocess.Popen[bytes]") -> None:
    run.chance.choice(run.ranks(process)).suspend()


def _no_room(run: Hurt, process: "subprocess.Popen[bytes]") -> None:
    for rank in run.ranks(process):
        resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (2**16, 2**16))


FAULTS: dict[str, Callable[[Hurt, "subprocess.Popen[bytes]"], None]] = {
    "kill a rank": _kill_a_rank,
    "kill all": _kill_all,
    "kill in a save": _kill_in_a_save,
    "kill in a test": _kill_in_a_test,
    "terminate": _terminate,
    "truncate": _truncate,
    "stall": _stall,
    "no room": _no_room,
}
