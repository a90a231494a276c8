"""The training loop.

The loop body runs once more than the optimizer steps, so the last weights are evaluated too.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch.nn.utils import get_total_norm

from outrider.conf.errors import RunError
from outrider.conf.quantities import format_count
from outrider.conf.schema import Config
from outrider.data.training_data import TrainingData
from outrider.models.formats.fingerprints import fingerprints
from outrider.models.target.load import LoadedTarget
from outrider.train import best_drafter, own_text
from outrider.train.bad_steps import save_batch
from outrider.train.callbacks import Callback, Callbacks
from outrider.train.evaluation import evaluate
from outrider.train.manifest import write_manifest
from outrider.train.metric_sums import MetricSums
from outrider.train.metrics_log import Logger, MetricsLog
from outrider.train.resume import require_equal_ranks, resume, resume_message
from outrider.train.schedule import fraction_done, is_over, learning_rate
from outrider.train.step_data import MicroBatch
from outrider.train.stop_signal import stop_signals
from outrider.train.trackers import TrackerThread
from outrider.train.trainer import Trainer

LESS_MEMORY = "Lower train.batch_tokens, raise launch.accumulation, or use gradient checkpointing."
NO_MEMORY = "DefaultCPUAllocator"  # in PyTorch's message, whose type is only RuntimeError


def fit(
    config: Config,
    loaded: LoadedTarget,
    data: TrainingData,
    console: Console,
    trackers: Sequence[TrackerThread] = (),
    on_start: Callable[[Trainer], None] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Path | None:
    """Train a drafter; `<run.dir>/drafter/` holds the best one afterwards.

    Args:
        on_start: called on the main rank before the first step, with everything built; its
            exceptions end the run before it starts.

    Returns:
        The folder of the drafter; None when a signal stopped the run, which is saved.

    Raises:
        RunError: the loss is NaN or infinite, a checkpoint is damaged, the disk is full, or a
            callback raised an exception.
        ConfigError: the run folder holds a run with other settings.
    """
    with console.status("initialising the drafter and the ranks"):
        run = Trainer(config, loaded, data)
    require_equal_ranks(run)
    messages = resume(run)
    resumed = messages is not None
    for message in messages or ():
        console.print(message, style="yellow", soft_wrap=True)
    if resumed and run.progress.finished and is_over(config.train, run.progress):
        console.print(_finished(run), soft_wrap=True)
        published = best_drafter.has_result(run)
        return run.folder / "drafter" if published else best_drafter.write_result(run)
    _begin(run, loaded, resumed, console, on_start)
    called = Callbacks(callbacks, run.main)
    called.call("on_start", run)
    loggers: list[Logger] = [*trackers, called]
    try:
        with stop_signals() as received, MetricsLog(config, console, run.main, loggers) as log:
            log.rewind(run.progress.step if resumed else -1)
            drafter = _run_steps(run, log, received, resumed, called)
            called.call("on_end", run, drafter)
            called.raise_error()
            return drafter
    except (RuntimeError, MemoryError) as error:
        if explained := _explain(run, error):
            raise explained from error
        raise
    finally:
        run.close()


def _begin(
    run: Trainer,
    loaded: LoadedTarget,
    resumed: bool,
    console: Console,
    on_start: Callable[[Trainer], None] | None,
) -> None:
    """Let the target answer held-out prompts, and write the manifest."""
    if resumed:
        console.print(resume_message(run), soft_wrap=True)
    if not resumed or own_text.is_measured(run.folder):
        own_text.add(run, loaded, console)
    if run.main:
        about, prints = run.data.about, fingerprints(loaded)
        facts = {"data": about, "target": loaded.source, "fingerprints": prints}
        write_manifest(run.folder, run.config, {**facts, "ranks": run.accelerator.num_processes})
        if on_start is not None:
            on_start(run)


def _run_steps(
    run: Trainer, log: MetricsLog, received: Sequence[object], resumed: bool, called: Callbacks
) -> Path | None:
    """Train until the end, a signal or the error of a callback, as `fit` describes.

    Args:
        received: signals so far.
    """
    train, first_step, is_warned = run.config.train, run.progress.step, False
    start = time.monotonic() - run.progress.seconds
    while True:
        stop = _sync_stop_and_clock(run, bool(received) or called.error is not None)
        step, over = run.progress.step, is_over(train, run.progress)
        evaluated = resumed and step == first_step
        if (over or step % train.eval_every == 0) and not evaluated:
            with run.progress.phase("held out"):
                is_far = evaluate(run, log, called)
            over = is_over(train, run.progress)
            if called.given:
                stop |= _sync_stop_and_clock(run, called.error is not None)
            if is_far and not is_warned:
                is_warned = True
                log.print(own_text.advice(run.config.data.name, run.config.data.path))
        if over or stop or (step % train.save_every == 0 and step > first_step):
            run.progress.finished = over
            with run.progress.phase("saving"):
                run.save()
        if over:
            return best_drafter.write_result(run)
        if stop:
            run.writer.wait()  # launchers end the other ranks when the first exits
            run.accelerator.wait_for_everyone()
            log.print(f"stopped at step {step}, saved; the same command continues")
            return None
        run.heartbeat.beat(step)
        with run.progress.phase("steps"):
            _advance(run, log)
        run.progress.step += 1
        run.progress.seconds = time.monotonic() - start
        called.call("on_step", run)


def _explain(run: Trainer, error: Exception) -> RunError | None:
    """Return what happened if memory is full or a rank is silent; None for another error."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or NO_MEMORY in str(error):
        tokens, length = run.config.train.batch_tokens, run.config.data.max_length
        why = f"A step of train.batch_tokens={tokens} in rows of {length} needs more memory"
        return RunError(f"{why} than there is.", LESS_MEMORY)
    message = "" if isinstance(error, RunError) else run.heartbeat.explain_timeout(error)
    fix = "Look at that rank's machine; the same command continues from the last checkpoint."
    return RunError(message, fix) if message else None


def _finished(run: Trainer) -> str:
    """Return that there is nothing left to train, and what can be done."""
    train, progress = run.config.train, run.progress
    limits = {
        "train.max_steps": train.max_steps and progress.step >= train.max_steps,
        "train.max_minutes": train.max_minutes and progress.seconds >= 60 * train.max_minutes,
        "train.patience": train.patience and progress.stale >= train.patience,
    }
    reached = " and ".join(key for key, is_reached in limits.items() if is_reached)
    more = "a callback ended it" if progress.ended else f"to go on, raise {reached}"
    return (
        f"{run.folder} is finished: {format_count(progress.step, 'step')}. To measure it: outrider "
        f"eval run.dir={run.folder}; {more}; to start over, train.resume=never."
    )


def _sync_stop_and_clock(run: Trainer, stop: bool) -> bool:
    """Set the main rank's clock on all ranks; return whether any rank has to stop.

    Learning rate and end of a run in minutes depend on it: ranks that differ diverge or deadlock.
    """
    seconds = run.progress.seconds * run.main
    stops, run.progress.seconds = run.reduce(
        torch.tensor([float(stop), seconds], dtype=torch.float64)
    ).tolist()
    return bool(stops > 0)


def _advance(run: Trainer, log: MetricsLog) -> None:
    """Take one optimizer step, or skip a bad one."""
    train, step = run.config.train, run.progress.step
    run.seed_step(step)
    done = fraction_done(train, run.progress)
    run.drafter.begin_step(step, done)
    rate = learning_rate(train, done)
    for group in run.optimizer.param_groups:
        group["lr"] = rate * group.get("lr_factor", 1.0)
    micro_batches = run.step_data.micro_batches(step)
    measure = step % train.log_every == 0
    before = run.copy_weights() if measure else []
    sums, norm, problem = optimizer_step(run, micro_batches, measure)
    if problem:
        run.optimizer.zero_grad()
        rank, batches = run.accelerator.process_index, [batch for batch, _ in micro_batches]
        log.print(run.bad_steps.skip(problem, save_batch(run.folder, step, rank, batches)))
        log.log(step, "skipped", {"skipped": float(run.progress.skipped)})
        return
    if run.average is not None:
        run.average.update()
    if measure:
        facts = {"lr": rate, "grad_norm": norm, **_update_ratio(before, run.copy_weights())}
        _log_step(run, log, sums, facts)


def optimizer_step(
    run: Trainer, micro_batches: list[MicroBatch], measure: bool
) -> tuple[MetricSums, float, str]:
    """Accumulate the gradients of this rank's micro-batches and step the optimizer.

    Returns:
        The metric sums of this rank, with the costly ones if `measure`; the gradient norm before
        clipping; what is wrong with the step ("" if it was taken).
    """
    sums, norm = run.objective.zero_sums(run.device), 0.0
    denominators = run.loss_denominators(micro_batches)
    share = run.accelerator.num_processes * run.config.launch.accumulation  # undoes the averaging
    total_loss = torch.zeros((), dtype=torch.float64)
    for trace in run.step_data.traces(run.progress.step, micro_batches):
        with run.accelerator.accumulate(run.model):
            loss, part = run.model(trace, denominators, measure)
            total_loss += loss.detach().cpu()
            if problem := _problem(run, total_loss):
                return sums, norm, problem
            run.accelerator.backward(loss * share)
            if run.accelerator.sync_gradients:
                parameters, clip = run.model.parameters(), run.config.train.clip
                norm = run.accelerator.clip_grad_norm_(parameters, clip)
                norm = 0.0 if norm is None else float(norm)  # DeepSpeed may not return it
                if not 0 <= norm < math.inf:  # DeepSpeed returns -1 where it masks NaN
                    return sums, norm, f"the norm of its gradient is {norm}"
            run.optimizer.step()
            run.optimizer.zero_grad()
        sums.add(part)
    return sums, norm, ""


def _problem(run: Trainer, total_loss: torch.Tensor) -> str:
    """Return what is wrong with the step so far; with the guard, only whole steps are checked."""
    if run.bad_steps.enabled and run.accelerator.sync_gradients:
        return run.bad_steps.problem(float(run.reduce(total_loss)))
    if run.bad_steps.enabled or math.isfinite(float(total_loss)):
        return ""
    return f"its loss is {float(total_loss)}"


def _update_ratio(before: list[torch.Tensor], after: list[torch.Tensor]) -> dict[str, float]:
    """Return the norm of the step relative to the norm of the weights."""
    if not before:
        return {}
    steps = [new.float() - old.float() for old, new in zip(before, after, strict=True)]
    ratio = get_total_norm(steps) / get_total_norm([old.float() for old in before])
    return {"update_ratio": float(ratio)}


def _log_step(run: Trainer, log: MetricsLog, sums: MetricSums, facts: dict[str, float]) -> None:
    metrics = run.means(sums)
    progress = run.progress
    speed = progress.step * run.rows * run.config.data.max_length / max(progress.seconds, 1e-9)
    metrics["objective"] = float(run.reduce(sums.objective))
    length = metrics.get("accept_length")
    accept = "" if length is None else f"accept {length:.2f}  "
    log.log(progress.step, "train", {**metrics, **facts, "tokens_per_second": speed})
    log.update_progress(
        fraction_done(run.config.train, progress),
        f"step {progress.step}  loss {metrics['loss@1']:.3f}  agree {metrics['agree@1']:.1%}  "
        f"{accept}best {progress.best:.2f}  {speed:.0f} tokens/s",
    )
