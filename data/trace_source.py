"""Interface of sources of traces of packed rows, and the source that runs the target.

TargetTraces runs the target, `record.reader.RecordedTraces` reads a recording, and
`record.cache.TraceCache` reads rows of earlier epochs and runs the target for the others.
"""

from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from outrider.models.interface import Batch, Trace
from outrider.models.target.target import Target


@runtime_checkable
class TraceSource(Protocol):
    """Outputs of the target for packed rows, computed or read."""

    @property
    def path(self) -> Path | None:
        """Folder on disk; None when nothing is stored."""

    @property
    def has_argmax(self) -> bool:
        """The target's top-1 token is stored for every supervised row."""

    @property
    def has_last_states(self) -> bool:
        """The target's last states are available for every supervised row."""

    @property
    def reads_disk(self) -> bool:
        """`trace` only reads files, so that threads may call it ahead of time."""

    def size(self) -> int:
        """Return the bytes on disk."""

    def trace(self, batch: Batch, device: torch.device | str = "cpu") -> Trace:
        """Return what `Target.trace` returns for these rows, in the precision of the storage."""


class TraceSources(NamedTuple):
    """Sources of the training rows and of the held-out rows."""

    train: TraceSource
    held: TraceSource


class TargetTraces:
    """Traces that a forward of the target computes."""

    path = None
    has_argmax = reads_disk = False
    has_last_states = True

    def __init__(self, target: Target) -> None:
        self.target = target

    def size(self) -> int:
        return 0

    def trace(self, batch: Batch, device: torch.device | str | None = None) -> Trace:
        """Return the trace of these rows, on the target's device unless another is given."""
        trace = self.target.trace(*(field.to(self.target.device) for field in batch))
        return trace if device is None else trace.to(device)
