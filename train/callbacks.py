"""Callbacks of a training that Python starts: `train(config, callbacks=[...])`."""

from collections.abc import Sequence
from pathlib import Path

from outrider.conf.errors import ConfigError, RunError
from outrider.train.trainer import Trainer

IMPORT = "from outrider.api import Callback"


class Callback:
    """What a training calls; override the methods that are needed.

    Every rank is given the same callbacks, and only the main one calls them: they must not wait for
    other ranks. An exception ends the run: it is saved as at a stop, and `train` raises a RunError
    that names callback and method.

    `run.progress.step` is the number of steps that were taken, `run.drafter` the trained model,
    `run.config` the configuration, `run.folder` the run folder.
    """

    def on_start(self, run: Trainer) -> None:
        """Called before the first step, or the one that a run continues with."""

    def on_step(self, run: Trainer) -> None:
        """Called after every optimizer step."""

    def on_log(self, step: int, kind: str, values: dict[str, float]) -> None:
        """Called with every line of `metrics.jsonl`, as a tracker is (docs/reference/metrics)."""

    def on_evaluate(
        self, run: Trainer, held: dict[str, float], own: dict[str, float]
    ) -> bool | None:
        """Called after every evaluation; return True to end the run as a finished one.

        Args:
            held: metrics of the held-out text.
            own: metrics of the target's own answers; {} without them.
        """
        return None

    def on_end(self, run: Trainer, drafter: Path | None) -> None:
        """Called after the last step; None instead of the drafter's folder if it was stopped."""


class Callbacks:
    """The callbacks of a run on one rank, and the first exception that one of them raised.

    It is a tracker of `MetricsLog`, too.

    Attributes:
        given: whether there are any; the same on every rank.
        error: what `raise_error` raises; nothing is called any more.
    """

    def __init__(self, callbacks: Sequence[Callback], main: bool) -> None:
        self.given, self._callbacks = bool(callbacks), callbacks if main else ()
        self.error: RunError | None = None

    def call(self, method: str, *arguments: object) -> bool:
        """Call a method of every callback; return whether one of them returned True."""
        asked = False
        for callback in self._callbacks if self.error is None else ():
            try:
                asked |= getattr(callback, method)(*arguments) is True
            except Exception as error:  # of any kind: it is the user's code
                name = f"{type(callback).__name__}.{method}"
                why = f"The callback {name} raised {type(error).__name__}: {error}"
                fix = "The run is saved; without the error the same call continues it."
                self.error = RunError(why, fix)
                self.error.__cause__ = error
                return False
        return asked

    def log(self, step: int, kind: str, values: dict[str, float]) -> None:
        self.call("on_log", step, kind, dict(values))

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raise a `ConfigError` for what is not a list of instances of `Callback`."""
    if not isinstance(callbacks, list | tuple):
        fix = "Write callbacks=[MyCallback()]."
        raise ConfigError("callbacks", callbacks, "This is not a list.", fix)
    for number, callback in enumerate(callbacks):
        if isinstance(callback, Callback):
            continue
        why = f"This is not a Callback, but of type {type(callback).__name__}."
        fix = f"Make its class a subclass: {IMPORT}"
        if isinstance(callback, type) and issubclass(callback, Callback):
            why, fix = "This is a class, not an instance.", f"Write {callback.__name__}()."
        raise ConfigError(f"callbacks[{number}]", callback, why, fix)
