"""Files of a recording: manifest, shards and their hashes.

    manifest.json            what was recorded, of which target and text, and the number of
                             documents of every shard; written first
    about.safetensors        draft vocabulary and column scales, if the recording needs them
    shard-00000.safetensors  ids [S], answer [S], length [n], whole [n], and the columns of
                             layout.py, document by document; keys and sources of the documents
    shard-00000.json         sha256 and sizes; a shard without it is not written yet

The bytes of a shard depend only on its documents, so that ranks and machines write shards side
by side, and a restarted process writes the missing ones.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.conf.errors import SHOWN, ConfigError, CorruptFile, RunError
from outrider.conf.fields import from_dict
from outrider.conf.files import parse_json, read_json, remove_temporary, sha256_of, write_json
from outrider.conf.tensor_files import int_column, read_tensors, write_tensors
from outrider.data.record.entropy_coding import ColumnScales
from outrider.data.record.layout import Layout, RowSelection
from outrider.data.tokenise import Document
from outrider.models.formats.weight_folder import damaged_means_error

MANIFEST, ABOUT = "manifest.json", "about.safetensors"
VERSION = 3  # of the format
REMOVED = ("fp8", "int4")  # encodings of earlier versions
COLUMNS = {  # the rows of a document that each column has
    "features.codes": "features", "features.scales": "features", "features.packed": "packed",
    "last.codes": "last", "last.scales": "last", "favourite": "teacher", "top.ids": "teacher",
    "top.p": "teacher", "top.rest": "teacher", "top.share": "teacher",
}  # fmt: skip
PACKED = "features.bytes"  # bytes per document, where features are entropy coded


@dataclass(frozen=True)
class DocumentLocation:
    """Shard of a document and its first row in each kind of column."""

    shard: int
    length: int
    has_last_states: bool  # they are stored (always, unless `top` replaces them)
    first_rows: dict[str, int]
    packed_bytes: int = 0  # of the features, where they are entropy coded


class RecordingFolder:
    """A recording on disk; RunError if there is none, or one of another version or encoding."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fix = f"Record it again: remove {path}, then outrider record data.traces={path}."
        if not (path / MANIFEST).is_file():
            fix = f"Write it first: outrider record data.traces={path}."
            raise RunError(f"{path} holds no recording.", fix)
        self.manifest = read_json(path / MANIFEST, self.fix)
        self._verified: set[int] = set()
        if (version := self.manifest.get("version")) != VERSION:
            other = f"a recording of version {version}" if version else "something else"
            fix = f"This is version {VERSION}. Choose another data.traces, or remove the folder."
            raise RunError(f"{path} holds {other}.", fix)
        with self.damaged_means_error():
            if (states := self.manifest["layout"]["states"]) in REMOVED:
                fix = f"{self.fix[:-1]} record.states=int8 (or coded)."
                raise RunError(f"{path} stores states in {states}, which is no longer read.", fix)
            self.shard_documents: list[int] = list(self.manifest["shards"])
            source, counts = self.manifest["source"], [*self.shard_documents]
            for name in ("cases", "given_cases"):
                counts += source.get(name, {}).values()
            if not all(type(count) is int and 0 <= count < 2**63 for count in counts):
                raise ValueError("shards and cases must be counts")

    def damaged_means_error(self) -> AbstractContextManager[None]:
        """Turn what Python raises for wrong types and sizes in the files into a RunError."""
        return damaged_means_error(self.path, self.fix, "a recording")

    @staticmethod
    def open_or_create(
        path: Path, about: Mapping[str, Any], layout: Layout, shard_documents: Sequence[int],
        facts: Mapping[str, Any],
    ) -> "RecordingFolder":  # fmt: skip
        """Return the folder of this recording; an existing one keeps its shard sizes.

        It must match `about` (what the recording depends on, with its layout as json), not `facts`.
        """
        if not (path / MANIFEST).is_file():
            if any(path.glob("shard-*")):
                fix = "Choose another data.traces, or remove these files."
                raise RunError(f"{path} holds shards without a manifest.", fix)
            fields = {**about, **facts, "version": VERSION, "shards": list(shard_documents)}
            parts = {} if layout.vocab is None else {"vocab": layout.vocab.int()}
            parts |= {} if layout.scales is None else vars(layout.scales)
            if parts:
                fields["about"] = write_tensors(path / ABOUT, parts, {})
            write_json(path / MANIFEST, fields)
        folder = RecordingFolder(path)
        folder.require_match(about)
        return folder

    def require_match(self, about: Mapping[str, Any]) -> None:
        """Raise RunError if the recording was made with other values."""
        fix = "Choose another data.traces, or the settings that it was recorded with."
        for name, value in about.items():
            if (recorded := self.manifest.get(name)) != value:
                text = repr(recorded)[:SHOWN]
                why = f"{self.path} was recorded with {name} = {text}, not {value!r}."
                raise RunError(why, fix)

    @cached_property
    def layout(self) -> Layout:
        digest = self.manifest.get("about")
        with self.damaged_means_error():
            fields = {k: v for k, v in self.manifest["layout"].items() if k != "vocab"}
            parts = {} if digest is None else read_tensors(self.path / ABOUT, digest, self.fix)
            vocab = parts.pop("vocab", None)
            try:
                layout = from_dict(Layout, fields, "layout")
            except ConfigError as error:
                raise ValueError(f"{error.key}: {error.why}") from None
            scales = ColumnScales(**parts) if parts else None
            return replace(layout, vocab=None if vocab is None else vocab.long(), scales=scales)

    # ---- shards ----

    def shard_file(self, shard: int) -> Path:
        return self.path / f"shard-{shard:05d}.safetensors"

    def is_written(self, shard: int) -> bool:
        """Return whether a shard is complete; its bytes are not verified."""
        file = self.shard_file(shard)
        return file.with_suffix(".json").is_file() and file.is_file()

    def missing_shards(self) -> list[int]:
        return [shard for shard in range(len(self.shard_documents)) if not self.is_written(shard)]

    def size(self) -> int:
        """Return the bytes on disk of the shards that are written."""
        shards = range(len(self.shard_documents))
        return sum(self.shard_file(s).stat().st_size for s in shards if self.is_written(s))

    def write_shard(
        self, shard: int, tensors: Mapping[str, Tensor], documents: Sequence[Document]
    ) -> None:
        """Write the columns of one shard, then the hash that completes it."""
        file = self.shard_file(shard)
        remove_temporary(self.path, f"{file.stem}.*")
        names = [(document.key, document.source) for document in documents]
        # one entry: safetensors writes several in any order, and the bytes must be reproducible
        digest = write_tensors(file, tensors, {"documents": json.dumps(names)})
        facts = {
            "sha256": digest, "bytes": file.stat().st_size,
            "documents": len(documents), "tokens": len(tensors["ids"]),
        }  # fmt: skip
        write_json(file.with_suffix(".json"), facts)

    def mark_missing(self, shard: int) -> None:
        self.shard_file(shard).with_suffix(".json").unlink(missing_ok=True)

    def verify_shard(self, shard: int) -> None:
        """Compare a shard with its hash, once per process; raise CorruptFile."""
        if shard in self._verified:
            return
        file = self.shard_file(shard)
        digest = read_json(file.with_suffix(".json"), self.fix).get("sha256")
        try:
            intact = sha256_of(file) == digest
        except OSError as error:
            raise CorruptFile(f"{file} cannot be read: {error}", self.fix) from None
        if not intact:
            why = f"{file} is damaged: its bytes are not the ones that were written."
            fix = f"Write it again: outrider record data.traces={self.path} record.damaged=again; "
            raise CorruptFile(why, f"{fix}or leave its documents out: record.damaged=skip.")
        self._verified.add(shard)

    def _open_shard(self, shard: int) -> Any:
        self.verify_shard(shard)
        file = self.shard_file(shard)
        try:
            return safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CorruptFile(f"{file} cannot be read: {error}", self.fix) from None

    def documents(self, shard: int) -> Iterator[tuple[Document, DocumentLocation]]:
        """Yield the texts of a shard and the locations of their rows."""
        with self.damaged_means_error(), self._open_shard(shard) as file:
            names = parse_json(file.metadata()["documents"])
            ids, lengths = int_column(file, "ids"), int_column(file, "length").tolist()
            answer, has_last = (file.get_tensor(name).bool() for name in ("answer", "whole"))
            coded = PACKED in file.keys()  # noqa: SIM118 - not a dict
            packed = int_column(file, PACKED).tolist() if coded else [0] * len(names)
            first_rows = dict.fromkeys(("features", "teacher", "last", "packed"), 0)
            texts = zip(ids.split(lengths), answer.split(lengths), strict=True)
            parts = zip(names, texts, has_last.tolist(), packed, strict=True)
            for (key, source), (tokens, answers), last, size in parts:
                if not (isinstance(key, str) and isinstance(source, str) and len(tokens)):
                    raise ValueError(f"{self.shard_file(shard).name} has a document without text")
                location = DocumentLocation(shard, len(tokens), last, dict(first_rows), size)
                yield Document(tokens.numpy(), answers.numpy(), key, source=source), location
                counts = _row_counts(self.layout.select_rows(answers), location)
                for column, count in counts.items():
                    first_rows[column] += count

    def read_rows(self, location: DocumentLocation, rows: RowSelection) -> dict[str, Tensor]:
        """Return the columns of (the beginning of) one document; rows: see `Layout.select_rows`."""
        counts, out = _row_counts(rows, location), {}
        with self._open_shard(location.shard) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                column = COLUMNS.get(name)
                if column is not None and (column != "last" or location.has_last_states):
                    start = location.first_rows[column]
                    out[name] = file.get_slice(name)[start : start + counts[column]]
        return out


def _row_counts(rows: RowSelection, location: DocumentLocation) -> dict[str, int]:
    """Return a document's rows in each kind of column, and the bytes of its coded features."""
    teacher = int(rows.teacher.sum())
    return {
        "features": int(rows.features.sum()), "teacher": teacher,
        "last": teacher * location.has_last_states, "packed": location.packed_bytes,
    }  # fmt: skip


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """Return a layout as an entry of the manifest, without vocabulary ids and scales."""
    return {
        "reads": layout.reads, "states": layout.states, "taps": list(layout.taps),
        "hidden": layout.hidden, "ahead": layout.ahead, "top": layout.top,
        "step": layout.step,
        "vocab": None if layout.vocab is None else len(layout.vocab),
    }  # fmt: skip


def text_columns(documents: Sequence[Document], with_last: Sequence[bool]) -> dict[str, Tensor]:
    """Return the columns of a shard's text; `with_last`: whose last states are stored."""
    ids: Int[Tensor, " S"] = torch.from_numpy(np.concatenate([d.ids for d in documents]))
    answer: Bool[Tensor, " S"] = torch.from_numpy(np.concatenate([d.answer for d in documents]))
    length = torch.tensor([len(d.ids) for d in documents]).int()
    return {"ids": ids, "answer": answer, "length": length, "whole": torch.tensor(list(with_last))}
