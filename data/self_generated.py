"""The target's own text: what it is asked, by whom it is written, where it lies.

The folder is named after everything the text depends on (target, prompts, template, settings), so
that a second run, or another drafter for the same target, finds it there. The prompts are read, or
the target's own too; the answers come from this process or from a server.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from outrider.conf.errors import RunError
from outrider.conf.files import claimed
from outrider.data import magpie as own_prompts
from outrider.data.conversations import Prompt, prompts
from outrider.data.endpoint import Link, Served
from outrider.data.generate import Question, Settings, Writer, write_answers
from outrider.data.sources import Source, data_source
from outrider.data.tokenise import key_of, prompt_ids
from outrider.data.traces import Store
from outrider.models.chat_template import template_hash
from outrider.models.formats.native import target_fingerprint
from outrider.models.load import Loaded, cache_home, stop_ids
from outrider.models.target import default_taps
from outrider.train.settings import Config, DataConfig, GenerateConfig

CONVERSATIONS = Path(__file__).parent / "tiny" / "conversations.jsonl"
PROMPTS = Path(__file__).parent / "prompts" / "general.jsonl"
LINE = 60.0  # seconds between lines of progress where there is no terminal
GB = 2**30
BYTES_OF_AN_ID = 8  # and of the favourite beside it
POLL = 2.0  # seconds between looks at the folder that rank 0 is filling


def source_of(data: DataConfig, usual: str) -> Source:
    """Where data.path leads; null is the embedded text."""
    return data_source(
        data.path or usual, subset=data.subset, split=data.split, revision=data.revision,
        skip_bad=data.skip_bad,
    )  # fmt: skip


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
        top_p=wish.top_p, seed=config.run.seed, record=wish.record and wish.endpoint is None,
    )  # fmt: skip
    about = {
        "target": target_fingerprint(loaded.target), "dtype": str(loaded.target.dtype),
        "prompts": _origin(config),
        "template": template_hash(loaded.tokenizer), "max_length": data.max_length,
        **({} if config.target.quantise is None else {"quantise": config.target.quantise}),
        **({} if wish.endpoint is None else {"server": wish.model}),
        **{k: v for k, v in asdict(settings).items() if k != "batch"},
    }  # fmt: skip
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    usual = default_taps(loaded.target.depth)  # recorded for everybody, so that drafters share
    store = Store(cache_home() / "self" / name, about, sorted({*loaded.target.taps, *usual}))
    return store, json.dumps([wish.minutes, wish.samples]), settings


def _origin(config: Config) -> str:
    """Which prompts are asked: a fingerprint, or that they are the target's own."""
    wish = config.data.generate
    if wish is not None and wish.self_prompted:
        return "own"
    return source_of(config.data, usual_prompts(config)).fingerprint()


def usual_prompts(config: Config) -> str:
    """What the target is asked without data.path: the embedded prompts that suit it."""
    return str(CONVERSATIONS if config.target.name == "tiny" else PROMPTS)


def questions_for(
    config: Config, loaded: Loaded, limit: int | None, console: Console, rank: int
) -> list[Prompt]:
    """What the target is asked: prompts that are read, or that it has written itself."""
    wish = config.data.generate
    assert wish is not None
    if not wish.self_prompted:
        return prompts(source_of(config.data, usual_prompts(config)), limit)
    assert limit is not None, "checked by the configuration"
    answers, _, settings = _asked(config, loaded)
    settings = replace(
        settings, temperature=own_prompts.TEMPERATURE, top_p=1.0, record=False,
        max_new_tokens=min(own_prompts.LONGEST, config.data.max_length // 2),
    )  # fmt: skip
    about = {**answers.about, "asked for": "prompts", "max_new_tokens": settings.max_new_tokens}
    store = Store(answers.folder.with_name(f"{answers.folder.name}-prompts"), about, ())
    stops = stop_ids(loaded.tokenizer, loaded.target)
    ends = [*stops, *own_prompts.bare(loaded.tokenizer)[1]]
    if str(limit) in store.fulfilled or rank > 0:
        store = store.only(str(limit)) if rank == 0 else _wait(store, str(limit), loaded)
        return own_prompts.sift(loaded.tokenizer, store.answers(), ends, limit)[0]
    writer = _writer(wish, loaded, settings, ends)
    with _alone(store, console) as store:
        console.print(f"the target writes {limit} prompts into {store.folder}", highlight=False)
        found, reasons = own_prompts.write_prompts(store, writer, loaded.tokenizer, limit, ends)
        store.finish(str(limit))
    if reasons:
        console.print(f"left out: {own_prompts.said(reasons)}", highlight=False)
    return found


def written(
    config: Config, loaded: Loaded, asked_of: Sequence[Prompt], console: Console, rank: int
) -> Store:
    """The store of answers this configuration asks for, complete."""
    store, request, settings = _asked(config, loaded)
    data, wish, folder = config.data, config.data.generate, store.folder
    assert wish is not None
    if request in store.fulfilled:
        console.print(f"the target's own text is in {folder}", highlight=False)
        return store.only(request)
    if rank > 0:
        return _wait(store, request, loaded)
    questions = _questions(asked_of, loaded, data, wish.max_new_tokens, console)
    writer = _writer(wish, loaded, settings, stop_ids(loaded.tokenizer, loaded.target))
    where = f" on {wish.endpoint}" if wish.endpoint else ""
    with _alone(store, console) as store:
        loaded.target.set_taps(store.taps)
        console.print(f"the target writes its own text{where} into {folder}", highlight=False)
        console.print(_intended(questions, wish, loaded, folder, len(store.taps)), highlight=False)
        with _progress(console, len(questions)) as tick:
            write_answers(writer, questions, store, minutes=wish.minutes, tick=tick)
        if isinstance(writer, Served):
            console.print(writer.said(), highlight=False)
        if not store.shards:
            raise RunError("No answer was finished in time.", "Raise data.generate.minutes.")
        store.finish(request)
    return store.only(request)


@contextmanager
def _alone(store: Store, console: Console) -> Iterator[Store]:
    """The store as it is once nobody else writes there, without what a kill left behind."""
    said = f"another process writes into {store.folder}: waiting for it"
    with claimed(store.folder, lambda: console.print(said, highlight=False)):
        for torn in store.folder.glob(".*.tmp"):
            torn.unlink()
        yield Store(store.folder, store.about, store.taps)


def _writer(
    wish: GenerateConfig, loaded: Loaded, settings: Settings, stops: Sequence[int]
) -> Writer | Served:
    """Who answers: the target in this process, or on a server."""
    if wish.endpoint is None:
        return Writer(loaded.target, stops, settings)
    link = Link(wish.endpoint, wish.model, wish.timeout, wish.retries)
    judge = None if loaded.target.elsewhere else loaded.target
    return Served(link, loaded.tokenizer, stops, settings, judge)


def _intended(
    questions: Sequence[Question], wish: GenerateConfig, loaded: Loaded, folder: Path, taps: int
) -> str:
    """How much will be written at most, and whether there is room for it."""
    recorded = wish.record and wish.endpoint is None
    rows = sum(len(q.ids) for q in questions) + len(questions) * wish.max_new_tokens
    wide = (taps + 1) * loaded.target.shape().hidden
    size = rows * (wide * loaded.target.dtype.itemsize * recorded + BYTES_OF_AN_ID) / GB
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


def _questions(
    asked: Sequence[Prompt], loaded: Loaded, data: DataConfig, room: int, console: Console
) -> list[Question]:
    """The prompts in tokens; those that leave no room for an answer are counted and dropped."""
    out, long = list[Question](), 0
    for place, prompt in enumerate(asked):
        opening = prompt.opening()
        ids = prompt_ids(loaded.tokenizer, opening)
        if len(ids) + min(room, 32) > data.max_length:
            long += 1
            continue
        out.append(Question(place, key_of(opening), ids))
    if not out:
        raise RunError(
            f"All {long} prompts are too long for data.max_length={data.max_length}.",
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

    def __exit__(self, error: object, *_: object) -> None:
        self.bar.stop()
        if error is None:
            self.console.print(self.said, highlight=False)
