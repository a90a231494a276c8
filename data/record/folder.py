"""The files of a recording: what it is of, its shards, and whether they are whole.

    manifest.json            what was recorded, of which target and text, and how many documents
                             each shard has; written first, the same by every rank and machine
    about.safetensors        draft vocabulary and sizes of columns, if the recording needs them
    shard-00000.safetensors  ids [S], answer [S], length [n], whole [n], and the columns of
                             columns.py, document behind document; keys and sources of these
    shard-00000.json         its sha256 and sizes; a shard without it has not been written

A shard depends on its own documents alone. So ranks and machines write side by side, and what a
killed run leaves undone is done again with the same bytes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.conf.errors import Damaged, RunError
from outrider.conf.files import read_json, read_tensors, sha256_of, write_json, write_tensors
from outrider.data.record.column_scales import Sizes
from outrider.data.record.layout import Kept, Layout
from outrider.data.tokenise import Document

MANIFEST, ABOUT = "manifest.json", "about.safetensors"
VERSION = 3  # of all this
COLUMNS = {  # which of a document's rows each part of a file has
    "features.codes": "features", "features.scales": "features", "last.codes": "whole",
    "last.scales": "whole", "favourite": "judges", "top.ids": "judges", "top.p": "judges",
    "top.rest": "judges", "top.share": "judges", "features.packed": "packed",
}  # fmt: skip
PACKED = "features.bytes"  # of each document, where rows have no length of their own


@dataclass(frozen=True)
class Place:
    """Where the columns of one document lie: its shard, and its first row in each kind of column.

    Attributes:
        whole: last states are there (always, unless `top` stands for them).
        packed: bytes of the features, where they are coded.
    """

    shard: int
    length: int
    whole: bool
    starts: dict[str, int]
    packed: int = 0


class Folder:
    """A recording on disk."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            RunError: there is none.
            Damaged: manifest.json or about.safetensors cannot be read.
        """
        self.path = path
        self.fix = f"Record it again: remove {path}, then outrider record data.traces={path}."
        if not (path / MANIFEST).is_file():
            fix = f"Write it first: outrider record data.traces={path}."
            raise RunError(f"{path} holds no recording.", fix)
        self.manifest = read_json(path / MANIFEST, self.fix)
        if (version := self.manifest.get("version")) != VERSION:
            other = f"a recording of version {version}" if version else "something else"
            fix = f"This is version {VERSION}. Choose another data.traces, or remove the folder."
            raise RunError(f"{path} holds {other}.", fix)
        self.counts: list[int] = list(self.manifest["shards"])
        self._sound: set[int] = set()

    @staticmethod
    def begin(
        path: Path,
        about: Mapping[str, Any],
        layout: Layout,
        counts: Sequence[int],
        facts: Mapping[str, Any],
    ) -> "Folder":
        """A folder for a recording like this; one that is there already must be of the same.

        Args:
            about: what it is of, and `facts_of` its layout.
            counts: documents of each shard; a folder that is there keeps its own.
            facts: what else to say of it, which need not be the same another time.

        Raises:
            RunError: the folder holds a recording of something else.
        """
        if not (path / MANIFEST).is_file():
            fields = {**about, **facts, "version": VERSION, "shards": list(counts)}
            parts = {} if layout.vocab is None else {"vocab": layout.vocab.int()}
            parts |= {} if layout.sizes is None else vars(layout.sizes)
            if parts:
                fields["about"] = write_tensors(path / ABOUT, parts, {})
            write_json(path / MANIFEST, fields)
        out = Folder(path)
        out.same(about)
        return out

    def same(self, about: Mapping[str, Any]) -> None:
        """
        Raises:
            RunError: what this says of the recording is not so.
        """
        for name, value in about.items():
            if (known := self.manifest.get(name)) != value:
                raise RunError(
                    f"{self.path} was recorded with {name} = {known!r}, not {value!r}.",
                    "Choose another data.traces, or the settings that it was recorded with.",
                )

    @cached_property
    def layout(self) -> Layout:
        facts = dict(self.manifest["layout"])
        digest = self.manifest.get("about")
        parts = {} if digest is None else read_tensors(self.path / ABOUT, digest, self.fix)
        vocab = parts.pop("vocab", None)
        sizes = Sizes(**parts) if parts else None
        taps = tuple(facts.pop("taps"))
        facts.pop("vocab")  # in about.safetensors, with the sizes
        return Layout(
            **facts, taps=taps, vocab=None if vocab is None else vocab.long(), sizes=sizes
        )

    def file(self, shard: int) -> Path:
        return self.path / f"shard-{shard:05d}.safetensors"

    def written(self, shard: int) -> bool:
        """Whether a shard was written; not whether it is still what was written."""
        return self.file(shard).with_suffix(".json").is_file() and self.file(shard).is_file()

    def missing(self) -> list[int]:
        return [shard for shard in range(len(self.counts)) if not self.written(shard)]

    def add(self, shard: int, tensors: Mapping[str, Tensor], documents: Sequence[Document]) -> int:
        """Write one shard; returns its bytes."""
        file = self.file(shard)
        for torn in self.path.glob(f".{file.stem}.*.tmp"):  # of a process that was killed here
            torn.unlink(missing_ok=True)
        names = [(document.key, document.source) for document in documents]
        # one entry alone: safetensors writes several in any order, and the bytes must be the same
        digest = write_tensors(file, tensors, {"documents": json.dumps(names)})
        size = file.stat().st_size
        facts = {
            "sha256": digest, "bytes": size,
            "documents": len(documents), "tokens": len(tensors["ids"]),
        }  # fmt: skip
        write_json(file.with_suffix(".json"), facts)
        return size

    def forget(self, shard: int) -> None:
        """So that it counts as missing."""
        self.file(shard).with_suffix(".json").unlink(missing_ok=True)

    def check(self, shard: int) -> None:
        """Read a shard's bytes once per process, and hold them against their hash.

        Raises:
            Damaged: they are not the ones that were written.
        """
        if shard in self._sound:
            return
        file = self.file(shard)
        known = read_json(file.with_suffix(".json"), self.fix)
        try:
            good = sha256_of(file) == known.get("sha256")
        except OSError as error:
            raise Damaged(f"{file} cannot be read: {error}", self.fix) from None
        if not good:
            why = f"{file} is damaged: its bytes are not the ones that were written."
            fix = (
                f"Write it again: outrider record data.traces={self.path} record.damaged=again; "
                "or leave its documents out: record.damaged=skip."
            )
            raise Damaged(why, fix)
        self._sound.add(shard)

    def read(self, shard: int, names: Sequence[str]) -> dict[str, Tensor]:
        """Whole columns of a shard that was checked."""
        self.check(shard)
        with _opened(self.file(shard), self.fix) as file:
            return {name: file.get_tensor(name) for name in names}

    def documents(self, shard: int) -> Iterator[tuple[Document, Place]]:
        """The texts of a shard, and where what was said about each of them lies."""
        self.check(shard)
        with _opened(self.file(shard), self.fix) as file:
            names = json.loads(file.metadata()["documents"])
            ids, answer, lengths, whole = (
                file.get_tensor(name) for name in ("ids", "answer", "length", "whole")
            )
            coded = PACKED in file.keys()  # noqa: SIM118 - not a dict
            packed = file.get_tensor(PACKED).tolist() if coded else [0] * len(names)
        starts = dict.fromkeys(("features", "judges", "whole", "packed"), 0)
        texts = zip(ids.split(lengths.tolist()), answer.split(lengths.tolist()), strict=True)
        parts = zip(names, texts, whole.tolist(), packed, strict=True)
        for (key, source), (own, answers), kept, size in parts:
            place = Place(shard, len(own), kept, dict(starts), size)
            yield Document(own.numpy(), answers.bool().numpy(), key, source=source), place
            for kind, count in _counts(self.layout.kept(answers.bool()), place).items():
                starts[kind] += count

    def columns(self, place: Place, kept: Kept) -> dict[str, Tensor]:
        """What a file says about (the beginning of) one document.

        Args:
            kept: which rows of it, as its layout says.
        """
        self.check(place.shard)
        counts = _counts(kept, place)
        with _opened(self.file(place.shard), self.fix) as file:
            out = {}
            for name in file.keys():  # noqa: SIM118 - not a dict
                if (kind := COLUMNS.get(name)) is None or (kind == "whole" and not place.whole):
                    continue
                start = place.starts[kind]
                out[name] = file.get_slice(name)[start : start + counts[kind]]
        return out

    def bytes(self) -> int:
        """On disk, of the shards that are there."""
        return sum(self.file(s).stat().st_size for s in range(len(self.counts)) if self.written(s))


def _counts(kept: Kept, place: Place) -> dict[str, int]:
    """Rows of a document in each kind of column; all its bytes of what is coded."""
    judges = int(kept.judges.sum())
    return {
        "features": int(kept.features.sum()), "judges": judges, "whole": judges * place.whole,
        "packed": place.packed,
    }  # fmt: skip


def facts_of(layout: Layout) -> dict[str, Any]:
    """Of a layout, for a manifest: what its sizes and draft vocabulary do not say."""
    return {
        "reads": layout.reads, "states": layout.states, "taps": list(layout.taps),
        "hidden": layout.hidden, "ahead": layout.ahead, "top": layout.top,
        "step": layout.step,
        "vocab": None if layout.vocab is None else len(layout.vocab),
    }  # fmt: skip


def _opened(file: Path, fix: str) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{file} cannot be read: {error}", fix) from None


def text_of(documents: Sequence[Document], whole: Sequence[bool]) -> dict[str, Tensor]:
    """The columns of a shard that hold its text."""
    ids: Int[Tensor, " S"] = torch.from_numpy(np.concatenate([d.ids for d in documents]))
    answer: Bool[Tensor, " S"] = torch.from_numpy(np.concatenate([d.answer for d in documents]))
    length = torch.tensor([len(d.ids) for d in documents]).int()
    return {"ids": ids, "answer": answer, "length": length, "whole": torch.tensor(list(whole))}
