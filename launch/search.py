"""A search for the best recipe: Optuna says what to try next, each trial is a run of its own.

    python train.py -m sweep=search drafter=eagle3 sweep.trials=24

The first trial is the recipe as it is, so that the search can only find something better. A run
that falls behind the median of the others at a held-out evaluation is stopped. The study lies in
`<sweep.dir>/study.db` (SQLite): the same command goes on where the search was stopped, and trials
that were under way continue from their checkpoints.

Source: Bergstra et al. 2011, "Algorithms for hyper-parameter optimization" (TPE), as Optuna has it
(Akiba et al. 2019, arXiv:1907.10902); stopping below the median, Golovin et al. 2017, "Vizier".
"""

import json
import shutil
import threading
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState
from rich.console import Console
from rich.markup import escape

from outrider.conf.compose import compose, flat
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import claimed
from outrider.conf.sweeps import SweepConfig, word
from outrider.eval import search_results as searched
from outrider.launch.job_pool import INTERRUPTED, Crew
from outrider.launch.sweep import jobs, write_texts
from outrider.train.settings import NEEDED, Config, check_files, decodings, parse, resolved

BEFORE = 4  # whole trials before one may be stopped
CODE = "exit code"


def search(overrides: list[str], sweep: SweepConfig) -> int:
    """Run trials until there are `sweep.trials`, then say what was found.

    Returns:
        0, or 130 where the search was stopped.

    Raises:
        ConfigError: nothing is varied, a value is no valid setting, `sweep.dir` holds another
            search, or run.dir is given (every trial has its own).
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    base, console = _base(overrides, sweep), Console()
    sweep = _with_present(sweep, base, console)
    with claimed(Path(sweep.dir)):
        study = _study(overrides, sweep)
        _recover(study)
        if not study.trials:
            _enqueue_present(study, base, sweep)
        return Search(study, overrides, sweep, console, decodings(base)[0][0]).run(base)


def _base(overrides: list[str], sweep: SweepConfig) -> Config:
    """The recipe as it is; every value that may be tried is tried on it here, without training."""
    if not sweep.over:
        why = "A search needs something to vary."
        fix = "Add sweep=search, or '+sweep.over={train.lr: {low: 1e-4, high: 1e-2, log: true}}'."
        raise ConfigError("sweep.over", sweep.over, why, fix)
    if any(text.startswith("run.dir=") for text in overrides):
        why = "Every trial has a folder of its own in sweep.dir."
        raise ConfigError("run.dir", overrides, why, "Set sweep.dir instead.")
    if len(jobs(overrides)) > 1:
        why = "A search varies what sweep.over lists; a list on the command line is a grid."
        raise ConfigError("overrides", overrides, why, "Give one value, or use sweep.over.")
    config = parse(compose(overrides))
    if sweep.metric in searched.OF_A_REPORT and not config.train.quick_eval:
        why = "It is read from the report of the run's first decoding."
        raise ConfigError("sweep.metric", sweep.metric, why, "Set train.quick_eval=true.")
    if sweep.metric == "speedup" and not config.eval.baseline:
        why = "A speedup is measured against plain decoding."
        raise ConfigError("sweep.metric", sweep.metric, why, "Set eval.baseline=true.")
    for name, values in sweep.over.items():
        ends = [values["low"], values["high"]] if isinstance(values, Mapping) else values
        for value in ends:
            parse(compose([*overrides, word(name, value)]))
    check_files(config, *NEEDED)
    return config


def _study(overrides: list[str], sweep: SweepConfig) -> optuna.Study:
    folder = Path(sweep.dir)
    folder.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        storage=f"sqlite:///{folder / searched.STUDY}", study_name="search",
        direction="maximize", load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=BEFORE, n_warmup_steps=1),
    )  # fmt: skip
    # another seed after every stop, or it would draw the same trials again
    seed = sweep.seed + len(study.get_trials(deepcopy=False))
    study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=8)
    about = {
        "overrides": overrides,
        "over": json.loads(json.dumps(sweep.over)),
        "metric": sweep.metric,
    }
    for name, value in about.items():
        known = study.user_attrs.get(name, value)
        if known != value:
            why = f"{folder} holds a search with {name} = {known}."
            raise ConfigError("sweep.dir", sweep.dir, why, "Choose another sweep.dir.")
        study.set_user_attr(name, value)
    return study


def _recover(study: optuna.Study) -> None:
    """Trials whose search was killed are tried again, in the folder that holds their checkpoint."""
    for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        study.tell(trial.number, state=TrialState.FAIL)
        study.enqueue_trial(trial.params, user_attrs={"folder": trial.user_attrs.get("folder")})


def _with_present(sweep: SweepConfig, base: Config, console: Console) -> SweepConfig:
    """The recipe's own values are among the choices."""
    now, over = dict(flat(plain_of(base))), dict[str, Any]()
    for name, values in sweep.over.items():
        value = now.get(name)
        if isinstance(values, Mapping):
            number = isinstance(value, int | float)
            if not (number and values["low"] <= float(value or 0) <= values["high"]):
                console.print(f"{name} = {value} lies outside its range: the recipe is not tried")
            over[name] = values
        else:
            known = json.dumps(value) in map(json.dumps, values)
            over[name] = list(values) if known else [value, *values]
    return replace(sweep, over=over)


def _enqueue_present(study: optuna.Study, base: Config, sweep: SweepConfig) -> None:
    """The settings as they are come first, where they are among those that may be tried."""
    now, present = dict(flat(plain_of(base))), dict[str, Any]()
    for name, values in sweep.over.items():
        value = now.get(name)
        if isinstance(values, Mapping):
            if isinstance(value, int | float) and values["low"] <= value <= values["high"]:
                present[name] = value
        elif json.dumps(value) in map(json.dumps, values):
            present[name] = json.dumps(value)
    if len(present) == len(sweep.over):
        study.enqueue_trial(present)


def abandoned(trial: optuna.trial.FrozenTrial) -> bool:
    """Its search was killed; another trial continues its run."""
    return trial.state == TrialState.FAIL and CODE not in trial.user_attrs


def plain_of(config: Config) -> dict[str, Any]:
    """Settings as json has them: lists, no tuples."""
    out: dict[str, Any] = json.loads(json.dumps(resolved(config)))
    return out


def suggested(trial: optuna.Trial, over: Mapping[str, Any]) -> dict[str, Any]:
    """A value for every key. Choices are known to Optuna by their json, which may be a list's."""
    found = dict[str, Any]()
    for name, values in over.items():
        if not isinstance(values, Mapping):
            found[name] = json.loads(
                trial.suggest_categorical(name, [json.dumps(value) for value in values])
            )
            continue
        low, high, how = values["low"], values["high"], {"log": bool(values.get("log"))}
        if isinstance(low, int) and isinstance(high, int):
            found[name] = trial.suggest_int(name, low, high, step=values.get("step") or 1, **how)
        else:
            found[name] = trial.suggest_float(name, low, high, step=values.get("step"), **how)
    return found


class Search:
    """The trials of one study."""

    def __init__(
        self, study: optuna.Study, overrides: list[str], sweep: SweepConfig, console: Console,
        report: str,
    ) -> None:  # fmt: skip
        """
        Args:
            report: name of the first decoding's report.
        """
        self.report = report
        self.study, self.overrides, self.sweep, self.console = study, overrides, sweep, console
        self.folder, self._turn = Path(sweep.dir), threading.Lock()
        self._began = time.monotonic()

    def run(self, base: Config) -> int:
        said = f"{self.sweep.trials} trials in {self.folder}, {self.sweep.jobs} at a time: "
        self.console.print(said + ", ".join(self.sweep.over), highlight=False)
        with Crew(self.sweep) as self.crew:
            if code := write_texts(self.crew, [self.overrides], [base]):
                return code
            with ThreadPoolExecutor(self.sweep.jobs) as threads:
                workers = [threads.submit(self._work) for _ in range(self.sweep.jobs)]
                try:
                    for worker in workers:
                        worker.result()
                except BaseException:
                    self.crew.stop()
                    raise
        searched.show(self.folder, self.console)
        if self.crew.stopped:
            self.console.print("stopped; the same command goes on")
            return INTERRUPTED
        return 0

    def _work(self) -> None:
        while not self.crew.stopped:
            with self._turn:
                if self._enough():
                    return
                trial = self.study.ask()
                values = suggested(trial, self.sweep.over)
                if trial.user_attrs.get("folder") is None:
                    trial.set_user_attr("folder", f"trial-{trial.number:04d}")
            self._try(trial, values)

    def _enough(self) -> bool:
        known = self.study.get_trials(deepcopy=False)
        tried = [t for t in known if t.state != TrialState.WAITING and not abandoned(t)]
        late = self.sweep.minutes and time.monotonic() - self._began > 60 * self.sweep.minutes
        assert self.sweep.trials is not None, "a search has a number of trials"
        return bool(late) or len(tried) >= self.sweep.trials

    def _try(self, trial: optuna.Trial, values: dict[str, Any]) -> None:
        folder = self.folder / trial.user_attrs["folder"]
        words = [*self.overrides, *(word(*pair) for pair in values.items()), f"run.dir={folder}"]
        trial.set_user_attr("words", [word(*pair) for pair in values.items()])
        watch = Watching(trial, folder, self.sweep)
        code = self.crew.run("train", words, folder / "output.txt", watch)
        if code == INTERRUPTED and not watch.pruned:
            if not self.crew.stopped:  # somebody stopped this run alone
                self._again(trial)
            return  # still running, as far as the study knows: it goes on next time
        state, value = TrialState.FAIL, None
        if watch.pruned:
            state = TrialState.PRUNED
        elif code == 0:
            state, value, code = self._result(folder)
        if state == TrialState.FAIL:
            trial.set_user_attr(CODE, code)
        else:
            for name, fact in searched.facts(folder, self.report).items():
                trial.set_user_attr(name, fact)
            _tidy(folder)
        with self._turn:
            self.study.tell(trial, value, state)
        self._say(trial, values, state, value, code)

    def _result(self, folder: Path) -> tuple[TrialState, float | None, int]:
        try:
            value = searched.value_of(folder, self.sweep.metric, self.report)
        except RunError as error:
            self.console.print(error.message, highlight=False)
            return TrialState.FAIL, None, 2
        return TrialState.COMPLETE, value, 0

    def _again(self, trial: optuna.Trial) -> None:
        with self._turn:
            self.study.tell(trial, state=TrialState.FAIL)
            folder = trial.user_attrs["folder"]
            self.study.enqueue_trial(trial.params, user_attrs={"folder": folder})

    def _say(
        self, trial: optuna.Trial, values: dict[str, Any], state: TrialState, value: Any, code: int
    ) -> None:
        how = {
            TrialState.COMPLETE: f"{value:.3f}" if value is not None else "",
            TrialState.PRUNED: "[dim]behind, stopped[/dim]",
            TrialState.FAIL: f"[red]exit code {code}[/red], see output.txt",
        }[state]
        shown = {name: f"{v:.4g}" if isinstance(v, float) else v for name, v in values.items()}
        given = escape("  ".join(f"{searched.short(name)}={v}" for name, v in shown.items()))
        best = f"  best {self.study.best_value:.3f}" if self._any_whole() else ""
        self.console.print(f"trial {trial.number}: {how}  {given}{best}", highlight=False)

    def _any_whole(self) -> bool:
        states = [TrialState.COMPLETE]
        return bool(self.study.get_trials(deepcopy=False, states=states))


class Watching:
    """Looks into a run's log; tells the study of held-out evaluations, and whether to stop."""

    def __init__(self, trial: optuna.Trial, folder: Path, sweep: SweepConfig) -> None:
        self.trial, self.log, self.sweep = trial, folder / "metrics.jsonl", sweep
        of_training = sweep.metric.startswith("accept_length")
        # depths may differ between trials: the first guess is what all of them have
        self.name = sweep.metric if of_training else "agree@1"
        self.pruned, self._seen = False, set[int]()

    def __call__(self) -> bool:
        """Whether the run is to be stopped."""
        if not self.sweep.prune or self.pruned:
            return self.pruned
        for step, value in searched.held(self.log, self.name):
            if step in self._seen:
                continue
            self._seen.add(step)
            self.trial.report(value, len(self._seen) - 1)
            self.pruned = self.pruned or bool(self.trial.should_prune())
        return self.pruned


def _tidy(folder: Path) -> None:
    """A trial that is over is not continued; its drafter, logs and reports stay."""
    for name in ("checkpoints", "best"):
        shutil.rmtree(folder / name, ignore_errors=True)
