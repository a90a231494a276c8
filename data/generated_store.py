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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from outrider.conf.errors import RunError
from outrider.conf.files import read_json, sha256_of, write_json, write_tensors
from outrider.data.tokenise import Document

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class GeneratedAnswer:
    """A prompt and its finished answer.

    Attributes:
        index: of the prompt.
        key: names the text of the prompt.
        ids: tokens of the prompt, then those of the answer.
        prompt_length: tokens of the prompt.
    """

    index: int
    key: str
    ids: list[int]
    prompt_length: int

    def to_document(self) -> Document:
        answer_length = len(self.ids) - self.prompt_length
        answer = [False] * self.prompt_length + [True] * answer_length
        return Document.of(self.ids, answer, self.key)


class GeneratedStore:
    """A folder of shards with one writer and any number of readers.

    Attributes:
        shards: sha256 of every shard, by file name.
        complete: for each request that was fulfilled (limits on time and number), its shards.
        seconds: of generation so far.
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        """
        Args:
            about: what the text depends on.

        Raises:
            RunError: the folder was made from something else.
        """
        self.folder, self.about = folder, about
        self.fix = f"Remove {folder} and prepare it again."
        self.shards: dict[str, str] = {}
        self.complete: dict[str, list[str]] = {}
        self.seconds = 0.0
        self._open: dict[str, Any] = {}
        if (folder / MANIFEST).is_file():
            manifest = read_json(folder / MANIFEST, self.fix)
            if manifest.get("about") != about:
                raise RunError(f"{folder} was made from something else than this run.", self.fix)
            self.shards = dict(manifest["shards"])
            self.complete = dict(manifest.get("fulfilled", {}))
            for request, names in self.complete.items():
                if isinstance(names, int):  # older manifests hold the number of shards
                    self.complete[request] = list(self.shards)[:names]
            self.seconds = float(manifest.get("seconds", 0.0))

    def reload(self) -> "GeneratedStore":
        """Return the store as its folder is now."""
        return GeneratedStore(self.folder, self.about)

    def add(self, answers: Sequence[GeneratedAnswer], seconds: float = 0.0) -> None:
        """Write one shard, which counts once the manifest names it.

        Args:
            seconds: time that it took to generate.
        """
        self.seconds += seconds
        answers = sorted(answers, key=lambda a: a.index)
        name = f"shard-{answers[0].index:08d}.safetensors"
        tensors = {
            "ids": torch.tensor([i for a in answers for i in a.ids], dtype=torch.int32),
            "length": torch.tensor([len(a.ids) for a in answers], dtype=torch.int32),
            "prompt": torch.tensor([a.prompt_length for a in answers], dtype=torch.int32),
            "place": torch.tensor([a.index for a in answers], dtype=torch.int32),
        }
        keys = json.dumps([a.key for a in answers])
        digest = write_tensors(self.folder / name, tensors, {"keys": keys})
        self.shards = dict(sorted({**self.shards, name: digest}.items()))
        self._write_manifest()

    def mark_complete(self, request: str) -> None:
        """Record that the present shards fulfil this request; later ones do not change it."""
        self.complete[request] = list(self.shards)
        self._write_manifest()

    def select(self, request: str) -> "GeneratedStore":
        """Return the store with the shards of one complete request."""
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
        """Return all answers, shard by shard.

        Raises:
            RunError: a shard is missing or damaged.
        """
        out: list[GeneratedAnswer] = []
        for name in self.shards:
            file = self._shard(name)
            keys = json.loads(file.metadata()["keys"])
            ids, *fields = (
                file.get_tensor(f).tolist() for f in ("ids", "length", "prompt", "place")
            )
            start = 0
            for key, length, prompt_length, index in zip(keys, *fields, strict=True):
                out.append(GeneratedAnswer(index, key, ids[start : start + length], prompt_length))
                start += length
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
