"""`data.mode=hybrid`: what the target said of a row is kept, as long as there is room.

The first epoch runs the target and writes; later epochs read what was kept and run it for the
rest. Rows of this run never make room for each other: an epoch takes every row once, so the row
used longest ago is as likely to be next as any, and with room for half of them a cache that
forgets it would answer 15 % of the rows, one that keeps what it has 50 % (docs/record.md). What
gives way, least recently used first, is what earlier runs left.

    kept/<of what>/<row>-<sha256>.safetensors   a row by the hash of its text, columns.py inside
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.conf.errors import Damaged, NoRoom, RunError
from outrider.conf.files import read_tensors, write_tensors
from outrider.data.batches import Batch, gather
from outrider.data.pack import Rows
from outrider.data.record.layout import Kept, Layout, Said, together
from outrider.data.record.quantise import NotFinite
from outrider.models.drafter import Trace
from outrider.models.drafters import kind
from outrider.models.load import cache_home
from outrider.models.target import Target
from outrider.train import distributed as start
from outrider.train.settings import Config

GB = 1e9
SHARE = 0.5  # of the disk that is free or kept already, where no limit is set
LONG = 3600.0  # seconds in which a file has surely been written


class Hybrid:
    """Traces from the disk, or from the target and then on the disk."""

    knows_favourites = knows_last = True

    def __init__(
        self, folder: Path, layout: Layout, target: Target, budget: float, ranks: int = 1
    ) -> None:
        """
        Args:
            folder: of rows like these; its neighbours give way to them.
            budget: bytes that all of them may take, of this rank and others alike.
            ranks: how many share the budget.
        """
        self.where, self.layout, self.target, self.budget = folder, layout, target, budget / ranks
        self.began = time.time()
        folder.mkdir(parents=True, exist_ok=True)
        for torn in folder.glob(".*.tmp"):  # of a process that was killed here
            if _facts(torn).mtime < self.began - LONG:
                torn.unlink(missing_ok=True)
        self.files = {_key_of(file): file for file in folder.glob("*.safetensors")}
        self.used = _used(folder.parent) / ranks
        self.crowded = True  # earlier runs may have left something
        self.hits = self.misses = 0

    @staticmethod
    def beginning(config: Config, target: Target, about: Mapping[str, Any]) -> "Hybrid":
        """For a run like this, in the user's cache."""
        reads = kind(config.drafter.name).reads
        ahead = config.drafter.depths if reads == "guesses" else 1
        layout = Layout(reads, config.record.states, target.taps, target.shape().hidden, ahead)
        facts = {**about, **vars(layout), "dtype": str(target.dtype)}
        name = hashlib.sha256(json.dumps(facts, sort_keys=True, default=list).encode()).hexdigest()
        folder = cache_home() / "kept" / name[:16]
        folder.mkdir(parents=True, exist_ok=True)
        limit, room = config.data.max_gb, shutil.disk_usage(folder).free + _used(folder.parent)
        budget = limit * GB if limit else SHARE * room  # the same when it is full as before
        return Hybrid(folder, layout, target, budget, start.world_size())

    def expect(self, rows: Rows) -> None:
        """These will be asked for: where they are kept already, they count as used from now on."""
        for row in range(len(rows)) if self.files else ():
            file = self.files.get(_key(gather(rows, torch.tensor([row])), 0))
            if file is not None:
                with suppress(OSError):
                    _use(file)

    def part(self, numbers: Sequence[int]) -> "Hybrid":
        """The same: rows are known by their text."""
        return self

    def size(self) -> int:
        """Bytes on disk."""
        return sum(_facts(file).size for file in self.where.glob("*.safetensors"))

    def trace(self, batch: Batch, device: torch.device | str = "cpu") -> Trace:
        """See `data.traces.Traces`; the same numbers whether they were kept or not."""
        keys = [_key(batch, row) for row in range(len(batch.ids))]
        parts = [self._read(key) for key in keys]
        self.hits += sum(part is not None for part in parts)
        missing = [row for row, part in enumerate(parts) if part is None]
        self.misses += len(missing)
        for row, part in zip(missing, self._computed(batch, missing), strict=True):
            self._keep(keys[row], part)
            parts[row] = part
        said = together(
            [self._said(p, batch, row) for row, p in enumerate(parts) if p is not None], torch.stack
        )
        taps = said.features if self.layout.reads == "taps" else said.features[..., :0]
        return Trace.of(batch, taps, said.last, said.favourite).to(device)

    def _said(self, part: dict[str, Tensor], batch: Batch, row: int) -> Said:
        kept = self.layout.kept(batch.answer[row].cpu(), batch.document[row].cpu())
        return self.layout.said(part, kept)

    @torch.no_grad()
    def _computed(self, batch: Batch, rows: list[int]) -> list[dict[str, Tensor]]:
        if not rows:
            return []
        few = Batch(*(field[rows].to(self.target.device) for field in batch))
        trace = self.target.trace(*few)
        out = []
        for row in range(len(rows)):
            kept = self.layout.kept(few.answer[row].cpu(), few.document[row].cpu())
            taps, last = trace.taps[row].cpu(), trace.last[row].cpu()
            out.append(self._columns(kept, taps, last))
        return out

    def _columns(self, kept: Kept, taps: Tensor, last: Tensor) -> dict[str, Tensor]:
        try:
            return self.layout.columns(self.target, kept, taps, last, whole=False)
        except NotFinite as error:
            fix = "Run the target in another precision: target.dtype=float32."
            raise RunError(f"{self.target.name}: {error}.", fix) from None

    # ---- the disk ----

    def _read(self, key: str) -> dict[str, Tensor] | None:
        """A row that was kept; one that is damaged or gone was not."""
        if (file := self.files.get(key)) is None:
            return None
        try:
            data = read_tensors(file, None, "")
            if not _named(file, data):
                raise Damaged(f"{file} is not what was written.", "")
            _use(file)
        except (Damaged, OSError):
            self._remove(file)
            return None
        return data

    def _remove(self, file: Path) -> None:
        """One that another process has removed already is gone all the same."""
        self.used -= _facts(file).size
        file.unlink(missing_ok=True)
        if self.files.get(_key_of(file)) == file:
            del self.files[_key_of(file)]

    def _keep(self, key: str, part: dict[str, Tensor]) -> None:
        size = sum(rows.numel() * rows.element_size() for rows in part.values())
        if self.used + size > self.budget and not self._give_way(size):
            return
        file = self.where / f"{key}-{_digest(part)}.safetensors"
        try:
            write_tensors(file, part, {})
        except NoRoom:  # others have filled the disk
            self.budget = 0.0
            return
        self.files[key] = file
        self.used += _facts(file).size

    def _give_way(self, size: int) -> bool:
        """Remove what earlier runs used longest ago, until there is room."""
        if not self.crowded:
            return False
        ages = sorted((_facts(file).mtime, file) for file in _kept(self.where.parent))
        for used, file in ages:
            if self.used + size <= self.budget:
                break
            if used >= self.began:
                self.crowded = False
                return False
            self._remove(file)
        return self.used + size <= self.budget


class _Facts(NamedTuple):
    size: int
    mtime: float


def _facts(file: Path) -> _Facts:
    """Of a file that another process may be removing: nothing, and long ago."""
    try:
        found = file.stat()
    except OSError:
        return _Facts(0, 0.0)
    return _Facts(found.st_size, found.st_mtime)


def _use(file: Path) -> None:
    """By this clock: that of the file system may lie some milliseconds behind."""
    now = time.time()
    os.utime(file, (now, now))


def _kept(home: Path) -> list[Path]:
    return list(home.glob("*/*.safetensors"))


def _used(home: Path) -> int:
    return sum(_facts(file).size for file in _kept(home))


def _key_of(file: Path) -> str:
    return file.name.partition("-")[0]


def _key(batch: Batch, row: int) -> str:
    """A packed row by its text."""
    digest = hashlib.sha256()
    for field in (batch.ids, batch.answer, batch.document):
        digest.update(field[row].cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def _digest(part: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(part):
        digest.update(name.encode())
        digest.update(part[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _named(file: Path, part: Mapping[str, Tensor]) -> bool:
    return file.stem.partition("-")[2] == _digest(part)
