"""Results of a search: a table of trials, parameter importance, quality against training time.

Reads `<sweep.dir>/study.db` and the runs beside it; writes `search.json` and `search.png` there.
Importance is PED-ANOVA's (Watanabe et al. 2023, arXiv:2304.10255): how much a key's values in the
best trials differ from its values in all trials.
"""

import re
import shlex
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.conf.errors import CorruptFile, RunError
from outrider.conf.files import write, write_json
from outrider.conf.json_shapes import RATE, read_object, require_shape
from outrider.conf.packages import require_package
from outrider.conf.shown_text import mask_values
from outrider.eval.report import png
from outrider.train.manifest import read_training
from outrider.train.metrics_log import read_log

STUDY = "study.db"
FORMAT = "outrider-search-1"
MAX_ROWS = 10
Study = Any  # Optuna's, which is imported where a study is read
FrozenTrial = Any
MIN_TRIALS = 12  # complete trials that importance needs: three in the better quarter
LR, DEPTHS = "train.lr", "drafter.depths"  # keys of a figure, if the search varied them
DECODED = "decoded tau"
FIX = "Run the same command again, or remove the trial's folder."
REPORT_METRICS = ("tau", "speedup", "tokens_per_second")
SEARCH = {  # `search.json`
    "format": FORMAT, "metric": str, "overrides": [str], "importance": {str: float}, str: object,
    "trials": [{
        "number": int, "state": str, "value": RATE, "params": {str: (float, str, bool, None)},
        "words?": [str], str: object, "seconds?, decoded tau?, decoded speedup?": float,
    }],
}  # fmt: skip


def held_out_curve(folder: Path, name: str) -> list[tuple[int, float]]:
    """Return (step, value) so far on the target's own answers, or on held-out text without them."""
    lines = read_log(folder)
    kind = "own" if any(line["kind"] == "own" for line in lines) else "held"
    chosen = (line for line in lines if line["kind"] == kind)
    return [(x["step"], float(x[name])) for x in chosen if isinstance(x.get(name), int | float)]


def metric_of_run(folder: Path, metric: str, report: str) -> float:
    """Return a metric of a finished run; `report` is the name of its first decoding's report.

    Raises:
        RunError: the metric was not measured.
    """
    measured = _read_report(folder, report) if metric in REPORT_METRICS else {}
    training = read_training(folder) or {}
    predicted = training.get("own_text") or training.get("held_out", {})
    value = {**predicted, **measured}.get(metric)
    if value is None:
        fix = "A number of a report needs train.quick_eval=true, and speedup eval.baseline=true."
        raise RunError(f"{folder} has no {metric}.", fix)
    return float(value)


def run_summary(folder: Path, report: str) -> dict[str, float]:
    """Return costs and results of a run, as far as they exist."""
    training, decoded = read_training(folder) or {}, _read_report(folder, report)
    costs = ("seconds", "steps", "parameters", "tokens_per_second")
    values = {name: training.get(name) for name in costs}
    values |= {f"decoded {name}": decoded.get(name) or None for name in ("tau", "speedup")}
    return {name: float(value) for name, value in values.items() if value is not None}


def _read_report(folder: Path, name: str) -> dict[str, Any]:
    """Read a report; {} if there is none."""
    file = folder / "eval" / f"{name}.json"
    shape = {f"{name}?": RATE for name in REPORT_METRICS}
    return read_object(file, FIX, shape) if file.is_file() else {}


def short_name(name: str) -> str:
    """Return a key without its group."""
    return name.rpartition(".")[2]


def trial_folder(search: Path, trial: FrozenTrial) -> Path | None:
    """Return the run of a trial; None if it has none, or a name that is not a trial's."""
    name = str(trial.user_attrs.get("folder"))
    return search / name if re.fullmatch(r"trial-\d+", name) else None


class Scatter(NamedTuple):
    """Points of a figure by group, and its axes; `log`: the x axis is logarithmic."""

    settings: list[str]  # that were varied
    groups: dict[str, list[tuple[float, float]]]
    xlabel: str
    ylabel: str
    log: bool


def rate_and_depth(complete: Sequence[Mapping[str, Any]], metric: str) -> Scatter | None:
    """Return tau over the learning rate, a group per depth; None if the search varied neither.

    Args:
        complete: the complete trials of `search.json`; without a decoded tau in each, their metric
            is drawn.
    """
    ylabel = DECODED if all(DECODED in trial for trial in complete) else metric
    values = [float(t["value"] if ylabel == metric else t[DECODED]) for t in complete]
    rates, depths = ([_number(t["params"].get(key)) for t in complete] for key in (LR, DEPTHS))
    several = [len(set(numbers)) > 1 and None not in numbers for numbers in (rates, depths)]
    if not any(several):
        return None
    groups = dict[str, list[tuple[float, float]]]()
    trials = sorted(zip(rates, depths, values, strict=True), key=lambda trial: trial[1] or 0.0)
    for rate, depth, value in trials:
        x = rate if several[0] else depth
        name = f"depth {depth:g}" if all(several) else "trials"
        groups.setdefault(name, []).append((x or 0.0, value))
    xlabel = "learning rate" if several[0] else DEPTHS
    settings = [key for key, one in zip(("learning rate", "depth"), several, strict=True) if one]
    return Scatter(settings, groups, xlabel, ylabel, several[0])


def _number(value: object) -> float | None:
    """Return a parameter as a number: Optuna stores choices as JSON."""
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if isfinite(number) else None


def load_study(folder: Path) -> Study:
    """Load the study of a search; without one, raise a RunError."""
    require_package("optuna", "run.dir", str(folder))
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    if not (folder / STUDY).is_file():
        fix = "Start one: outrider train -m sweep=search."
        raise RunError(f"{folder} has no search.", fix)
    with study_errors(folder):
        return optuna.load_study(storage=f"sqlite:///{folder / STUDY}", study_name="search")


@contextmanager
def study_errors(folder: Path) -> Iterator[None]:
    """Turn what Optuna and SQLAlchemy raise for a damaged study into a `CorruptFile`."""
    try:
        yield
    except Exception as error:
        message = f"{folder / STUDY} cannot be read: {error}"
        raise CorruptFile(message, "Restore it from a copy, or search in another folder.") from None


def show(folder: Path, console: Console) -> None:
    """Print the results, and write `search.json` and `search.png`."""
    study = load_study(folder)
    with study_errors(folder):
        trials = study.get_trials(deepcopy=False)
        complete = rank_trials(trials)
        shares = importance(study, complete)
        attributes = study.user_attrs
    rows = [
        {"number": t.number, "state": t.state.name, "value": t.value, "params": t.params}
        | dict(t.user_attrs)
        for t in trials
    ]
    best = complete[0].number if complete else None
    content = {"format": FORMAT, **attributes, "importance": shares, "best": best, "trials": rows}
    require_shape(content, SEARCH, str(folder / STUDY), "Search in another folder.")
    metric = content["metric"]
    console.print(_table(trials, complete, metric))
    if metric not in REPORT_METRICS and any(DECODED in t.user_attrs for t in complete):
        legend = f"{metric}: of a chain of drafter.depths tokens; decoded tau: of decode.depth"
        console.print(legend)
    if shares:
        parts = "  ".join(f"{name} {share:.0%}" for name, share in shares.items())
        console.print(f"importance (PED-ANOVA): {parts}")
    if complete:
        words = [*content["overrides"], *complete[0].user_attrs.get("words", [])]
        command = f"outrider train {' '.join(map(shlex.quote, words))}"
        console.print(Text(f"best: {command}"), soft_wrap=True)
        run = trial_folder(folder, complete[0])
        if kept := [name for name in ("drafter", "checkpoints") if run and (run / name).is_dir()]:
            line = f"its {' and '.join(kept)}: {run}; outrider eval run.dir={run} measures it"
            console.print(Text(line), soft_wrap=True)
    write_json(folder / "search.json", mask_values(content))
    if complete:
        numbers = {trial.number for trial in complete}
        finished = [row for row in rows if row["number"] in numbers]
        write(folder / "search.png", png(draw_search(finished, shares, metric)))
        console.print(f"written: {folder}/search.json, search.png")


def rank_trials(trials: list[FrozenTrial]) -> list[FrozenTrial]:
    """Return the complete trials, best first."""
    complete = [t for t in trials if t.state.name == "COMPLETE" and t.value is not None]
    return sorted(complete, key=lambda trial: (-float(trial.value or 0), trial.number))


def importance(study: Study, complete: list[FrozenTrial]) -> dict[str, float]:
    """Return shares that sum to 1, largest first; {} for too few trials or equal values."""
    if len(complete) < MIN_TRIALS or len({trial.value for trial in complete}) == 1:
        return {}
    import optuna

    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.25)
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


def pareto_front(costs: list[float], values: list[float]) -> list[int]:
    """Return the Pareto-optimal indices, cheapest first.

    pareto_front([1, 2, 3], [5, 4, 6]) == [0, 2]
    """
    front, best = list[int](), float("-inf")
    for i in sorted(range(len(costs)), key=lambda i: (costs[i], -values[i])):
        if values[i] > best:
            front.append(i)
            best = values[i]
    return front


def _table(trials: list[FrozenTrial], complete: list[FrozenTrial], metric: str) -> Table:
    count = Counter(trial.state.name for trial in trials)
    states = (
        f"{count['COMPLETE']} complete trials, {count['PRUNED']} pruned, {count['FAIL']} failed"
    )
    table = Table(title=f"{states}; the best by {metric}")
    names = list(dict.fromkeys(name for trial in complete for name in trial.params))
    decoded = (DECODED, "decoded speedup")
    extra = [name for name in decoded if any(name in t.user_attrs for t in complete)]
    for head in ("trial", metric, *map(short_name, names), "minutes", *extra):
        table.add_column(head, justify="right")
    for trial in complete[:MAX_ROWS]:
        params = [Text(_format(trial.params.get(name))) for name in names]
        minutes = f"{trial.user_attrs.get('seconds', 0) / 60:.1f}"
        numbers = [f"{trial.user_attrs[n]:.2f}" if n in trial.user_attrs else "-" for n in extra]
        table.add_row(str(trial.number), f"{trial.value:.3f}", *params, minutes, *numbers)
    return table


def _format(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace('"', "")


def draw_search(
    complete: Sequence[Mapping[str, Any]], shares: dict[str, float], metric: str
) -> Any:
    """Plot the metric against minutes with the Pareto front; rate and depth; importance."""
    from matplotlib.figure import Figure

    scatter = rate_and_depth(complete, metric)
    panels = 1 + (scatter is not None) + bool(shares)
    figure = Figure(figsize=(5 * panels, 4))
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    costs = [float(trial.get("seconds", 0)) / 60 for trial in complete]
    values = [float(trial["value"]) for trial in complete]
    axes[0].scatter(costs, values, color="tab:blue")
    front = [(costs[i], values[i]) for i in pareto_front(costs, values)]
    line = "-" if len(front) > 2 else ""
    axes[0].plot(*zip(*front, strict=True), ls=line, color="tab:orange", marker="o")
    title = "against training time (orange: Pareto front)"
    axes[0].set(xlabel="minutes of training", ylabel=metric, title=title)
    if scatter is not None:
        for name, points in scatter.groups.items():
            axes[1].scatter(*zip(*points, strict=True), label=name)
        axes[1].set(
            xlabel=scatter.xlabel,
            ylabel=scatter.ylabel,
            title=f"against {' and '.join(scatter.settings)}",
        )
        axes[1].set_xscale("log" if scatter.log else "linear")
        if len(scatter.groups) > 1:
            axes[1].legend()
    if shares:
        names = list(shares)[::-1]
        axes[-1].barh([short_name(n) for n in names], [shares[n] for n in names], color="tab:blue")
        axes[-1].set_title("importance (PED-ANOVA)")
    figure.tight_layout()
    return figure
