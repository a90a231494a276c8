"""From settings to training material: documents, rows, draft vocabulary, recorded traces.

`data=tiny` and `data=jsonl` read conversations; `data=self` lets the target answer prompts first
(`own_text.py`). Questions that are prompts of the suite are found in either (`overlap.py`).
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from rich.console import Console
from torch import Tensor

from outrider.conf.errors import ConfigError, RunError
from outrider.data.batches import gather
from outrider.data.contamination import Guard
from outrider.data.conversations import Prompt, Summary, conversations
from outrider.data.pack import Rows, pack, split
from outrider.data.record.cache import Hybrid
from outrider.data.record.folder import Folder
from outrider.data.record.reader import Recording, check_reads, open_recording
from outrider.data.self_generated import (
    CONVERSATIONS,
    is_written,
    questions_for,
    source_of,
    written,
)
from outrider.data.sources import Source, data_source
from outrider.data.suite import suite_of
from outrider.data.tokenise import Document, key_of, render_all, show_samples
from outrider.data.traces import Recorded, Store, Traces
from outrider.models.drafter import Trace
from outrider.models.load import Loaded
from outrider.models.target import Target
from outrider.models.vocab import DraftVocab
from outrider.train.manifest import identify
from outrider.train.settings import Config, DataConfig


@dataclass
class Material:
    """What a run trains on.

    Attributes:
        train, held: packed rows; no conversation is in both.
        counts: how often each token is an answer token of the training part.
        held_counts: the same of the held-out part.
        noted: traces of all documents, in their order, recorded when they were written.
        recorded: traces for training and held-out rows; None: the target runs online.
        known_vocab: the draft vocabulary that `recorded` is about, if it is about one.
        about: where it came from, for the manifest.
    """

    train: Rows
    held: Rows
    counts: Int[Tensor, " V"]
    held_counts: Int[Tensor, " V"]
    documents: list[Document]
    about: dict[str, Any]
    noted: Traces | None = None
    recorded: tuple[Traces, Traces] | None = None
    known_vocab: Int[Tensor, " Vd"] | None = None

    def vocab(self, size: int | None) -> DraftVocab:
        """The answer tokens that may be drafted: the most frequent ones, or the recorded ones."""
        if self.known_vocab is not None:
            if min(size or len(self.counts), len(self.counts)) != len(self.known_vocab):
                why = f"The recording is about {len(self.known_vocab)} tokens (record.top)."
                fix = f"Use {len(self.known_vocab)}, or record again."
                raise ConfigError("drafter.draft_vocab_size", size, why, fix)
            return DraftVocab(self.known_vocab, len(self.counts))
        return DraftVocab.from_counts(self.counts, len(self.counts) if size is None else size)

    def part(self, documents: list[Document], data: DataConfig) -> "Material":
        """The same on some of the documents; what was recorded is computed anew."""
        return _pack(documents, data, len(self.counts), self.about)

    def held_traces(self, target: Target, rows: int, recorded: bool = True) -> Iterator[Trace]:
        """Some held-out rows, one by one, with the taps that are set.

        Args:
            rows: at most so many.
            recorded: take what was recorded, if it was; for a target that is what it was then.
        """
        for index in range(min(rows, len(self.held))):
            batch = gather(self.held, torch.tensor([index]))
            if self.recorded is not None and recorded:
                yield self.recorded[1].trace(batch, target.device)
            else:
                yield target.trace(*(field.to(target.device) for field in batch))


def prepare(config: Config) -> int:
    """The verb: make the training text and show it."""
    from outrider.models import drafters, load
    from outrider.train import distributed as start

    start.use_cores()
    console = Console()
    loaded = load.load(config.target, start.device())
    console.print(f"target: {loaded.source}")
    taps = drafters.taps_of(config.drafter, loaded.target.depth)
    material(config, loaded, taps, console, start.rank())
    return 0


def material(
    config: Config, loaded: Loaded, taps: Sequence[int], console: Console, rank: int
) -> Material:
    """Everything a run trains on. Rank 0 writes the text that is missing, the others wait for it.

    Raises:
        RunError: a file is damaged, or nothing is left to train or to evaluate on.
    """
    from outrider.data.record.writer import recording_of

    if config.data.traces is not None:
        folder = Folder(Path(config.data.traces).expanduser())
        folder.same(identify(loaded))
        return _from_recording(config, folder, loaded, taps, console, rank)
    made, mode = text(config, loaded, taps, console, rank), config.data.mode
    if mode == "recorded":
        folder = recording_of(config, loaded, made, console)
        return _from_recording(config, folder, loaded, taps, console, rank)
    if mode == "hybrid":
        kept = Hybrid.beginning(config, loaded.target, identify(loaded))
        kept.expect(made.train)
        kept.expect(made.held)
        made.recorded = (kept, kept)
    if mode == "auto" and made.noted is not None:
        train, held = (
            _numbers(made.documents, s) for s in split(made.documents, config.data.holdout)
        )
        made.recorded = (made.noted.part(train), made.noted.part(held))
    if rank == 0:
        console.print(_said(made))
    return made


def text(
    config: Config, loaded: Loaded, taps: Sequence[int], console: Console, rank: int
) -> Material:
    """The text of a run, and what was recorded while it was written."""
    loaded.target.set_taps(taps)
    longest = loaded.target.shape().max_positions
    if config.data.max_length > longest:
        why = f"{loaded.target.name} has {longest} positions."
        raise ConfigError("data.max_length", config.data.max_length, why, f"Use at most {longest}.")
    guard = _guard(config)
    if config.data.name == "self":
        documents, places, store, about = _own_text(config, loaded, guard, console, rank)
    else:
        source, limit = source_of(config.data, str(CONVERSATIONS)), config.data.max_samples
        places, store = [], None
        documents, about = _rendered(
            source, limit, config.data, loaded.tokenizer, guard, console, rank
        )
    documents = [_cut(document, config.data.max_length) for document in documents]
    documents, places = _long_enough(documents, places, config.data.shortest, console, rank)
    made = _pack(documents, config.data, loaded.target.vocab, about)
    loaded.target.set_taps(taps)  # writing set those that it records
    if store is not None and store.records(taps):
        made.noted = Recorded(store, places, taps)
    if rank == 0:
        show_samples(console, loaded.tokenizer, documents)
    return made


def _from_recording(
    config: Config, folder: Folder, loaded: Loaded, taps: Sequence[int], console: Console, rank: int
) -> Material:
    """Text and traces of a recording.

    Raises:
        ConfigError: other conversations would be held out than those recorded for it.
        RunError, Damaged: see `open_recording`.
    """
    loaded.target.set_taps(taps)
    check_reads(folder, config)
    documents, recording, left_out = open_recording(folder, taps, config.record.damaged)
    if left_out and rank == 0:
        console.print(f"[yellow]note:[/yellow] damaged files are left out: {left_out}")
    documents, recording = _wanted(documents, recording, config, console, rank)
    layout = folder.manifest["layout"]
    about = {**folder.manifest["source"], "traces": str(folder.path), "layout": layout}
    made = _pack(documents, config.data, loaded.target.vocab, about)
    train, held = (_numbers(documents, side) for side in split(documents, config.data.holdout))
    top = folder.layout.top
    if top and not all(recording.places[i].whole for i in held):
        known = folder.manifest["holdout"]
        why = f"Last states were recorded for the conversations of data.holdout={known}."
        raise ConfigError("data.holdout", config.data.holdout, why, f"Use {known}.")
    made.recorded = recording.part(train, whole=not top), recording.part(held)
    made.known_vocab = folder.layout.vocab
    if rank == 0:
        show_samples(console, loaded.tokenizer, documents)
        console.print(_said(made))
    return made


def _wanted(
    documents: list[Document], recording: Recording, config: Config, console: Console, rank: int
) -> tuple[list[Document], Recording]:
    """So many of the recorded documents as are asked for, cut to the rows of this run."""
    data, suite = config.data, recording.folder.manifest.get("suite")
    documents = documents[: data.max_samples]
    longer = sum(len(document.ids) > data.max_length for document in documents)
    documents = [_cut(document, data.max_length) for document in documents]
    numbers = list(range(len(documents)))
    documents, numbers = _long_enough(documents, numbers, data.shortest, console, rank)
    if rank == 0 and longer:
        said = f"{longer} recorded conversations are cut to data.max_length={data.max_length}"
        console.print(f"[yellow]note:[/yellow] {said}")
    if rank == 0 and suite != config.eval.prompts:
        said = f"the recorded text was compared with eval.prompts={suite or 'null'}, not these"
        console.print(f"[yellow]note:[/yellow] {said}")
    return documents, recording.part(numbers)


def _numbers(documents: Sequence[Document], part: Sequence[Document]) -> list[int]:
    """Which of the documents these are."""
    place = {id(document): i for i, document in enumerate(documents)}
    return [place[id(document)] for document in part]


def _guard(config: Config) -> Guard:
    """Against training on the prompts that the drafter will be measured on.

    Prompts that the target wrote itself are nobody's loss: they are left out, not refused.
    """
    wish, own = config.data.overlap, config.data.generate
    if own is not None and own.self_prompted and wish == "refuse":
        wish = "drop"
    return Guard([] if wish == "keep" else suite_of(config, None), wish)


def _own_text(
    config: Config, loaded: Loaded, guard: Guard, console: Console, rank: int
) -> tuple[list[Document], list[int], Store | None, dict[str, Any]]:
    """What the target wrote (and what is mixed in): documents, places in the store, origin.

    The store is None where some of the documents are not in it.
    """
    by_server = config.data.generate is not None and config.data.generate.endpoint is not None
    if loaded.target.elsewhere and not by_server and not is_written(config, loaded):
        why = f"With target.place={config.target.place} no rank can write the target's text alone."
        fix = "Run `outrider prepare` with the same settings and target.place=replicated first."
        raise RunError(why, fix)
    wish = config.data.generate
    limit = None if wish is None else wish.samples
    asked_of = questions_for(config, loaded, limit, console, rank)
    known = _known_prompts(asked_of, guard, console, rank)
    store = written(config, loaded, asked_of, console, rank)
    answers = sorted(enumerate(store.answers()), key=lambda pair: pair[1].place)
    asked = [
        (i, a) for i, a in answers if (limit is None or a.place < limit) and a.key not in known
    ]
    documents = [answer.document() for _, answer in asked][: config.data.max_samples]
    documents = [replace(document, source="self") for document in documents]
    about: dict[str, Any] = {"source": "self", "store": store.about}
    about["cases"] = {"used": len(asked), **({"in the suite": len(known)} if known else {})}
    if config.data.given is None:
        return documents, [i for i, _ in asked], store, about
    more, given = _given(len(documents), config.data, loaded, guard, console, rank)
    about |= {"given": given["sha256"], "given_cases": given["cases"]}
    return documents + more, [], None, about


def _known_prompts(asked: Sequence[Prompt], guard: Guard, console: Console, rank: int) -> set[str]:
    """Keys of the prompts that are in the suite; their answers are written, but not used.

    The text does not depend on the suite, so that runs measured on different ones share it.
    """
    known = {key_of(prompt.opening()) for prompt in asked if guard.meets(prompt.turns[:1])}
    guard.settle()
    if known and rank == 0:
        console.print(f"{len(known)} prompts are in the suite and left out")
    return known


def _given(
    written: int, data: DataConfig, loaded: Loaded, guard: Guard, console: Console, rank: int
) -> tuple[list[Document], dict[str, Any]]:
    """Conversations to be mixed in, and what is known of their file."""
    assert data.given is not None
    wanted = _beside(written, data.given_share)
    source = data_source(data.given, "data.given", skip_bad=data.skip_bad)
    found, about = _rendered(source, wanted, data, loaded.tokenizer, guard, console, rank)
    if len(found) < wanted:
        console.print(f"[yellow]note:[/yellow] {data.given} holds {len(found)} of {wanted} wanted")
    return found, about


def _beside(written: int, share: float) -> int:
    """How many given conversations make this share of the whole: 20 and 0.25 -> 7."""
    return round(written * share / (1 - share))


def _long_enough(
    documents: list[Document], places: list[int], shortest: int, console: Console, rank: int
) -> tuple[list[Document], list[int]]:
    """The documents with so many answer tokens, and their places in the store, if they have any."""
    keep = [i for i, document in enumerate(documents) if document.answer.sum() >= shortest]
    if rank == 0 and len(keep) < len(documents):
        left_out = len(documents) - len(keep)
        console.print(
            f"{left_out} conversations have fewer than {shortest} answer tokens: left out"
        )
    return [documents[i] for i in keep], [places[i] for i in keep if i < len(places)]


def _cut(document: Document, length: int) -> Document:
    return replace(document, ids=document.ids[:length], answer=document.answer[:length])


def _rendered(
    source: Source,
    limit: int | None,
    data: DataConfig,
    tokenizer: Any,
    guard: Guard,
    console: Console,
    rank: int,
) -> tuple[list[Document], dict[str, Any]]:
    """The first `limit` conversations of a source in tokens, and which source it was."""
    summary = Summary()
    if rank == 0 and source.said():
        console.print(source.said(), highlight=False)
    found = guard.apart(conversations(source, summary), summary)
    documents = render_all(
        tokenizer, found, max_length=data.max_length, summary=summary, limit=limit,
        supervise=data.supervise, cut=data.long == "cut",
    )  # fmt: skip
    guard.settle()
    if rank == 0 and summary.counts:
        console.print(summary)
    name = source.name or (source.local.name if source.local else source.place)
    documents = [replace(document, source=name) for document in documents]
    about = {"source": data.name, "sha256": source.fingerprint(), "cases": dict(summary.counts)}
    return documents, about


def _pack(
    documents: list[Document], data: DataConfig, vocab: int, about: dict[str, Any]
) -> Material:
    train, held = split(documents, data.holdout)
    if not train or not held:
        raise RunError(
            f"{len(documents)} conversations are too few to train and to hold some out.",
            "Give more of them.",
        )
    largest = max(int(document.ids.max()) for document in documents)
    if largest >= vocab:
        raise RunError(
            f"The tokenizer gives token {largest}, and the target knows 0..{vocab - 1}.",
            "Use the tokenizer that belongs to the target.",
        )
    counts, held_counts = _answer_counts(train, vocab), _answer_counts(held, vocab)
    about = {**about, "documents": len(documents), "sha256_documents": _digest(documents)}
    rows = pack(train, data.max_length), pack(held, data.max_length)
    return Material(*rows, counts, held_counts, documents, about)


def _answer_counts(documents: Sequence[Document], vocab: int) -> Int[Tensor, " V"]:
    taught = np.concatenate([document.ids[document.answer] for document in documents])
    return torch.from_numpy(np.bincount(taught, minlength=vocab))


def _digest(documents: Sequence[Document]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        plain = [document.ids.tolist(), document.answer.tolist()]
        digest.update(json.dumps(plain).encode())
    return digest.hexdigest()


def _said(made: Material) -> str:
    return (
        f"data: {made.about['documents']} conversations, {len(made.train)} training rows of "
        f"{made.train.length} tokens ({made.train.fill:.1%} filled, "
        f"{made.train.supervised:.1%} supervised), {len(made.held)} held-out rows"
        + (", recorded traces" if made.recorded else "")
    )
