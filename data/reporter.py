"""Messages and progress bars of data preparation, printed by the main rank only."""

import time

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from outrider.conf.console import Console

LINE = 60.0  # seconds between lines of progress without a terminal


class Reporter:
    """A console that prints in the main process only."""

    def __init__(self, console: Console, main: bool = True, messages: bool = True) -> None:
        """Without `messages`, only notes and progress are printed."""
        self.console, self.main, self.messages = console, main, main and messages

    @classmethod
    def silent(cls) -> "Reporter":
        return cls(Console(quiet=True), main=False)

    def print(self, message: RenderableType) -> None:
        """Print a message or a table, without highlighted numbers and without wrapped paths."""
        if self.messages:
            self._print(message)

    def _print(self, message: RenderableType) -> None:
        if self.main:
            soft = isinstance(message, str | Text)
            self.console.print(message, soft_wrap=soft)

    def note(self, message: str) -> None:
        """Print a message that the user should read although nothing failed."""
        self._print(Text.assemble(("note:", "yellow"), f" {message}"))

    def progress(
        self, verb: str, total: int | None, unit: str, *, before: int = 0,
        seconds: float | None = None,
    ) -> "TokenProgress":  # fmt: skip
        """Return a progress bar over `total` units (None: unknown), as a context manager.

        Args:
            before: units that an earlier call finished.
            seconds: the work stops after this time, finished or not.
        """
        return TokenProgress(self, verb, total, unit, before, seconds)


class TokenProgress:
    """A progress bar with tokens per second and the time left; without a terminal, a line a minute.

    with reporter.progress("recording", 12, "conversations") as bar:
        bar.advance(1, tokens)
    """

    def __init__(
        self, reporter: Reporter, verb: str, total: int | None, unit: str, before: int,
        seconds: float | None,
    ) -> None:  # fmt: skip
        self.reporter, self.verb, self.total, self.unit = reporter, verb, total, unit
        self.before, self.seconds = before, seconds
        self.done, self.tokens = float(before), 0
        self.start = self.last_line = time.monotonic()
        self.bar = Progress(
            TextColumn(verb), BarColumn(), MofNCompleteColumn(), TextColumn(unit),
            TextColumn("{task.fields[speed]}"), TextColumn("{task.fields[left]}"),
            console=reporter.console, disable=not reporter.main, transient=total is None,
        )  # fmt: skip
        self.task = self.bar.add_task(verb, total=total, completed=before, speed="", left="")

    def __enter__(self) -> "TokenProgress":
        self.bar.start()
        return self

    def advance(self, count: float, tokens: int = 0) -> None:
        """Add finished units and the tokens they hold, if they are counted."""
        self.update(self.done + count, self.tokens + tokens)

    def update(self, done: float, tokens: int, rate: float | None = None) -> None:
        """Set finished units, tokens so far and tokens per second (None: since the start)."""
        now = time.monotonic()
        self.done, self.tokens = done, tokens
        rate = tokens / max(now - self.start, 1e-9) if rate is None else rate
        speed = f"{tokens:,} tokens, {rate:,.0f}/s" if tokens else ""
        left = self._left(now)
        self.bar.update(self.task, completed=done, speed=speed, left=left)
        silent = self.reporter.console.is_terminal or not self.reporter.main
        if not silent and now - self.last_line > LINE:
            self.last_line = now
            count = f"{done:.0f}/{self.total}" if self.total else f"{done:,.0f}"
            parts = [f"{self.verb}: {count} {self.unit}", speed, left]
            self.reporter.console.print(", ".join(filter(None, parts)))

    def _left(self, now: float) -> str:
        """Return an estimate of the time left; "" if it is unknown, or nothing is left."""
        if not self.total or not self.before < self.done < self.total:
            return ""
        seconds = (now - self.start) / (self.done - self.before) * (self.total - self.done)
        if self.seconds is not None:
            seconds = min(seconds, max(0.0, self.start + self.seconds - now))
        return f"about {max(1, round(seconds / 60))} min left"

    def __exit__(self, *_error: object) -> None:
        self.bar.update(self.task, left="")
        self.bar.stop()
