"""A disk cache of traces (`data.mode=hybrid`): the target runs once per packed row.

The first epoch runs the target and stores its output; later epochs read the stored rows and run
the target for the others. Rows of this run never evict each other: an epoch reads every row once,
so that least-recently-used eviction with space for half of the rows would hit 15 % of them, and
keeping the first ones hits 50 % (docs/record.md). Rows of earlier runs are evicted, least recently
used first.

    kept/<run>/<row>-<sha256>.safetensors   a row by the hash of its text; columns of layout.py
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.conf.errors import CorruptFile, DiskFull, RunError
from outrider.conf.files import remove_temporary
from outrider.conf.paths import cache_home
from outrider.conf.schema import Config
from outrider.conf.tensor_files import read_tensors, write_tensors
from outrider.data.batches import select_rows
from outrider.data.pack import Rows
from outrider.data.record.folder import layout_to_json
from outrider.data.record.layout import Layout, RecordedRows, RowSelection, combine
from outrider.data.record.quantise import NotFinite
from outrider.models.formats.weight_folder import DAMAGE
from outrider.models.interface import Batch, Trace
from outrider.models.target import process
from outrider.models.target.target import Target

GB = 1e9
DISK_SHARE = 0.5  # of the bytes that are free or cached, where no limit is set
NAME = re.compile(r"[0-9a-f]{16}/[0-9a-f]{32}-[0-9a-f]{16}\.safetensors")  # folder and file
STALE = 3600.0  # seconds after which a temporary file belongs to a killed process


class TraceCache:
    """A `TraceSource` that stores the target's output.

    The output is the same whether a row was stored or not. Rows of the folder's siblings may be
    evicted; `budget` is the bytes of all these folders, which the ranks share equally.
    """

    has_argmax = has_last_states = True
    reads_disk = False  # it may run the target

    def __init__(
        self, folder: Path, layout: Layout, target: Target, budget: float, ranks: int = 1
    ) -> None:
        self.path, self.layout, self.target, self.budget = folder, layout, target, budget / ranks
        self.start_time = time.time()
        folder.mkdir(parents=True, exist_ok=True)
        remove_temporary(folder, "*-*.safetensors", self.start_time - STALE)
        self.files = {_file_key(file): file for file in _cached_rows(folder.parent, folder.name)}
        self.used = _cached_bytes(folder.parent) / ranks
        self.may_evict = True  # rows of earlier runs may be left
        self.hits = self.misses = 0

    @staticmethod
    def from_config(config: Config, target: Target, about: Mapping[str, Any]) -> "TraceCache":
        """Return the cache of this configuration; `about` are fingerprints of its target."""
        layout = Layout.for_drafter(config, target)
        facts = {**about, **layout_to_json(layout), "sizes": None, "dtype": str(target.dtype)}
        name = hashlib.sha256(json.dumps(facts, sort_keys=True, default=list).encode()).hexdigest()
        folder = cache_home() / "kept" / name[:16]
        folder.mkdir(parents=True, exist_ok=True)
        limit = config.data.max_gb
        available = shutil.disk_usage(folder).free + _cached_bytes(folder.parent)
        budget = limit * GB if limit else DISK_SHARE * available
        return TraceCache(folder, layout, target, budget, process.world_size())

    def touch_rows(self, rows: Rows) -> None:
        """Mark the stored ones of these rows as used, so that they are not evicted."""
        for row in range(len(rows)) if self.files else ():
            file = self.files.get(_row_key(select_rows(rows, torch.tensor([row])), 0))
            if file is not None:
                with suppress(OSError):
                    _touch(file)

    def size(self) -> int:
        return _cached_bytes(self.path.parent, self.path.name)

    def trace(self, batch: Batch, device: torch.device | str = "cpu") -> Trace:
        batch = Batch(*(field.cpu() for field in batch))
        keys = [_row_key(batch, row) for row in range(len(batch.ids))]
        selections = self._select_rows(batch)
        stored = [self._read(*pair) for pair in zip(keys, selections, strict=True)]
        missing = [row for row, part in enumerate(stored) if part is None]
        self.hits += len(keys) - len(missing)
        self.misses += len(missing)
        for row, part in zip(missing, self._run_target(batch, missing), strict=True):
            self._store(keys[row], part)
            stored[row] = self.layout.decode(part, selections[row])
        rows = combine([part for part in stored if part is not None], torch.stack)
        taps = rows.features if self.layout.reads == "taps" else rows.features[..., :0]
        return Trace.from_batch(batch, taps, rows.last, rows.argmax).to(device)

    def _select_rows(self, batch: Batch) -> list[RowSelection]:
        texts = zip(batch.answer, batch.document, strict=True)
        return [self.layout.select_rows(*text) for text in texts]

    @torch.no_grad()
    def _run_target(self, batch: Batch, rows: list[int]) -> list[dict[str, Tensor]]:
        """Return the columns of these rows; RunError if the target outputs NaN or infinity."""
        if not rows:
            return []
        part = Batch(*(field[rows] for field in batch))
        trace = self.target.trace(*(field.to(self.target.device) for field in part))
        states = zip(self._select_rows(part), trace.taps.cpu(), trace.last.cpu(), strict=True)
        try:
            return [self.layout.encode(self.target, *row, False) for row in states]
        except NotFinite as error:
            fix = "Run the target in another precision: target.dtype=float32."
            raise RunError(f"{self.target.name}: {error}.", fix) from None

    # ---- the disk ----

    def _read(self, key: str, rows: RowSelection) -> RecordedRows | None:
        """Return a stored row; None where it is missing or damaged."""
        if (file := self.files.get(key)) is None:
            return None
        try:
            part = read_tensors(file, None, "")
            if file.stem.partition("-")[2] != _digest(part):
                raise CorruptFile(f"{file} is damaged.", "")
            _touch(file)
            return self.layout.decode(part, rows)
        except (OSError, *DAMAGE):
            self._remove(file)
            return None

    def _remove(self, file: Path) -> None:
        """Remove a file, which another process may have removed already."""
        self.used -= _stat(file)[0]
        file.unlink(missing_ok=True)
        if self.files.get(_file_key(file)) == file:
            del self.files[_file_key(file)]

    def _store(self, key: str, part: dict[str, Tensor]) -> None:
        size = sum(rows.numel() * rows.element_size() for rows in part.values())
        if self.used + size > self.budget and not self._evict(size):
            return
        file = self.path / f"{key}-{_digest(part)}.safetensors"
        try:
            write_tensors(file, part, {})
        except DiskFull:
            self.budget = 0.0
            return
        self.files[key] = file
        self.used += _stat(file)[0]

    def _evict(self, size: int) -> bool:
        """Remove rows of earlier runs until `size` bytes fit; return whether they do."""
        if not self.may_evict:
            return False
        oldest_first = sorted((_stat(file)[1], file) for file in _cached_rows(self.path.parent))
        for last_use, file in oldest_first:
            if self.used + size <= self.budget:
                break
            if last_use >= self.start_time:
                self.may_evict = False
                return False
            self._remove(file)
        return self.used + size <= self.budget


def _stat(file: Path) -> tuple[int, float]:
    """Return bytes and time of the last use; zeros where another process has removed the file."""
    try:
        return (stat := file.stat()).st_size, stat.st_mtime
    except OSError:
        return 0, 0.0


def _touch(file: Path) -> None:
    """Set the time of use from this process's clock; the file system's may lag by milliseconds."""
    now = time.time()
    os.utime(file, (now, now))


def _cached_rows(home: Path, folder: str = "*") -> Iterator[Path]:
    """Yield the files in the cache's folders that the cache has named; others are the user's."""
    for file in home.glob(f"{folder}/*.safetensors"):
        if NAME.fullmatch(f"{file.parent.name}/{file.name}") and file.is_file():
            yield file


def _cached_bytes(home: Path, folder: str = "*") -> int:
    return sum(_stat(file)[0] for file in _cached_rows(home, folder))


def _file_key(file: Path) -> str:
    return file.name.partition("-")[0]


def _row_key(batch: Batch, row: int) -> str:
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
