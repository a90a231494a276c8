"""`outrider train`: prepare the target, build the data, train or search, measure the drafter.

The search of a drafter whose settings are searched instead of trained: `launch/sublayers.py`.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from outrider.conf.console import Console
from outrider.conf.errors import RunStopped
from outrider.conf.files import folder_lock, write_json
from outrider.conf.packages import require_packages
from outrider.conf.schema import Config
from outrider.conf.searched import SearchedConfig
from outrider.data.corpus import load_training_data
from outrider.data.python_rows import with_rows
from outrider.data.reporter import Reporter
from outrider.data.sources import require_path
from outrider.data.target_fit import load_adapted
from outrider.data.training_data import TrainingData
from outrider.eval.run import has_reports, quick_report
from outrider.launch.doctor.run import print_start_summary, require_trainable
from outrider.launch.sublayers import check_search, search_sublayers
from outrider.models import drafters
from outrider.models.decode.from_config import policy_of
from outrider.models.drafters.eagle3 import eagle3_taps, spread_taps
from outrider.models.target import process
from outrider.models.target.load import LoadedTarget
from outrider.train import checkpoint, distributed, trackers
from outrider.train.callbacks import Callback, check_callbacks
from outrider.train.checks import check_length
from outrider.train.loop import fit
from outrider.train.manifest import read_training
from outrider.train.optimizer import require_torch_class
from outrider.train.resume import as_it_began, require_same_settings
from outrider.train.settings import check_files
from outrider.train.trackers import TrackerThread


def train(
    config: Config, *, rows: Iterable[Mapping[str, Any]] | None = None,
    callbacks: Sequence[Callback] = (),
) -> int:  # fmt: skip
    """Train and measure a drafter, or search its settings. Returns the exit code, 0.

    The run folder is checked and locked before anything is loaded.

    Args:
        rows: the training text (data=jsonl) or its prompts (data=self), instead of `data.path`: see
            `data/python_rows.py`. Every rank must be given the same ones.
        callbacks: of class `train/callbacks.py::Callback`; the same on every rank.

    Raises:
        RunStopped: Ctrl-C or SIGTERM stopped the run, which is saved.
        ConfigError, RunError: settings or files do not allow the run, or a callback raised an
            exception.
    """
    check_callbacks(callbacks)
    console = Console(quiet=process.rank() > 0)
    if rows is not None:
        config = with_rows(config, rows, partial(console.print, soft_wrap=True))
    require_path(config.data)
    if isinstance(config.drafter, SearchedConfig):
        check_search(config, callbacks)
    else:
        distributed.require_matching_launcher(config.launch)
        require_packages(config)
        require_torch_class(config.train)
    main = process.rank() == 0
    with folder_lock(Path(config.run.dir)) if main else nullcontext():
        _run(config, console, callbacks)
    return 0


def _run(config: Config, console: Console, callbacks: Sequence[Callback]) -> None:
    """Prepare, build, loop, measure."""
    start, main = time.monotonic(), process.rank() == 0
    config, loaded, reporter = _prepare(config, console)
    if isinstance(config.drafter, SearchedConfig):
        search_sublayers(config, loaded, reporter)
        return
    data = _build_data(config, loaded, reporter)
    seconds = {"loading": time.monotonic() - start}
    require_trainable(config, loaded, data)
    with trackers.open_trackers(config, console.print, main) as services:
        _loop(config, loaded, data, console, services, callbacks)
        if main and config.train.quick_eval:
            _measure(config, loaded, data, console, services, seconds)


def _prepare(config: Config, console: Console) -> tuple[Config, LoadedTarget, Reporter]:
    """Check the settings against the run folder, and load the target that they are adapted to."""
    begins = not checkpoint.list_checkpoints(Path(config.run.dir) / "checkpoints")
    if begins:
        check_files(config, "drafter.warm_start")
    if config.train.quick_eval and config.decode.tree and not config.eval.grid:
        policy_of(config.decode)  # reads the file
    process.set_threads()
    if config.target.place in ("sharded", "tensor"):
        process.init_group(config.launch)
    if warning := config.drafter.warning():
        console.print(warning, style="yellow")
    config = as_it_began(config)
    require_same_settings(config)
    measures, reporter = config.train.quick_eval, Reporter(console, process.rank() == 0)
    pair = load_adapted(config, reporter, begins=begins, trains=True, measures=measures)
    return *pair, reporter


def _build_data(config: Config, loaded: LoadedTarget, reporter: Reporter) -> TrainingData:
    """Build the training text and its features; `loop.fit` builds the drafter on them."""
    check_length(config)
    layers = loaded.target.num_layers
    taps = drafters.resolve_taps(config.drafter, layers)
    if taps == spread_taps(layers) != eagle3_taps(layers):
        reporter.console.print(f"target has {layers} layers: taps adapted to {list(taps)}")
    return load_training_data(config, loaded, taps, reporter)


def _loop(
    config: Config, loaded: LoadedTarget, data: TrainingData, console: Console,
    services: Sequence[TrackerThread], callbacks: Sequence[Callback],
) -> None:  # fmt: skip
    """Train the drafter to the end; RunStopped: a signal or a callback stopped it."""
    on_start = partial(print_start_summary, console, loaded=loaded)
    outcome = fit(config, loaded, data, console, services, on_start, callbacks)
    process.destroy_group()
    if outcome is None:
        fix = "The same call continues it."
        raise RunStopped(f"Training in {config.run.dir} was stopped, and is saved.", fix)


def _measure(
    config: Config, loaded: LoadedTarget, data: TrainingData, console: Console,
    services: Sequence[TrackerThread], seconds: dict[str, float],
) -> None:  # fmt: skip
    """Measure the drafter, unless its reports exist or the target needs all ranks."""
    folder = Path(config.run.dir)
    if loaded.target.is_remote:
        console.print(f"measure it with: outrider eval run.dir={config.run.dir}")
    elif not has_reports(config, folder / "drafter" / "model.safetensors"):
        start = time.monotonic()
        quick_report(config, loaded, data, console, services)
        phases = {**seconds, "report": time.monotonic() - start}
        summary = read_training(folder) or {}
        phases = {**summary.get("phases", {}), **phases}
        write_json(folder / "training.json", {**summary, "phases": phases})
