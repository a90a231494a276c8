"""What a run will cost, foreseen before it starts; `outrider doctor` measures some of it too.

Memory and disk are sums of what is known to be allocated; time is the arithmetic of a step
divided by a rate measured in half a second of matrix products on this machine. All three are
estimates and are said to be such.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from outrider.launch import memory
from outrider.train.objective import chunk_of

if TYPE_CHECKING:
    from outrider.train.trainer import Run

EFFICIENCY = 0.5  # of that rate; softmax, norms and copies take the rest of the time
SQUARE = 512  # side of the matrices whose product is timed


class Cost(NamedTuple):
    """Estimates for one rank."""

    memory: float  # bytes
    disk: float  # bytes, checkpoints and drafter
    flops: float  # of one optimizer step, all ranks
    seconds: float  # of one optimizer step


def existing(folder: Path) -> Path:
    """The folder, or the one that it will lie in."""
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
    noted = recorded is not None and recorded[0].knows_favourites
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
