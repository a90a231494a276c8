"""Checks by trial steps: the largest batch that fits into memory, and the time of a step.

On a GPU the batch doubles until it does not fit, then the interval is bisected. On a CPU a process
that takes too much memory is swapped out or killed, so the resident memory at a few rows is
extrapolated as a line, and the result is tried only where that is cheap. Resident memory is
compared with that before the first trial, because the allocator reuses the memory of earlier ones.
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from outrider.conf.quantities import format_bytes, format_count
from outrider.data.batches import select_rows
from outrider.launch.bench.common import PeakMemory, resident_bytes
from outrider.launch.cost_estimate import Cost, memory_of_run, trained_parameters
from outrider.launch.doctor.finding import Finding
from outrider.models.decode.round_times import Stopwatch
from outrider.models.target import process
from outrider.train.loop import LESS_MEMORY, optimizer_step
from outrider.train.optimizer import state_numbers
from outrider.train.schedule import format_seconds
from outrider.train.trainer import Trainer

USABLE = 0.8  # share of the free memory that a run may take; files and other processes need some
TRIAL_SHARE = 0.5  # share of the free memory that a trial may take
LONG = 5.0  # seconds that one trial may take
SHORT = 2.0  # seconds that one trial for the line may take
MAX_ROWS = 2**14
CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))
STEP_PARTS = ("unroll", "logits", "features", "forward")  # parts of `outrider memory`


class BatchTrial(NamedTuple):
    """A measured forward and backward pass."""

    rows: int
    peak: float  # bytes above those before the first trial
    seconds: float


def largest_fitting(fits: Callable[[int], bool], most: int = MAX_ROWS) -> int:
    """Return the largest number in 0..most that fits, in about 2 log2(result) calls of `fits`."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    larger = range(low + 1, min(high, most + 1))
    return low + bisect_left(larger, True, key=lambda count: not fits(count))


class MemoryLine(NamedTuple):
    """Bytes of a step as a line: fixed + each * rows."""

    fixed: float
    each: float

    @classmethod
    def fit(cls, one: BatchTrial, other: BatchTrial) -> "MemoryLine":
        each = max(1.0, (other.peak - one.peak) / (other.rows - one.rows))
        return cls(max(0.0, one.peak - each * one.rows), each)

    def at(self, rows: int) -> float:
        return self.fixed + self.each * rows

    def rows(self, limit: float) -> int:
        return min(MAX_ROWS, max(0, int((limit - self.fixed) / self.each)))


def free_memory() -> float:
    """Return the free CPU memory per rank: of the machine, or of its container (cgroup)."""
    free = float(psutil.virtual_memory().available)
    if all(file.is_file() for file in CGROUP):
        limit, used = (file.read_text().strip() for file in CGROUP)
        if limit.isdecimal() and used.isdecimal():
            free = min(free, max(0.0, float(limit) - float(used)))
    return free / max(1, process.local_world_size())


def forward_backward(run: Trainer, rows: int) -> float:
    """Run a forward and backward pass without the optimizer, and return its seconds."""
    watch = Stopwatch(run.target.device)
    batch = select_rows(run.data.train, torch.arange(rows) % len(run.data.train))
    denominators = torch.full((len(run.objective.weights),), float(batch.ids.numel()))
    with run.accelerator.autocast():
        loss, _ = run.objective(run.sources.train.trace(batch, run.target.device), denominators)
    loss.backward()
    run.objective.zero_grad(set_to_none=True)
    return watch.lap()


def check_largest_batch(run: Trainer, cost: Cost) -> Finding:
    """Check how many rows of data.max_length fit into one pass of a rank."""
    passes, length = _passes(run), run.data.train.length
    now = max(1, run.rows // passes)
    facts: dict[str, Any] = {"rows_now": now, "by_sums": cost.memory, "length": length}
    if run.config.launch.name == "zero3" or (process.world_size() > 1 and run.target.is_remote):
        message = "not measured where ranks shard the weights: see outrider memory"
        return Finding("memory", "ok", message, facts)
    rows, method, measured = _on_gpu(run) if run.target.device.type == "cuda" else _on_cpu(run)
    estimated_rows = largest_fitting(lambda rows: _estimated_bytes(run, rows) <= measured["room"])
    facts |= {"rows": rows, "how": method, "rows_by_sums": estimated_rows,
              "step_by_sums": _estimated_bytes(run, now), **measured}  # fmt: skip
    prefix = "more than " if rows >= MAX_ROWS else ""
    message = (
        f"room for {prefix}{format_count(rows, 'row')} of {length} tokens in one pass, the run "
        f"uses {now} (train.batch_tokens <= {rows * length * passes})\n"
        f"{method}; estimated as in outrider memory: {format_count(estimated_rows, 'row')}, "
        f"{format_bytes(cost.memory)} in total"
    )
    return Finding("memory", "wrong" if rows < now else "ok", message, facts, LESS_MEMORY)


def _passes(run: Trainer) -> int:
    """Return the forward passes of a step over all ranks."""
    return int(run.accelerator.num_processes * run.config.launch.accumulation)


def _estimated_bytes(run: Trainer, rows: int) -> float:
    """Bytes of a step beside the weights, estimated as in `outrider memory`."""
    tokens = rows * run.config.data.max_length * _passes(run)
    config = replace(run.config, train=replace(run.config.train, batch_tokens=tokens))
    parts = memory_of_run(run, config)
    gradients = 4 * trained_parameters(run)
    return sum(parts[name] for name in STEP_PARTS) + _state_bytes(run) + gradients


def _state_bytes(run: Trainer) -> int:
    """Bytes of the optimizer's states, allocated in the first step."""
    return 4 * state_numbers(run.drafter, run.config.train)


def _on_cpu(run: Trainer) -> tuple[int, str, dict[str, Any]]:
    """Return the rows that fit, a description of the method, and the measurements."""
    forward_backward(run, 1)  # libraries allocate their own memory on the first call
    before, free = float(resident_bytes()), free_memory()
    trials = [_trial(run, 1, before)]
    while True:
        trials.append(_trial(run, 2 * trials[-1].rows, before))
        line, last = MemoryLine.fit(trials[-2], trials[-1]), trials[-1]
        if 2 * last.seconds > SHORT or line.at(2 * last.rows) > TRIAL_SHARE * free:
            break
    line = MemoryLine(line.fixed + _state_bytes(run), line.each)
    rows = line.rows(USABLE * free)
    method = (
        f"extrapolated from resident memory at {trials[-2].rows} and {last.rows} rows to "
        f"{USABLE:.0%} of {format_bytes(free)} free"
    )
    is_quick = rows / last.rows * last.seconds < LONG
    if rows > last.rows and is_quick and line.at(rows) < TRIAL_SHARE * free:
        trials.append(_trial(run, rows, before))
        peak, predicted = format_bytes(trials[-1].peak), format_bytes(line.at(rows))
        method += f"; measured {peak}, predicted {predicted}"
    else:
        method += "; not tried"
    measured = {"room": USABLE * free, "row_bytes": line.each, "fixed_bytes": line.fixed}
    return rows, method, {**measured, "trials": [list(trial) for trial in trials]}


def _trial(run: Trainer, rows: int, before: float) -> BatchTrial:
    with PeakMemory() as peak:
        seconds = forward_backward(run, rows)
    return BatchTrial(rows, max(0.0, peak.highest - before), seconds)


def _on_gpu(run: Trainer) -> tuple[int, str, dict[str, Any]]:
    """Return as `_on_cpu`, from trials with the memory of the optimizer's states reserved."""
    device, trials = run.target.device, list[BatchTrial]()
    moments = torch.empty(_state_bytes(run), dtype=torch.uint8, device=device)
    torch.cuda.empty_cache()
    free = float(torch.cuda.mem_get_info(device)[0])
    before = torch.cuda.memory_allocated(device)

    def fits(rows: int) -> bool:
        if trials and trials[-1].seconds > LONG:
            return False  # larger ones take even longer
        torch.cuda.reset_peak_memory_stats(device)
        try:
            seconds = forward_backward(run, rows)
        except torch.cuda.OutOfMemoryError:
            run.objective.zero_grad(set_to_none=True)
            return False
        finally:
            torch.cuda.empty_cache()
        peak = torch.cuda.max_memory_allocated(device) - before
        trials.append(BatchTrial(rows, float(peak), seconds))
        return True

    rows = largest_fitting(fits)
    del moments
    torch.cuda.empty_cache()
    method = f"tried up to {format_count(rows, 'row')} in {format_bytes(free)} of free memory"
    if trials and trials[-1].seconds > LONG:
        method += "; larger batches take too long to try"
    return rows, method, {"room": free, "trials": [list(trial) for trial in trials]}


def check_step_time(run: Trainer, steps: int, cost: Cost) -> Finding:
    """Measure the seconds of a step after one warm-up step, and predict the time of the run.

    The learning rate is zero: every operation runs, and no weight changes.
    """
    seconds = _timed_steps(run, steps + 1)[1:]
    if not seconds:
        fix = "Lower train.lr, or check the text: the loss of the first steps is not finite."
        return Finding("time", "wrong", "the loss of a step is not finite", {}, fix)
    each, held, train = statistics.median(seconds), _evaluation_seconds(run), run.config.train
    ends = [60 * train.max_minutes] if train.max_minutes else []
    if train.max_steps:
        ends.append(each * train.max_steps + held * (train.max_steps // train.eval_every + 1))
    speed = run.rows * run.config.data.max_length / each
    facts = {"seconds_per_step": each, "spread": max(seconds) / min(seconds),
             "steps": len(seconds), "seconds_held_out": held, "tokens_per_second": speed,
             "training_seconds": min(ends), "seconds_per_step_by_sums": cost.seconds}  # fmt: skip
    message = (
        f"{each:.2g} s per step of {format_count(run.rows, 'row')} (median of {len(seconds)}; "
        f"estimated {cost.seconds:.2g} s), {speed:,.0f} tokens/s; evaluation "
        f"{format_seconds(held)}\n"
        f"training takes {format_seconds(min(ends))}, without initialisation and the report"
    )
    return Finding("time", "ok", message, facts)


def _timed_steps(run: Trainer, count: int) -> list[float]:
    """Seconds of each step; none if one is bad."""
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    seconds, watch = list[float](), Stopwatch(run.target.device)
    for number in range(count):
        run.seed_step(number)
        watch.lap()
        _, _, wrong = optimizer_step(run, run.step_data.micro_batches(number), False)
        if wrong:
            return []
        seconds.append(watch.lap())
    return seconds


@torch.no_grad()
def _evaluation_seconds(run: Trainer) -> float:
    """Seconds of a held-out evaluation, extrapolated from one batch."""
    world, rows = run.accelerator.num_processes, run.data.held
    size = max(1, run.rows // _passes(run))
    batch = select_rows(rows, torch.arange(size) % len(rows))
    watch = Stopwatch(run.target.device)
    with run.accelerator.autocast():
        trace = run.sources.held.trace(batch, run.target.device)
        run.objective(trace, torch.ones(len(run.objective.weights)), True)
    batches: int = math.ceil(len(rows) / (world * size))
    return batches * watch.lap()
