"""The micro-batches of a step on one rank, and the target's traces of them."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.conf.schema import Config
from outrider.data.batches import Batches
from outrider.data.prefetch import Prefetcher
from outrider.data.trace_source import TargetTraces, TraceSource
from outrider.data.training_data import TrainingData
from outrider.models.drafting.drafter import Drafter
from outrider.models.interface import Batch, Trace
from outrider.models.target.target import Target


class MicroBatch(NamedTuple):
    """Packed rows and the source of their trace."""

    batch: Batch
    source: TraceSource


class StepData:
    """Training rows of one rank; recorded traces are read ahead in threads."""

    def __init__(
        self, config: Config, data: TrainingData, drafter: Drafter, target: Target,
        rank: int, world: int,
    ) -> None:  # fmt: skip
        self.drafter, self.device = drafter, target.device
        self.source, self.online = data.trace_sources(target).train, TargetTraces(target)
        rows = config.train.batch_tokens // config.data.max_length
        self.batches = Batches(data.train, rows, config.run.seed)
        self.rank, self.world, self.accumulation = rank, world, config.launch.accumulation
        self.prefetcher = Prefetcher(self._read, config.data.workers, config.train.max_steps)

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """Return what this rank trains on, with on-policy text where the drafter generates it."""
        return [self._on_policy(batch) for batch in self._batches(step)]

    def traces(self, step: int, micro_batches: list[MicroBatch]) -> Iterator[Trace]:
        """Yield the trace of each micro-batch on the target's device."""
        if all(micro_batch.source.reads_disk for micro_batch in micro_batches):
            yield from (trace.to(self.device) for trace in self.prefetcher.get(step))
        else:
            for batch, source in micro_batches:
                yield source.trace(batch, self.device)

    def close(self) -> None:
        self.prefetcher.close()

    def _batches(self, step: int) -> list[Batch]:
        return self.batches.micro(step, self.rank, self.world, self.accumulation)

    def _on_policy(self, batch: Batch) -> MicroBatch:
        batch = Batch(*(field.to(self.device) for field in batch))
        own = self.drafter.on_policy_batch(batch)
        return MicroBatch(batch, self.source) if own is None else MicroBatch(own, self.online)

    def _read(self, step: int) -> list[Trace]:
        """Return the recorded traces of a step, on the CPU."""
        return [self.source.trace(batch) for batch in self._batches(step)]


def trained_counts(drafter: Drafter, batch: Batch, depths: int) -> Tensor:
    """Return how many rows of a batch are trained at depths 1..`depths`."""
    states = torch.zeros(*batch.ids.shape, 0)
    trace = Trace.from_batch(batch, states, states)
    masks = [drafter.trained_mask(trace, depth) for depth in range(1, depths + 1)]
    return torch.stack([mask.sum() for mask in masks]).float()
