"""Training, top to bottom: `train` is the verb, `fit` the loop.

The loop runs once more than it steps, so that the last weights are evaluated too. It is a function
of its arguments: a test calls it with a tiny target and looks at the folder.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch.nn.utils import get_total_norm

from outrider.conf.errors import RunError
from outrider.conf.files import claimed, read_json, write_json
from outrider.data.prepare import Material, material
from outrider.launch.doctor.run import at_start, check
from outrider.models import drafters, load
from outrider.models.load import Loaded
from outrider.models.target import default_taps, usual_taps
from outrider.train import best_drafter as best
from outrider.train import checkpoint, trackers
from outrider.train import distributed as start
from outrider.train.manifest import identify, write_manifest
from outrider.train.metric_sums import Sums
from outrider.train.metrics_log import Tracker
from outrider.train.settings import Config, check_files, decodings
from outrider.train.trackers import Background
from outrider.train.trainer import Piece, Run, clock


def train(config: Config) -> int:
    """The verb: load, prepare, train, measure. Returns the exit code."""
    start.check(config.launch)
    trackers.check(config)
    if not checkpoint.found(Path(config.run.dir) / "checkpoints"):
        check_files(config, "drafter.warm_start")
    start.use_cores()
    if config.target.place in ("sharded", "tensor"):
        start.join(config.launch)
    main, began = start.rank() == 0, clock()
    console = Console(quiet=not main)
    loaded = load.load(config.target, start.device())
    console.print(f"target: {loaded.source}")
    taps = drafters.taps_of(config.drafter, loaded.target.depth)
    if taps == default_taps(loaded.target.depth) != usual_taps(loaded.target.depth):
        console.print(f"target has {loaded.target.depth} layers: taps adapted to {list(taps)}")
    made = material(config, loaded, taps, console, start.rank())
    took = {"loading": clock() - began}
    say = partial(console.print, markup=False)
    with (
        claimed(Path(config.run.dir)) if main else nullcontext(),  # mistakes leave no folder
        trackers.following(config, say, main) as services,
    ):
        outcome = fit(config, loaded, made, console, services)
        start.leave()
        if outcome is None:
            return 130
        if main and config.train.quick_eval:
            _report(config, loaded, made, console, services, took)
    return 0


def _report(
    config: Config, loaded: Loaded, made: Material, console: Console,
    services: Sequence[Background], took: dict[str, float],
) -> None:  # fmt: skip
    """What the new drafter is worth, unless that is known, or this rank cannot find out alone."""
    if loaded.target.elsewhere:
        console.print(f"measure it with: outrider eval run.dir={config.run.dir}")
    elif not _measured(config):
        from outrider.eval.run import quick_report

        began = clock()
        quick_report(config, loaded, made, console, services)
        _book(Path(config.run.dir), {**took, "report": clock() - began})


def _book(folder: Path, seconds: dict[str, float]) -> None:
    """Add what lies before and behind the training to its account."""
    file = folder / "training.json"
    account = read_json(file, checkpoint.FIX)
    write_json(file, {**account, "phases": {**account.get("phases", {}), **seconds}})


def _measured(config: Config) -> bool:
    """Whether all reports are of the drafter that is there now."""
    folder = Path(config.run.dir)
    drafter = folder / "drafter" / "model.safetensors"
    reports = [folder / "eval" / f"{out}.json" for out, _ in decodings(config)]
    when = drafter.stat().st_mtime_ns
    return all(report.is_file() and report.stat().st_mtime_ns > when for report in reports)


def fit(
    config: Config,
    loaded: Loaded,
    made: Material,
    console: Console,
    services: Sequence[Background] = (),
) -> Path | None:
    """Train a drafter; `<run.dir>/drafter/` holds the best one afterwards.

    Args:
        services: are told every number.

    Returns:
        The folder of the drafter; None when a signal stopped the run (it is saved and continues
        with the same command).

    Raises:
        RunError: the doctor finds something wrong, the loss is not a number, a checkpoint is
            damaged.
        NoRoom: the disk is full.
        ConfigError: the run folder holds a run with other settings.
    """
    check(config, loaded, made)
    with console.status("finding first weights and preparing the ranks"):
        run = Run(config, loaded, made)
    resumed = run.resume()
    for note in run.notes:
        console.print(note, style="yellow", soft_wrap=True)
    if resumed and run.progress.finished and run.done() >= 1:
        console.print(f"{run.folder} is finished: {run.progress.step} steps.")
        return run.folder / "drafter" if best.published(run) else best.publish(run)
    if run.main:
        facts = {"data": made.about, "target": loaded.source, "fingerprints": identify(loaded)}
        write_manifest(run.folder, config, {**facts, "ranks": run.accelerator.num_processes})
        at_start(console, run, loaded)
    began, first = clock() - run.progress.seconds, run.progress.step
    unheard = run.listen()
    try:
        with Tracker(config, console, run.main, services) as tracker:
            tracker.rewind(first if resumed else -1)
            while True:
                stop = run.agree()
                step, over = run.progress.step, run.done() >= 1
                if (over or step % config.train.eval_every == 0) and not (
                    resumed and step == first
                ):
                    with run.phase("held out"):
                        _evaluate(run, tracker)
                if over or stop or (step % config.train.save_every == 0 and step > first):
                    run.progress.finished = over
                    with run.phase("saving"):
                        run.save()
                if over:
                    return best.publish(run)
                if stop:
                    tracker.say(f"stopped at step {step}, saved; the same command continues")
                    return None
                run.roll.here(step)
                with run.phase("steps"):
                    _advance(run, tracker)
                run.progress.step += 1
                run.progress.seconds = clock() - began
    except RuntimeError as error:
        said = "" if isinstance(error, RunError) else run.roll.missing(error)
        if not said:
            raise
        fix = "Look at that rank's machine; the same command continues from the last checkpoint."
        raise RunError(said, fix) from error
    finally:
        unheard()
        run.roll.close()
        run.behind.wait()
        run.ahead.close()


def _advance(run: Run, tracker: Tracker) -> None:
    """One optimizer step, or a bad one that is left out."""
    config, step = run.config.train, run.progress.step
    run.sow(step)
    rate = run.learning_rate(run.done())
    for group in run.optimizer.param_groups:
        group["lr"] = rate * group.get("pace", 1.0)
    pieces = run.micro_batches(step)
    speaking = step % config.log_every == 0
    before = run.weights() if speaking else []
    sums, norm, wrong = work(run, pieces, speaking)
    if wrong:
        tracker.say(run.leave_out(pieces, wrong))
        tracker.log(step, "skipped", {"skipped": float(run.progress.skipped)})
    elif speaking:
        moved = _moved(before, run.weights())
        _speak(run, tracker, sums, {"lr": rate, "grad_norm": norm, **moved})


def work(run: Run, pieces: list[Piece], speaking: bool) -> tuple[Sums, float, str]:
    """All micro-batches of this rank, then AdamW; what was counted, the gradient's norm before
    clipping, and what is wrong with the step ("": it was taken).
    """
    sums, norm = run.objective.zero(run.target.device), 0.0
    divide = run.divisors(pieces)
    share = run.accelerator.num_processes * run.config.launch.accumulation  # undoes the averaging
    spent = torch.zeros((), dtype=torch.float64)
    for trace in run.traces(run.progress.step, pieces):
        with run.accelerator.accumulate(run.model):
            loss, part = run.model(trace, divide, speaking)
            spent += loss.detach().cpu()
            if wrong := _wrong(run, spent):
                return sums, norm, wrong
            run.accelerator.backward(loss * share)
            if run.accelerator.sync_gradients:
                norm = _clipped(run)
                if not 0 <= norm < math.inf:  # DeepSpeed says -1 where it masks one
                    return sums, norm, f"the norm of its gradient is {norm}"
            run.optimizer.step()
            run.optimizer.zero_grad()
        sums.add(part)
    return sums, norm, ""


def _clipped(run: Run) -> float:
    """The gradient's norm before clipping; 0 where DeepSpeed keeps it to itself."""
    norm = run.accelerator.clip_grad_norm_(run.model.parameters(), run.config.train.clip)
    return 0.0 if norm is None else float(norm)


def _wrong(run: Run, spent: torch.Tensor) -> str:
    """What is wrong with the step so far; judged as a whole where steps may be left out."""
    if run.guard.on and run.accelerator.sync_gradients:
        return run.guard.wrong(float(run.reduce(spent)))
    if run.guard.on or math.isfinite(float(spent)):
        return ""
    return f"its loss is {float(spent)}"


def _moved(before: list[torch.Tensor], after: list[torch.Tensor]) -> dict[str, float]:
    """How far the step went, in norms of what it went from."""
    if not before:
        return {}
    steps = [new.float() - old.float() for old, new in zip(before, after, strict=True)]
    ratio = get_total_norm(steps) / get_total_norm([old.float() for old in before])
    return {"update_ratio": float(ratio)}


def _speak(run: Run, tracker: Tracker, sums: Sums, facts: dict[str, float]) -> None:
    means = run.over_ranks(sums).means()
    step, seconds = run.progress.step, max(run.progress.seconds, 1e-9)
    speed = step * run.rows * run.config.data.max_length / seconds
    means["objective"] = sum(
        w * means.get(f"loss@{d}", 0.0) for d, w in enumerate(run.objective.weights, start=1)
    )
    means["objective"] += run.drafter.keep * means.get("kept", 0.0)
    tracker.log(step, "train", {**means, **facts, "tokens_per_second": speed})
    tracker.show(
        run.done(),
        f"step {step}  loss {means['loss@1']:.3f}  agree {means['agree@1']:.1%}  "
        f"accept {means['accept_length']:.2f}  best {run.progress.best:.2f}  {speed:.0f} tokens/s",
    )


def _evaluate(run: Run, tracker: Tracker) -> None:
    means = run.held_out()
    better = best.keep(run, means)
    tracker.log(run.progress.step, "held", means)
    tracker.say(
        f"held out, step {run.progress.step}: loss {means['loss@1']:.3f}, "
        f"agree {means['agree@1']:.1%}, predicted acceptance length "
        f"{means['accept_length']:.2f}{' (best so far)' if better else ''}"
    )
    if not means["loss@1"] < float("inf"):
        raise RunError("The held-out loss is not a number.", "Lower train.lr and start again.")
