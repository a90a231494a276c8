"""Text that the target wrote, with what it thought while writing: shards on disk.

A shard holds some finished documents side by side, in the order of their places: their ids and,
when they were recorded, the tapped features and last states of every row, in the target's own
precision. It is named after the first place, and written whole or not at all.

    manifest.json                what it is of: target, taps, prompts, settings; a hash per shard
    shard-00000000.safetensors   ids [S], prompt [n], length [n], place [n],
                                 taps [S,KH], last [S,H], favourite [S]
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.conf.files import read_json, sha256_of, write_json, write_tensors
from outrider.data.batches import Batch
from outrider.data.tokenise import Document
from outrider.models.drafter import Trace

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Written:
    """One answer, finished. The first `prompt` ids are the prompt, the others the target's own.

    Attributes:
        place: which prompt it answers.
        taps, last: rows of the target, one per id but the newest; None when not recorded.
        favourite: the target's most probable next token at these rows, -1 inside the prompt.
    """

    place: int
    key: str
    ids: list[int]
    prompt: int
    taps: Float[Tensor, "S KH"] | None = None
    last: Float[Tensor, "S H"] | None = None
    favourite: Int[Tensor, " S"] | None = None

    def document(self) -> Document:
        answer = [False] * self.prompt + [True] * (len(self.ids) - self.prompt)
        return Document.of(self.ids, answer, self.key)


class Store:
    """A folder of shards. One writer; any number of readers."""

    def __init__(self, folder: Path, about: dict[str, Any], taps: Sequence[int]) -> None:
        """
        Args:
            about: what the text depends on; a folder made from something else is refused.
            taps: layers to record. A folder that exists goes on with the layers it began with.
        """
        self.folder, self.about = folder, about
        self.fix = f"Remove {folder} and prepare it again."
        self.taps = tuple(taps)
        self.shards: dict[str, str] = {}
        self.fulfilled: dict[str, list[str]] = {}  # requests that are complete: their shards
        self.seconds = 0.0  # of writing so far
        self._open: dict[str, Any] = {}
        if (folder / MANIFEST).is_file():
            known = read_json(folder / MANIFEST, self.fix)
            if known.get("about") != about:
                raise RunError(f"{folder} was made from something else than this run.", self.fix)
            self.shards, self.taps = dict(known["shards"]), tuple(known["taps"])
            self.fulfilled = dict(known.get("fulfilled", {}))
            for request, names in self.fulfilled.items():
                if isinstance(names, int):  # older folders count
                    self.fulfilled[request] = list(self.shards)[:names]
            self.seconds = float(known.get("seconds", 0.0))

    def add(self, answers: Sequence[Written], seconds: float = 0.0) -> None:
        """Write one shard; it counts once the manifest names it. `seconds` is what it took."""
        self.seconds += seconds
        answers = sorted(answers, key=lambda a: a.place)
        name = f"shard-{answers[0].place:08d}.safetensors"
        tensors = {
            "ids": torch.tensor([i for a in answers for i in a.ids], dtype=torch.int32),
            "length": torch.tensor([len(a.ids) for a in answers], dtype=torch.int32),
            "prompt": torch.tensor([a.prompt for a in answers], dtype=torch.int32),
            "place": torch.tensor([a.place for a in answers], dtype=torch.int32),
        }
        for field, blank in (("taps", 0), ("last", 0), ("favourite", -1)):
            rows = [getattr(a, field) for a in answers]
            if all(part is not None for part in rows):
                full = [_full(r, len(a.ids), blank) for r, a in zip(rows, answers, strict=True)]
                tensors[field] = torch.cat(full)
        keys = json.dumps([a.key for a in answers])
        written = write_tensors(self.folder / name, tensors, {"keys": keys})
        self.shards = dict(sorted({**self.shards, name: written}.items()))
        self._write()

    def finish(self, request: str) -> None:
        """Note that all this request asked for is here; a later, larger one does not change it."""
        self.fulfilled[request] = list(self.shards)
        self._write()

    def only(self, request: str) -> "Store":
        """The same folder as this fulfilled request left it."""
        part = Store(self.folder, self.about, self.taps)
        part.shards = {name: self.shards[name] for name in self.fulfilled[request]}
        return part

    def _write(self) -> None:
        fields = {
            "about": self.about, "taps": list(self.taps), "seconds": self.seconds,
            "fulfilled": self.fulfilled, "shards": self.shards,
        }  # fmt: skip
        write_json(self.folder / MANIFEST, fields)

    def answers(self) -> list[Written]:
        """All documents of all shards, shard by shard; rows stay on disk.

        Raises:
            RunError: a shard is missing or damaged.
        """
        out: list[Written] = []
        for name in self.shards:
            file = self._shard(name)
            keys = json.loads(file.metadata()["keys"])
            fields = [file.get_tensor(f).tolist() for f in ("ids", "length", "prompt", "place")]
            ids, start = fields[0], 0
            for key, length, prompt, place in zip(keys, *fields[1:], strict=True):
                out.append(Written(place, key, ids[start : start + length], prompt))
                start += length
        return out

    def records(self, taps: Sequence[int]) -> bool:
        """Whether the features of these layers lie beside the text."""
        first = next(iter(self.shards), None)
        if first is None or not set(taps) <= set(self.taps):
            return False
        return "taps" in list(self._shard(first).keys())

    def records_favourites(self) -> bool:
        """Whether the target's favourite stands beside every state (older folders lack it)."""
        return all("favourite" in list(self._shard(name).keys()) for name in self.shards)

    def size(self) -> int:
        """Bytes on disk."""
        return sum((self.folder / name).stat().st_size for name in self.shards)

    def _shard(self, name: str) -> Any:
        if name not in self._open:
            try:
                if sha256_of(self.folder / name) != self.shards[name]:
                    raise RunError(f"{self.folder / name} is damaged.", self.fix)
                self._open[name] = safe_open(self.folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise RunError(f"{self.folder / name} is damaged: {error}", self.fix) from None
        return self._open[name]

    def starts(self) -> list[tuple[str, int, int]]:
        """For every document: its shard, its first row there, its length."""
        out = []
        for name in self.shards:
            start = 0
            for length in self._shard(name).get_tensor("length").tolist():
                out.append((name, start, length))
                start += length
        return out

    def rows(self, name: str, start: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Taps [length, KH], last states [length, H] and favourites [length] of one document."""
        file, part = self._shard(name), slice(start, start + length)
        taps, last = file.get_slice("taps")[part], file.get_slice("last")[part]
        if "favourite" not in file.keys():  # noqa: SIM118 - not a dict
            return taps, last, torch.full((len(last),), -1)
        return taps, last, file.get_slice("favourite")[part].long()


@runtime_checkable
class Traces(Protocol):
    """Where traces of packed rows come from, if not from a forward of the target.

    Attributes:
        where: the folder.
        knows_favourites: the target's favourite stands beside every state that judges.
        knows_last: its last states are there, of the rows that judge.
    """

    where: Path
    knows_favourites: bool
    knows_last: bool

    def size(self) -> int:
        """Bytes on disk."""
        ...

    def trace(self, batch: Batch, device: torch.device | str = "cpu") -> Trace:
        """The same as `Target.trace` on the same rows, within the precision of the recording."""
        ...

    def part(self, numbers: Sequence[int]) -> "Traces":
        """The same for these of the documents, in this order."""
        ...


class Recorded:
    """Traces of packed rows, put together from documents that were recorded while written."""

    def __init__(self, store: Store, order: Sequence[int], taps: Sequence[int]) -> None:
        """
        Args:
            order: for document number i of the packed rows, its number in the store.
            taps: which of the recorded layers, in this order.
        """
        self.store, self.order, self.starts = store, list(order), store.starts()
        self.taps, self.columns = tuple(taps), [store.taps.index(tap) for tap in taps]
        self.where, self.knows_favourites = store.folder, store.records_favourites()
        self.knows_last = True

    def part(self, numbers: Sequence[int]) -> "Recorded":
        """The same for these of the documents, in this order."""
        return Recorded(self.store, [self.order[i] for i in numbers], self.taps)

    def size(self) -> int:
        """Bytes on disk."""
        return self.store.size()

    def trace(self, batch: Batch, device: torch.device | str = "cpu") -> Trace:
        """See `Traces`."""
        rows = [self._row(batch.document[i]) for i in range(len(batch.ids))]
        taps, last, favourite = (torch.stack(part) for part in zip(*rows, strict=True))
        return Trace.of(batch, taps, last, favourite).to(device)

    def _row(self, document: Int[Tensor, " T"]) -> tuple[Tensor, Tensor, Tensor]:
        numbers, counts = torch.unique_consecutive(document, return_counts=True)
        parts = []
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            name, start, length = self.starts[self.order[max(number, 0)]]
            taps, last, favourite = self.store.rows(name, start, min(count, length))
            taps = taps.unflatten(-1, (len(self.store.taps), -1))[:, self.columns].flatten(-2)
            if number < 0:  # padding
                taps, last = taps[:1].expand(count, -1) * 0, last[:1].expand(count, -1) * 0
                favourite = favourite[:1].expand(count) * 0 - 1
            parts.append((taps, last, favourite))
        taps, last, favourite = (torch.cat(part) for part in zip(*parts, strict=True))
        return taps, last, favourite


def _full(rows: Tensor, length: int, blank: int) -> Tensor:
    """The newest token of a document was never read by the target: its row is blank."""
    missing = length - len(rows)
    return torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), blank)])
