"""Services that follow a run: wandb and TensorBoard, behind one small interface.

The run never waits for them and never ends because of them. Each is opened, told and closed by a
thread of its own; what it cannot take in time is dropped and counted; the first error is said once
and the service is left alone from then on. `metrics.jsonl` in the run folder has everything.
"""

import importlib.util
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from outrider.train.config import Config, resolved
from outrider.train.errors import ConfigError

ROOM = 1000  # lines that may wait for a service
PATIENCE = 30.0  # seconds that the end of a run waits for what is still to be told


class Service(Protocol):
    """What follows a run."""

    def log(self, step: int, kind: str, values: dict[str, float]) -> None:
        """`kind` is train, held or skipped."""
        ...

    def close(self) -> None: ...


class Wandb:
    """Weights & Biases; runs of one sweep share WANDB_RUN_GROUP."""

    def __init__(self, config: Config) -> None:
        import wandb

        settings, folder = config.train.wandb, Path(config.run.dir)
        self.run = wandb.init(
            project=settings.project, mode=settings.mode, dir=str(folder), name=folder.name,
            config=resolved(config),
        )  # fmt: skip

    def log(self, step: int, kind: str, values: dict[str, float]) -> None:
        self.run.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    """Event files in `<run.dir>/tensorboard`."""

    def __init__(self, config: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(Path(config.run.dir) / "tensorboard"))

    def log(self, step: int, kind: str, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{kind}/{name}", value, step)

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
        self._lines: queue.Queue[tuple[int, str, dict[str, float]] | None] = queue.Queue(ROOM)
        self.dropped, self.failed = 0, False
        self._thread = threading.Thread(target=self._follow, args=(make,), daemon=True)
        self._thread.start()

    def log(self, step: int, kind: str, values: dict[str, float]) -> None:
        """Never waits."""
        if self.failed:
            return
        try:
            self._lines.put_nowait((step, kind, dict(values)))
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Let it take what is still waiting, for a while."""
        with suppress(queue.Full):
            self._lines.put(None, timeout=self._patience)
        self._thread.join(self._patience)
        left = self._lines.qsize() if self._thread.is_alive() else 0
        if not self.failed and self.dropped + left:
            self._say(
                f"{self.name} did not take {self.dropped + left} lines in time; "
                "metrics.jsonl has them all"
            )

    def _follow(self, make: Callable[[], Service]) -> None:
        try:
            service = make()
            while (line := self._lines.get()) is not None:
                service.log(*line)
            service.close()
        except BaseException as error:  # whatever a service does, the run goes on
            self.failed = True
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._say(f"{self.name} is not available ({first}); the run goes on without it")
