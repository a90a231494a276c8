"""`outrider eval`, and the report at the end of training."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.conf.console import Console
from outrider.conf.errors import CorruptFile
from outrider.conf.garbage import exempt_objects
from outrider.conf.schema import Config
from outrider.data.conversations import Prompt
from outrider.data.reporter import Reporter
from outrider.data.suite import load_suite
from outrider.data.target_fit import load_fitting_target
from outrider.data.training_data import TrainingData
from outrider.eval.contamination_check import drop_contaminated
from outrider.eval.measure import measure
from outrider.eval.open_drafter import find_drafter, open_drafter, require_single_process
from outrider.eval.rank_tables import measure_held_out
from outrider.eval.report import Report, save
from outrider.eval.report_tables import explain_metrics, in_short, show_and_save, show_grid
from outrider.eval.token_origins import report_summary
from outrider.models.adapt import adapt
from outrider.models.decode.from_config import decodings, greedy_warning
from outrider.models.drafting.drafter import Drafter
from outrider.models.formats import native
from outrider.models.target import process
from outrider.models.target.chat_template import template_change
from outrider.models.target.load import LoadedTarget
from outrider.models.target.target import Target
from outrider.train.manifest import RESTORE, read_manifest
from outrider.train.trackers import TrackerThread

QUICK_PROMPTS = 8  # of the report at the end of training


def evaluate(config: Config, explain: bool = False) -> int:
    """Run `outrider eval`. Returns the exit code, 0."""
    evaluated(config, explain)
    return 0


def evaluated(config: Config, explain: bool = False) -> dict[str, Report]:
    """Measure a run's drafter, or a published one; print, write and return the reports by name.

    Args:
        explain: print every table and the definitions of the metrics, too.

    Raises:
        ConfigError, RunError: the target, the drafter or the prompts cannot be used.
    """
    folder = Path(config.run.dir)
    source = find_drafter(config)
    console = Console()
    require_single_process("eval")
    process.set_threads()
    loaded = load_fitting_target(config, measures=True)
    console.print(f"target: {loaded.source}")
    drafter, config, about = open_drafter(source, config, loaded.target, console)
    config = adapt(config, Reporter(console).note)
    suite: Sequence[Prompt] = load_suite(config, config.eval.limit)
    if source is not None and config.eval.drafter is None:  # a run, whose training text is known
        warn_of_another_template(folder, config, loaded.tokenizer, console)
        suite = drop_contaminated(config, suite, console)
    _patch_target(drafter, loaded.target, console)
    exempt_objects()
    reports = dict(_print_reports(config, loaded, drafter, about, suite, console, explain))
    if explain:
        explain_metrics(console)
    return reports


def warn_of_another_template(run: Path, config: Config, tokenizer: Any, console: Console) -> None:
    """Print a warning if the run was trained with another chat template."""
    try:
        warning = template_change(read_manifest(run) or {}, config.target, tokenizer)
    except ValueError as error:
        raise CorruptFile(f"{run / 'manifest.json'}: {error}.", RESTORE) from None
    if warning:
        console.print(warning, style="red")


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
    for name, report in short_reports(config, loaded, drafter, {}, console):
        for service in services:
            service.report(report_summary(report, folder / "eval", name, loaded.tokenizer))


def has_reports(config: Config, drafter: Path) -> bool:
    """Return whether all reports of a run exist and are newer than this file of its drafter."""
    changed = drafter.stat().st_mtime_ns
    reports = [Path(config.run.dir) / "eval" / f"{out}.json" for out, _ in decodings(config)]
    return all(report.is_file() and report.stat().st_mtime_ns > changed for report in reports)


def short_reports(
    config: Config, loaded: LoadedTarget, drafter: Drafter, about: dict[str, Any], console: Console
) -> Iterator[tuple[str, Report]]:
    """Measure a drafter on a few prompts; print, write and yield every report with its name.

    Args:
        about: fields of the report about the drafter.
    """
    suite = load_suite(config, config.eval.limit or QUICK_PROMPTS)
    return _print_reports(config, loaded, drafter, about, suite, console)


def _print_reports(
    config: Config, loaded: LoadedTarget, drafter: Drafter, about: dict[str, Any],
    suite: Sequence[Prompt], console: Console, in_full: bool = False,
) -> Iterator[tuple[str, Report]]:  # fmt: skip
    """Measure, print and write every report and yield it with its name; a grid in one table."""
    folder, parts, reports = Path(config.run.dir) / "eval", report_configs(config), {}
    if warning := greedy_warning([part.decode for part in parts]):
        console.print(warning, style="yellow")
    for part in parts:
        name = part.eval.out
        report = measure(loaded.target, loaded.tokenizer, drafter, part, console, suite)
        reports[name] = report = replace(report, setting={**report.setting, **about})
        if len(parts) == 1 or in_full:
            show_and_save(report, folder, name, console, in_full)
        else:
            console.print(f"{name}: {in_short(report)}")
            save(report, folder, name)
        yield name, report
    if len(parts) > 1:
        show_grid(reports, folder, console)
