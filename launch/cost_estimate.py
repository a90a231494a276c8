"""Estimates of a run's memory, disk and time, made before it starts.

Memory and disk are sums of known allocations. Time is the floating-point operations of a step
divided by this machine's rate, measured in a quarter of a second of matrix products.
"""

from typing import NamedTuple

import torch

from outrider.conf.schema import Config
from outrider.launch import memory
from outrider.launch.step_cost import checkpoint_bytes, step_flops
from outrider.models.decode.round_times import Stopwatch
from outrider.models.target import process
from outrider.train.optimizer import state_numbers
from outrider.train.teacher import max_logits
from outrider.train.trainer import Trainer

EFFICIENCY = 0.5  # share of that rate in a step: softmax, norms and copies take the rest
MATRIX_SIZE = {"cpu": 512, "cuda": 4096}  # of the timed matrix product: enough to fill it
AT_ONCE = 4  # products between two looks at the clock


class Cost(NamedTuple):
    """Estimates per rank."""

    memory: float  # bytes
    disk: float  # bytes of checkpoints and drafter
    seconds: float  # of one optimizer step


def trained_parameters(run: Trainer) -> int:
    return sum(p.numel() for p in run.objective.parameters() if p.requires_grad)


def estimate(run: Trainer) -> Cost:
    """Estimate memory, disk and time of a run on this machine."""
    size, tokens = trained_parameters(run), run.config.train.batch_tokens
    train = run.config.train
    disk = checkpoint_bytes(train, size, state_numbers(run.drafter, train))
    rate = EFFICIENCY * matmul_rate(2 if run.config.launch.precision == "bf16" else 4)
    flops = _flops(run, size, run.data.train.supervised * tokens, tokens)
    memory_bytes = sum(memory_of_run(run, run.config).values())
    return Cost(memory_bytes, disk, flops / rate / run.accelerator.num_processes)


def memory_of_run(run: Trainer, config: Config) -> dict[str, float]:
    """Return the bytes per rank of each part of `outrider memory`, of a run with this `config`."""
    return memory.memory_by_part(
        config, memory.ParameterCounts.of(run.target.model), run.target.shape(), run.drafter,
        run.accelerator.num_processes, max_logits(run.target.device), run.data.train.supervised,
    )  # fmt: skip


def _flops(run: Trainer, size: int, rows: float, tokens: int) -> float:
    """Return the floating-point operations of a step of this run."""
    recorded = run.data.recorded
    has_argmax = recorded is not None and recorded.train.has_argmax
    return step_flops(
        run.target, run.drafter, size=size, rows=rows, tokens=tokens,
        online=recorded is None, depths=sum(weight > 0 for weight in run.objective.weights),
        full_head=not has_argmax or run.objective.needs_full_head(measure=False),
    )  # fmt: skip


def matmul_rate(bytes_of: int) -> float:
    """Measure floating-point operations per second of this machine's matrix products."""
    device = process.device()
    dtype, size = torch.bfloat16 if bytes_of == 2 else torch.float32, MATRIX_SIZE[device.type]
    x = torch.randn(size, size, device=device, dtype=dtype)
    watch, count, elapsed = Stopwatch(device), 0, 0.0
    torch.mm(x, x)  # the first product loads libraries
    watch.lap()
    while elapsed < 0.25:
        for _ in range(AT_ONCE):
            torch.mm(x, x)
        count, elapsed = count + AT_ONCE, elapsed + watch.lap()
    rate: float = 2.0 * size**3 * count / elapsed
    return rate
