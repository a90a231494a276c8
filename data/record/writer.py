"""`outrider record`: run the target over the training text once, and keep what it said.

Shard s holds the documents of its own stretch of the text, packed into rows among themselves; so
its bytes depend on nothing else, and ranks, machines and killed runs may share the work in any
way. Before the first shard, and every so often, a document is compared with a plain forward of the
model, without packing, masks or hooks of ours.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from outrider.conf.errors import ConfigError, Damaged, RunError
from outrider.data.batches import gather
from outrider.data.pack import pack, split
from outrider.data.record import column_scales as sizes
from outrider.data.record.entropy_coding import OutOfRange
from outrider.data.record.folder import MANIFEST, Folder, facts_of, text_of
from outrider.data.record.layout import Layout
from outrider.data.record.quantise import NotFinite, bytes_per_row
from outrider.data.record.verify import compare
from outrider.data.tokenise import Document
from outrider.models.drafter import Trace
from outrider.models.drafters import kind
from outrider.models.load import Loaded, cache_home
from outrider.models.target import Target
from outrider.train import distributed as start
from outrider.train.manifest import identify
from outrider.train.settings import Config

if TYPE_CHECKING:
    from outrider.data.prepare import Material

FORWARD = 8192  # tokens of a forward, about
POLL = 2.0  # seconds between looks at what other ranks are writing
GB = 1e9
LINE = 60.0  # seconds between lines of progress where there is no terminal


def record(config: Config) -> int:
    """The verb: prepare the text, then write its recording."""
    from outrider.data.prepare import text
    from outrider.models import drafters, load

    start.use_cores()
    console = Console(quiet=start.rank() > 0)
    if config.target.place in ("sharded", "tensor"):
        start.join(config.launch)
    loaded = load.load(config.target, start.device())
    console.print(f"target: {loaded.source}")
    taps = drafters.taps_of(config.drafter, loaded.target.depth)
    made = text(config, loaded, taps, console, start.rank())
    folder = recording_of(config, loaded, made, console)
    console.print(f"train from it: data.traces={folder.path}", highlight=False, soft_wrap=True)
    start.leave()
    return 0


def recording_of(config: Config, loaded: Loaded, made: "Material", console: Console) -> Folder:
    """The recording that this configuration asks for, with nothing missing of this rank's part.

    Raises:
        RunError: it does not fit, or the target says something else without packing.
        NoRoom: the disk has become full.
    """
    work = Recorder(config, loaded, made, console)
    folder = work.folder()
    work.write(folder)
    return folder


class Recorder:
    """One rank's part of the work."""

    def __init__(self, config: Config, loaded: Loaded, made: "Material", console: Console) -> None:
        self.config, self.wish, self.target = config, config.record, loaded.target
        self.loaded, self.made, self.console = loaded, made, console
        self.documents, self.noted = made.documents, made.noted
        self.layout = layout_of(config, loaded.target, made)
        self.counts = _cut(self.documents, self.wish.shard)
        held = {document.key for document in split(self.documents, config.data.holdout)[1]}
        self.whole = [not self.layout.top or d.key in held for d in self.documents]
        self.about = {**about_of(config, loaded, made), "layout": facts_of(self.layout)}
        usual = cache_home() / "traces" / _name(self.about)
        told = config.data.traces
        self.path = usual if told is None else Path(told).expanduser()

    # ---- the folder ----

    def folder(self) -> Folder:
        """Begun by the first rank of the first machine, if it does not exist; others wait."""
        (machine, _), rank = self.wish.part, start.rank()
        together = self.target.elsewhere  # then every rank runs every forward
        first = machine == 0 and rank == 0
        if not (self.path / MANIFEST).is_file() and machine == 0 and (first or together):
            self._room(1.0)
            self._find_sizes()
        if not (first or (self.path / MANIFEST).is_file()):
            self._wait()
        facts = {"source": self.made.about, "suite": self.config.eval.prompts}
        folder = Folder.begin(self.path, self.about, self.layout, self.counts, facts)
        self.layout, self.counts = folder.layout, folder.counts
        return folder

    def _wait(self) -> None:
        """Until the first rank of the first machine has begun the folder."""
        said = f"waiting for the machine with record.share=1/... to begin {self.path}"
        self.console.print(said, highlight=False, soft_wrap=True)
        while not (self.path / MANIFEST).is_file():
            time.sleep(POLL)

    def _find_sizes(self) -> None:
        """Of the columns of the first documents' features."""
        if self.layout.step is not None and self.layout.width:
            self.layout = replace(self.layout, sizes=sizes.fit(self._sample(sizes.SAMPLE)))

    def _sample(self, rows: int) -> Iterator[Tensor]:
        """Features of the first documents, so many rows at least."""
        found = 0
        for shard in range(len(self.counts)):
            for trace in self._traces(shard):
                features = trace.taps if self.layout.reads == "taps" else trace.last
                yield features[trace.document >= 0].cpu()
                found += int((trace.document >= 0).sum())
                if found >= rows:
                    return

    # ---- writing ----

    def write(self, folder: Folder) -> None:
        """What is missing of this rank's part; then wait for the other ranks' parts."""
        together = self.target.elsewhere
        (machine, machines), rank, world = self.wish.part, start.rank(), start.world_size()
        mine, of = (machine, machines) if together else (machine * world + rank, machines * world)
        ours = range(mine, len(folder.counts), of)
        self._mend(folder, ours)
        todo = [shard for shard in ours if not folder.written(shard)]
        if todo:
            self._intend(folder, todo)
            with _Bar(self.console, len(todo)) as tick:
                for done, shard in enumerate(todo):
                    if done % self.wish.check_every == 0:
                        self._prove(shard)
                    tensors = self._shard(shard)
                    if not (together and rank):
                        folder.add(shard, tensors, self._of(shard))
                    tick(len(tensors["ids"]))
        while machines == 1 and folder.missing():
            time.sleep(POLL)
        said = f"{folder.path} holds {decimal(folder.bytes())}"
        missing = len(folder.missing())
        self.console.print(
            said + (f"; other machines have {missing} files to write" if missing else ""),
            highlight=False, soft_wrap=True,
        )  # fmt: skip

    def _mend(self, folder: Folder, shards: Iterable[int]) -> None:
        """Shards that are not what was written are to be written again, if that is wished."""
        for shard in shards if self.wish.damaged == "again" else ():
            try:
                if folder.written(shard):
                    folder.check(shard)
            except Damaged as error:
                self.console.print(f"{error.message} It is recorded again.", style="yellow")
                folder.forget(shard)

    def _of(self, shard: int) -> list[Document]:
        first = sum(self.counts[:shard])
        return self.documents[first : first + self.counts[shard]]

    def _traces(self, shard: int) -> Iterator[Trace]:
        """What the target says about the shard's documents, in packed rows."""
        documents, first = self._of(shard), sum(self.counts[:shard])
        rows = pack(documents, self.config.data.max_length)
        size = max(1, FORWARD // rows.length)
        noted = (
            None if self.noted is None else self.noted.part(range(first, first + len(documents)))
        )
        for index in torch.arange(len(rows)).split(size):
            batch = gather(rows, index)
            if noted is not None:
                yield noted.trace(batch)
            else:
                yield self.target.trace(*(field.to(self.target.device) for field in batch))

    @torch.no_grad()
    def _shard(self, shard: int) -> dict[str, Tensor]:
        """The shard's tensors: its text, and the columns of all its documents."""
        documents, first = self._of(shard), sum(self.counts[:shard])
        whole = self.whole[first : first + len(documents)]
        parts: dict[int, dict[str, Tensor]] = {}
        for trace in self._traces(shard):
            for number, own in _documents(trace):
                parts[number] = self._columns(own, whole[number], documents[number].key)
        names = dict.fromkeys(name for part in parts.values() for name in part)
        columns = {
            name: torch.cat([parts[i][name] for i in range(len(documents)) if name in parts[i]])
            for name in names
        }
        return {**text_of(documents, whole), **columns}

    def _columns(self, trace: Trace, whole: bool, key: str) -> dict[str, Tensor]:
        """
        Raises:
            RunError: the target says NaN or infinity.
        """
        kept = self.layout.kept(trace.answer[0].cpu())
        taps, last = trace.taps[0].cpu(), trace.last[0].cpu()
        try:
            return self.layout.columns(self.target, kept, taps, last, whole and self.layout.top > 0)
        except NotFinite as error:
            fix = "Run the target in another precision: target.dtype=float32."
            raise RunError(f"{self.target.name}, document {key[:12]}: {error}.", fix) from None
        except OutOfRange as error:
            fix = "Take a larger record.step, or record.states=int8."
            raise RunError(f"{self.target.name}, document {key[:12]}: {error}.", fix) from None

    # ---- before, and in between ----

    def _intend(self, folder: Folder, todo: Sequence[int]) -> None:
        """What will be written, how long it takes, and whether there is room.

        Raises:
            ConfigError, RunError: there is not.
        """
        began = time.monotonic()
        trace = next(self._traces(todo[0]))
        pace = trace.ids.numel() / (time.monotonic() - began)
        tokens = sum(len(d.ids) for shard in todo for d in self._of(shard))
        whole = sum(folder.counts[shard] for shard in folder.missing()) / len(self.documents)
        size, free = self._room(whole)
        per_token = self.bytes() / sum(len(d.ids) for d in self.documents)
        self.console.print(
            f"recording {tokens:,} tokens in {len(todo)} files: {decimal(int(size))} "
            f"({per_token:.0f} bytes per token) of {decimal(free)} free, "
            f"about {tokens / pace / 60:.1f} minutes",
            highlight=False,
        )

    def _room(self, share: float) -> tuple[float, int]:
        """Bytes of so much of the recording, and bytes that are free.

        Raises:
            ConfigError: it is larger than it may be.
            RunError: it is larger than what is free.
        """
        size, free = share * self.bytes(), shutil.disk_usage(_existing(self.path)).free
        limit = self.config.data.max_gb
        if limit is not None and self.bytes() > limit * GB:
            why = f"The recording will have {decimal(int(self.bytes()))}."
            fix = "Raise it, take record=small, or data.mode=hybrid: it keeps what fits."
            raise ConfigError("data.max_gb", limit, why, fix)
        if size > free:
            why = f"{self.path} needs {decimal(int(size))}, and {decimal(free)} are free there."
            raise RunError(why, "Make room, choose another data.traces, or take record=small.")
        return size, free

    def bytes(self) -> float:
        """Of the whole recording, about."""
        tokens = sum(len(document.ids) for document in self.documents)
        answers = [int(document.answer.sum()) for document in self.documents]
        itemsize = self.target.dtype.itemsize
        out = tokens * self.layout.bytes_per_token(sum(answers) / max(1, tokens), itemsize)
        if self.layout.top:
            kept = sum(count for count, whole in zip(answers, self.whole, strict=True) if whole)
            out += kept * bytes_per_row(self.layout.lasts, self.layout.hidden, itemsize)
        return out

    @torch.no_grad()
    def _prove(self, shard: int) -> None:
        """A document of the shard, before it is stored in fewer bits, against a plain forward.

        Raises:
            RunError: the two differ.
        """
        trace = next(self._traces(shard))
        number, own = next(_documents(trace))
        document = self._of(shard)[number]
        error = compare(self.target, own)
        if not error.fine:
            raise RunError(
                f"{self.target.name} says something else of document {document.key[:12]} when it "
                f"is packed with others: {error}.",
                "Nothing of this file was written. Report it: this reading of the target is wrong.",
            )


def layout_of(config: Config, target: Target, made: "Material") -> Layout:
    """What this drafter needs of a trace, stored as the settings say.

    Raises:
        ConfigError: settings that do not suit the drafter.
    """
    wish, cfg = config.record, config.drafter
    reads = kind(cfg.name).reads
    if wish.states == "coded" and reads in ("last", "guesses") and not wish.top:
        why = f"{cfg.name} reads the states that its teacher is made of: it would be bent."
        raise ConfigError("record.states", "coded", why, "Add record.top=32, or take int8.")
    vocab = made.vocab(cfg.draft_vocab_size).kept if wish.top else None
    if vocab is not None and len(vocab) > 2**16:
        why = f"Recorded tokens have 16 bits, and the draft vocabulary has {len(vocab):,} tokens."
        fix = "Set drafter.draft_vocab_size=65536 or less."
        raise ConfigError("record.top", wish.top, why, fix)
    hidden, ahead = target.shape().hidden, cfg.depths if reads == "guesses" else 1
    step = wish.step if wish.states == "coded" else None
    return Layout(reads, wish.states, target.taps, hidden, ahead, wish.top, vocab=vocab, step=step)


def about_of(config: Config, loaded: Loaded, made: "Material") -> dict[str, Any]:
    """What a recording depends on, but for its layout."""
    about = {
        **identify(loaded), "dtype": str(loaded.target.dtype),
        "documents": made.about["sha256_documents"], "max_length": config.data.max_length,
    }  # fmt: skip
    if not config.record.top:
        return about
    return {**about, "holdout": config.data.holdout}  # whose last states are kept beside the tokens


def _name(about: Mapping[str, Any]) -> str:
    """Of a folder in the cache: a few words, and a hash of everything."""
    layout = about["layout"]
    taps = "-".join(map(str, layout["taps"])) if layout["reads"] == "taps" else layout["reads"]
    top = f"-top{layout['top']}" if layout["top"] else ""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return f"{taps}-{layout['states']}{layout['step'] or ''}{top}-{digest[:16]}"


def _cut(documents: Sequence[Document], tokens: int) -> list[int]:
    """How many documents each shard has: so many tokens, or one document more."""
    counts, held = [0], 0
    for document in documents:
        if held >= tokens:
            counts.append(0)
            held = 0
        counts[-1] += 1
        held += len(document.ids)
    return counts


def _documents(trace: Trace) -> Iterator[tuple[int, Trace]]:
    """The documents of packed rows, each with its number, as a trace of its own."""
    for row in range(len(trace.ids)):
        numbers, counts = torch.unique_consecutive(trace.document[row], return_counts=True)
        begins = (counts.cumsum(0) - counts).tolist()
        for number, begin, count in zip(numbers.tolist(), begins, counts.tolist(), strict=True):
            if number >= 0:
                own = slice(begin, begin + count)
                held = {name: v for name, v in vars(trace).items() if v is not None}
                yield number, Trace(**{name: v[row : row + 1, own] for name, v in held.items()})


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.absolute().parents) if place.exists())


class _Bar:
    """Progress over shards, with tokens per second; a line now and then in a log file."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.done, self.tokens = console, total, 0, 0
        self.began = self.spoke = time.monotonic()
        self.bar = Progress(
            TextColumn("recording"), BarColumn(), MofNCompleteColumn(),
            TextColumn("files, {task.fields[rate]:,.0f} tokens/s"), TimeRemainingColumn(),
            console=console,
        )  # fmt: skip
        self.task = self.bar.add_task("recording", total=total, rate=0.0)

    def __enter__(self) -> Any:
        self.bar.start()
        return self._tick

    def _tick(self, tokens: int) -> None:
        self.done, self.tokens, now = self.done + 1, self.tokens + tokens, time.monotonic()
        rate = self.tokens / (now - self.began)
        self.bar.update(self.task, completed=self.done, rate=rate)
        if not self.console.is_terminal and now - self.spoke > LINE:
            self.spoke = now
            self.console.print(f"recording: {self.done}/{self.total} files, {rate:,.0f} tokens/s")

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
