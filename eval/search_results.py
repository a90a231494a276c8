"""What a search has found: a table of its trials, what mattered, and what quality costs.

Reads `<sweep.dir>/study.db` and the runs beside it; writes `search.json` and `search.png` there.
The importance of a key is PED-ANOVA's (Watanabe et al. 2023, arXiv:2304.10255): how much the
better trials' values of it differ from all trials' values.
"""

import io
import json
import shlex
import warnings
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.conf.errors import RunError
from outrider.conf.files import read_json, write, write_json

STUDY = "study.db"
FORMAT = "outrider-search-1"
SHOWN = 10
FEW = 4  # whole trials below which nothing is said of importance
FIX = "Give the same command again, or remove the trial's folder."
OF_A_REPORT = ("tau", "speedup", "tokens_per_second")


def held(log: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) of the held-out evaluations so far."""
    try:
        lines = log.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # being written
        if entry.get("kind") == "held" and name in entry:
            found.append((int(entry["step"]), float(entry[name])))
    return found


def value_of(folder: Path, metric: str, report: str) -> float:
    """What a finished run has reached.

    Args:
        report: name of its first decoding's report.

    Raises:
        RunError: it was not measured.
    """
    if metric in OF_A_REPORT:
        found = _report(folder, report)
        if found is None or found.get(metric) is None:
            fix = f"{metric} needs train.quick_eval=true, and speedup eval.baseline=true."
            raise RunError(f"{folder} has no {metric}.", fix)
        return float(found[metric])
    training = read_json(folder / "training.json", FIX)
    return float(training["held_out"][metric])


def facts(folder: Path, report: str) -> dict[str, float]:
    """What a run cost and brought, as far as it came."""
    found = dict[str, float]()
    if (folder / "training.json").is_file():
        training = read_json(folder / "training.json", FIX)
        names = ("seconds", "steps", "parameters", "tokens_per_second")
        found = {name: float(training[name]) for name in names}
    said = _report(folder, report) or {}
    return found | {
        f"decoded {name}": float(said[name]) for name in ("tau", "speedup") if said.get(name)
    }


def _report(folder: Path, name: str) -> dict[str, Any] | None:
    file = folder / "eval" / f"{name}.json"
    return read_json(file, FIX) if file.is_file() else None


def short(name: str) -> str:
    return name.rpartition(".")[2]


def load(folder: Path) -> optuna.Study:
    """
    Raises:
        RunError: there is no study.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    if not (folder / STUDY).is_file():
        fix = "Start one: python train.py -m sweep=search."
        raise RunError(f"{folder} holds no search.", fix)
    return optuna.load_study(storage=f"sqlite:///{folder / STUDY}", study_name="search")


def show(folder: Path, console: Console) -> None:
    """Print, and write `search.json` and `search.png`."""
    study = load(folder)
    trials = study.get_trials(deepcopy=False)
    whole = ranked(trials)
    metric = str(study.user_attrs["metric"])
    console.print(_table(trials, whole, metric))
    mattered = importance(study, whole)
    if mattered:
        parts = "  ".join(f"{name} {share:.0%}" for name, share in mattered.items())
        console.print(f"importance (PED-ANOVA): {parts}", highlight=False)
    if whole:
        words = [*study.user_attrs["overrides"], *whole[0].user_attrs["words"]]
        said = f"best: python train.py {' '.join(map(shlex.quote, words))}"
        console.print(Text(said), soft_wrap=True)
    write_json(folder / "search.json", _fields(study, trials, whole, mattered))
    if whole:
        write(folder / "search.png", _picture(whole, mattered, metric))
        console.print(f"written: {folder}/search.json, search.png", highlight=False)


def ranked(trials: list[FrozenTrial]) -> list[FrozenTrial]:
    """Whole ones, best first."""
    whole = [t for t in trials if t.state == TrialState.COMPLETE and t.value is not None]
    return sorted(whole, key=lambda trial: (-float(trial.value or 0), trial.number))


def importance(study: optuna.Study, whole: list[FrozenTrial]) -> dict[str, float]:
    """Shares that sum to 1, largest first; {} of too few trials, or of equal ones."""
    if len(whole) < FEW or len({trial.value for trial in whole}) == 1:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.25)
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


def front(costs: list[float], values: list[float]) -> list[int]:
    """Whom nobody beats in both, cheapest first; of costs 1, 2, 3 with values 5, 4, 6: 0 and 2."""
    found, best = list[int](), float("-inf")
    for i in sorted(range(len(costs)), key=lambda i: (costs[i], -values[i])):
        if values[i] > best:
            found.append(i)
            best = values[i]
    return found


def _table(trials: list[FrozenTrial], whole: list[FrozenTrial], metric: str) -> Table:
    count = {state: sum(t.state == state for t in trials) for state in TrialState}
    title = (
        f"{count[TrialState.COMPLETE]} whole trials, {count[TrialState.PRUNED]} stopped, "
        f"{count[TrialState.FAIL]} failed; the best by {metric}"
    )
    table = Table(title=title)
    names = list(dict.fromkeys(name for trial in whole for name in trial.params))
    extra = [n for n in ("decoded tau", "decoded speedup") if any(n in t.user_attrs for t in whole)]
    for head in ("trial", metric, *map(short, names), "minutes", *extra):
        table.add_column(head, justify="right")
    for trial in whole[:SHOWN]:
        given = [Text(_shown(trial.params.get(name))) for name in names]
        minutes = f"{trial.user_attrs.get('seconds', 0) / 60:.1f}"
        more = [f"{trial.user_attrs[n]:.2f}" if n in trial.user_attrs else "-" for n in extra]
        table.add_row(str(trial.number), f"{trial.value:.3f}", *given, minutes, *more)
    return table


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace('"', "")


def _fields(
    study: optuna.Study,
    trials: list[FrozenTrial],
    whole: list[FrozenTrial],
    mattered: dict[str, float],
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        **study.user_attrs,
        "importance": mattered,
        "best": whole[0].number if whole else None,
        "trials": [
            {"number": t.number, "state": t.state.name, "value": t.value, "params": t.params}
            | dict(t.user_attrs)
            for t in trials
        ],
    }


def _picture(whole: list[FrozenTrial], mattered: dict[str, float], metric: str) -> bytes:
    """Left: value against minutes of training, and the front. Right: what mattered."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    costs = [float(t.user_attrs.get("seconds", 0)) / 60 for t in whole]
    by_speed = all("decoded speedup" in trial.user_attrs for trial in whole)
    name = "decoded speedup" if by_speed else metric
    values = [float(t.user_attrs[name] if by_speed else t.value or 0) for t in whole]
    left.scatter(costs, values, color="tab:blue")
    best = front(costs, values)
    left.plot([costs[i] for i in best], [values[i] for i in best], color="tab:orange", marker="o")
    left.set_xlabel("minutes of training")
    left.set_ylabel(name)
    left.set_title("what it costs (orange: nobody is better and cheaper)")
    names = list(mattered)[::-1]
    right.barh([short(n) for n in names], [mattered[n] for n in names], color="tab:blue")
    right.set_title("what mattered (PED-ANOVA)")
    figure.tight_layout()
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    pyplot.close(figure)
    return file.getvalue()
