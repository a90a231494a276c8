"""`outrider eval`, and the report at the end of training."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from outrider.conf.console import Console
from outrider.conf.schema import Config
from outrider.data.reporter import Reporter
from outrider.data.suite import load_suite
from outrider.data.training_data import TrainingData
from outrider.eval.contamination_check import drop_contaminated
from outrider.eval.measure import measure
from outrider.eval.open_drafter import find_drafter, open_drafter, require_single_process
from outrider.eval.rank_tables import measure_held_out
from outrider.eval.report_tables import explain_metrics, show_and_save
from outrider.eval.token_origins import report_summary
from outrider.models import process
from outrider.models.adapt import adapt
from outrider.models.chat_template import template_change
from outrider.models.decode.from_config import decodings
from outrider.models.drafter import Drafter
from outrider.models.formats import native
from outrider.models.load import LoadedTarget, load_target
from outrider.models.target import Target
from outrider.train.trackers import TrackerThread

QUICK_PROMPTS = 8  # of the report at the end of training


def evaluate(config: Config, explain: bool = False) -> int:
    """Run `outrider eval`: measure a run's drafter, or a published one; print and write the report.

    Args:
        explain: print the definitions of the metrics, too.

    Raises:
        ConfigError, RunError: the target, the drafter or the prompts cannot be used.
    """
    folder = Path(config.run.dir)
    source = find_drafter(config)
    console = Console(width=None if sys.stdout.isatty() else 120)
    require_single_process("eval")
    process.set_threads()
    target, tokenizer, origin = load_target(config.target, process.device())
    console.print(f"target: {origin}", highlight=False)
    drafter, config, about = open_drafter(source, config, target, console)
    config = adapt(config, Reporter(console).note)
    suite = load_suite(config, config.eval.limit)
    if config.eval.drafter is None:  # the training text of a published drafter is unknown
        if warning := template_change(folder, config.target, tokenizer):
            console.print(warning, style="red")
        suite = drop_contaminated(config, suite, console)
    _patch_target(drafter, target, console)
    for part in report_configs(config):
        report = measure(target, tokenizer, drafter, part, console, suite)
        report = replace(report, setting={**report.setting, **about})
        show_and_save(report, folder / "eval", part.eval.out, console)
    if explain:
        explain_metrics(console)
    return 0


def _patch_target(drafter: Drafter, target: Target, console: Console) -> None:
    """Apply the drafter's changes of the target, for plain and speculative decoding alike."""
    if change := drafter.patch_target(target):
        console.print(f"{change}: lossless for the changed target only", style="yellow")


def report_configs(config: Config) -> list[Config]:
    """Return one configuration per report: `decode` as it is, or each entry of `eval.grid`."""
    return [
        replace(config, decode=decode, eval=replace(config.eval, out=out, grid=()))
        for out, decode in decodings(config)
    ]


def quick_report(
    config: Config,
    loaded: LoadedTarget,
    data: TrainingData,
    console: Console,
    services: Sequence[TrackerThread] = (),
) -> None:
    """Measure the run's best drafter on a few prompts at the end of `train`; print and write.

    Uses `eval.limit` prompts, 8 if that is null. The acceptance of its ranks on held-out text is
    written first (ranks.json). The services receive every report once it is written.
    """
    folder = Path(config.run.dir)
    drafter, _ = native.load(folder / "drafter", loaded.target)
    _patch_target(drafter, loaded.target, console)
    measure_held_out(folder, drafter, loaded.target, data, config.data.max_length)
    suite = load_suite(config, config.eval.limit or QUICK_PROMPTS)
    for part in report_configs(config):
        report = measure(loaded.target, loaded.tokenizer, drafter, part, console, suite)
        show_and_save(report, folder / "eval", part.eval.out, console)
        for service in services:
            service.report(report_summary(report, folder / "eval", part.eval.out, loaded.tokenizer))
