"""Traces of packed rows, put together from a recording instead of a target forward."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from outrider.conf.errors import ConfigError, Damaged, RunError
from outrider.data.batches import Batch
from outrider.data.record.folder import Folder, Place
from outrider.data.record.layout import Kept, Layout, Said, together
from outrider.data.tokenise import Document
from outrider.models.drafter import Trace
from outrider.models.drafters import kind
from outrider.train.settings import Config


class Recording:
    """A folder, opened to train from: its texts, and what the target said about each.

    `part` gives the same recording for documents in another order, which is what packed rows
    number theirs by; `trace` then reads them.
    """

    def __init__(
        self, folder: Folder, places: Sequence[Place], taps: Sequence[int], *, whole: bool = True
    ) -> None:
        """
        Args:
            places: for document number i of the packed rows, where it lies.
            taps: which of the recorded layers, in this order.
            whole: these documents are read for their last states, where both are there.
        """
        self.folder, self.places, self.whole = folder, list(places), whole
        layout = folder.layout
        self.columns = [layout.taps.index(tap) for tap in taps] if layout.reads == "taps" else []
        self.where = folder.path
        self.knows_favourites, self.knows_last = True, whole or layout.serves

    def part(self, numbers: Sequence[int], whole: bool = True) -> "Recording":
        """The same for these of the documents, in this order."""
        taps = [self.folder.layout.taps[column] for column in self.columns]
        return Recording(self.folder, [self.places[i] for i in numbers], taps, whole=whole)

    def size(self) -> int:
        """Bytes on disk."""
        return self.folder.bytes()

    def trace(self, batch: Batch, device: torch.device | str = "cpu") -> Trace:
        """The same as `Target.trace` on the same rows, within the precision of the recording.

        With `record.top`, `Trace.top` is the teacher and `last` has no columns, but for the
        documents that are whole.
        """
        rows = [self._row(batch.document[i], batch.answer[i]) for i in range(len(batch.ids))]
        said = together(rows, torch.stack)
        return Trace.of(batch, said.features, said.last, said.favourite, said.top).to(device)

    def _row(self, document: Int[Tensor, " T"], answer: Tensor) -> Said:
        """A row's documents, one behind the other."""
        numbers, counts = torch.unique_consecutive(document, return_counts=True)
        parts = [
            self._document(number, own)
            for number, own in zip(numbers.tolist(), answer.split(counts.tolist()), strict=True)
        ]
        return together(parts, torch.cat)

    def _document(self, number: int, answer: Tensor) -> Said:
        """What was said about (the beginning of) a document; nothing about padding."""
        layout, place = self.folder.layout, self.places[max(number, 0)]
        kept = layout.kept(answer)
        if number < 0:
            kept = Kept(torch.zeros_like(answer), torch.zeros_like(answer))
        said = layout.said(self.folder.columns(place, kept), kept)
        return self._wanted(layout, said)

    def _wanted(self, layout: Layout, said: Said) -> Said:
        """The taps that are asked for; and one teacher, not two."""
        features = said.features[:, :0]
        if self.columns:
            features = said.features.unflatten(-1, (len(layout.taps), -1))[:, self.columns]
            features = features.flatten(-2)
        if self.whole:
            return Said(features, said.last, said.favourite, None)
        last = said.last if layout.serves else said.last[:, :0]
        return Said(features, last, said.favourite, said.top)


READS = {  # what drafters read, and the recordings that serve them
    "taps": ("taps",), "last": ("last",), "guesses": ("guesses", "last"),
    "ids": ("ids", "guesses", "last", "taps"),
}  # fmt: skip


def check_reads(folder: Folder, config: Config) -> None:
    """
    Raises:
        ConfigError: the recording does not hold what this drafter reads.
    """
    cfg, layout = config.drafter, folder.layout
    reads = kind(cfg.name).reads
    deep_enough = layout.reads != "guesses" or reads != "guesses" or layout.ahead >= cfg.depths
    if layout.reads not in READS[reads] or not deep_enough:
        raise ConfigError(
            "data.traces", str(folder.path),
            f"It was recorded for drafters that read {layout.reads} (down to depth "
            f"{layout.ahead}), and {cfg.name} reads {reads} (down to {cfg.depths}).",
            f"Record for it: outrider record drafter={cfg.name} data.traces=FOLDER",
        )  # fmt: skip


def open_recording(
    folder: Folder, taps: Sequence[int], damaged: str
) -> tuple[list[Document], Recording, list[int]]:
    """All texts of a recording, the recording in their order, and the shards that were left out.

    Args:
        damaged: "refuse" a recording that misses something, or "skip" what is missing.

    Raises:
        RunError: it is not complete, or does not hold these taps.
        Damaged: a shard is not what was written.
    """
    layout = folder.layout
    if layout.reads == "taps" and not set(taps) <= set(layout.taps):
        raise RunError(
            f"{folder.path} holds the outputs of layers {list(layout.taps)}, "
            f"and this drafter reads {list(taps)}.",
            f"Set drafter.taps={list(layout.taps)}, or record again.",
        )
    documents, places, left_out = list[Document](), list[Place](), list[int]()
    for shard in range(len(folder.counts)):
        try:
            if not folder.written(shard):
                fix = f"Go on with it: outrider record data.traces={folder.path}"
                raise Damaged(f"{folder.file(shard)} has not been written.", fix)
            found = list(folder.documents(shard))
        except Damaged:
            if damaged != "skip":
                raise
            left_out.append(shard)
            continue
        documents += [document for document, _ in found]
        places += [place for _, place in found]
    return documents, Recording(folder, places, taps), left_out
