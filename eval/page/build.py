"""`outrider report`: one page on a run, on a search, or on all runs of a folder.

The reports of a published drafter, or of one without weights, count as a run.

The page shows files of the folder. Only the calibration of the drafter's confidence may be
measured for it, with report.measure=true.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import outrider
from outrider.conf.command_settings import ReportConfig
from outrider.conf.console import Console
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.schema import Config
from outrider.conf.shown_text import for_terminal
from outrider.eval.calibration import calibrate
from outrider.eval.metrics import METRICS
from outrider.eval.page import acceptance, answers, comparison, plans, speed, sublayers, training
from outrider.eval.page.elements import (
    Collapsible,
    Figure,
    Note,
    Page,
    Part,
    Section,
    text_table,
)
from outrider.eval.page.run_files import RunFiles, read_run_files
from outrider.eval.page.write import write_page
from outrider.eval.run_results import STUDY, RunResults, load_runs
from outrider.eval.token_origins import TextDecoder
from outrider.models.target.load import load_tokenizer
from outrider.train.metrics_log import METRICS as LOGGED
from outrider.train.settings import load_run

SEARCH_FILES = ("search.json", STUDY)


def report(folder: Path, options: ReportConfig, overrides: Sequence[str]) -> int:
    """Run the verb on a run (`overrides` may relocate its target), a search or a folder of runs.

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
        console.print(f"written: {file}", soft_wrap=True)
    return 0


def write_comparison(
    runs: Sequence[RunResults], without: Sequence[RunError], searches: Sequence[Path], folder: Path
) -> None:
    """Write the page of `outrider compare ... to=FOLDER`."""
    sections = comparison.comparison_sections(runs, without) if runs else []
    sections += [
        comparison.search_section(search, f"search-{i}") for i, search in enumerate(searches)
    ]
    title = f"{len(runs)} runs compared" if runs else "Results of searches"
    page = _page(title, [], sections, [*(run.folder for run in runs), *searches])
    for file in write_page(page, folder):
        print(for_terminal(f"written: {file}"))


def _page(
    title: str, lead: Sequence[str], sections: Sequence[Section], folders: Sequence[Path]
) -> Page:
    """Return a page with the definitions as its last section."""
    decoded = [[m.name, m.unit, m.definition] for m in METRICS]
    logged = [[name, m.unit, f"{m.meaning}; {m.reduction}"] for name, m in LOGGED.items()]
    head, note = ["name", "unit", "definition"], "x@d is x at depth d."
    definitions = Section("definitions", "Definitions of all numbers", [
        Collapsible("of reports", [text_table("metrics of a report", head, decoded, note)]),
        Collapsible("of training", [text_table("metrics of training", head, logged, note)]),
    ])  # fmt: skip
    places = ", ".join(map(str, folders))
    source = f"Written by outrider {outrider.__version__} report from {places}."
    return Page(title, lead, [*sections, definitions], source)


def _run_page(config: Config, options: ReportConfig, console: Console) -> Page:
    folder = Path(config.run.dir)
    run = read_run_files(folder)
    if options.measure:
        calibrate(config, run.reports, console)
        run = read_run_files(folder)
    tokenizer = _tokenizer(config, run)
    answer_parts = partial(answers.answer_parts, tokenizer=tokenizer, count=options.examples)
    sections: list[tuple[str, str, Callable[[RunFiles], Iterator[Part]]]] = [
        ("speed", "Speed", speed.speed_parts),
        ("acceptance", "Acceptance", acceptance.acceptance_parts),
        ("answers", "Answers: origin of each token", answer_parts),
        ("time", "Time, measured and predicted", speed.time_parts),
        ("plan", "Predicted speedup", plans.plan_parts),
        ("context", "Acceptance by context length", acceptance.context_parts),
        ("temperature", "Acceptance by temperature", acceptance.temperature_parts),
        ("calibration", "Calibration of the drafter's confidence", plans.calibration_parts),
        ("curves", "Loss and acceptance in training", training.curve_parts),
        ("search", "Search for skipped sublayers", sublayers.search_parts),
        ("cost", "Cost of training", training.cost_parts),
        ("origin", "Configuration and fingerprints", training.provenance_parts),
    ]
    built = [
        Section(name, heading, sorted(parts(run), key=lambda part: not isinstance(part, Figure)))
        for name, heading, parts in sections
    ]
    built = _gather_empty([section for section in built if section.parts])
    lead = [f"{out}: {r.verdict()}" for out, r in run.reports.items()]
    title = f"{config.drafter.name} on {config.target.path or config.target.name}"
    return _page(title, lead, built, [folder])


def _gather_empty(sections: Sequence[Section]) -> list[Section]:
    """Replace the sections that have only notes by a line with their names; it opens to the notes.

    Their order is kept; the line is the last section.
    """
    empty = [one for one in sections if all(isinstance(part, Note) for part in one.parts)]
    if not empty:
        return list(sections)
    notes = [
        Note(f"{one.title}. {part.text}", part.command)
        for one in empty
        for part in one.parts
        if isinstance(part, Note)
    ]
    names = "; ".join(one.title for one in empty)
    missing = Section("missing", "Without data", [Collapsible(names, notes)])
    return [*(one for one in sections if one not in empty), missing]


def _folder_page(folder: Path) -> Page:
    """Return the page of a search, of the runs in a folder, or of reports without a run."""
    if any((folder / name).is_file() for name in SEARCH_FILES):
        section = comparison.search_section(folder, "search")
        return _page(f"Search: {folder.name}", [], [section], [folder])
    places = {file.parent for file in folder.glob("*/config.yaml")}
    places |= {file.parents[1] for file in folder.glob("*/eval/*.json")}
    if not places and any(folder.glob("eval/*.json")):
        places = {folder}
    if not places:
        message = f"{folder} holds no run, no search and no folder of a run."
        raise RunError(message, "Give run.dir=runs/<name>, or the folder that contains runs.")
    runs, without, _ = load_runs(sorted(places))
    sections = comparison.comparison_sections(runs, without)
    title = f"{len(runs)} runs compared" if places != {folder} else "reports"
    return _page(f"{folder.name}: {title}", [], sections, [folder])


def _refuse_run_options(options: ReportConfig, overrides: Sequence[str]) -> None:
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
