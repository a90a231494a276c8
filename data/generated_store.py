"""Self-generated text on disk: shards of prompts and answers in tokens.

A shard holds some finished answers side by side, in the order of their prompts. Its name is the
index of the first prompt. It is written as a whole or not at all.

    manifest.json                about (what the text depends on), sha256 of every shard
    shard-00000000.safetensors   ids [S], all tokens of n answers; per answer the length of its
                                 prompt, prompt [n], its total length, length [n], and the index of
                                 its prompt, place [n]

Shards of earlier versions also hold features of the target, which are ignored.
"""

import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from outrider.conf.errors import RunError
from outrider.conf.files import parse_json, read_json, sha256_of, write_json
from outrider.conf.tensor_files import int_column, write_tensors
from outrider.data.tokenise import Document
from outrider.models.formats.weight_folder import damaged_means_error
from outrider.models.target.hf_folder import plain_weights_name

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class GeneratedAnswer:
    """A prompt and its finished answer."""

    index: int  # of the prompt
    key: str  # names the text of the prompt
    ids: list[int]  # tokens of the prompt, then those of the answer
    prompt_length: int

    def to_document(self) -> Document:
        answer = [i >= self.prompt_length for i in range(len(self.ids))]
        return Document.of(self.ids, answer, self.key)


class GeneratedStore:
    """A folder of shards with one writer and any number of readers."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        """Open the folder; RunError if it was made from something else than `about`."""
        self.folder, self.about = folder, about
        self.fix = f"Remove {folder} and prepare it again."
        self.shards: dict[str, str] = {}  # file name -> sha256
        self.complete: dict[str, list[str]] = {}  # fulfilled request (limits) -> its shards
        self.seconds = 0.0  # of generation so far
        self._open: dict[str, Any] = {}
        if (folder / MANIFEST).is_file():
            manifest = read_json(folder / MANIFEST, self.fix)
            if manifest.get("about") != about:
                raise RunError(f"{folder} was made from something else than this run.", self.fix)
            with self._damaged_means_error():
                self.shards = dict(manifest["shards"])
                if wrong := [name for name in self.shards if not plain_weights_name(name)]:
                    raise ValueError(f"{wrong[0]!r} is no name of a shard")
                for request, names in manifest.get("fulfilled", {}).items():
                    # older manifests hold the number of shards
                    chosen = list(self.shards)[:names] if isinstance(names, int) else names
                    self.complete[request] = [name for name in chosen if self.shards[name]]
                self.seconds = float(manifest.get("seconds", 0.0))

    def _damaged_means_error(self) -> AbstractContextManager[None]:
        return damaged_means_error(self.folder, self.fix, "self-generated text")

    def reload(self) -> "GeneratedStore":
        return GeneratedStore(self.folder, self.about)

    def add(self, answers: Sequence[GeneratedAnswer], seconds: float = 0.0) -> None:
        """Write one shard, generated in `seconds`; it counts once the manifest names it."""
        self.seconds += seconds
        answers = sorted(answers, key=lambda a: a.index)
        name = f"shard-{answers[0].index:08d}.safetensors"
        columns = {
            "ids": [i for a in answers for i in a.ids],
            "length": [len(a.ids) for a in answers],
            "prompt": [a.prompt_length for a in answers],
            "place": [a.index for a in answers],
        }
        tensors = {n: torch.tensor(column, dtype=torch.int32) for n, column in columns.items()}
        keys = json.dumps([a.key for a in answers])
        digest = write_tensors(self.folder / name, tensors, {"keys": keys})
        self.shards = dict(sorted({**self.shards, name: digest}.items()))
        self._write_manifest()

    def mark_complete(self, request: str) -> None:
        """Record that the present shards fulfil this request; later ones do not change it."""
        self.complete[request] = list(self.shards)
        self._write_manifest()

    def select(self, request: str) -> "GeneratedStore":
        part = self.reload()
        part.shards = {name: self.shards[name] for name in self.complete[request]}
        return part

    def touch(self) -> None:
        """Set the folder's time of change, by which waiting ranks see progress."""
        with suppress(OSError):
            os.utime(self.folder)

    def progress(self) -> tuple[int, float]:
        """Return what changes while another process writes: shards, the folder's time of change."""
        return len(self.shards), self.folder.stat().st_mtime if self.folder.exists() else 0.0

    def _write_manifest(self) -> None:
        fields = {
            "about": self.about, "seconds": self.seconds, "fulfilled": self.complete,
            "shards": self.shards,
        }  # fmt: skip
        write_json(self.folder / MANIFEST, fields)

    def answers(self) -> list[GeneratedAnswer]:
        """Return all answers, shard by shard; RunError if one is missing or damaged."""
        out: list[GeneratedAnswer] = []
        for name in self.shards:
            with self._damaged_means_error():
                file = self._shard(name)
                names = ("length", "prompt", "place")
                ids, *fields = (int_column(file, n) for n in ("ids", *names))
                columns = parse_json(file.metadata()["keys"]), *(f.tolist() for f in fields)
                texts = ids.split(columns[1])
                for text, key, length, prompt_length, index in zip(texts, *columns, strict=True):
                    if not isinstance(key, str) or not 0 < prompt_length < length:
                        raise ValueError(f"{name} has an answer without text")
                    out.append(GeneratedAnswer(index, key, text.tolist(), prompt_length))
        return out

    def _shard(self, name: str) -> Any:
        """Open a shard; check its hash the first time."""
        if name not in self._open:
            try:
                if sha256_of(self.folder / name) != self.shards[name]:
                    raise RunError(f"{self.folder / name} is damaged.", self.fix)
                self._open[name] = safe_open(self.folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise RunError(f"{self.folder / name} is damaged: {error}", self.fix) from None
        return self._open[name]
