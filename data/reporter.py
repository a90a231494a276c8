"""Messages and progress bars of data preparation, printed by the main rank only."""

import time

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from outrider.conf.console import Console

LINE = 60.0  # seconds between lines of progress without a terminal


class Reporter:
    """A console that prints in the main process only."""

    def __init__(self, console: Console, main: bool = True) -> None:
        self.console, self.main = console, main

    @classmethod
    def silent(cls) -> "Reporter":
        return cls(Console(quiet=True), main=False)

    def print(self, message: RenderableType) -> None:
        """Print a message or a table, without highlighted numbers and without wrapped paths."""
        if self.main:
            soft = isinstance(message, str | Text)
            self.console.print(message, highlight=False, soft_wrap=soft)

    def note(self, message: str) -> None:
        """Print a message that the user should read although nothing failed."""
        self.print(Text.assemble(("note:", "yellow"), f" {message}"))

    def progress(self, verb: str, total: int | None, unit: str) -> "TokenProgress":
        """Return a progress bar over `total` units (None: unknown), as a context manager."""
        return TokenProgress(self, verb, total, unit)


class TokenProgress:
    """A progress bar with tokens per second; without a terminal, one line per minute.

    with reporter.progress("recording", 12, "files") as bar:
        bar.advance(1, tokens)
    """

    def __init__(self, reporter: Reporter, verb: str, total: int | None, unit: str) -> None:
        self.reporter, self.verb, self.total, self.unit = reporter, verb, total, unit
        self.done = self.tokens = 0
        self.start = self.last_line = time.monotonic()
        self.bar = Progress(
            TextColumn(verb), BarColumn(), MofNCompleteColumn(), TextColumn(unit),
            TextColumn("{task.fields[tokens]:,} tokens, {task.fields[rate]:,.0f}/s"),
            TimeRemainingColumn(), console=reporter.console, disable=not reporter.main,
            transient=total is None,
        )  # fmt: skip
        self.task = self.bar.add_task(verb, total=total, tokens=0, rate=0.0)

    def __enter__(self) -> "TokenProgress":
        self.bar.start()
        return self

    def advance(self, count: int, tokens: int) -> None:
        """Add finished units and the tokens they hold."""
        self.update(self.done + count, self.tokens + tokens)

    def update(self, done: int, tokens: int, rate: float | None = None) -> None:
        """Set finished units, tokens so far and tokens per second (None: since the start)."""
        now = time.monotonic()
        self.done, self.tokens = done, tokens
        rate = tokens / max(now - self.start, 1e-9) if rate is None else rate
        self.bar.update(self.task, completed=done, tokens=tokens, rate=rate)
        if not self.reporter.console.is_terminal and now - self.last_line > LINE:
            self.last_line = now
            count = f"{done}/{self.total}" if self.total else f"{done:,}"
            self.reporter.print(
                f"{self.verb}: {count} {self.unit}, {tokens:,} tokens, {rate:,.0f}/s"
            )

    def __exit__(self, *_error: object) -> None:
        self.bar.stop()
