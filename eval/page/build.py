"""`outrider report`: one page on a run, on a search, or on all runs of a folder.

Everything stands in files of the folder already; the page only shows it. The one thing that may be
measured for it, and only when asked, is the calibration of the drafter's confidence.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

import outrider
from outrider.conf.errors import ConfigError, Damaged, RunError
from outrider.eval import compare
from outrider.eval.calibration import calibrate
from outrider.eval.compare import Measured
from outrider.eval.metrics import METRICS
from outrider.eval.page import acceptance, answers, speed, training
from outrider.eval.page import comparison as several
from outrider.eval.page import plans as foreseen
from outrider.eval.page.elements import Fold, Page, Section, table
from outrider.eval.page.run_files import Run, read_run
from outrider.eval.page.write import publish
from outrider.eval.token_origins import Speller
from outrider.models.load import tokenizer_of
from outrider.train.metrics_log import METRICS as LOGGED
from outrider.train.reporting import ReportConfig
from outrider.train.settings import Config, load_run

SEARCHED = ("search.json", compare.STUDY)


def report(folder: Path, wanted: ReportConfig, words: Sequence[str]) -> int:
    """The verb.

    Args:
        folder: `run.dir`.
        words: overrides that say where the run's target lies.

    Raises:
        ConfigError, RunError: nothing that can be shown lies there, or a file of it is damaged.
    """
    console = Console()
    if (folder / "config.yaml").is_file():
        config = load_run(str(folder), list(words))
        page = _of_run(config, wanted, console)
    else:
        _only_shown(wanted, words)
        page = _of_folder(folder)
    for file in publish(page, folder):
        console.print(f"written: {file}", highlight=False, soft_wrap=True)
    return 0


def write_compared(
    runs: Sequence[Measured], without: Sequence[RunError], searches: Sequence[Path], folder: Path
) -> None:
    """The page of `outrider compare ... to=FOLDER`."""
    sections = several.compared(runs, without) if runs else []
    for i, place in enumerate(searches):
        sections += _searched(place, f"search-{i}")
    title = f"{len(runs)} runs compared" if runs else "What searches have found"
    places = [*(str(run.folder) for run in runs), *map(str, searches)]
    page = Page(title, [], [*sections, _definitions()], _source(places))
    for file in publish(page, folder):
        print(f"written: {file}")


def _of_run(config: Config, wanted: ReportConfig, console: Console) -> Page:
    folder = Path(config.run.dir)
    run = read_run(folder)
    if wanted.measure:
        calibrate(config, run.reports, console)
        run = read_run(folder)
    makers: list[tuple[str, Callable[[Run], Section]]] = [
        ("eval/*.json", speed.measured_of),
        ("eval/*.json", acceptance.acceptance_of),
        ("eval/*.json", speed.times_of),
        ("plan/*.json", foreseen.plans_of),
        ("eval/*.outputs.jsonl", acceptance.contexts_of),
        ("eval/*.json", acceptance.temperatures_of),
        ("calibration.json", foreseen.calibration_of),
        ("metrics.jsonl", training.curves_of),
        ("training.json", training.cost_of),
        ("manifest.json", training.origin_of),
    ]
    sections = [_made(maker, run, file) for file, maker in makers]
    shown = partial(answers.answers_of, speller=_speller(config, run), count=wanted.examples)
    sections.insert(2, _made(shown, run, "eval/*.outputs.jsonl"))
    lead = [f"{out}: {r.verdict()}" for out, r in run.reports.items()]
    title = f"{config.drafter.name} on {config.target.path or config.target.name}"
    return Page(title, lead, [*sections, _definitions()], _source([str(folder)]))


def _made(maker: Callable[[Run], Section], run: Run, file: str) -> Section:
    """A section; a file whose content is of other kinds than a run writes is named."""
    try:
        made = maker(run)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        message = f"{run.folder / file} does not hold what a run writes there: {error!r}"
        raise Damaged(message, "Restore it from a copy, or have it written again.") from error
    figures_first = sorted(made.parts, key=lambda part: part.kind != "figure")
    return made._replace(parts=figures_first)


def _of_folder(folder: Path) -> Page:
    """Of a search, or of the runs side by side in a folder."""
    if any((folder / name).is_file() for name in SEARCHED):
        sections = _searched(folder, "search")
        title = f"Search: {folder.name}"
        return Page(title, [], [*sections, _definitions()], _source([str(folder)]))
    places = sorted(file.parent for file in folder.glob("*/config.yaml"))
    if not places:
        message = f"{folder} holds no run, no search and no folder of a run."
        raise RunError(message, "Give run.dir=runs/<name>, or the folder in which runs lie.")
    runs, without, _ = compare.found(places)
    sections = several.compared(runs, without)
    title = f"{folder.name}: {len(runs)} runs compared"
    return Page(title, [], [*sections, _definitions()], _source([str(folder)]))


def _searched(folder: Path, name: str) -> list[Section]:
    content = several.read_search(folder)
    try:
        return several.searched(content, name)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        fix = f"Have it written again: outrider compare {folder}"
        raise Damaged(
            f"{folder / 'search.json'} lacks what it should have: {error!r}", fix
        ) from error


def _only_shown(wanted: ReportConfig, words: Sequence[str]) -> None:
    """What is measured is a run's."""
    why, fix = "This belongs to one run, and run.dir is none.", "Give the run.dir of one run."
    if wanted.measure:
        raise ConfigError("report.measure", True, why, fix)
    for word in words:
        name, _, value = word.partition("=")
        if name != "run.dir":
            raise ConfigError(name, value, why, fix)


def _speller(config: Config, run: Run) -> Speller | str:
    """The target's tokenizer, or why there is none."""
    if not any(report.outputs for report in run.reports.values()):
        return "there is nothing to read"
    try:
        found: Speller = tokenizer_of(config.target)
        return found
    except ConfigError as error:
        return f"the tokenizer {error.value} could not be read"


def _definitions() -> Section:
    decoded = [[m.name, m.unit, m.definition] for m in METRICS]
    logged = [[name, m.unit, f"{m.meaning}; {m.reduction}"] for name, m in LOGGED.items()]
    head, told = ["name", "unit", "definition"], "x@d is x at depth d."
    return Section("definitions", "Every number's definition", [
        Fold("of reports", [table("metrics of a report", head, decoded, told)]),
        Fold("of training", [table("metrics of training", head, logged, told)]),
    ])  # fmt: skip


def _source(places: Sequence[str]) -> str:
    return f"Written by outrider {outrider.__version__} report from {', '.join(places)}."
