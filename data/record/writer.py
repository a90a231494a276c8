"""Recording: one pass of the target over the text of a run, stored in shards.

A shard holds consecutive documents, packed into rows among themselves. Its bytes depend on nothing
else, so that ranks, machines and restarted processes divide the shards as they like. Before the
first shard, and every `record.check_every` shards, one document is compared with a plain forward of
the model.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.conf.errors import ConfigError, CorruptFile, RunError
from outrider.conf.paths import cache_home
from outrider.conf.quantities import format_bytes, format_count
from outrider.conf.schema import Config
from outrider.data.batches import select_rows
from outrider.data.pack import pack, split_holdout
from outrider.data.record.entropy_coding import SAMPLE, ColumnScales, OutOfRange
from outrider.data.record.folder import MANIFEST, RecordingFolder, layout_to_json, text_columns
from outrider.data.record.layout import Layout, check_record
from outrider.data.record.quantise import NotFinite, row_bytes
from outrider.data.record.verify import compare_with_plain_forward
from outrider.data.reporter import Reporter
from outrider.data.tokenise import Document
from outrider.data.training_data import TrainingData
from outrider.models.formats.fingerprints import fingerprints
from outrider.models.interface import Batch, Trace
from outrider.models.target import process
from outrider.models.target.load import LoadedTarget
from outrider.models.target.target import Target

FORWARD = 8192  # tokens per forward, approximately
GB = 1e9


def write_recording(
    config: Config, loaded: LoadedTarget, data: TrainingData, reporter: Reporter
) -> RecordingFolder:
    """Return the recording of this configuration; write this rank's missing shards.

    Raises:
        RunError: the disk is too small (DiskFull: became full), the packed forward differs from a
            plain one, or other ranks make no progress.
    """
    recorder = Recorder(config, loaded, data, reporter)
    folder = recorder.open_folder()
    recorder.write(folder)
    return folder


class FirstTrace(NamedTuple):
    """The trace of the first rows of a shard, and the seconds of its forward."""

    shard: int
    trace: Trace
    seconds: float


class Recorder:
    """The part of a recording that one rank writes."""

    def __init__(
        self, config: Config, loaded: LoadedTarget, data: TrainingData, reporter: Reporter
    ) -> None:
        self.config, self.settings, self.target = config, config.record, loaded.target
        self.data, self.documents, self.reporter = data, data.documents, reporter
        self.layout = layout_of(config, loaded.target, data)
        self.shard_documents = shard_sizes(self.documents, self.settings.shard)
        held = {document.key for document in split_holdout(self.documents, config.data.holdout)[1]}
        # with record.top, last states are stored for held-out documents only
        self.with_last_states = [not self.layout.top or d.key in held for d in self.documents]
        self.about = {**about_of(config, loaded, data), "layout": layout_to_json(self.layout)}
        default, chosen = cache_home() / "traces" / _folder_name(self.about), config.data.traces
        self.path = default if chosen is None else Path(chosen).expanduser()
        # a sharded target runs on all ranks at once
        self.in_lockstep = self.target.is_remote
        self._first: FirstTrace | None = None

    def is_complete(self) -> bool:
        exists = (self.path / MANIFEST).is_file()
        return exists and not RecordingFolder(self.path).missing_shards()

    def open_folder(self) -> RecordingFolder:
        """Return the folder, which the first rank of the first machine creates."""
        machine = self.settings.part[0]
        creates = machine == 0 and process.rank() == 0
        exists = (self.path / MANIFEST).is_file()
        if not exists and machine == 0 and (creates or self.in_lockstep):
            self._check_space(1.0)
            if self.layout.step is not None and self.layout.width:
                sample = self._sample_features(SAMPLE)
                self.layout = replace(self.layout, scales=ColumnScales.fit(sample))
        if not creates and not exists:
            self.reporter.print(f"waiting for the machine with record.share=1/... at {self.path}")
            process.wait_until(
                lambda: ((self.path / MANIFEST).is_file(), None),
                self.config.launch.wait, f"the first rank to create {self.path}",
            )  # fmt: skip
        facts = {"source": self.data.about, "suite": self.config.eval.prompts}
        folder = RecordingFolder.open_or_create(
            self.path, self.about, self.layout, self.shard_documents, facts
        )
        self.layout, self.shard_documents = folder.layout, folder.shard_documents
        return folder

    def _sample_features(self, rows: int) -> Iterator[Tensor]:
        """Yield features of the first documents, at least `rows` rows of them."""
        count = 0
        for shard in range(len(self.shard_documents)):
            for trace in self._traces(shard):
                features = trace.taps if self.layout.reads == "taps" else trace.last
                yield features[trace.document >= 0].cpu()
                count += int((trace.document >= 0).sum())
                if count >= rows:
                    return

    # ---- writing ----

    def write(self, folder: RecordingFolder) -> None:
        """Write the missing shards of this rank, then wait for those of the other ranks."""
        (machine, machines), world = self.settings.part, process.world_size()
        first, every = machine * world + process.rank(), machines * world
        if self.in_lockstep:
            first, every = machine, machines
        own = range(first, len(folder.shard_documents), every)
        self._discard_corrupt(folder, own)
        missing = [shard for shard in own if not folder.is_written(shard)]
        if missing:
            self._announce(folder, missing)
            self._write_shards(folder, missing)
        if machines == 1:
            process.wait_until(
                lambda: (not folder.missing_shards(), len(folder.missing_shards())),
                self.config.launch.wait, f"the other ranks' files in {folder.path}",
            )  # fmt: skip
        rest = len(folder.missing_shards())
        others = f"; other machines have {format_count(rest, 'file')} to write" if rest else ""
        self.reporter.print(f"{folder.path} holds {format_bytes(folder.size())}{others}")

    def _write_shards(self, folder: RecordingFolder, shards: Sequence[int]) -> None:
        total = sum(self.shard_documents[shard] for shard in shards)
        with self.reporter.progress("recording", total, "conversations") as bar:
            for index, shard in enumerate(shards):
                if index % self.settings.check_every == 0:
                    self._verify(shard)
                tensors = self._encode_shard(shard)
                if not self.in_lockstep or process.rank() == 0:
                    folder.write_shard(shard, tensors, self._documents_of(shard))
                bar.advance(self.shard_documents[shard], len(tensors["ids"]))

    def _discard_corrupt(self, folder: RecordingFolder, shards: Iterable[int]) -> None:
        """With record.damaged=again, mark damaged shards as missing."""
        for shard in shards if self.settings.damaged == "again" else ():
            try:
                if folder.is_written(shard):
                    folder.verify_shard(shard)
            except CorruptFile as error:
                self.reporter.note(f"{error.message} It is recorded again.")
                folder.mark_missing(shard)

    def _span(self, shard: int) -> slice:
        first = sum(self.shard_documents[:shard])
        return slice(first, first + self.shard_documents[shard])

    def _documents_of(self, shard: int) -> list[Document]:
        return self.documents[self._span(shard)]

    def _traces(self, shard: int) -> Iterator[Trace]:
        """Yield the target's traces of a shard's documents, in packed rows."""
        yield self._first_trace(shard).trace
        batches = self._batches(shard)
        next(batches)
        for batch in batches:
            yield self.target.trace(*batch)

    def _batches(self, shard: int) -> Iterator[Batch]:
        rows = pack(self._documents_of(shard), self.config.data.max_length)
        for index in torch.arange(len(rows)).split(max(1, FORWARD // rows.length)):
            yield Batch(*(field.to(self.target.device) for field in select_rows(rows, index)))

    def _first_trace(self, shard: int) -> FirstTrace:
        """Return the first batch of a shard, which is also timed and verified; it runs once."""
        if self._first is None or self._first.shard != shard:
            start = time.monotonic()
            trace = self.target.trace(*next(self._batches(shard)))
            self._first = FirstTrace(shard, trace, time.monotonic() - start)
        return self._first

    @torch.no_grad()
    def _encode_shard(self, shard: int) -> dict[str, Tensor]:
        documents, with_last = self._documents_of(shard), self.with_last_states[self._span(shard)]
        parts: dict[int, dict[str, Tensor]] = {}
        for trace in self._traces(shard):
            for number, part in split_documents(trace):
                parts[number] = self._encode(part, with_last[number], documents[number].key)
        names = dict.fromkeys(name for part in parts.values() for name in part)
        columns = {
            name: torch.cat([parts[i][name] for i in range(len(documents)) if name in parts[i]])
            for name in names
        }
        return {**text_columns(documents, with_last), **columns}

    def _encode(self, trace: Trace, with_last: bool, key: str) -> dict[str, Tensor]:
        """Return the columns of one document; RunError for NaN, infinity and what is too large."""
        rows = self.layout.select_rows(trace.answer[0].cpu())
        taps, last = trace.taps[0].cpu(), trace.last[0].cpu()
        with_last = with_last and self.layout.top > 0
        try:
            return self.layout.encode(self.target, rows, taps, last, with_last)
        except NotFinite as error:
            message, fix = str(error), "Run the target in another precision: target.dtype=float32."
        except OutOfRange as error:
            message, fix = str(error), "Take a larger record.step, or record.states=int8."
        raise RunError(f"{self.target.name}, document {key[:12]}: {message}.", fix)

    # ---- checks ----

    def _announce(self, folder: RecordingFolder, shards: Sequence[int]) -> None:
        first = self._first_trace(shards[0])
        rate = first.trace.ids.numel() / first.seconds
        tokens = sum(len(d.ids) for shard in shards for d in self._documents_of(shard))
        missing = sum(folder.shard_documents[shard] for shard in folder.missing_shards())
        size, free = self._check_space(missing / len(self.documents))
        per_token = self.size() / sum(len(d.ids) for d in self.documents)
        self.reporter.print(
            f"recording {tokens:,} tokens in {format_count(len(shards), 'file')}: "
            f"{format_bytes(size)} ({per_token:.0f} bytes per token) of {format_bytes(free)} free, "
            f"about {format_count(max(1, round(tokens / rate / 60)), 'minute')}"
        )

    def _check_space(self, share: float) -> tuple[float, int]:
        """Return the bytes of this share of the recording, and the bytes that are free.

        Raises ConfigError if all exceeds data.max_gb, RunError if the share exceeds the free space.
        """
        parents = (self.path, *self.path.absolute().parents)
        size, limit = share * self.size(), self.config.data.max_gb
        free = shutil.disk_usage(next(parent for parent in parents if parent.exists())).free
        if limit is not None and self.size() > limit * GB:
            why = f"The recording takes {format_bytes(self.size())}."
            fix = "Raise it, take record=small, or data.mode=hybrid: it stores what fits."
            raise ConfigError("data.max_gb", limit, why, fix)
        if size > free:
            room = f"{format_bytes(free)} are free there"
            why = f"{self.path} needs {format_bytes(size)}, and {room}."
            fix = "Free disk space, choose another data.traces, or take record=small."
            raise RunError(why, fix)
        return size, free

    def size(self) -> float:
        """Return the approximate bytes of the whole recording."""
        tokens = sum(len(document.ids) for document in self.documents)
        answers = [int(document.answer.sum()) for document in self.documents]
        itemsize = self.target.dtype.itemsize
        out = tokens * self.layout.bytes_per_token(sum(answers) / max(1, tokens), itemsize)
        if self.layout.top:
            pairs = zip(answers, self.with_last_states, strict=True)
            rows = sum(count for count, with_last in pairs if with_last)
            out += rows * row_bytes(self.layout.last_states, self.layout.hidden, itemsize)
        return out

    @torch.no_grad()
    def _verify(self, shard: int) -> None:
        """Raise RunError if a document of the shard differs from a plain forward."""
        number, trace = next(split_documents(self._first_trace(shard).trace))
        difference = compare_with_plain_forward(self.target, trace)
        if not difference.within_tolerance:
            key = self._documents_of(shard)[number].key
            why = f"{self.target.name} outputs other states of document {key[:12]}"
            fix = "Nothing of this file was written. Please report this: wrong states were read."
            raise RunError(f"{why} when it is packed with others: {difference}.", fix)


def layout_of(config: Config, target: Target, data: TrainingData) -> Layout:
    """Return the layout for this drafter; ConfigError for settings that do not suit it."""
    cfg, record = config.drafter, config.record
    check_record(record, cfg, target.vocab_size)
    vocab = data.vocab(cfg.draft_vocab_size).target_ids if record.top else None
    return Layout.for_drafter(config, target, vocab)


def about_of(config: Config, loaded: LoadedTarget, data: TrainingData) -> dict[str, Any]:
    """Return what a recording depends on, except for its layout."""
    about = {
        **fingerprints(loaded), "dtype": str(loaded.target.dtype),
        "documents": data.about["sha256_documents"], "max_length": config.data.max_length,
    }  # fmt: skip
    # with record.top, last states are stored for held-out documents only
    return {**about, "holdout": config.data.holdout} if config.record.top else about


def _folder_name(about: Mapping[str, Any]) -> str:
    """Return a name in the cache: the layout, and a hash of everything."""
    layout = about["layout"]
    taps = "-".join(map(str, layout["taps"])) if layout["reads"] == "taps" else layout["reads"]
    top = f"-top{layout['top']}" if layout["top"] else ""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return f"{taps}-{layout['states']}{layout['step'] or ''}{top}-{digest[:16]}"


def shard_sizes(documents: Sequence[Document], tokens: int) -> list[int]:
    """Return the number of documents per shard: a shard ends once it has `tokens` tokens."""
    counts, filled = [0], 0
    for document in documents:
        if filled >= tokens:
            counts.append(0)
            filled = 0
        counts[-1] += 1
        filled += len(document.ids)
    return counts


def split_documents(trace: Trace) -> Iterator[tuple[int, Trace]]:
    """Yield the documents of packed rows: number and trace of each."""
    fields = {name: value for name, value in vars(trace).items() if value is not None}
    for row in range(len(trace.ids)):
        numbers, counts = torch.unique_consecutive(trace.document[row], return_counts=True)
        ends = counts.cumsum(0)
        spans = zip(numbers.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True)
        for number, start, end in spans:
            if number >= 0:
                parts = {name: value[row : row + 1, start:end] for name, value in fields.items()}
                yield number, Trace(**parts)
