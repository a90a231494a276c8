"""`outrider advise`: predict the gain of more training text from pilot runs.

    outrider advise drafter=eagle3 target=tiny advise.shares=[0.01,0.02,0.04]

A pilot is a run of the configured drafter on a part of the training conversations. All pilots share
the held-out text; each has the draft vocabulary of its own text. All take the same number of steps,
not of epochs: with equal epochs the smallest pilot would take a few steps, most of them warm-up,
and the fit would measure training time. The result of a pilot is its best held-out evaluation.

The prediction holds for runs of `advise.steps` steps; longer runs gain more from more text.
Finished pilots are stored in `<run.dir>/advise` and reused.
"""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
from rich.table import Table

from outrider.conf.command_settings import AdviseConfig
from outrider.conf.console import Console
from outrider.conf.errors import ConfigError
from outrider.conf.files import folder_lock, write, write_json
from outrider.conf.json_shapes import read_object
from outrider.conf.quantities import format_count
from outrider.conf.schema import Config, WandbConfig
from outrider.data.corpus import load_training_data
from outrider.data.pack import pack, split_holdout
from outrider.data.reporter import Reporter
from outrider.data.target_fit import load_fitting_target
from outrider.data.tokenise import Document
from outrider.data.training_data import TrainingData
from outrider.eval.report import png
from outrider.eval.report_tables import explain as print_definitions
from outrider.eval.report_tables import narrow_table
from outrider.launch import scaling_law
from outrider.launch.doctor.run import print_start_summary, require_trainable
from outrider.launch.scaling_law import FAR, Forecast, Point, ScalingFit, candidate_fits
from outrider.models import drafters
from outrider.models.adapt import adapt
from outrider.models.target import process
from outrider.models.target.load import LoadedTarget
from outrider.train import distributed, loop
from outrider.train.checkpoint import FIX

FORMAT = "outrider-advice-1"
EVALUATIONS = 6  # held-out evaluations per pilot
SMALL_GAIN = 0.02  # tokens per round, of twice the text
DEFINITIONS = {
    "acceptance length": "tokens per round, predicted on held-out text that all pilots share",
    "best step": "the evaluation with the longest acceptance, which counts",
    "range": "over the other fit, and over fits with each pilot left out",
    "twice the text": "tokens per round gained by twice as much text, for the same steps",
    "fit": "acceptance against tokens, by least squares; saturating, or a line in their logarithm",
}


@dataclass(frozen=True)
class Pilot:
    """A part of the training text, and the result of a run on it."""

    share: float
    repeat: int
    conversations: int
    tokens: int
    accept_length: float = float("nan")  # held-out, at `best_step`; nan before the run
    best_step: int = -1


def advise(config: Config, settings: AdviseConfig, explain: bool = False) -> int:
    """Run the verb: pilots, a scaling fit, a plot. Returns the exit code.

    Args:
        explain: print the definitions, too.
    """
    distributed.require_matching_launcher(config.launch)
    process.set_threads()
    if config.target.place in ("sharded", "tensor"):
        process.init_group(config.launch)
    main, console = process.rank() == 0, Console(quiet=process.rank() > 0)
    loaded = load_fitting_target(config, trains=True)
    reporter = Reporter(console, main)
    config = adapt(config, reporter.note, loaded.target.shape())
    taps = drafters.resolve_taps(config.drafter, loaded.target.num_layers)
    data = load_training_data(config, loaded, taps, reporter, record=False)
    train, held = split_holdout(data.documents, config.data.holdout)
    parts, pilots = choose_pilots(train, config, settings), list[Pilot]()
    folder = Path(config.run.dir) / "advise"
    with folder_lock(folder) if main else nullcontext():
        for pilot, documents in parts:
            text = f"{format_count(pilot.conversations, 'conversation')}, {pilot.tokens:,} tokens"
            console.print(f"pilot on {pilot.share:.3%}: {text}")
            part = data.with_documents([*documents, *held], config.data)
            done = run_pilot(config, settings, loaded, part, pilot)
            if done is None:
                return 130
            pilots.append(done)
        if main:
            write_advice(console, folder, config, settings, pilots, _tokens(train))
            if explain:
                print_definitions(console, DEFINITIONS)
    process.destroy_group()
    return 0


def _tokens(documents: Sequence[Document]) -> int:
    return sum(len(document.ids) for document in documents)


def choose_pilots(
    train: Sequence[Document], config: Config, settings: AdviseConfig
) -> list[tuple[Pilot, list[Document]]]:
    """Choose the conversations of each pilot; within a repeat each contains the next smaller.

    Raises:
        ConfigError: a share has fewer rows than one step.
    """
    whole, needed = _tokens(train), config.train.batch_tokens // config.data.max_length
    pilots = []
    for repeat in range(settings.repeats):
        order = random.Random(config.run.seed + repeat).sample(list(train), len(train))
        for share in sorted(set(settings.shares)):
            part = take_tokens(order, share * whole)
            rows = len(pack(part, config.data.max_length))
            if rows < needed:
                least = share * needed / max(1, rows)
                raise ConfigError(
                    "advise.shares", share,
                    f"That is {format_count(len(part), 'conversation')} in "
                    f"{format_count(rows, 'row')}; a step takes {needed}.",
                    f"Use shares from about {least:.2g}, more text, or less train.batch_tokens.",
                )  # fmt: skip
            pilots.append((Pilot(share, repeat, len(part), _tokens(part)), part))
    return pilots


def take_tokens(order: Sequence[Document], tokens: float) -> list[Document]:
    """Return the first documents until they have so many tokens; at least one."""
    counts = accumulate(len(document.ids) for document in order)
    enough = next((n for n, count in enumerate(counts, start=1) if count >= tokens), len(order))
    return list(order[:enough])


def run_pilot(
    config: Config, settings: AdviseConfig, loaded: LoadedTarget, data: TrainingData, pilot: Pilot
) -> Pilot | None:
    """Train a pilot and return it with its result; None after Ctrl-C."""
    name = f"share-{pilot.share:g}-{pilot.repeat}"
    folder = Path(config.run.dir) / "advise" / f"steps-{settings.steps}" / name
    train = replace(
        config.train, max_steps=settings.steps, max_minutes=None, quick_eval=False, resume="auto",
        eval_every=max(1, settings.steps // EVALUATIONS), save_every=settings.steps, keep_last=1,
        keep_every=None, tensorboard=False, wandb=WandbConfig(),
    )  # fmt: skip
    run = replace(config.run, dir=str(folder), seed=config.run.seed + pilot.repeat)
    quiet, pilot_config = Console(quiet=True), replace(config, run=run, train=train)
    require_trainable(pilot_config, loaded, data)
    on_start = partial(print_start_summary, quiet, loaded=loaded)
    if loop.fit(pilot_config, loaded, data, quiet, on_start=on_start) is None:
        return None
    shape = {"held_out": {"accept_length": float}, "best_step": int}
    summary = read_object(folder / "training.json", FIX, shape)
    length = summary["held_out"]["accept_length"]
    return replace(pilot, accept_length=length, best_step=summary["best_step"])


def write_advice(
    console: Console, folder: Path, config: Config, settings: AdviseConfig,
    pilots: Sequence[Pilot], whole: int,
) -> None:  # fmt: skip
    """Print a table and the prediction, and write `advise.json` and `advise.png`."""
    points: list[Point] = [(float(pilot.tokens), pilot.accept_length) for pilot in pilots]
    most = float(config.drafter.depths + 1)
    largest = max(tokens for tokens, _ in points)
    near, far = (scaling_law.forecast(points, n, most) for n in (largest, float(whole)))
    fits = candidate_fits(points, most)
    console.print(verdict(far, largest), style="bold", soft_wrap=True)
    console.print(_table(pilots))
    console.print(_forecast_table(near, far))
    note = "" if scaling_law.saturates(points, most) else "; no saturation visible yet"
    fit = f"{fits[0].formula()}, at {settings.steps} steps{note}"
    console.print(fit, soft_wrap=True)
    write(folder / "advise.png", _plot(points, fits, far))
    fields = {
        "format": FORMAT, "steps": settings.steps, "tokens": whole, "fit": fits[0]._asdict(),
        "pilots": [asdict(pilot) for pilot in pilots],
        "largest_pilot": near._asdict(), "all_text": far._asdict(),
    }  # fmt: skip
    write_json(folder / "advise.json", fields)
    files = f"written: {folder}/advise.json (every number), advise.png"
    console.print(files, soft_wrap=True)


def _table(pilots: Sequence[Pilot]) -> Table:
    """Return a row per share; its repeats differ in text and seed."""
    head = "pilots on", "conversations", "tokens", "best step", "acceptance length"
    table = narrow_table(head)
    for share in sorted({p.share for p in pilots}):
        same = [p for p in pilots if p.share == share]
        columns = (
            (f"{p.conversations:,}", f"{p.tokens:,}", str(p.best_step), f"{p.accept_length:.3f}")
            for p in same
        )
        cells = ("  ".join(dict.fromkeys(cell)) for cell in zip(*columns, strict=True))
        table.add_row(f"{share:.3%}", *cells)
    return table


def _forecast_table(near: Forecast, far: Forecast) -> Table:
    """Return the predicted acceptance length of the largest pilot's text and of all text."""
    head = "predicted for", "tokens", "length", "range", "twice the text", "range "
    table = narrow_table(head, ("predicted for",))
    for name, f in (("largest pilot", near), ("all text", far)):
        now, gain = f"{f.now_low:.2f}-{f.now_high:.2f}", f"{f.low:+.2f} to {f.high:+.2f}"
        table.add_row(name, f"{f.tokens:,.0f}", f"{f.now:.2f}", now, f"{f.gain:+.2f}", gain)
    return table


def verdict(prediction: Forecast, largest: float) -> str:
    """Return a sentence on whether more text helps, with a caveat for a far extrapolation."""
    factor = prediction.tokens / largest
    caveat = f" It is {factor:.0f} times the largest pilot: larger shares give a better prediction."
    caveat = caveat if factor > FAR else ""
    if prediction.high < SMALL_GAIN:
        return f"More text brings little: less than {SMALL_GAIN} tokens per round.{caveat}"
    if prediction.low > SMALL_GAIN:
        return f"More text helps: by at least {prediction.low:.2f} tokens per round.{caveat}"
    return f"These pilots do not show whether more text helps.{caveat}"


def _plot(points: Sequence[Point], fits: Sequence[ScalingFit], far: Forecast) -> bytes:
    """Plot pilots, the fit with its range, and the prediction for all text and twice that."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2))
    axes = figure.add_subplot()
    tokens = np.geomspace(min(n for n, _ in points), 2 * far.tokens, 200)
    curves = np.array([[fit.at(n) for n in tokens] for fit in fits])
    band = "range: other form, each pilot left out"
    axes.fill_between(tokens, curves.min(0), curves.max(0), alpha=0.2, label=band)
    axes.plot(tokens, curves[0], label=fits[0].formula())
    axes.plot(*zip(*points, strict=True), "ko", label="pilots")
    sizes, label = (far.tokens, 2 * far.tokens), "all training text, and twice that"
    axes.plot(sizes, (far.now, far.twice), "o", mfc="none", mec="tab:red", label=label)
    labels = {"xlabel": "tokens of training text", "ylabel": "held-out acceptance length"}
    axes.set(xscale="log", **labels)
    axes.legend(fontsize=8)
    figure.tight_layout()
    return png(figure)
