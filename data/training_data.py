"""The packed rows, counts and traces that a run trains on."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.quantities import format_count
from outrider.conf.schema import DataConfig
from outrider.data.batches import select_rows
from outrider.data.pack import Rows, pack, split_holdout
from outrider.data.tokenise import Document
from outrider.data.trace_source import TargetTraces, TraceSources
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import Trace
from outrider.models.target.target import Target


@dataclass
class TrainingData:
    """Packed rows of a run, their statistics, and recorded traces of them."""

    train: Rows
    held: Rows  # held-out conversations
    counts: Int[Tensor, " V"]  # how often each token is an answer token of the training rows
    held_counts: Int[Tensor, " V"]
    documents: list[Document]  # the text that was packed
    about: dict[str, Any]  # origin of the text, for the manifest
    recorded: TraceSources | None = None  # None: the target runs online
    recorded_vocab: Int[Tensor, " Vd"] | None = None  # draft vocabulary, with record.top

    def vocab(self, size: int | None) -> DraftVocab:
        """Return the draft vocabulary: the most frequent answer tokens, or the recorded ones."""
        if self.recorded_vocab is not None:
            if min(size or len(self.counts), len(self.counts)) != len(self.recorded_vocab):
                why = f"The recording holds {len(self.recorded_vocab)} tokens (record.top)."
                fix = f"Use {len(self.recorded_vocab)}, or record again."
                raise ConfigError("drafter.draft_vocab_size", size, why, fix)
            return DraftVocab(self.recorded_vocab, len(self.counts))
        return DraftVocab.from_counts(self.counts, len(self.counts) if size is None else size)

    def with_documents(self, documents: list[Document], data: DataConfig) -> "TrainingData":
        """Return the data of some of the documents, without recorded traces."""
        return pack_documents(documents, data, len(self.counts), self.about)

    def trace_sources(self, target: Target) -> TraceSources:
        """Return the trace sources of training and held-out rows: a recording or the target."""
        online = TargetTraces(target)
        return self.recorded or TraceSources(online, online)

    def held_traces(self, target: Target, rows: int, recorded: bool = True) -> Iterator[Trace]:
        """Yield traces of the first `rows` held-out rows, one row each, on the target's device.

        With `recorded`, a recording is read where there is one, instead of running the target.
        """
        source = self.trace_sources(target).held if recorded else TargetTraces(target)
        for index in range(min(rows, len(self.held))):
            yield source.trace(select_rows(self.held, torch.tensor([index])), target.device)


def pack_documents(
    documents: list[Document], data: DataConfig, vocab: int, about: dict[str, Any]
) -> TrainingData:
    """Split documents into training and held-out ones, count their tokens and pack them.

    Raises RunError if a side is empty, or a token is outside the target's vocabulary.
    """
    train, held = split_holdout(documents, data.holdout)
    if not train or not held:
        count = format_count(len(documents), "conversation")
        why = f"{count}: too few to train and to hold some out."
        raise RunError(why, "Give more of them.")
    largest = max(int(document.ids.max()) for document in documents)
    if largest >= vocab:
        why = f"The tokenizer outputs token {largest}; the target's vocabulary is 0..{vocab - 1}."
        raise RunError(why, "Use the tokenizer that belongs to the target.")
    counts, held_counts = _answer_counts(train, vocab), _answer_counts(held, vocab)
    about = {**about, "documents": len(documents), "sha256_documents": _digest(documents)}
    rows = pack(train, data.max_length), pack(held, data.max_length)
    return TrainingData(*rows, counts, held_counts, documents, about)


def _answer_counts(documents: Sequence[Document], vocab: int) -> Int[Tensor, " V"]:
    answers = np.concatenate([document.ids[document.answer] for document in documents])
    return torch.from_numpy(np.bincount(answers, minlength=vocab))


def _digest(documents: Sequence[Document]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        content = [document.ids.tolist(), document.answer.tolist()]
        digest.update(json.dumps(content).encode())
    return digest.hexdigest()
