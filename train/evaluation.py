"""The evaluation of a drafter during training: held-out text, and the target's own answers."""

import torch

from outrider.conf.errors import RunError
from outrider.conf.quantities import format_count
from outrider.data.trace_source import TargetTraces
from outrider.train import best_drafter, own_text
from outrider.train.callbacks import Callbacks
from outrider.train.metrics_log import MetricsLog
from outrider.train.trainer import Trainer


def evaluate(run: Trainer, log: MetricsLog, called: Callbacks) -> bool:
    """Measure held-out text and the target's own answers; keep the drafter if it is the best.

    Returns whether far more draft tokens are accepted on the held-out text. Progress counts the
    evaluations since the best one, and has whether a callback asked for the end.

    Raises:
        RunError: the loss is NaN or infinite.
    """
    held, own = _measure(run, log)
    best = best_drafter.save_if_best(run, held, own)
    _print_evaluation(run, log, "held out", held, own, best)
    if not held["loss@1"] < float("inf"):
        raise RunError("The held-out loss is not finite.", "Lower train.lr and start again.")
    if run.average is not None and run.progress.step:
        with run.average.applied():
            averaged = _measure(run, log, "_ema")
        better = best_drafter.save_if_best(run, *averaged, averaged=True)
        _print_evaluation(run, log, "averaged weights", *averaged, better)
        best |= better
    run.progress.stale = 0 if best else run.progress.stale + 1
    if run.progress.stale == run.config.train.patience:
        log.print(f"no better acceptance in {format_count(run.progress.stale, 'evaluation')}: ends")
    if called.given:
        asked = called.call("on_evaluate", run, held, own)
        run.progress.ended = bool(run.reduce(torch.tensor(float(asked))) > 0)
    return bool(own) and own_text.is_far(held, own)


def _measure(
    run: Trainer, log: MetricsLog, suffix: str = ""
) -> tuple[dict[str, float], dict[str, float]]:
    """Return and log the metrics of the held-out text, and of the target's own answers, if any."""
    held, own = run.evaluate(run.data.held, run.sources.held), dict[str, float]()
    log.log(run.progress.step, f"held{suffix}", held)
    if run.own_text is not None:
        own = run.evaluate(run.own_text, TargetTraces(run.target))
        log.log(run.progress.step, f"own{suffix}", own)
    return held, own


def _print_evaluation(
    run: Trainer, log: MetricsLog, what: str, held: dict[str, float], own: dict[str, float],
    best: bool,
) -> None:  # fmt: skip
    conditions = f" with {run.config.drafter.depths} draft tokens"
    if own:
        conditions += f", {own['accept_length']:.2f} on the target's own answers"
    log.print(
        f"{what}, step {run.progress.step}: loss {held['loss@1']:.3f}, agree {held['agree@1']:.1%},"
        f" predicted acceptance length {held['accept_length']:.2f}{conditions}"
        f"{' (best so far)' if best else ''}"
    )
