"""State of a training run: drafter, objective, optimizer, data and progress."""

import copy
import hashlib
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.conf.schema import Config
from outrider.data.batches import permutation, select_rows
from outrider.data.pack import Rows
from outrider.data.trace_source import TargetTraces, TraceSource
from outrider.data.training_data import TrainingData
from outrider.models import drafters
from outrider.models.target import process
from outrider.models.target.load import LoadedTarget
from outrider.train import checkpoint, distributed
from outrider.train.bad_steps import BadStepGuard
from outrider.train.checkpoint_writer import CheckpointWriter
from outrider.train.heartbeat import Heartbeat
from outrider.train.losses import parse_depth_weights
from outrider.train.metric_sums import MetricSums
from outrider.train.objective import Objective
from outrider.train.optimizer import build_optimizer
from outrider.train.step_data import MicroBatch, StepData, trained_counts
from outrider.train.weight_average import WeightAverage

INIT_ROWS = 8  # packed rows per batch while initial weights are fitted


class Trainer:
    """One run on one rank.

    Attributes:
        drafter: the trained model; `objective` holds it, `model` is the objective as accelerate
            wraps it.
        rows: packed rows per optimizer step, over all ranks.
        progress: what a checkpoint stores beside weights and states of the optimizer.
        average: the moving average of the weights; None without `train.ema`.
        own_text: the target's own answers to held-out prompts; None without them.
        initialisation: the origin of the initial weights, for messages.
        start_seconds: time that it took to find them; None for a continued run.
    """

    def __init__(
        self, config: Config, loaded: LoadedTarget, data: TrainingData, *, begin: bool = True
    ) -> None:
        """Build everything; with `begin=False`, without initial weights, only to estimate costs."""
        cfg: Any = config.drafter
        self.config, self.data, self.target = config, data, loaded.target
        self.device = loaded.target.device
        self.folder, self.sources = Path(config.run.dir), data.trace_sources(loaded.target)
        self.rows = config.train.batch_tokens // config.data.max_length
        torch.manual_seed(config.run.seed)
        vocab = data.vocab(cfg.draft_vocab_size)
        self.drafter = drafters.build(cfg, self.target, vocab).to(self.device)
        self.drafter.gradient_checkpointing = config.train.gradient_checkpointing
        start = time.monotonic()
        self.initialisation = self._initialise() if begin else "weights not yet initialised"
        resumes = self.initialisation.startswith("a checkpoint")
        self.start_seconds = None if resumes else time.monotonic() - start
        self.objective = Objective(
            self.drafter,
            self.target,
            weights=parse_depth_weights(cfg.depth_weights, cfg.depths),
            loss=cfg.loss,
            renormalise=cfg.renormalise,
            path="stored" if config.launch.name == "zero3" else "fused",
        )
        self.accelerator = distributed.build_accelerator(
            config.launch, config.train.clip,
            max(1, self.rows // (process.world_size() * config.launch.accumulation)),
            sum(p.numel() for p in self.drafter.parameters() if p.requires_grad),
        )  # fmt: skip
        self.main = bool(self.accelerator.is_main_process)
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        self.heartbeat = Heartbeat(rank, world, wait=60 * config.launch.wait)
        optimizer = build_optimizer(self.drafter, config.train, config.launch)
        self.model, self.optimizer = self.accelerator.prepare(self.objective, optimizer)
        distributed.limit_waits(config.launch.wait)
        self.progress = checkpoint.Progress()
        decay = config.train.ema
        self.average = WeightAverage(self.objective, decay) if decay is not None else None
        self.own_text: Rows | None = None
        self.bad_steps = BadStepGuard(self.progress, config.train.skip_bad, config.train.spike)
        self.step_data = StepData(config, data, self.drafter, self.target, rank, world)
        self.writer = CheckpointWriter(self.folder, config.train)

    def _initialise(self) -> str:
        """Fit initial weights on the training rows, unless a checkpoint has weights."""
        if self.config.train.resume != "never" and self.checkpoints():
            return "a checkpoint of this run"
        source = self.sources.train
        if self.drafter.fits_last_states and not source.has_last_states:
            source = TargetTraces(self.target)
        order = permutation(self.config.run.seed, 0, len(self.data.train))
        batches = (select_rows(self.data.train, rows) for rows in order.split(INIT_ROWS))
        traces = (source.trace(batch, self.device) for batch in batches)
        return self.drafter.initialise(self.target, traces)

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints of the run folder, oldest first."""
        return checkpoint.list_checkpoints(self.folder / "checkpoints")

    def seed_step(self, step: int) -> None:
        """Seed noise and dropout from only the run's seed, the step and the rank."""
        rank = self.accelerator.process_index
        name = f"{self.config.run.seed} {step} {rank}".encode()
        torch.manual_seed(int.from_bytes(hashlib.sha256(name).digest()[:7], "big"))

    def loss_denominators(self, micro_batches: list[MicroBatch]) -> Tensor:
        """Return the trained rows of the whole step per depth; all with normalise=tokens."""
        cfg: Any = self.config.drafter
        if cfg.normalise == "tokens":
            return torch.full((cfg.depths,), float(self.rows * self.config.data.max_length))
        counts = [trained_counts(self.drafter, batch, cfg.depths) for batch, _ in micro_batches]
        return self.reduce(torch.stack(counts).sum(0)).clamp(min=1)

    def reduce(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        out: Tensor = self.accelerator.reduce(values.to(self.device), "sum")
        return out

    def means(self, sums: MetricSums) -> dict[str, float]:
        """Return the metrics of the sums of all ranks."""
        return sums.unflatten(self.reduce(sums.flatten())).means()

    def copy_weights(self) -> list[Tensor]:
        """Return copies of the trained parameters; none with ZeRO-3, where ranks hold slices."""
        if self.config.launch.name == "zero3":
            return []
        return [p.detach().clone() for p in self.objective.parameters() if p.requires_grad]

    @torch.no_grad()
    def evaluate(self, rows: Rows, source: TraceSource) -> dict[str, float]:
        """Return the metrics over all of these rows, which are divided among the ranks."""
        cfg: Any = self.config.drafter
        world = self.accelerator.num_processes
        size = max(1, self.rows // (world * self.config.launch.accumulation))
        sums, denominators = self.objective.zero_sums(self.device), torch.ones(cfg.depths)
        self.objective.eval()  # no noise, no dropout
        for turn in range(-(-len(rows) // (world * size))):
            first = (turn * world + self.accelerator.process_index) * size
            index = torch.arange(first, first + size)
            batch = select_rows(rows, index % len(rows))
            # ZeRO-3 gathers weights in lockstep: a rank without rows left repeats some, uncounted
            batch = batch._replace(answer=batch.answer & (index < len(rows))[:, None])
            trace = source.trace(batch, self.device)
            with self.accelerator.autocast():
                sums.add(self.objective(trace, denominators, True)[1])
        self.objective.train()
        return self.means(sums)

    def save(self) -> None:
        """Copy what a checkpoint needs, and write it while training goes on."""
        progress = copy.deepcopy(self.progress)
        optimizer = self.optimizer if progress.step > 0 else None
        tensors = checkpoint.collect_state(self.objective, optimizer, self.average)
        if self.main:
            self.writer.save(tensors, progress)

    def close(self) -> None:
        """End threads, once the last checkpoint is written."""
        self.heartbeat.close()
        try:
            self.writer.wait()
        finally:
            self.step_data.close()
