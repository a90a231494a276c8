"""From settings to training material: documents, rows, draft vocabulary, recorded traces.

`data=tiny` and `data=jsonl` read conversations; `data=self` lets the target answer prompts first
(`generate.py`), into a folder named after everything the text depends on, so that a second run,
or another drafter for the same target, finds it there.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from outrider.data.chat import Document, key_of, prompt_ids, render_all, show_samples
from outrider.data.generate import Question, Settings, Writer, write_answers
from outrider.data.loader import gather
from outrider.data.pack import Rows, pack, split
from outrider.data.sources import conversations, fingerprint, prompts
from outrider.data.traces import Recorded, Store
from outrider.models.base import Trace
from outrider.models.formats.native import target_fingerprint
from outrider.models.load import Loaded, cache_home, stop_ids
from outrider.models.target import Target, default_taps
from outrider.models.vocab import DraftVocab
from outrider.train.config import Config, DataConfig, GenerateConfig
from outrider.train.errors import ConfigError, RunError

CONVERSATIONS = Path(__file__).parent / "tiny" / "conversations.jsonl"
PROMPTS = Path(__file__).parent / "prompts" / "general.jsonl"
LINE = 60.0  # seconds between lines of progress where there is no terminal
GB = 2**30
BYTES_OF_AN_ID = 8  # and of the favourite beside it
POLL = 2.0  # seconds between looks at the folder that rank 0 is filling


@dataclass
class Material:
    """What a run trains on.

    Attributes:
        train, held: packed rows; no conversation is in both.
        counts: how often each token is an answer token of the training part.
        held_counts: the same of the held-out part.
        recorded: traces for training and held-out rows; None: the target runs online.
        about: where it came from, for the manifest.
    """

    train: Rows
    held: Rows
    counts: Int[Tensor, " V"]
    held_counts: Int[Tensor, " V"]
    recorded: tuple[Recorded, Recorded] | None
    documents: list[Document]
    about: dict[str, Any]

    def vocab(self, size: int | None) -> DraftVocab:
        return DraftVocab.from_counts(self.counts, len(self.counts) if size is None else size)

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
    from outrider.launch import start
    from outrider.models import drafters, load

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
    """Everything a run trains on. Rank 0 writes what is missing, the others wait for it.

    Raises:
        RunError: a file is damaged, or nothing is left to train or to evaluate on.
    """
    loaded.target.set_taps(taps)
    longest = loaded.target.shape().max_positions
    if config.data.max_length > longest:
        why = f"{loaded.target.name} has {longest} positions."
        raise ConfigError("data.max_length", config.data.max_length, why, f"Use at most {longest}.")
    if config.data.name == "self":
        documents, places, store, about = _own_text(config, loaded, console, rank)
    else:
        path = config.data.path or str(CONVERSATIONS)
        documents, about = _rendered(path, config.data, loaded.tokenizer, console, rank)
        documents, places, store = documents[: config.data.max_samples], [], None
    documents = [_cut(document, config.data.max_length) for document in documents]
    made = _pack(documents, config.data, loaded.target.vocab, about)
    if store is not None and store.records(taps):
        made.recorded = _recorded(store, documents, places, config.data.holdout, taps)
    if rank == 0:
        show_samples(console, loaded.tokenizer, documents)
        console.print(_said(made))
    return made


def _own_text(
    config: Config, loaded: Loaded, console: Console, rank: int
) -> tuple[list[Document], list[int], Store | None, dict[str, Any]]:
    """What the target wrote (and what is mixed in): documents, places in the store, origin.

    The store is None where some of the documents are not in it.
    """
    store = written(config, loaded, console, rank)
    wish = config.data.generate
    limit = None if wish is None else wish.samples
    asked = [(i, a) for i, a in enumerate(store.answers()) if limit is None or a.place < limit]
    documents = [answer.document() for _, answer in asked][: config.data.max_samples]
    about: dict[str, Any] = {"source": "self", "store": store.about}
    if config.data.given is None:
        return documents, [i for i, _ in asked], store, about
    more, about["given"] = _given(len(documents), config.data, loaded, console, rank)
    return documents + more, [], None, about


def _given(
    written: int, data: DataConfig, loaded: Loaded, console: Console, rank: int
) -> tuple[list[Document], str]:
    """Conversations to be mixed in, and the hash of their file."""
    assert data.given is not None
    found, about = _rendered(data.given, data, loaded.tokenizer, console, rank)
    wanted = _beside(written, data.given_share)
    if len(found) < wanted:
        console.print(f"[yellow]note:[/yellow] {data.given} holds {len(found)} of {wanted} wanted")
    return found[:wanted], about["sha256"]


def _beside(written: int, share: float) -> int:
    """How many given conversations make this share of the whole: 20 and 0.25 -> 7."""
    return round(written * share / (1 - share))


def _cut(document: Document, length: int) -> Document:
    return Document(document.ids[:length], document.answer[:length], document.key, document.cut)


def _rendered(
    path: str, data: DataConfig, tokenizer: Any, console: Console, rank: int
) -> tuple[list[Document], dict[str, Any]]:
    found, summary = conversations(path)
    documents = render_all(tokenizer, found, max_length=data.max_length, summary=summary)
    if rank == 0 and summary.counts:
        console.print(summary)
    return documents, {"source": data.name, "sha256": fingerprint(path)}


def _pack(
    documents: list[Document], data: DataConfig, vocab: int, about: dict[str, Any]
) -> Material:
    train, held = split(documents, data.holdout)
    if not train or not held:
        raise RunError(
            f"{len(documents)} conversations are too few to train and to hold some out.",
            "Give more of them.",
        )
    largest = max(max(document.ids) for document in documents)
    if largest >= vocab:
        raise RunError(
            f"The tokenizer gives token {largest}, and the target knows 0..{vocab - 1}.",
            "Use the tokenizer that belongs to the target.",
        )
    counts, held_counts = _answer_counts(train, vocab), _answer_counts(held, vocab)
    about = {**about, "documents": len(documents), "sha256_documents": _digest(documents)}
    rows = pack(train, data.max_length), pack(held, data.max_length)
    return Material(*rows, counts, held_counts, None, documents, about)


def _answer_counts(documents: Sequence[Document], vocab: int) -> Int[Tensor, " V"]:
    counts = torch.zeros(vocab, dtype=torch.long)
    for document in documents:
        ids = torch.tensor(document.ids)[torch.tensor(document.answer)]
        counts += torch.bincount(ids, minlength=vocab)
    return counts


def _digest(documents: Sequence[Document]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        digest.update(json.dumps([document.ids, document.answer]).encode())
    return digest.hexdigest()


def _recorded(
    store: Store,
    documents: list[Document],
    places: Sequence[int],
    holdout: float,
    taps: Sequence[int],
) -> tuple[Recorded, Recorded]:
    place = {id(document): i for document, i in zip(documents, places, strict=False)}
    train, held = split(documents, holdout)
    return (
        Recorded(store, [place[id(d)] for d in train], taps),
        Recorded(store, [place[id(d)] for d in held], taps),
    )


def _said(made: Material) -> str:
    return (
        f"data: {made.about['documents']} conversations, {len(made.train)} training rows of "
        f"{made.train.length} tokens ({made.train.fill:.1%} filled, "
        f"{made.train.supervised:.1%} supervised), {len(made.held)} held-out rows"
        + (", recorded features" if made.recorded else "")
    )


# ---- the target's own text ----


def is_written(config: Config, loaded: Loaded) -> bool:
    """Whether the text that this configuration asks for is there already."""
    store, request, _ = _asked(config, loaded)
    return request in store.fulfilled


def _asked(config: Config, loaded: Loaded) -> tuple[Store, str, Settings]:
    """The folder for this configuration's text, what is asked of it, and how to write it."""
    data, wish = config.data, config.data.generate
    assert wish is not None, "data=self has its settings"
    settings = Settings(
        batch=wish.batch, max_new_tokens=wish.max_new_tokens, temperature=wish.temperature,
        top_p=wish.top_p, seed=config.run.seed, record=wish.record,
    )  # fmt: skip
    about = {
        "target": target_fingerprint(loaded.target), "dtype": str(loaded.target.dtype),
        "prompts": fingerprint(_prompt_file(config)), "template": _template(loaded.tokenizer),
        "max_length": data.max_length,
        **{k: v for k, v in asdict(settings).items() if k != "batch"},
    }  # fmt: skip
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    usual = default_taps(loaded.target.depth)  # recorded for everybody, so that drafters share
    store = Store(cache_home() / "self" / name, about, sorted({*loaded.target.taps, *usual}))
    return store, json.dumps([wish.minutes, wish.samples]), settings


def _prompt_file(config: Config) -> str:
    """What the target is asked: data.path, or the embedded prompts that suit it."""
    return config.data.path or str(CONVERSATIONS if config.target.name == "tiny" else PROMPTS)


def written(config: Config, loaded: Loaded, console: Console, rank: int) -> Store:
    """The store of answers this configuration asks for, complete."""
    store, request, settings = _asked(config, loaded)
    data, wish, folder = config.data, config.data.generate, store.folder
    assert wish is not None
    source = _prompt_file(config)
    if request in store.fulfilled:
        console.print(f"the target's own text is in {folder}", highlight=False)
        return store.only(request)
    if rank > 0:
        return _wait(store, request, loaded)
    questions = _questions(source, loaded, data, wish.samples, wish.max_new_tokens, console)
    stops = stop_ids(loaded.tokenizer, loaded.target)
    writer = Writer(loaded.target, stops, settings)
    loaded.target.set_taps(store.taps)
    console.print(f"the target writes its own text into {folder}")
    console.print(_intended(questions, wish, loaded, folder, len(store.taps)), highlight=False)
    with _progress(console, len(questions)) as tick:
        write_answers(writer, questions, store, minutes=wish.minutes, tick=tick)
    if not store.shards:
        raise RunError("No answer was finished in time.", "Raise data.generate.minutes.")
    store.finish(request)
    return store.only(request)


def _intended(
    questions: Sequence[Question], wish: GenerateConfig, loaded: Loaded, folder: Path, taps: int
) -> str:
    """How much will be written at most, and whether there is room for it."""
    rows = sum(len(q.ids) for q in questions) + len(questions) * wish.max_new_tokens
    wide = (taps + 1) * loaded.target.shape().hidden
    size = rows * (wide * loaded.target.dtype.itemsize * wish.record + BYTES_OF_AN_ID) / GB
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free / GB
    time_limit = "" if wish.minutes is None else f" in {wish.minutes:g} minutes"
    said = f"up to {len(questions):,} answers{time_limit}, at most {size:.1f} GB of {free:.0f} free"
    return said + (": the disk may fill up" if size > free else "")


def _wait(store: Store, request: str, loaded: Loaded) -> Store:
    """Until rank 0 is done; when it fails, its launcher ends all ranks."""
    while request not in store.fulfilled:
        time.sleep(POLL)
        store = Store(store.folder, store.about, store.taps)
    return store.only(request)


def _template(tokenizer: Any) -> str:
    return hashlib.sha256(str(getattr(tokenizer, "chat_template", "")).encode()).hexdigest()[:16]


def _questions(
    source: str, loaded: Loaded, data: DataConfig, samples: int | None, room: int, console: Console
) -> list[Question]:
    """The prompts in tokens; those that leave no room for an answer are counted and dropped."""
    out, long = list[Question](), 0
    for place, prompt in enumerate(prompts(source, samples, key="data.path")):
        opening = prompt.opening()
        ids = prompt_ids(loaded.tokenizer, opening)
        if len(ids) + min(room, 32) > data.max_length:
            long += 1
            continue
        out.append(Question(place, key_of(opening), ids))
    if not out:
        raise RunError(
            f"All {long} prompts of {source} are too long for data.max_length={data.max_length}.",
            "Raise it; prompts and answers share a row.",
        )
    if long:
        console.print(f"{long} prompts were too long for data.max_length={data.max_length}")
    return out


class _progress:
    """A bar over answers, with answer tokens per second; a line now and then in a log file."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.spoke = console, total, time.monotonic()
        self.said = "no answer was missing"
        self.bar = Progress(
            TextColumn("writing"), BarColumn(), TextColumn("{task.completed}/{task.total} answers"),
            TextColumn("{task.fields[tokens]} tokens, {task.fields[rate]:.0f}/s"),
            TimeElapsedColumn(), console=console,
        )  # fmt: skip
        self.task = self.bar.add_task("writing", total=total, tokens=0, rate=0.0)

    def __enter__(self) -> Any:
        self.bar.start()
        return self._tick

    def _tick(self, done: int, tokens: int, rate: float) -> None:
        self.said = f"wrote {done} answers, {tokens:,} tokens, {rate:.0f} tokens/s"
        self.bar.update(self.task, completed=done, tokens=tokens, rate=rate)
        if not self.console.is_terminal and time.monotonic() - self.spoke > LINE:
            self.spoke = time.monotonic()
            self.console.print(
                f"writing: {done}/{self.total} answers, {tokens} tokens, {rate:.0f}/s"
            )

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        self.console.print(self.said, highlight=False)
