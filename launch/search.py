"""A hyperparameter search with Optuna; each trial is a run.

    python train.py -m sweep=search drafter=eagle3 sweep.trials=24

The first trial is the unchanged configuration. A run below the median of the others at a held-out
evaluation is pruned. The study is stored in `<sweep.dir>/study.db` (SQLite): the same command
resumes a stopped search, and its unfinished trials continue from their checkpoints. Of the finished
ones all keep their drafter, and the best one its checkpoints.

Source: Bergstra et al. 2011, "Algorithms for hyper-parameter optimization" (TPE), as implemented in
Optuna (Akiba et al. 2019, arXiv:1907.10902); median pruning, Golovin et al. 2017, "Vizier".
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
from optuna.trial import FrozenTrial, TrialState
from rich.text import Text

from outrider.conf.compose import compose, flatten
from outrider.conf.console import Console
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import folder_lock
from outrider.conf.schema import Config, to_dict
from outrider.conf.shown_text import mask_values
from outrider.conf.sweeps import SweepConfig, to_override
from outrider.eval import search_results
from outrider.eval.search_results import short_name
from outrider.launch.combinations import expand_overrides
from outrider.launch.grid import generate_texts
from outrider.launch.job_pool import JobPool
from outrider.launch.processes import INTERRUPTED
from outrider.models.adapt import adapt
from outrider.models.decode.from_config import decodings
from outrider.models.target import load
from outrider.models.target.target import Target
from outrider.train.settings import INPUT_FILES, check_files, parse

MIN_TRIALS = 4  # before pruning starts
EXIT_CODE = "exit code"  # attribute of a failed trial


def search(overrides: list[str], sweep: SweepConfig) -> int:
    """Run trials until there are `sweep.trials`, then print the results. Returns the exit code."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    base, console = _base_config(overrides, sweep), Console()
    sweep, params = _include_base(sweep, base, console)
    with folder_lock(Path(sweep.dir)):
        study = _open_study(overrides, sweep)
        for orphan in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            _requeue(study, orphan)
        if not study.trials and len(params) == len(sweep.over):
            study.enqueue_trial(params)
        return Search(study, overrides, sweep, console, decodings(base)[0][0]).run(base)


def _base_config(overrides: list[str], sweep: SweepConfig) -> Config:
    """Return the unchanged configuration, after validating every value of `sweep.over` with it."""
    if not sweep.over:
        why = "A search needs keys to vary."
        fix = "Add sweep=search, or '+sweep.over={train.lr: {low: 1e-4, high: 1e-2, log: true}}'."
        raise ConfigError("sweep.over", sweep.over, why, fix)
    if any(word.startswith("run.dir=") for word in overrides):
        why = "Every trial has its own folder in sweep.dir."
        raise ConfigError("run.dir", overrides, why, "Set sweep.dir instead.")
    if len(expand_overrides(overrides)) > 1:
        why = "A search varies the keys of sweep.over; a list on the command line is a grid."
        raise ConfigError("overrides", overrides, why, "Use one value, or sweep.over.")
    config = parse(compose(overrides))
    if sweep.metric in search_results.REPORT_METRICS and not config.train.quick_eval:
        why = "This metric comes from the run's report."
        raise ConfigError("sweep.metric", sweep.metric, why, "Set train.quick_eval=true.")
    if sweep.metric == "speedup" and not config.eval.baseline:
        why = "A speedup needs plain decoding as its baseline."
        raise ConfigError("sweep.metric", sweep.metric, why, "Set eval.baseline=true.")
    for name, values in sweep.over.items():
        for value in (values["low"], values["high"]) if isinstance(values, Mapping) else values:
            parse(compose([*overrides, to_override(name, value)]))
    check_files(config, *INPUT_FILES)
    if set(config.automatic).isdisjoint(sweep.over):
        return config
    shape = Target(load.meta_model(config.target), fuse=False).shape()
    return adapt(config, lambda _: None, shape)  # the first trial's values


def _open_study(overrides: list[str], sweep: SweepConfig) -> optuna.Study:
    """Create or load the study; refuse that of a search with other settings."""
    folder = Path(sweep.dir)
    folder.mkdir(parents=True, exist_ok=True)
    with search_results.study_errors(folder):
        study = optuna.create_study(
            storage=f"sqlite:///{folder / search_results.STUDY}", study_name="search",
            direction="maximize", load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(MIN_TRIALS, n_warmup_steps=1),
        )  # fmt: skip
        # a new seed after every stop, or the sampler would repeat its trials
        seed = sweep.seed + len(study.get_trials(deepcopy=False))
    study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=8)
    settings = {"overrides": overrides, "over": sweep.over, "metric": sweep.metric}
    for name, value in json.loads(json.dumps(mask_values(settings))).items():
        known = study.user_attrs.get(name, value)
        if known != value:
            why = f"{folder} has a search with {name} = {known}."
            raise ConfigError("sweep.dir", sweep.dir, why, "Choose another sweep.dir.")
        study.set_user_attr(name, value)
    return study


def _requeue(study: optuna.Study, trial: optuna.Trial | FrozenTrial) -> None:
    """Requeue a trial in the folder of its checkpoints."""
    study.tell(trial.number, state=TrialState.FAIL)
    study.enqueue_trial(trial.params, user_attrs={"folder": trial.user_attrs.get("folder")})


def _include_base(
    sweep: SweepConfig, base: Config, console: Console
) -> tuple[SweepConfig, dict[str, Any]]:
    """Add the base's values to the choices; also return its parameters within their ranges."""
    base_values = dict(flatten(json.loads(json.dumps(to_dict(base)))))  # tuples become lists
    over, params = dict[str, Any](), dict[str, Any]()
    for name, values in sweep.over.items():
        value = base_values.get(name)
        if isinstance(values, Mapping):
            over[name] = values
            if isinstance(value, int | float) and values["low"] <= value <= values["high"]:
                params[name] = value
            else:
                console.print(f"{name} = {value} is outside its range: not the first trial")
        else:
            known = json.dumps(value) in map(json.dumps, values)
            over[name] = list(values) if known else [value, *values]
            params[name] = json.dumps(value)
    return replace(sweep, over=over), params


def _is_tried(trial: FrozenTrial) -> bool:
    """Return whether the trial counts: neither queued, nor failed and continued by another one."""
    failed = trial.state == TrialState.FAIL
    return EXIT_CODE in trial.user_attrs if failed else bool(trial.state != TrialState.WAITING)


def suggest_values(trial: optuna.Trial, over: Mapping[str, Any]) -> dict[str, Any]:
    """Return Optuna's value for every key; it stores choices as JSON, since they may be lists."""
    params = dict[str, Any]()
    for name, values in over.items():
        if not isinstance(values, Mapping):
            choices = [json.dumps(value) for value in values]
            params[name] = json.loads(trial.suggest_categorical(name, choices))
            continue
        low, high, step, log = values["low"], values["high"], values.get("step"), values.get("log")
        if isinstance(low, int) and isinstance(high, int):
            params[name] = trial.suggest_int(name, low, high, step=step or 1, log=bool(log))
        else:
            params[name] = trial.suggest_float(name, low, high, step=step, log=bool(log))
    return params


class Search:
    """Trials of a study, `sweep.jobs` at a time; a metric is read from the run's `report`."""

    def __init__(
        self, study: optuna.Study, overrides: list[str], sweep: SweepConfig, console: Console,
        report: str,
    ) -> None:  # fmt: skip
        self.study, self.overrides, self.sweep, self.console = study, overrides, sweep, console
        self.report, self.folder = report, Path(sweep.dir)
        self._lock, self._start = threading.Lock(), time.monotonic()

    def run(self, base: Config) -> int:
        title = f"{self.sweep.trials} trials in {self.folder}, {self.sweep.jobs} at a time: "
        self.console.print(title + ", ".join(self.sweep.over))
        with JobPool(self.sweep) as self.pool:
            if code := generate_texts(self.pool, [self.overrides], [base]):
                return code
            with ThreadPoolExecutor(self.sweep.jobs) as threads:
                workers = [threads.submit(self._work) for _ in range(self.sweep.jobs)]
                try:
                    for worker in workers:
                        worker.result()
                except BaseException:
                    self.pool.stop()
                    raise
        search_results.show(self.folder, self.console)
        if self.pool.stopped:
            self.console.print("stopped; the same command resumes the search")
            return INTERRUPTED
        return 0

    def _work(self) -> None:
        while not self.pool.stopped:
            with self._lock, search_results.study_errors(self.folder):
                if self._is_finished():
                    return
                trial = self.study.ask()
                values = suggest_values(trial, self.sweep.over)
                if search_results.trial_folder(self.folder, trial) is None:
                    trial.set_user_attr("folder", f"trial-{trial.number:04d}")
            self._run_trial(trial, values)

    def _is_finished(self) -> bool:
        tried = sum(map(_is_tried, self.study.get_trials(deepcopy=False)))
        late = self.sweep.minutes and time.monotonic() - self._start > 60 * self.sweep.minutes
        assert self.sweep.trials is not None, "a search has a number of trials"
        return bool(late) or tried >= self.sweep.trials

    def _run_trial(self, trial: optuna.Trial, values: dict[str, Any]) -> None:
        folder = self.folder / trial.user_attrs["folder"]
        own = [to_override(*pair) for pair in values.items()]
        trial.set_user_attr("words", own)
        pruning = PruningWatch(trial, folder, self.sweep)
        words = [*self.overrides, *own, f"run.dir={folder}"]
        code = self.pool.run("train", words, folder / "output.txt", pruning)
        if code == INTERRUPTED and not pruning.pruned:
            if not self.pool.stopped:  # only this run was stopped from outside
                with self._lock:
                    _requeue(self.study, trial)
            return  # the study has it as running; the next search requeues it
        value: float | None = None
        state = TrialState.PRUNED if pruning.pruned else TrialState.FAIL
        if code == 0 and not pruning.pruned:
            try:
                value = search_results.metric_of_run(folder, self.sweep.metric, self.report)
                state = TrialState.COMPLETE
            except RunError as error:
                self.console.print(error.message)
                code = 2
        if state == TrialState.FAIL:
            trial.set_user_attr(EXIT_CODE, code)
        else:
            for name, number in search_results.run_summary(folder, self.report).items():
                trial.set_user_attr(name, number)
        with self._lock:
            self.study.tell(trial, value, state)
            self._remove_checkpoints()
        self._print_trial(trial, values, state, value, code)

    def _remove_checkpoints(self) -> None:
        """Remove what only resuming needs from finished trials, except from the best one."""
        states = [TrialState.COMPLETE, TrialState.PRUNED]
        finished = self.study.get_trials(deepcopy=False, states=states)
        best = search_results.rank_trials(finished)[:1]
        kept = {search_results.trial_folder(self.folder, trial) for trial in best}
        for trial in finished:
            folder = search_results.trial_folder(self.folder, trial)
            if folder is not None and folder not in kept:
                for name in ("checkpoints", "best"):
                    shutil.rmtree(folder / name, ignore_errors=True)

    def _print_trial(
        self, trial: optuna.Trial, values: dict[str, Any], state: TrialState, value: Any, code: int
    ) -> None:
        result = Text.assemble((f"exit code {code}", "red"), ", see output.txt")
        if state != TrialState.FAIL:
            result = Text("pruned", "dim") if value is None else Text(f"{value:.3f}")
        texts = {name: f"{v:.4g}" if isinstance(v, float) else v for name, v in values.items()}
        params = "  ".join(f"{short_name(name)}={text}" for name, text in texts.items())
        complete = self.study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        best = f"  best {self.study.best_value:.3f}" if complete else ""
        line = Text.assemble(f"trial {trial.number}: ", result, f"  {params}{best}")
        self.console.print(line)


class PruningWatch:
    """Reports a run's held-out evaluations to the study; returns whether the run must stop."""

    def __init__(self, trial: optuna.Trial, folder: Path, sweep: SweepConfig) -> None:
        self.trial, self.folder, self.sweep = trial, folder, sweep
        held_out = sweep.metric.startswith("accept_length")
        # for tau and speedup depth 1, since trials may differ in their other depths
        self.name = sweep.metric if held_out else "agree@1"
        self.pruned, self._reported = False, set[int]()

    def __call__(self) -> bool:
        if not self.sweep.prune or self.pruned:
            return self.pruned
        for step, value in search_results.held_out_curve(self.folder, self.name):
            if step in self._reported:
                continue
            self._reported.add(step)
            self.trial.report(value, len(self._reported) - 1)
            self.pruned = self.pruned or bool(self.trial.should_prune())
        return self.pruned
