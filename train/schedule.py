"""Learning rate, end and time left of a run, as functions of settings and progress."""

import math
from collections.abc import Callable

from outrider.conf.plugins import Registry
from outrider.conf.schema import TrainConfig
from outrider.train.checkpoint import Progress

# factor on train.lr, from the share of the steps after the warm-up that is left: 1 to 0
SCHEDULES: Registry[Callable[[float, TrainConfig], float]] = Registry("schedule", Callable, {
    "cosine": lambda left, train: 0.5 - 0.5 * math.cos(math.pi * left),
    "linear": lambda left, train: left,
    "constant": lambda left, train: 1.0,
    # warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395), with the decay in the form 1 - sqrt
    # that Haegele et al. 2024 found best (arXiv:2405.18392, section 3.1)
    "wsd": lambda left, train: 1.0 - math.sqrt(1.0 - min(1.0, left / train.decay)),
})  # fmt: skip


def fraction_done(train: TrainConfig, progress: Progress) -> float:
    """Return the share of the run that is over: by steps or by minutes, whichever is larger."""
    steps = progress.step / train.max_steps if train.max_steps else 0.0
    minutes = progress.seconds / (60 * train.max_minutes) if train.max_minutes else 0.0
    return max(steps, minutes)


def is_over(train: TrainConfig, progress: Progress) -> bool:
    """Return whether a limit of steps or minutes, `train.patience` or a callback ends the run."""
    impatient = train.patience is not None and progress.stale >= train.patience
    return progress.ended or impatient or fraction_done(train, progress) >= 1


def seconds_left(train: TrainConfig, progress: Progress) -> float:
    """Return the training time until the end at the pace so far; a step must have been taken."""
    limits = list[float]()
    if train.max_steps:
        pace = progress.seconds / progress.step
        limits.append(pace * (train.max_steps - progress.step))
    if train.max_minutes:
        limits.append(60 * train.max_minutes - progress.seconds)
    return max(0.0, min(limits))


def format_seconds(seconds: float) -> str:
    """Return a duration with its unit."""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.2g} s"


def learning_rate(train: TrainConfig, fraction: float) -> float:
    """Return the learning rate at `fraction` of the run: linear warm-up, then `train.schedule`."""
    warmup = train.warmup
    if isinstance(warmup, int):
        warmup = warmup / max(1, train.max_steps or 1000)
    if fraction < warmup:
        return train.lr * (fraction + 1e-2 * warmup) / (1.01 * warmup)
    left = 1 - min(1.0, (fraction - warmup) / (1 - warmup))
    return train.lr * SCHEDULES[train.schedule](left, train)
