"""The commands `outrider prepare` and `outrider record`: training data on disk, before a run."""

from outrider.conf.console import Console
from outrider.conf.schema import Config
from outrider.data.corpus import load_text, load_training_data
from outrider.data.record.writer import write_recording
from outrider.data.reporter import Reporter
from outrider.data.target_fit import load_adapted
from outrider.models import drafters
from outrider.models.target import process
from outrider.models.target.load import LoadedTarget


def prepare(config: Config) -> int:
    """Make the training data of a run and show samples of it."""
    config, loaded, taps, reporter = _load(config, Console())
    load_training_data(config, loaded, taps, reporter)
    return 0


def record(config: Config) -> int:
    """Make the text of a run, then record the target's states of it."""
    if config.target.place in ("sharded", "tensor"):
        process.init_group(config.launch)
    config, loaded, taps, reporter = _load(config, Console(quiet=process.rank() > 0), records=True)
    data = load_text(config, loaded, taps, reporter)
    folder = write_recording(config, loaded, data, reporter)
    reporter.print(f"train from it: data.traces={folder.path}")
    process.destroy_group()
    return 0


def _load(
    config: Config, console: Console, *, records: bool = False
) -> tuple[Config, LoadedTarget, tuple[int, ...], Reporter]:
    """Load the target; return the settings adapted to it, the target and the drafter's taps."""
    process.set_threads()
    reporter = Reporter(console, main=process.rank() == 0)
    config, loaded = load_adapted(config, reporter, trains=True, records=records)
    taps = drafters.resolve_taps(config.drafter, loaded.target.num_layers)
    return config, loaded, taps, reporter
