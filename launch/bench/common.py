"""Common code of the benchmarks: machine description, peak memory, child processes, results."""

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from outrider.conf.errors import RunError
from outrider.conf.files import write_json
from outrider.conf.quantities import format_count
from outrider.conf.schema import DrafterSettings, TargetConfig
from outrider.launch.processes import clean_environment
from outrider.models import drafters
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.target import process
from outrider.models.target.target import Target
from outrider.train.manifest import machine as machine_facts

CHILD = "OUTRIDER_BENCH_CHILD"  # set in the environment of a process that measures one setting


def describe_machine(on_gpu: bool | None = None) -> str:
    """Return the processor, threads, GPU and PyTorch version in one line.

    Args:
        on_gpu: the GPU was used; None: if there is one.
    """
    if on_gpu is None:
        on_gpu = process.device().type == "cuda"
    device = torch.cuda.get_device_name() if on_gpu else "no GPU"
    threads = format_count(torch.get_num_threads(), "thread")
    return f"{machine_facts()['processor']}, {threads}, {device}, torch {torch.__version__}"


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def children_bytes() -> int:
    """Return the resident memory of all processes that this one has started."""
    total = 0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += child.memory_info().rss
    return total


class PeakMemory:
    """Highest resident memory while the block runs, sampled at intervals."""

    def __init__(self, of: Callable[[], int] = resident_bytes, seconds: float = 0.001) -> None:
        """
        Args:
            of: bytes to sample.
            seconds: between two samples.
        """
        self.of, self.seconds, self.highest = of, seconds, of()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._ended.wait(self.seconds):
            self.highest = max(self.highest, self.of())

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Return the peak memory of a step above its start: of the GPU, or resident memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    before = resident_bytes()
    with PeakMemory() as peak:
        step()
    return peak.highest - before


def target_settings(name: str, dtype: Any = "float32") -> TargetConfig:
    """Return the settings of a target: tiny, smollm2, or a folder or hub id."""
    if name in ("tiny", "smollm2"):
        return TargetConfig("tiny" if name == "tiny" else "smollm2", dtype=dtype)
    return TargetConfig("hf", path=name, dtype=dtype)


def allow_positions(target: Target, count: int) -> None:
    """Allow more positions than the target was trained for, where its text does not matter."""
    config = target.text_config
    config.max_position_embeddings = max(count, config.max_position_embeddings)


def default_drafter(name: str, target: Target, draft_vocab: int = 0) -> Drafter:
    """Build a drafter with its default settings and untrained weights."""
    return build_drafter(drafters.config_class(name)(name=name), target, draft_vocab)


def build_drafter(cfg: DrafterSettings, target: Target, draft_vocab: int = 0) -> Drafter:
    """Build a drafter with untrained weights, if any, over the first tokens; 0: over all."""
    torch.manual_seed(0)
    size = target.vocab_size
    vocab = DraftVocab(torch.arange(min(draft_vocab, size) or size), size)
    drafter = drafters.build(cfg, target, vocab)
    return drafter.to(target.device, target.dtype).eval()


def use_threads(threads: int) -> None:
    """Use this many CPU threads; 0 keeps PyTorch's default."""
    if threads:
        torch.set_num_threads(threads)


def run_command(command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Run a command and return its standard output; a RunError is raised if it fails."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        output = (done.stderr or done.stdout).strip()[-2000:]
        message = f"{shlex.join(command)} ended with {done.returncode}:\n{output}"
        raise RunError(message, "Run this command directly to see the whole output.")
    return done.stdout


def run_outrider(*words: str, env: Mapping[str, str] | None = None) -> str:
    """Run `outrider WORDS` in a new process and return its standard output."""
    return run_command([sys.executable, "-m", "outrider.launch.cli", *words], env)


def run_in_child(bench: str, options: Any, **settings: object) -> Any:
    """Measure in a child process, with one setting of every list; return the parsed output."""
    values = {**dataclasses.asdict(options), **settings, "out": ""}
    words = [f"{key}={value}" for key, value in values.items()]
    output = run_outrider("bench", bench, *words, env={**os.environ, CHILD: "1"})
    return json.loads(output.strip().splitlines()[-1])


def answer_parent(measure: Callable[[], Any]) -> bool:
    """In a child of `run_in_child`, print the measurement as JSON; return whether it is a child."""
    if CHILD in os.environ:
        print(json.dumps(measure()))
    return CHILD in os.environ


def number_table(title: str, names: Sequence[str], text: Sequence[str] = ()) -> Table:
    """Return a table of right-aligned columns; those in `text` are left-aligned and unwrapped."""
    table = Table(title=title)
    for name in names:
        table.add_column(name, justify="left" if name in text else "right", no_wrap=name in text)
    return table


def save_result(out: str, result: Mapping[str, Any]) -> None:
    """Write the result as JSON; "" writes nothing."""
    if out:
        write_json(Path(out), result)


def report(
    console: Console, table: Table, out: str, result: Mapping[str, Any], on_gpu: bool | None = None
) -> None:
    """Print the table and the machine; write the machine and the result to `out`."""
    console.print(table)
    console.print(describe_machine(on_gpu))
    save_result(out, {"machine": describe_machine(on_gpu), **result})


def local_environment(ranks: int) -> dict[str, str]:
    """Return the environment of local ranks: one thread each, the CPU where GPUs are too few."""
    few = {"ACCELERATE_USE_CPU": "true"} if torch.cuda.device_count() < ranks else {}
    return {**clean_environment(), "OMP_NUM_THREADS": "1", **few}
