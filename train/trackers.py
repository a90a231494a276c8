"""Services that follow a run: wandb and TensorBoard, behind one small interface.

The run never waits for them and never ends because of them. Each is opened, told and closed by a
thread of its own, opened when there is something to tell; what it cannot take in time is dropped
and counted; the first error is said once and the service is left alone from then on. The run folder
has everything: `metrics.jsonl`, `eval/`.
"""

import importlib.util
import queue
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from outrider.conf.errors import ConfigError
from outrider.conf.files import write
from outrider.train.settings import Config, resolved

IDENTITY = "wandb-id.txt"  # in the run folder: which run of wandb this is
ROOM = 1000  # lines that may wait for a service
PATIENCE = 30.0  # seconds that the end of a run waits for what is still to be told


class Answer(NamedTuple):
    """A decoded prompt, for people to read.

    Attributes:
        counts: tokens by who proposed them.
        marked, coloured: its text with everybody's part, plain and in html.
    """

    id: str
    category: str
    prompt: str
    tau: float | None
    counts: dict[str, int]
    marked: str
    coloured: str


class Told(NamedTuple):
    """A finished report: its name, its headline numbers, some answers, its files."""

    name: str
    numbers: dict[str, float]
    answers: list[Answer]
    files: list[Path]


class Service(Protocol):
    """What follows a run."""

    def log(self, step: int, kind: str, values: dict[str, float]) -> None:
        """`kind` is train, held or skipped."""
        ...

    def report(self, told: Told) -> None: ...

    def close(self) -> None: ...


class Wandb:
    """Weights & Biases; runs of one sweep share WANDB_RUN_GROUP.

    A run that is continued here continues there. What it logs again, wandb leaves out; it is equal.
    """

    def __init__(self, config: Config) -> None:
        import wandb

        self.wandb: Any = wandb
        settings, folder = config.train.wandb, Path(config.run.dir)
        self.run = wandb.init(
            project=settings.project, mode=settings.mode, dir=str(folder), name=folder.name,
            config=resolved(config), id=_identity(folder),
            resume="allow" if settings.mode == "online" else None,
            settings=_patient(wandb.Settings),
        )  # fmt: skip

    def log(self, step: int, kind: str, values: dict[str, float]) -> None:
        self.run.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    def report(self, told: Told) -> None:
        """A table of answers, the numbers as summary, the files as an artifact."""
        kinds = list(told.answers[0].counts)
        table = self.wandb.Table(
            ["id", "category", "prompt", "tau", *kinds, "[accepted] ~rejected~", "colours"]
        )
        for a in told.answers:
            shown = self.wandb.Html(a.coloured, inject=False)
            table.add_data(
                a.id, a.category, a.prompt, a.tau, *a.counts.values(), a.marked, shown
            )  # fmt: skip
        self.run.log({f"{told.name}/answers": table})
        self.run.summary.update({f"{told.name}/{k}": value for k, value in told.numbers.items()})
        artifact = self.wandb.Artifact(
            f"{told.name}-{self.run.id}", "report", metadata=told.numbers
        )
        for file in told.files:
            artifact.add_file(str(file), policy="immutable")  # read where it lies, not copied
        self.run.log_artifact(artifact)

    def close(self) -> None:
        self.run.finish()


def _patient(settings: Any) -> Any:
    """How long wandb itself may wait: unbidden it waits for ever at the process's end."""
    waits = {"init_timeout": PATIENCE, "finish_timeout": PATIENCE}
    known = settings.model_fields  # older versions cannot be told the second
    return settings(**{name: value for name, value in waits.items() if name in known})


def _identity(folder: Path) -> str:
    """The run's name for wandb, the same whenever it is continued."""
    file = folder / IDENTITY
    if not file.is_file():
        write(file, f"{secrets.token_hex(4)}\n".encode())
    return file.read_text().strip()


class TensorBoard:
    """Event files in `<run.dir>/tensorboard`."""

    def __init__(self, config: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(Path(config.run.dir) / "tensorboard"))

    def log(self, step: int, kind: str, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{kind}/{name}", value, step)

    def report(self, told: Told) -> None:
        """The numbers, and the answers as text."""
        for name, value in told.numbers.items():
            self.writer.add_scalar(f"{told.name}/{name}", value)
        text = "\n\n".join(f"{a.id}: {a.prompt}\n\n{a.marked}" for a in told.answers)
        self.writer.add_text(
            f"{told.name}/answers", "\n".join(f"    {x}" for x in text.split("\n"))
        )

    def close(self) -> None:
        self.writer.close()


def services(config: Config, say: Callable[[str], None]) -> "list[Background]":
    """Those that the configuration asks for."""
    found = []
    if config.train.wandb.mode != "disabled":
        found.append(Background("wandb", partial(Wandb, config), say))
    if config.train.tensorboard:
        found.append(Background("tensorboard", partial(TensorBoard, config), say))
    return found


@contextmanager
def following(
    config: Config, say: Callable[[str], None], main: bool
) -> Iterator[list["Background"]]:
    """The services of the main rank, until they have been told everything."""
    found = services(config, say) if main else []
    try:
        yield found
    finally:
        for service in found:
            service.close()


def check(config: Config) -> None:
    """
    Raises:
        ConfigError: a service is asked for whose package is not there.
    """
    if config.train.tensorboard and importlib.util.find_spec("tensorboard") is None:
        fix = "pip install tensorboard (or: pip install outrider[tensorboard])"
        raise ConfigError("train.tensorboard", True, "The package is missing.", fix)


class Background:
    """A service in a thread of its own."""

    def __init__(
        self, name: str, make: Callable[[], Service], say: Callable[[str], None],
        patience: float = PATIENCE,
    ) -> None:  # fmt: skip
        """
        Args:
            make: opens the service; it may fail or take for ever.
            say: told once where the service fails, and of what was dropped.
            patience: seconds that `close` waits at most.
        """
        self.name, self._say, self._patience = name, say, patience
        self._lines: queue.Queue[Callable[[Service], None] | None] = queue.Queue(ROOM)
        self.dropped, self.failed = 0, False
        self._thread = threading.Thread(target=self._follow, args=(make,), daemon=True)

    def log(self, step: int, kind: str, values: dict[str, float]) -> None:
        """Never waits."""
        kept = dict(values)
        self._tell(lambda service: service.log(step, kind, kept))

    def report(self, told: Told) -> None:
        """Never waits."""
        self._tell(lambda service: service.report(told))

    def _tell(self, line: Callable[[Service], None]) -> None:
        if self.failed:
            return
        if self._thread.ident is None:
            self._thread.start()
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Let it take what is still waiting, for a while."""
        if self._thread.ident is None:  # nothing was told
            return
        with suppress(queue.Full):
            self._lines.put(None, timeout=self._patience)
        self._thread.join(self._patience)
        left = self._lines.qsize() if self._thread.is_alive() else 0
        if not self.failed and self.dropped + left:
            self._say(
                f"{self.name} did not take {self.dropped + left} lines in time; "
                "the run folder has them all"
            )
        self.failed = True  # whatever happens to it now, it was said

    def _follow(self, make: Callable[[], Service]) -> None:
        try:
            service = make()
            while (line := self._lines.get()) is not None:
                line(service)
            service.close()
        except BaseException as error:  # whatever a service does, the run goes on
            if self.failed:
                return
            self.failed = True
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._say(f"{self.name} is not available ({first}); the run goes on without it")
