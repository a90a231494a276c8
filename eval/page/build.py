"""`outrider report`: one page on a run, on a search, or on all runs of a folder.

The page shows files of the folder. Only the calibration of the drafter's confidence may be
measured for it, with report.measure=true.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

import outrider
from outrider.conf.commands import ReportConfig
from outrider.conf.errors import ConfigError, CorruptFile, RunError
from outrider.conf.schema import Config
from outrider.eval import compare
from outrider.eval.calibration import calibrate
from outrider.eval.compare import RunResults
from outrider.eval.metrics import METRICS
from outrider.eval.page import acceptance, answers, comparison, plans, speed, training
from outrider.eval.page.elements import Collapsible, Page, Section, text_table
from outrider.eval.page.run_files import RunFiles, read_run_files
from outrider.eval.page.write import write_page
from outrider.eval.token_origins import TextDecoder
from outrider.models.load import load_tokenizer
from outrider.train.metrics_log import METRICS as LOGGED
from outrider.train.settings import load_run

SEARCH_FILES = ("search.json", compare.STUDY)


def report(folder: Path, options: ReportConfig, overrides: Sequence[str]) -> int:
    """Run the verb.

    Args:
        folder: `run.dir`.
        overrides: of the run's configuration, for the location of its target.

    Raises:
        ConfigError, RunError: the folder has nothing to show, or a file of it is corrupt.
    """
    console = Console()
    if (folder / "config.yaml").is_file():
        config = load_run(str(folder), list(overrides))
        page = _run_page(config, options, console)
    else:
        _refuse_run_options(options, overrides)
        page = _folder_page(folder)
    for file in write_page(page, folder):
        console.print(f"written: {file}", highlight=False, soft_wrap=True)
    return 0


def write_comparison(
    runs: Sequence[RunResults], without: Sequence[RunError], searches: Sequence[Path], folder: Path
) -> None:
    """Write the page of `outrider compare ... to=FOLDER`."""
    sections = comparison.comparison_sections(runs, without) if runs else []
    for i, search in enumerate(searches):
        sections += _search_sections(search, f"search-{i}")
    title = f"{len(runs)} runs compared" if runs else "Results of searches"
    folders = [*(str(run.folder) for run in runs), *map(str, searches)]
    page = Page(title, [], [*sections, _definitions()], _source(folders))
    for file in write_page(page, folder):
        print(f"written: {file}")


def _run_page(config: Config, options: ReportConfig, console: Console) -> Page:
    folder = Path(config.run.dir)
    run = read_run_files(folder)
    if options.measure:
        calibrate(config, run.reports, console)
        run = read_run_files(folder)
    builders: list[tuple[str, Callable[[RunFiles], Section]]] = [
        ("eval/*.json", speed.speed_section),
        ("eval/*.json", acceptance.acceptance_section),
        ("eval/*.json", speed.time_section),
        ("plan/*.json", plans.plan_section),
        ("eval/*.outputs.jsonl", acceptance.context_section),
        ("eval/*.json", acceptance.temperature_section),
        ("calibration.json", plans.calibration_section),
        ("metrics.jsonl", training.curves_section),
        ("training.json", training.cost_section),
        ("manifest.json", training.provenance_section),
    ]
    sections = [_build_section(build, run, file) for file, build in builders]
    tokenizer = _tokenizer(config, run)
    build_answers = partial(answers.answers_section, tokenizer=tokenizer, count=options.examples)
    sections.insert(2, _build_section(build_answers, run, "eval/*.outputs.jsonl"))
    lead = [f"{out}: {r.verdict()}" for out, r in run.reports.items()]
    title = f"{config.drafter.name} on {config.target.path or config.target.name}"
    return Page(title, lead, [*sections, _definitions()], _source([str(folder)]))


def _build_section(build: Callable[[RunFiles], Section], run: RunFiles, file: str) -> Section:
    """Build a section, figures first; an error names the file with invalid content."""
    try:
        section = build(run)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        message = f"{run.folder / file} has unexpected content: {error!r}"
        raise CorruptFile(message, "Restore it from a copy, or write it again.") from error
    figures_first = sorted(section.parts, key=lambda part: part.kind != "figure")
    return section._replace(parts=figures_first)


def _folder_page(folder: Path) -> Page:
    """Return the page of a search, or of the runs in a folder."""
    if any((folder / name).is_file() for name in SEARCH_FILES):
        sections = _search_sections(folder, "search")
        title = f"Search: {folder.name}"
        return Page(title, [], [*sections, _definitions()], _source([str(folder)]))
    places = sorted(file.parent for file in folder.glob("*/config.yaml"))
    if not places:
        message = f"{folder} holds no run, no search and no folder of a run."
        raise RunError(message, "Give run.dir=runs/<name>, or the folder that contains runs.")
    runs, without, _ = compare.load_runs(places)
    sections = comparison.comparison_sections(runs, without)
    title = f"{folder.name}: {len(runs)} runs compared"
    return Page(title, [], [*sections, _definitions()], _source([str(folder)]))


def _search_sections(folder: Path, name: str) -> list[Section]:
    content = comparison.read_search(folder)
    try:
        return comparison.search_section(content, name)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"{folder / 'search.json'} has unexpected content: {error!r}"
        raise CorruptFile(message, f"Write it again: outrider compare {folder}") from error


def _refuse_run_options(options: ReportConfig, overrides: Sequence[str]) -> None:
    """Raise for options of a single run."""
    why, fix = "This option is for one run, and run.dir is not a run.", "Give the run.dir of a run."
    if options.measure:
        raise ConfigError("report.measure", True, why, fix)
    for override in overrides:
        name, _, value = override.partition("=")
        if name != "run.dir":
            raise ConfigError(name, value, why, fix)


def _tokenizer(config: Config, run: RunFiles) -> TextDecoder | str:
    """Return the target's tokenizer, or why there is none."""
    if not any(report.outputs for report in run.reports.values()):
        return "no report has outputs"
    try:
        tokenizer: TextDecoder = load_tokenizer(config.target)
        return tokenizer
    except ConfigError as error:
        return f"the tokenizer {error.value} could not be read"


def _definitions() -> Section:
    decoded = [[m.name, m.unit, m.definition] for m in METRICS]
    logged = [[name, m.unit, f"{m.meaning}; {m.reduction}"] for name, m in LOGGED.items()]
    head, note = ["name", "unit", "definition"], "x@d is x at depth d."
    return Section("definitions", "Definitions of all numbers", [
        Collapsible("of reports", [text_table("metrics of a report", head, decoded, note)]),
        Collapsible("of training", [text_table("metrics of training", head, logged, note)]),
    ])  # fmt: skip


def _source(places: Sequence[str]) -> str:
    return f"Written by outrider {outrider.__version__} report from {', '.join(places)}."
