"""What is measured: the largest batch that fits, and what a step takes, both by real steps.

On a GPU batches double until one does not fit, then the gap is halved. On a CPU a process that
takes too much is swapped out or killed, so nothing is tried that might: the growth of resident
memory at a few rows is extrapolated as a line, and the answer is tried only where that is cheap.
Resident memory is compared with that before the first of these steps and not with that before
each, because what the allocator keeps of one step is what the next one uses.
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
from outrider.launch.bench.train_step import Peak, resident
from outrider.launch.cost_estimate import Cost
from outrider.launch.doctor.finding import Finding, size_of, time_of
from outrider.train import distributed as start
from outrider.train.objective import chunk_of
from outrider.train.trainer import Run

SHARE = 0.8  # of the free memory that a run may take; the rest is for files and for others
TRIED = 0.5  # of the free memory that is taken here, to see
LONG = 5.0  # seconds that one trial may take
SOON = 2.0  # seconds that one trial may take of those that the line is drawn through
MOST = 2**14  # rows, beyond which nobody asks
MOMENTS = 8  # bytes of AdamW's moments for each trained parameter, which come with the first step
GROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current")
IN_A_STEP = ("unroll", "judging", "features", "reading")  # parts of `outrider memory`


class Trial(NamedTuple):
    """A forward and backward pass of so many rows."""

    rows: int
    peak: float  # bytes above what was there before the first
    seconds: float


def largest(fits: Callable[[int], bool], most: int = MOST) -> int:
    """The largest number in 0..most that fits, if every smaller one does too.

    Doubled until it does not fit, then halved: 2 log2(answer) questions.
    """
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class Line(NamedTuple):
    """Bytes of a step: fixed + each * rows."""

    fixed: float
    each: float

    @classmethod
    def through(cls, one: Trial, other: Trial) -> "Line":
        each = max(1.0, (other.peak - one.peak) / (other.rows - one.rows))
        return cls(max(0.0, one.peak - each * one.rows), each)

    def at(self, rows: int) -> float:
        return self.fixed + self.each * rows

    def rows(self, room: float) -> int:
        return min(MOST, max(0, int((room - self.fixed) / self.each)))


def room_here() -> float:
    """Bytes of the CPU's memory that this rank may still take: of the machine, or its container."""
    free = float(psutil.virtual_memory().available)
    limits = [Path(name) for name in GROUPS]
    if all(file.is_file() for file in limits):
        most, now = (file.read_text().strip() for file in limits)
        if most.isdecimal() and now.isdecimal():
            free = min(free, max(0.0, float(most) - float(now)))
    return free / max(1, start.ranks_here())


def step(run: Run, rows: int) -> float:
    """Forward and backward of so many rows, the optimizer left alone; returns seconds."""
    began, material = time.perf_counter(), run.material
    batch = gather(material.train, torch.arange(rows) % len(material.train))
    divide = torch.full((len(run.objective.weights),), float(batch.ids.numel()))
    with run.accelerator.autocast():
        loss, _ = run.objective(run.trace(batch, held=False), divide)
    loss.backward()
    float(loss.detach())
    run.objective.zero_grad(set_to_none=True)
    return time.perf_counter() - began


def largest_batch(run: Run, cost: Cost) -> Finding:
    """Rows of data.max_length that one forward and backward pass of a rank can hold."""
    now = max(1, run.rows // (run.accelerator.num_processes * run.config.launch.accumulation))
    by_sums, length = _by_sums(run), run.material.train.length
    facts: dict[str, Any] = {"rows_now": now, "by_sums": cost.memory, "length": length}
    if run.config.launch.name == "zero3" or (start.world_size() > 1 and run.target.elsewhere):
        said = "not tried where ranks hold shares of weights: outrider memory has the sums"
        return Finding("memory", "ok", said, facts)
    found, how, measured = _on_gpu(run) if run.target.device.type == "cuda" else _on_cpu(run)
    room = measured.pop("room")
    foreseen = largest(lambda rows: by_sums(rows) <= room)
    facts |= {"rows": found, "how": how, "rows_by_sums": foreseen, "room": room,
              "step_by_sums": by_sums(now), **measured}  # fmt: skip
    passes = run.accelerator.num_processes * run.config.launch.accumulation
    most = "more than " if found >= MOST else ""
    said = (
        f"{most}{found:,} rows of {length} tokens fit into one pass, {now} are taken "
        f"(train.batch_tokens={found * length * passes} at most)\n"
        f"{how}; by the sums of outrider memory {foreseen:,}, and {size_of(cost.memory)} in all"
    )
    if found < now:
        fix = "Use fewer train.batch_tokens, more launch.accumulation, or gradient checkpointing."
        return Finding("memory", "wrong", said, facts, fix)
    return Finding("memory", "ok", said, facts)


def _by_sums(run: Run) -> Callable[[int], float]:
    """Bytes that a step of so many rows takes beside the weights, as `outrider memory` sums."""
    config, ranks = run.config, run.accelerator.num_processes
    sizes, chunk = memory.Sizes.of(run.target.model), chunk_of(run.target.device)
    trained = sum(p.numel() for p in run.objective.parameters() if p.requires_grad)

    def total(rows: int) -> float:
        tokens = rows * config.data.max_length * ranks * config.launch.accumulation
        here = replace(config, train=replace(config.train, batch_tokens=tokens))
        parts = memory.parts(
            here, sizes, run.target.shape(), run.drafter, ranks, chunk,
            run.material.train.supervised,
        )  # fmt: skip
        return sum(parts[name] for name in IN_A_STEP) + (MOMENTS + 4) * trained

    return total


def _moments(run: Run) -> int:
    return MOMENTS * sum(p.numel() for p in run.objective.parameters() if p.requires_grad)


def _on_cpu(run: Run) -> tuple[int, str, dict[str, Any]]:
    """Rows, how they were found, and what was measured."""
    step(run, 1)  # libraries allocate their own memory on the first call
    before, room = float(resident()), room_here()
    trials = [_tried(run, 1, before)]
    while True:
        trials.append(_tried(run, 2 * trials[-1].rows, before))
        line, last = Line.through(trials[-2], trials[-1]), trials[-1]
        if 2 * last.seconds > SOON or line.at(2 * last.rows) > TRIED * room:
            break
    line = Line(line.fixed + _moments(run), line.each)
    rows = line.rows(SHARE * room)
    how = (
        f"resident memory at {trials[-2].rows} and {last.rows} rows, as a line into {SHARE:.0%} of "
        f"{size_of(room)} free"
    )
    if rows > last.rows and rows / last.rows * last.seconds < LONG and line.at(rows) < TRIED * room:
        trials.append(_tried(run, rows, before))
        how += f"; tried: {size_of(trials[-1].peak)}, {size_of(line.at(rows))} foreseen"
    else:
        how += "; not tried that far"
    measured = {"room": SHARE * room, "row_bytes": line.each, "fixed_bytes": line.fixed}
    return rows, how, {**measured, "trials": [list(trial) for trial in trials]}


def _tried(run: Run, rows: int, before: float) -> Trial:
    with Peak() as watch:
        seconds = step(run, rows)
    return Trial(rows, max(0.0, watch.highest - before), seconds)


def _on_gpu(run: Run) -> tuple[int, str, dict[str, Any]]:
    """As `_on_cpu`; batches are really tried, in the room that AdamW's moments leave."""
    device, trials = run.target.device, list[Trial]()
    moments = torch.empty(_moments(run), dtype=torch.uint8, device=device)
    free = float(torch.cuda.mem_get_info(device)[0])
    before = torch.cuda.memory_allocated(device)

    def fits(rows: int) -> bool:
        if trials and trials[-1].seconds > LONG:
            return False  # nobody waits for larger ones
        torch.cuda.reset_peak_memory_stats(device)
        try:
            seconds = step(run, rows)
        except torch.cuda.OutOfMemoryError:
            run.objective.zero_grad(set_to_none=True)
            return False
        finally:
            torch.cuda.empty_cache()
        peak = torch.cuda.max_memory_allocated(device) - before
        trials.append(Trial(rows, float(peak), seconds))
        return True

    rows = largest(fits)
    del moments
    torch.cuda.empty_cache()
    how = f"tried up to {rows} rows in {size_of(free)} of free memory"
    if trials and trials[-1].seconds > LONG:
        how += "; larger ones would take long to try"
    return rows, how, {"room": free, "trials": [list(trial) for trial in trials]}


def pace(run: Run, steps: int, cost: Cost) -> Finding:
    """Seconds of a step, after one that warms up, and when the run would be over.

    The learning rate is zero: every operation is done, and no weight changes.
    """
    seconds = _steps(run, steps + 1)[1:]
    if not seconds:
        fix = "Lower train.lr, or look at the text: the loss of the first steps is not a number."
        return Finding("time", "wrong", "a step's loss is not a number", {}, fix)
    each, train = statistics.median(seconds), run.config.train
    held, evaluations = _held_out(run), (train.max_steps or 0) // train.eval_every + 1
    whole = each * train.max_steps + held * evaluations if train.max_steps else None
    ends = [end for end in (whole, 60 * train.max_minutes if train.max_minutes else None) if end]
    speed = run.rows * run.config.data.max_length / each
    facts = {"seconds_per_step": each, "spread": max(seconds) / min(seconds),
             "steps": len(seconds), "seconds_held_out": held, "tokens_per_second": speed,
             "training_seconds": min(ends), "seconds_per_step_by_sums": cost.seconds}  # fmt: skip
    said = (
        f"{each:.2g} s per step of {run.rows} rows (median of {len(seconds)}; {cost.seconds:.2g} "
        f"by the sums), {speed:,.0f} tokens/s; held out {time_of(held)} each time\n"
        f"training is over after {time_of(min(ends))}, first weights and the report not counted"
    )
    return Finding("time", "ok", said, facts)


def _steps(run: Run, count: int) -> list[float]:
    """Seconds of so many steps; fewer where one is bad."""
    from outrider.train.loop import work

    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    seconds = list[float]()
    for number in range(count):
        run.sow(number)
        began = time.perf_counter()
        _, _, wrong = work(run, run.micro_batches(number), False)
        if wrong:
            return []
        if run.target.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds


@torch.no_grad()
def _held_out(run: Run) -> float:
    """Seconds of a held-out evaluation, from one batch of it."""
    world, rows = run.accelerator.num_processes, run.material.held
    size = max(1, run.rows // (world * run.config.launch.accumulation))
    batch = gather(rows, torch.arange(size) % len(rows))
    began = time.perf_counter()
    with run.accelerator.autocast():
        run.objective(run.trace(batch, held=True), torch.ones(len(run.objective.weights)), True)
    if run.target.device.type == "cuda":
        torch.cuda.synchronize()
    batches = int(-(-len(rows) // (world * size)))
    return batches * (time.perf_counter() - began)
