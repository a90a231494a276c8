"""Traces of packed rows, read from a recording."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from outrider.conf.errors import ConfigError, CorruptFile, RunError
from outrider.conf.schema import Config
from outrider.data.record.folder import DocumentLocation, RecordingFolder
from outrider.data.record.layout import RecordedRows, RowSelection, combine
from outrider.data.tokenise import Document
from outrider.models.drafters import drafter_class
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import Batch, ModelShape, Trace

READABLE = {  # what a drafter reads -> recordings that contain it
    "taps": ("taps",), "last": ("last",), "guesses": ("guesses", "last"),
    "ids": ("ids", "guesses", "last", "taps"),
}  # fmt: skip


class RecordedTraces:
    """A `TraceSource` that reads a recording.

    `locations` are those of document 0, 1, ... of the packed rows, `taps` the recorded layers to
    return. Where both last states and `top` are stored, `with_last_states` chooses the former.
    """

    has_argmax = reads_disk = True

    def __init__(
        self, folder: RecordingFolder, locations: Sequence[DocumentLocation], taps: Sequence[int],
        shape: ModelShape, *, with_last_states: bool = True,
    ) -> None:  # fmt: skip
        self.folder, self.path, self.locations = folder, folder.path, list(locations)
        self.shape = shape  # of the target
        self.with_last_states, layout = with_last_states, folder.layout
        read_taps = taps if layout.reads == "taps" else ()
        self.tap_indices = [layout.taps.index(tap) for tap in read_taps]
        self.has_last_states = with_last_states or layout.features_hold_teacher

    def select(self, documents: Sequence[int], with_last_states: bool = True) -> "RecordedTraces":
        """Return the source for rows whose document i is `documents[i]` of this one."""
        taps = [self.folder.layout.taps[index] for index in self.tap_indices]
        parts = [self.locations[i] for i in documents], taps, self.shape
        return RecordedTraces(self.folder, *parts, with_last_states=with_last_states)

    def size(self) -> int:
        return self.folder.size()

    def trace(self, batch: Batch, device: torch.device | str = "cpu") -> Trace:
        """Return the recorded trace of these rows.

        With `record.top`, `Trace.top` is the teacher and `last` has no columns, except for
        documents whose last states are stored and read.
        """
        batch = Batch(*(field.cpu() for field in batch))
        texts = zip(batch.document, batch.answer, strict=True)
        rows = combine([self._read_row(*text) for text in texts], torch.stack)
        return Trace.from_batch(batch, rows.features, rows.last, rows.argmax, rows.top).to(device)

    def _read_row(self, document: Int[Tensor, " T"], answer: Tensor) -> RecordedRows:
        numbers, counts = torch.unique_consecutive(document, return_counts=True)
        parts = zip(numbers.tolist(), answer.split(counts.tolist()), strict=True)
        return combine([self._read_document(*part) for part in parts], torch.cat)

    def _read_document(self, number: int, answer: Tensor) -> RecordedRows:
        """Return (the beginning of) a document; zeros for padding (number -1)."""
        layout, location = self.folder.layout, self.locations[max(number, 0)]
        rows = layout.select_rows(answer)
        if number < 0:
            rows = RowSelection(torch.zeros_like(answer), torch.zeros_like(answer))
        with self.folder.damaged_means_error():
            parts = self.folder.read_rows(location, rows)
            stored = layout.decode(parts, rows, location.length)
            self._check(stored)
        features = stored.features[:, :0]
        if self.tap_indices:
            taps = stored.features.unflatten(-1, (len(layout.taps), -1))
            features = taps[:, self.tap_indices].flatten(-2)
        if self.with_last_states:  # one of the two teachers
            return stored._replace(features=features, top=None)
        last = stored.last if layout.features_hold_teacher else stored.last[:, :0]
        return stored._replace(features=features, last=last)

    def _check(self, rows: RecordedRows) -> None:
        """Raise a ValueError for sizes and tokens that the target does not have."""
        layout, top = self.folder.layout, rows.top
        sizes = layout.hidden, rows.features.shape[-1], rows.last.shape[-1] or self.shape.hidden
        if sizes != (self.shape.hidden, layout.width, self.shape.hidden):
            raise ValueError(f"states of {sizes[1:]} columns, and the target has another size")
        size = 0 if layout.vocab is None else len(layout.vocab)
        if int(rows.argmax.max()) >= self.shape.vocab or (top and int(top.ids.max()) >= size):
            raise ValueError("a token outside the vocabulary")


def require_features_for(folder: RecordingFolder, config: Config) -> None:
    """Raise ConfigError if the recording does not contain what this drafter reads."""
    cfg, layout = config.drafter, folder.layout
    reads = drafter_class(cfg.name).required_features
    deep_enough = layout.reads != "guesses" or reads != "guesses" or layout.ahead >= cfg.depths
    if layout.reads not in READABLE[reads] or not deep_enough:
        why = f"It was recorded for drafters that read {layout.reads} (down to depth "
        why += f"{layout.ahead}), and {cfg.name} reads {reads} (down to {cfg.depths})."
        fix = f"Record for it: outrider record drafter={cfg.name} data.traces=FOLDER"
        raise ConfigError("data.traces", str(folder.path), why, fix)


def open_recording(
    folder: RecordingFolder, taps: Sequence[int], damaged: str, shape: ModelShape
) -> tuple[list[Document], RecordedTraces, list[int]]:
    """Return all texts of a recording, their traces, and the numbers of shards left out.

    `shape` is the target's. Shards that are missing or damaged are left out with `damaged`="skip",
    else raise CorruptFile.
    """
    layout = folder.layout
    if layout.reads == "taps" and not set(taps) <= set(layout.taps):
        stored_taps = list(layout.taps)
        why = f"{folder.path} holds the outputs of layers {stored_taps}"
        fix = f"Set drafter.taps={stored_taps}, or record again."
        raise RunError(f"{why}, and this drafter reads {list(taps)}.", fix)
    if layout.vocab is not None:
        with folder.damaged_means_error():
            DraftVocab(layout.vocab, shape.vocab)
    documents, locations, left_out = list[Document](), list[DocumentLocation](), list[int]()
    for shard in range(len(folder.shard_documents)):
        try:
            if not folder.is_written(shard):
                fix = f"Complete it: outrider record data.traces={folder.path}"
                raise CorruptFile(f"{folder.shard_file(shard)} has not been written.", fix)
            stored = list(folder.documents(shard))
        except CorruptFile:
            if damaged != "skip":
                raise
            left_out.append(shard)
            continue
        documents += [document for document, _ in stored]
        locations += [location for _, location in stored]
    return documents, RecordedTraces(folder, locations, taps, shape), left_out
