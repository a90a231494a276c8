"""The plan of a run, before it starts: what is trained, on what, and what it will cost.

Memory and disk are sums of what is known to be allocated; time is the arithmetic of a step
divided by a rate measured in half a second of matrix products on this machine. All three are
estimates and are printed as such.
"""

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from outrider.launch import memory
from outrider.train.objective import chunk_of

if TYPE_CHECKING:
    from outrider.train.config import Config
    from outrider.train.run import Run

MB, GB = 2**20, 2**30
SAMPLE = 16  # answers that `doctor` lets the target write
WIDE, FAST = 512, 2e-3  # states from this size on, and a learning rate that is too much for them
EFFICIENCY = 0.5  # of that rate; softmax, norms and copies take the rest of the time
SQUARE = 512  # side of the matrices whose product is timed


class Cost(NamedTuple):
    """Estimates for one rank."""

    memory: float  # bytes
    disk: float  # bytes, checkpoints and drafter
    flops: float  # of one optimizer step, all ranks
    seconds: float  # of one optimizer step


def doctor(config: "Config") -> int:
    """The verb: everything a run would print before its first step, and no step.

    Text that the target has yet to write is judged by a short sample of it.
    """
    from outrider.data.own_text import is_written
    from outrider.data.prepare import material
    from outrider.launch import start
    from outrider.models import drafters, load
    from outrider.train.manifest import versions
    from outrider.train.run import Run

    console = Console()
    console.print("  ".join(f"{name} {version}" for name, version in versions().items()))
    start.use_cores()
    loaded = load.load(config.target, start.device())
    console.print(f"target: {loaded.source}")
    taps = drafters.taps_of(config.drafter, loaded.target.depth)
    loaded.target.set_taps(taps)
    sampled = config.data.generate is not None and not is_written(config, loaded)
    if sampled:
        console.print(f"the target's own text is judged by a sample of {SAMPLE} answers")
        config = _sampled(config)
    made = material(config, loaded, taps, console, start.rank())
    show(console, Run(config, loaded, made, begin=False), sampled=sampled)
    return 0


def _sampled(config: "Config") -> "Config":
    """The same run on a sample of its text, which takes seconds to write."""
    wish = config.data.generate
    assert wish is not None, "only data=self has one"
    few = replace(wish, samples=SAMPLE, minutes=None, max_new_tokens=min(64, wish.max_new_tokens))
    return replace(config, data=replace(config.data, generate=few))


def show(console: Console, run: "Run", sampled: bool = False) -> None:
    """Print the plan as a table, then what looks wrong about it.

    Args:
        sampled: the text is a small part of what will be there.
    """
    cost, config = estimate(run), run.config
    trained = sum(p.numel() for p in run.objective.parameters() if p.requires_grad)
    rows, vocab = run.material.train, run.drafter.vocab
    table = Table(title=f"plan: {config.drafter.name} for {run.target.name}", show_header=False)
    table.add_row("trained", f"{trained / 1e6:.2f} M parameters ({run.started_from})")
    table.add_row("frozen target", f"{run.target.parameters() / 1e6:.2f} M parameters")
    table.add_row("taps", f"outputs of decoder layers {list(run.drafter.taps)}")
    table.add_row("supervised", f"{rows.supervised:.1%} of {rows.ids.numel():,} tokens")
    coverage = vocab.coverage(run.material.held_counts)
    table.add_row(
        "draft vocabulary", f"{len(vocab):,} tokens, {coverage:.2%} of held-out answer tokens"
    )
    table.add_row("step", f"{run.rows} rows of {rows.length} tokens, {len(rows)} rows per epoch")
    table.add_row("memory, about", f"{cost.memory / GB:.2f} GB per rank")
    table.add_row("disk, about", f"{cost.disk / MB:.0f} MB in {run.folder}")
    if run.material.recorded is not None:
        store = run.material.recorded[0].store
        table.add_row("recorded text", f"{store.size() / MB:.0f} MB in {store.folder}")
    table.add_row("time, about", _time(cost, config))
    console.print(table)
    for warning in [] if sampled else warnings(run, cost):
        console.print(f"[yellow]note:[/yellow] {warning}")


def _time(cost: Cost, config: "Config") -> str:
    each = f"{cost.seconds:.2f} s per step"
    limits = []
    if config.train.max_steps:
        limits.append(f"{cost.seconds * config.train.max_steps / 60:.1f} min")
    if config.train.max_minutes:
        limits.append(f"at most {config.train.max_minutes:g} min")
    return f"{each}, {' and '.join(limits)} of training"


def warnings(run: "Run", cost: Cost) -> list[str]:
    """What a careful colleague would say."""
    out = []
    coverage = run.drafter.vocab.coverage(run.material.held_counts)
    if coverage < 0.9:
        out.append(
            f"the draft vocabulary misses {1 - coverage:.1%} of the answer tokens: "
            "raise drafter.draft_vocab_size"
        )
    free = shutil.disk_usage(_existing(run.folder)).free
    if free < 2 * cost.disk:
        out.append(f"only {free / GB:.1f} GB are free where {run.folder} will lie")
    config = run.config.train
    if run.target.shape().hidden >= WIDE and config.lr > FAST:
        out.append(
            f"train.lr={config.lr:g} suits the embedded target; for one of "
            f"{run.target.shape().hidden} numbers per state begin near 5e-4, or 5e-5 (EAGLE-3)"
        )
    if config.max_steps and config.max_steps * run.rows > 20 * len(run.material.train):
        out.append("every row will be seen more than 20 times: more data would do more good")
    return out


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def estimate(run: "Run") -> Cost:
    """Memory, disk and time of this run on this machine."""
    trained = [p for p in run.objective.parameters() if p.requires_grad]
    size = sum(p.numel() for p in trained)
    tokens = run.config.train.batch_tokens
    bytes_of = 2 if run.config.launch.precision == "bf16" else 4
    supervised = run.material.train.supervised
    found = memory.parts(
        run.config, memory.Sizes.of(run.target.model), run.target.shape(), run.drafter,
        run.accelerator.num_processes, chunk_of(run.target.device), supervised,
    )  # fmt: skip
    disk = (run.config.train.keep_last + 1) * 12 * size + 3 * 4 * size
    rate = EFFICIENCY * pieces_rate(bytes_of)
    flops = _flops(run, size, supervised * tokens, tokens)
    return Cost(sum(found.values()), disk, flops, flops / rate / run.accelerator.num_processes)


def _flops(run: "Run", size: int, rows: float, tokens: int) -> float:
    """Two per weight and row forward, four backward; the teacher's head; the target if it runs."""
    trained = sum(weight > 0 for weight in run.objective.weights)
    unrolled = 6.0 * size * rows * run.drafter.passes(trained)
    vocab, hidden = len(run.drafter.vocab), run.target.head_weight.shape[1]
    if not any(p.ndim > 1 and len(p) == vocab for p in run.drafter.parameters()):
        unrolled += 4.0 * vocab * hidden * rows * trained  # through the target's frozen head
    recorded = run.material.recorded
    noted = recorded is not None and recorded[0].store.records_favourites()
    noted = noted and not run.objective.asks_whole(measure=False)
    judging = len(run.drafter.vocab) if noted else run.target.vocab
    teacher = 2.0 * judging * hidden * rows
    online = 0.0 if run.material.recorded else 2.0 * run.target.parameters() * tokens
    total: float = unrolled + teacher + online
    return total


def pieces_rate(bytes_of: int) -> float:
    """Floating point operations per second of this machine's matrix products, measured now."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if bytes_of == 2 else torch.float32
    x = torch.randn(SQUARE, SQUARE, device=device, dtype=dtype)
    count = 0
    started = time.perf_counter()
    while (elapsed := time.perf_counter() - started) < 0.25:
        float((x @ x)[0, 0])
        count += 1
    rate: float = 2.0 * SQUARE**3 * count / elapsed
    return rate
