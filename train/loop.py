"""Training, top to bottom: `train` is the verb, `fit` the loop.

The loop runs once more than it steps, so that the last weights are evaluated too. It is a function
of its arguments: a test calls it with a tiny target and looks at the folder.
"""

import math
from pathlib import Path

import torch
from rich.console import Console

from outrider.data.loader import Batch
from outrider.data.prepare import Material, material
from outrider.launch import plan, start
from outrider.models import drafters, load
from outrider.models.load import Loaded
from outrider.models.target import default_taps, usual_taps
from outrider.train import checkpoint
from outrider.train.config import Config, check_files, decodings
from outrider.train.errors import RunError
from outrider.train.manifest import write_manifest
from outrider.train.run import Run, clock
from outrider.train.sums import Sums
from outrider.train.tracking import Tracker


def train(config: Config) -> int:
    """The verb: load, prepare, train, measure. Returns the exit code."""
    start.check(config.launch)
    if not checkpoint.found(Path(config.run.dir) / "checkpoints"):
        check_files(config, "drafter.warm_start")
    start.use_cores()
    main = start.rank() == 0
    console = Console(quiet=not main)
    loaded = load.load(config.target, start.device())
    console.print(f"target: {loaded.source}")
    taps = drafters.taps_of(config.drafter, loaded.target.depth)
    if taps == default_taps(loaded.target.depth) != usual_taps(loaded.target.depth):
        console.print(f"target has {loaded.target.depth} layers: taps adapted to {list(taps)}")
    made = material(config, loaded, taps, console, start.rank())
    before = _age(config)
    outcome = fit(config, loaded, made, console)
    start.leave()
    if outcome is None:
        return 130
    reports = [Path(config.run.dir) / "eval" / f"{out}.json" for out, _ in decodings(config)]
    known = all(report.is_file() for report in reports) and before == _age(config)
    if main and config.train.quick_eval and not known:
        from outrider.eval.run import quick_report

        quick_report(config, loaded, made, console)
    return 0


def _age(config: Config) -> int | None:
    """When the run's drafter was written; a report of the same drafter is not made twice."""
    file = Path(config.run.dir) / "drafter" / "model.safetensors"
    return file.stat().st_mtime_ns if file.is_file() else None


def fit(config: Config, loaded: Loaded, made: Material, console: Console) -> Path | None:
    """Train a drafter; `<run.dir>/drafter/` holds the best one afterwards.

    Returns:
        The folder of the drafter; None when a signal stopped the run (it is saved and continues
        with the same command).

    Raises:
        RunError: the loss is not a number, a checkpoint is damaged, the disk is full.
        ConfigError: the run folder holds a run with other settings.
    """
    with console.status("finding first weights and preparing the ranks"):
        run = Run(config, loaded, made)
    resumed = run.resume()
    for note in run.notes:
        console.print(note, style="yellow", soft_wrap=True)
    if resumed and run.progress.finished and run.done() >= 1:
        console.print(f"{run.folder} is finished: {run.progress.step} steps.")
        done = run.folder / "drafter"
        return done if done.is_dir() else run.publish()
    if run.main:
        write_manifest(run.folder, config, {"data": made.about, "target": loaded.source})
        plan.show(console, run)
    began, first = clock() - run.progress.seconds, run.progress.step
    unheard = run.listen()
    try:
        with Tracker(run.folder, config.train.wandb, console, run.main) as tracker:
            tracker.rewind(first if resumed else -1)
            while True:
                stop = run.agree()
                step, over = run.progress.step, run.done() >= 1
                if (over or step % config.train.eval_every == 0) and not (
                    resumed and step == first
                ):
                    _evaluate(run, tracker)
                if over or stop or (step % config.train.save_every == 0 and step > first):
                    run.progress.finished = over
                    run.save()
                if over:
                    return run.publish()
                if stop:
                    tracker.say(f"stopped at step {step}, saved; the same command continues")
                    return None
                _advance(run, tracker)
                run.progress.step += 1
                run.progress.seconds = clock() - began
    finally:
        unheard()


def _advance(run: Run, tracker: Tracker) -> None:
    """One optimizer step: all micro-batches of this rank, then AdamW."""
    config, step = run.config.train, run.progress.step
    run.sow(step)
    rate = run.learning_rate(run.done())
    for group in run.optimizer.param_groups:
        group["lr"] = rate * group.get("pace", 1.0)
    pieces = run.micro_batches(step)
    divide = run.divisors(pieces)
    speaking = step % config.log_every == 0
    sums = run.objective.zero(run.target.device)
    share = run.accelerator.num_processes * run.config.launch.accumulation  # undoes the averaging
    for batch, noted in pieces:
        trace = run.trace(batch, False, noted)
        with run.accelerator.accumulate(run.model):
            loss, part = run.model(trace, divide, speaking)
            _refuse_nan(run, loss, batch)
            run.accelerator.backward(loss * share)
            norm = None
            if run.accelerator.sync_gradients:
                norm = run.accelerator.clip_grad_norm_(run.model.parameters(), config.clip)
                if norm is not None and not math.isfinite(float(norm)):
                    raise run.save_bad_batch(*(piece.batch for piece in pieces))
            run.optimizer.step()
            run.optimizer.zero_grad()
        sums.add(part)
    if speaking:
        _speak(run, tracker, sums, rate, norm)


def _refuse_nan(run: Run, loss: torch.Tensor, batch: Batch) -> None:
    if not torch.isfinite(loss):
        raise run.save_bad_batch(batch)


def _speak(
    run: Run, tracker: Tracker, sums: Sums, rate: float, norm: torch.Tensor | float | None
) -> None:
    means = run.over_ranks(sums).means()
    step, seconds = run.progress.step, max(run.progress.seconds, 1e-9)
    speed = step * run.rows * run.config.data.max_length / seconds
    means["objective"] = sum(
        w * means.get(f"loss@{d}", 0.0) for d, w in enumerate(run.objective.weights, start=1)
    )
    means["objective"] += run.drafter.keep * means.get("kept", 0.0)
    extra = {"lr": rate, "grad_norm": float(norm or 0.0), "tokens_per_second": speed}
    tracker.log(step, "train", {**means, **extra})
    tracker.show(
        run.done(),
        f"step {step}  loss {means['loss@1']:.3f}  agree {means['agree@1']:.1%}  "
        f"accept {means['accept_length']:.2f}  best {run.progress.best:.2f}  {speed:.0f} tokens/s",
    )


def _evaluate(run: Run, tracker: Tracker) -> None:
    means = run.held_out()
    better = run.keep_best(means)
    tracker.log(run.progress.step, "held", means)
    tracker.say(
        f"held out, step {run.progress.step}: loss {means['loss@1']:.3f}, "
        f"agree {means['agree@1']:.1%}, predicted acceptance length "
        f"{means['accept_length']:.2f}{' (best so far)' if better else ''}"
    )
    if not means["loss@1"] < float("inf"):
        raise RunError("The held-out loss is not a number.", "Lower train.lr and start again.")
