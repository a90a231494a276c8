"""Checks by trial steps: the largest batch that fits into memory, and the time of a step.

On a GPU the batch doubles until it does not fit, then the interval is bisected. On a CPU a process
that takes too much memory is swapped out or killed, so the resident memory at a few rows is
extrapolated as a line, and the result is tried only where that is cheap. Resident memory is
compared with that before the first trial, because the allocator reuses the memory of earlier ones.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from outrider.data.batches import gather
from outrider.launch import memory
from outrider.launch.bench.machine import PeakMemory, resident_bytes
from outrider.launch.cost_estimate import Cost
from outrider.launch.doctor.finding import Finding, format_bytes, format_seconds
from outrider.models import process
from outrider.train.teacher import max_logits
from outrider.train.trainer import Trainer

USABLE = 0.8  # share of the free memory that a run may take; files and other processes need some
TRIAL_SHARE = 0.5  # share of the free memory that a trial may take
LONG = 5.0  # seconds that one trial may take
SHORT = 2.0  # seconds that one trial for the line may take
MAX_ROWS = 2**14
MOMENTS = 8  # bytes of AdamW's moments per trained parameter, allocated in the first step
CGROUP = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current")
STEP_PARTS = ("unroll", "logits", "features", "forward")  # parts of `outrider memory`


class BatchTrial(NamedTuple):
    """A measured forward and backward pass."""

    rows: int
    peak: float  # bytes above those before the first trial
    seconds: float


def largest_fitting(fits: Callable[[int], bool], most: int = MAX_ROWS) -> int:
    """Return the largest number in 0..most that fits, if every smaller one does too.

    It calls `fits` about 2 log2(result) times.
    """
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


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
    limits = [Path(name) for name in CGROUP]
    if all(file.is_file() for file in limits):
        limit, used = (file.read_text().strip() for file in limits)
        if limit.isdecimal() and used.isdecimal():
            free = min(free, max(0.0, float(limit) - float(used)))
    return free / max(1, process.local_world_size())


def forward_backward(run: Trainer, rows: int) -> float:
    """Run a forward and backward pass without the optimizer, and return its seconds."""
    start, material = time.perf_counter(), run.data
    batch = gather(material.train, torch.arange(rows) % len(material.train))
    denominators = torch.full((len(run.objective.weights),), float(batch.ids.numel()))
    with run.accelerator.autocast():
        loss, _ = run.objective(run.sources.train.trace(batch, run.target.device), denominators)
    loss.backward()
    float(loss.detach())
    run.objective.zero_grad(set_to_none=True)
    return time.perf_counter() - start


def largest_batch(run: Trainer, cost: Cost) -> Finding:
    """Check how many rows of data.max_length fit into one pass of a rank."""
    now = max(1, run.rows // (run.accelerator.num_processes * run.config.launch.accumulation))
    estimated, length = _estimated_bytes(run), run.data.train.length
    facts: dict[str, Any] = {"rows_now": now, "by_sums": cost.memory, "length": length}
    if run.config.launch.name == "zero3" or (process.world_size() > 1 and run.target.is_remote):
        message = "not measured where ranks shard the weights: see outrider memory"
        return Finding("memory", "ok", message, facts)
    rows, method, measured = _on_gpu(run) if run.target.device.type == "cuda" else _on_cpu(run)
    limit = measured.pop("room")
    estimated_rows = largest_fitting(lambda rows: estimated(rows) <= limit)
    facts |= {"rows": rows, "how": method, "rows_by_sums": estimated_rows, "room": limit,
              "step_by_sums": estimated(now), **measured}  # fmt: skip
    passes = run.accelerator.num_processes * run.config.launch.accumulation
    prefix = "more than " if rows >= MAX_ROWS else ""
    message = (
        f"{prefix}{rows:,} rows of {length} tokens fit into one pass, the run uses {now} "
        f"(train.batch_tokens <= {rows * length * passes})\n"
        f"{method}; estimated as in outrider memory: {estimated_rows:,} rows, "
        f"{format_bytes(cost.memory)} in total"
    )
    if rows < now:
        fix = "Lower train.batch_tokens, raise launch.accumulation, or use gradient checkpointing."
        return Finding("memory", "wrong", message, facts, fix)
    return Finding("memory", "ok", message, facts)


def _estimated_bytes(run: Trainer) -> Callable[[int], float]:
    """Bytes of a step beside the weights, by rows, estimated as in `outrider memory`."""
    config, ranks = run.config, run.accelerator.num_processes
    sizes, chunk = memory.ParameterCounts.of(run.target.model), max_logits(run.target.device)
    trained = sum(p.numel() for p in run.objective.parameters() if p.requires_grad)

    def total(rows: int) -> float:
        tokens = rows * config.data.max_length * ranks * config.launch.accumulation
        changed = replace(config, train=replace(config.train, batch_tokens=tokens))
        parts = memory.memory_by_part(
            changed, sizes, run.target.shape(), run.drafter, ranks, chunk,
            run.data.train.supervised,
        )  # fmt: skip
        return sum(parts[name] for name in STEP_PARTS) + (MOMENTS + 4) * trained

    return total


def _moments(run: Trainer) -> int:
    return MOMENTS * sum(p.numel() for p in run.objective.parameters() if p.requires_grad)


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
    line = MemoryLine(line.fixed + _moments(run), line.each)
    rows = line.rows(USABLE * free)
    method = (
        f"extrapolated from resident memory at {trials[-2].rows} and {last.rows} rows to "
        f"{USABLE:.0%} of {format_bytes(free)} free"
    )
    if (
        rows > last.rows
        and rows / last.rows * last.seconds < LONG
        and line.at(rows) < TRIAL_SHARE * free
    ):
        trials.append(_trial(run, rows, before))
        method += (
            f"; measured {format_bytes(trials[-1].peak)}, predicted {format_bytes(line.at(rows))}"
        )
    else:
        method += "; not tried"
    measured = {"room": USABLE * free, "row_bytes": line.each, "fixed_bytes": line.fixed}
    return rows, method, {**measured, "trials": [list(trial) for trial in trials]}


def _trial(run: Trainer, rows: int, before: float) -> BatchTrial:
    with PeakMemory() as peak:
        seconds = forward_backward(run, rows)
    return BatchTrial(rows, max(0.0, peak.highest - before), seconds)


def _on_gpu(run: Trainer) -> tuple[int, str, dict[str, Any]]:
    """As `_on_cpu`, by trials in the memory that AdamW's moments leave."""
    device, trials = run.target.device, list[BatchTrial]()
    moments = torch.empty(_moments(run), dtype=torch.uint8, device=device)
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
    method = f"tried up to {rows} rows in {format_bytes(free)} of free memory"
    if trials and trials[-1].seconds > LONG:
        method += "; larger batches take too long to try"
    return rows, method, {"room": free, "trials": [list(trial) for trial in trials]}


def step_time(run: Trainer, steps: int, cost: Cost) -> Finding:
    """Measure the seconds of a step after one warm-up step, and predict the time of the run.

    The learning rate is zero: every operation runs, and no weight changes.
    """
    seconds = _timed_steps(run, steps + 1)[1:]
    if not seconds:
        fix = "Lower train.lr, or check the text: the loss of the first steps is not finite."
        return Finding("time", "wrong", "the loss of a step is not finite", {}, fix)
    each, train = statistics.median(seconds), run.config.train
    held, evaluations = _evaluation_seconds(run), (train.max_steps or 0) // train.eval_every + 1
    whole = each * train.max_steps + held * evaluations if train.max_steps else None
    ends = [end for end in (whole, 60 * train.max_minutes if train.max_minutes else None) if end]
    speed = run.rows * run.config.data.max_length / each
    facts = {"seconds_per_step": each, "spread": max(seconds) / min(seconds),
             "steps": len(seconds), "seconds_held_out": held, "tokens_per_second": speed,
             "training_seconds": min(ends), "seconds_per_step_by_sums": cost.seconds}  # fmt: skip
    message = (
        f"{each:.2g} s per step of {run.rows} rows (median of {len(seconds)}; estimated "
        f"{cost.seconds:.2g} s), {speed:,.0f} tokens/s; evaluation {format_seconds(held)}\n"
        f"training takes {format_seconds(min(ends))}, without initialisation and the report"
    )
    return Finding("time", "ok", message, facts)


def _timed_steps(run: Trainer, count: int) -> list[float]:
    """Seconds of each step; none if one is bad."""
    from outrider.train.loop import optimizer_step

    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    seconds = list[float]()
    for number in range(count):
        run.seed_step(number)
        start = time.perf_counter()
        _, _, wrong = optimizer_step(run, run.step_data.micro_batches(number), False)
        if wrong:
            return []
        if run.target.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


@torch.no_grad()
def _evaluation_seconds(run: Trainer) -> float:
    """Seconds of a held-out evaluation, extrapolated from one batch."""
    world, rows = run.accelerator.num_processes, run.data.held
    size = max(1, run.rows // (world * run.config.launch.accumulation))
    batch = gather(rows, torch.arange(size) % len(rows))
    start = time.perf_counter()
    with run.accelerator.autocast():
        trace = run.sources.held.trace(batch, run.target.device)
        run.objective(trace, torch.ones(len(run.objective.weights)), True)
    if run.target.device.type == "cuda":
        torch.cuda.synchronize()
    batches = int(-(-len(rows) // (world * size)))
    return batches * (time.perf_counter() - start)
