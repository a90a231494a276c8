"""A search: its trials, pruning, resuming after a kill, and its results.

A fake job pool writes the files of a run.
"""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest
from rich.console import Console

from outrider.conf.errors import ConfigError, CorruptFile, RunError
from outrider.conf.schema import TrainConfig
from outrider.conf.sweeps import read_sweep
from outrider.eval import search_results
from outrider.launch.cli import main
from outrider.launch.job_pool import JobPool
from outrider.launch.processes import INTERRUPTED
from outrider.launch.search import search

Run = Callable[[dict[str, str], Path, Any], int]
OVER = "+sweep.over={train.lr: {low: 1e-4, high: 1e-2, log: true}, drafter.loss: [[soft_ce], [tv]]}"

RATE = TrainConfig().lr  # of the base configuration


def words_of(words: list[str]) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in words)


def finish(folder: Path, value: float, seconds: float = 60.0) -> int:
    """Write the summary of a successful run."""
    summary = {
        "seconds": seconds, "steps": 300, "parameters": 10, "tokens_per_second": 5.0,
        "held_out": {"accept_length": value},
    }  # fmt: skip
    (folder / "training.json").write_text(json.dumps(summary))
    return 0


def write_held_out(folder: Path, *values: float) -> None:
    """Write held-out evaluations, one per hundred steps."""
    lines = [
        {"step": 100 * i, "kind": "held", "accept_length": value} for i, value in enumerate(values)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], list[dict[str, str]]]:
    """Replace runs by a function; returns the words of every started run."""

    def with_runs(run: Run) -> list[dict[str, str]]:
        started: list[dict[str, str]] = []

        def fake_run(_pool: JobPool, verb: str, words: list[str], log: Path, watch: Any) -> int:
            assert verb == "train"
            started.append(words_of(words))
            folder = Path(started[-1]["run.dir"])
            folder.mkdir(parents=True, exist_ok=True)
            assert log == folder / "output.txt"
            return run(started[-1], folder, watch)

        monkeypatch.setattr(JobPool, "run", fake_run)
        return started

    return with_runs


def run_search(folder: Path, trials: int, *words: str) -> int:
    settings, rest = read_sweep(
        [f"sweep.dir={folder}", f"sweep.trials={trials}", OVER, "drafter=eagle3", *words]
    )
    return search(rest, settings)


def trials(folder: Path) -> list[optuna.trial.FrozenTrial]:
    found: list[optuna.trial.FrozenTrial] = search_results.load_study(folder).get_trials()
    return found


def by_rate(words: dict[str, str], folder: Path, _watch: Any) -> int:
    """The closer to the base configuration, the better."""
    distance = abs(float(words["train.lr"]) / RATE - 1)
    return finish(folder, 3 - distance)


def test_base_configuration_runs_first_and_best_is_printed(
    tmp_path: Path, play: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    started = play(by_rate)
    assert run_search(tmp_path, 12) == 0
    assert len(started) == 12
    assert (started[0]["train.lr"], started[0]["drafter.loss"]) == (str(RATE), '["soft_ce"]')
    assert all(1e-4 <= float(words["train.lr"]) <= 1e-2 for words in started)
    assert {words["drafter.loss"] for words in started} == {'["soft_ce"]', '["tv"]'}
    assert len({words["run.dir"] for words in started}) == 12
    output = capsys.readouterr().out
    best = f"best: outrider train drafter=eagle3 train.lr={RATE} 'drafter.loss=[\"soft_ce\"]'"
    assert best in output
    found = json.loads((tmp_path / "search.json").read_text())
    assert found["best"] == 0
    assert found["trials"][0]["value"] == 3
    assert found["importance"]["train.lr"] > found["importance"]["drafter.loss"]
    assert (tmp_path / "search.png").read_bytes()[:4] == b"\x89PNG"


def test_the_best_trial_keeps_its_checkpoints(
    tmp_path: Path, play: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    values = iter([1.0, 3.0, 2.0])

    def run(_words: dict[str, str], folder: Path, _watch: Any) -> int:
        (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
        (folder / "drafter").mkdir()
        return finish(folder, next(values))

    play(run)
    run_search(tmp_path, 3)
    assert [f.parent.name for f in tmp_path.glob("trial-*/checkpoints")] == ["trial-0001"]
    best = tmp_path / "trial-0001"
    line = f"its drafter and checkpoints: {best}; outrider eval run.dir={best} measures it"
    assert line in capsys.readouterr().out.replace("\n", " ")
    found = json.loads((tmp_path / "search.json").read_text())
    assert found["importance"] == {}, "of three trials"


def test_rate_and_depth_are_drawn_against_tau_where_the_search_varied_them() -> None:
    def trial(value: float, **more: Any) -> dict[str, Any]:
        return {"value": value, "params": {"train.lr": 1e-3, "drafter.loss": '["tv"]'}, **more}

    one, other = trial(2.0), trial(1.0)
    assert search_results.rate_and_depth([one, other], "tau") is None
    other["params"] = {"train.lr": 2e-3}
    scatter = search_results.rate_and_depth([one, other], "tau")
    assert scatter is not None
    assert scatter.groups == {"trials": [(1e-3, 2.0), (2e-3, 1.0)]}
    assert (scatter.xlabel, scatter.ylabel, scatter.log) == ("learning rate", "tau", True)
    one["params"]["drafter.depths"], other["params"]["drafter.depths"] = "2", "4"  # choices
    one["decoded tau"], other["decoded tau"] = 1.5, 1.25
    scatter = search_results.rate_and_depth([one, other], "accept_length")
    assert scatter is not None
    assert scatter.groups == {"depth 2": [(1e-3, 1.5)], "depth 4": [(2e-3, 1.25)]}
    assert scatter.ylabel == "decoded tau"


def test_the_axis_of_the_picture_is_the_metric_that_was_searched() -> None:
    drawn = [
        {"value": 2.0, "params": {}, "seconds": 60.0, "decoded speedup": 1.1},
        {"value": 3.0, "params": {}, "seconds": 90.0, "decoded speedup": 1.2},
    ]
    (axes,) = search_results.draw_search(drawn, {}, "accept_length").axes
    assert axes.get_ylabel() == "accept_length"
    assert [tuple(point) for point in axes.collections[0].get_offsets()] == [(1, 2), (1.5, 3)]
    assert axes.lines[0].get_linestyle() == "None", "no line through two points"


def test_compare_shows_a_search(
    tmp_path: Path, play: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(words: dict[str, str], folder: Path, watch: Any) -> int:
        (folder / "eval").mkdir()
        (folder / "eval" / "eval.json").write_text('{"tau": 1.5}')
        return by_rate(words, folder, watch)

    play(measured)
    run_search(tmp_path, 4)
    capsys.readouterr()
    assert main(["compare", str(tmp_path)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "4 complete trials, 0 pruned, 0 failed; the best by accept_length" in output
    assert "accept_length: of a chain of drafter.depths tokens; decoded tau: of" in output


def test_trial_below_median_is_pruned(tmp_path: Path, play: Any) -> None:
    """Values are compared at the same evaluation; the first evaluation prunes no trial."""
    number = [0]

    def run(_words: dict[str, str], folder: Path, watch: Any) -> int:
        number[0] += 1
        bad = number[0] == 6
        write_held_out(folder, 1.0)
        assert not watch(), "the first evaluation prunes nothing"
        write_held_out(folder, 1.0, 1.1 if bad else 2.0 + number[0] / 100)
        if watch():
            assert bad
            return INTERRUPTED
        return finish(folder, 3.0)

    play(run)
    assert run_search(tmp_path, 7) == 0
    states = [trial.state.name for trial in trials(tmp_path)]
    assert states == ["COMPLETE"] * 5 + ["PRUNED"] + ["COMPLETE"]


def test_prune_false_disables_pruning(tmp_path: Path, play: Any) -> None:
    def run(_words: dict[str, str], folder: Path, watch: Any) -> int:
        write_held_out(folder, 1.0, 0.1)
        assert not watch()
        return finish(folder, 3.0)

    play(run)
    run_search(tmp_path, 7, "sweep.prune=false")


def test_search_continues_after_failed_trial(tmp_path: Path, play: Any) -> None:
    codes = iter([0, 1, 0])

    def run(_words: dict[str, str], folder: Path, _watch: Any) -> int:
        return next(codes) or finish(folder, 2.0)

    play(run)
    assert run_search(tmp_path, 3) == 0
    found = trials(tmp_path)
    assert [trial.state.name for trial in found] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert found[1].user_attrs["exit code"] == 1


def test_stopped_search_resumes_its_running_trial(tmp_path: Path, play: Any) -> None:
    """The running trial continues in its folder, with its values; no trial runs twice."""
    first = play(lambda words, folder, watch: INTERRUPTED if folder.name == "trial-0002" else 0)

    def until_the_third(words: dict[str, str], folder: Path, watch: Any) -> int:
        if len(first) == 3:
            pools[0].stop()
            return INTERRUPTED
        return finish(folder, 2.0)

    pools: list[JobPool] = []
    enter = JobPool.__enter__

    def record_pool(pool: JobPool) -> JobPool:
        pools.append(pool)
        return enter(pool)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobPool, "__enter__", record_pool)
        first = play(until_the_third)
        assert run_search(tmp_path, 5) == INTERRUPTED
    assert len(first) == 3
    resumed = play(lambda words, folder, watch: finish(folder, 2.0))
    assert run_search(tmp_path, 5) == 0
    assert resumed[0] == first[2]
    assert len(resumed) == 3
    assert run_search(tmp_path, 5) == 0, "all trials are complete"
    assert len(resumed) == 3


def test_interrupted_trial_is_requeued(tmp_path: Path, play: Any) -> None:
    """One run is stopped from outside; the search continues and requeues it."""
    codes = iter([0, INTERRUPTED, 0, 0])

    def run(_words: dict[str, str], folder: Path, _watch: Any) -> int:
        code = next(codes)
        return code or finish(folder, 2.0)

    started = play(run)
    assert run_search(tmp_path, 3) == 0
    assert started[2] == started[1]
    assert [t.state.name for t in trials(tmp_path)] == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]


def test_base_value_is_added_to_choices(tmp_path: Path, play: Any) -> None:
    """The base has loss soft_ce and depth weights geometric:0.8."""
    started = play(by_rate)
    over = "+sweep.over={train.lr: {low: 1e-4, high: 1e-2}, drafter.loss: [[tv]]}"
    assert run_search(tmp_path, 1, over) == 0
    assert started[0]["drafter.loss"] == '["soft_ce"]'


def test_resumed_search_samples_new_values(tmp_path: Path, play: Any) -> None:
    started = play(by_rate)
    run_search(tmp_path, 4)
    run_search(tmp_path, 8)
    rates = [words["train.lr"] for words in started]
    assert len(set(rates)) == len(rates) == 8


def test_sweep_over_replaces_yaml_values() -> None:
    settings, _ = read_sweep(["sweep=search", "sweep.over={train.lr: [1e-3, 1e-4]}"])
    assert settings.over == {"train.lr": [1e-3, 1e-4]}
    assert settings.trials == 24


def test_folder_of_another_search_is_refused(tmp_path: Path, play: Any) -> None:
    play(by_rate)
    run_search(tmp_path, 1)
    with pytest.raises(ConfigError, match="has a search with overrides"):
        run_search(tmp_path, 1, "train.max_steps=10")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["sweep.trials=2"], "needs keys to vary"),
        (["sweep=search", "run.dir=here"], "its own folder"),
        (["sweep=search", "train.lr=1,2"], "is a grid"),
        (["sweep.trials=2", "+sweep.over={train.lrr: [1]}"], "Did you mean train.lr?"),
        (["sweep.trials=2", "+sweep.over={train.lr: [3]}"], "train.lr = 3"),
        (["sweep.trials=2", "+sweep.over={train.lr: {low: 1, high: 0}}"], "low must be below high"),
        (["sweep.trials=2", "+sweep.over={train.lr: {low: 1}}"], "not a range"),
        (
            ["sweep.trials=2", "+sweep.over={train.lr: {low: 0.1, high: 1.0, log: true, step: 2}}"],
            "a log scale has none",
        ),
        (["sweep=search", "sweep.metric=tau", "train.quick_eval=false"], "quick_eval=true"),
        (["sweep=search", "sweep.metric=speedup", "eval.baseline=false"], "baseline=true"),
        (["sweep.trials=2", "+sweep.over={train.lr: 1}"], "no values to choose from"),
        (["sweep.jobs=2", "sweep.devices=['0']"], "one entry per job"),
        (["+sweep.over={train.lr: {low: 1e-4, high: 1e-3}}"], "only a search"),
    ],
)
def test_invalid_search_is_refused(words: list[str], reason: str, tmp_path: Path) -> None:
    from outrider.launch.sweep import sweep

    with pytest.raises(ConfigError) as caught:
        sweep([*words, f"sweep.dir={tmp_path}"])
    assert reason in str(caught.value)


def test_missing_metric_is_an_error(tmp_path: Path) -> None:
    finish(tmp_path, 2.0)
    with pytest.raises(RunError, match="has no speedup"):
        search_results.metric_of_run(tmp_path, "speedup", "eval")
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "eval.json").write_text(json.dumps({"speedup": 1.5, "tau": 2.5}))
    assert search_results.metric_of_run(tmp_path, "speedup", "eval") == 1.5
    assert search_results.run_summary(tmp_path, "eval")["decoded tau"] == 2.5


def test_pareto_front() -> None:
    assert search_results.pareto_front([1.0, 2.0, 3.0, 3.0], [5.0, 4.0, 6.0, 7.0]) == [0, 3]
    assert search_results.pareto_front([2.0, 1.0], [1.0, 1.0]) == [1]


def test_incomplete_log_line_is_skipped(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    assert search_results.held_out_curve(tmp_path, "accept_length") == []
    log.write_text('{"step": 0, "kind": "held", "accept_length": 1.5}\n{"step": 100, "ki')
    assert search_results.held_out_curve(tmp_path, "accept_length") == [(0, 1.5)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_real_trials_two_at_a_time(tmp_path: Path) -> None:
    """Real runs; only the best keeps its checkpoints."""
    short = [
        "train.max_steps=6", "train.eval_every=3", "data.max_samples=60", "data.max_length=128",
        "train.batch_tokens=512", "train.quick_eval=false", "drafter.depths=2",
    ]  # fmt: skip
    assert run_search(tmp_path, 4, "sweep.jobs=2", *short) == 0
    found = trials(tmp_path)
    assert {trial.state.name for trial in found} <= {"COMPLETE", "PRUNED"}
    best = max(trial.value or 0 for trial in found)
    assert best > 1
    (kept,) = tmp_path.glob("trial-*/checkpoints")
    (winner,) = search_results.rank_trials(found)[:1]
    assert kept.parent.name == winner.user_attrs["folder"]
    search_results.show(tmp_path, Console(quiet=True))


def test_speedup_search_varies_the_drafter() -> None:
    settings, _ = read_sweep(["sweep=speedup", "drafter=eagle3"])
    default, _ = read_sweep(["sweep=search", "drafter=eagle3"])
    assert settings.metric == "speedup"
    assert set(settings.over) - set(default.over) == {"drafter.depths", "drafter.draft_vocab_size"}
    assert set(default.over) < set(settings.over)


def test_folder_of_a_trial_is_always_inside_the_search(tmp_path: Path, play: Any) -> None:
    """A received study may name any folder, and a finished trial's checkpoints are removed."""
    started, folder = play(by_rate), tmp_path / "search"
    run_search(folder, 1)
    study = search_results.load_study(folder)
    study.enqueue_trial(study.trials[0].params, user_attrs={"folder": "../elsewhere"})
    run_search(folder, 2)
    assert Path(started[-1]["run.dir"]) == folder / "trial-0001"


def test_damaged_study_is_a_message(tmp_path: Path) -> None:
    (tmp_path / search_results.STUDY).write_bytes(b"no database" * 1000)
    for reader in (search_results.load_study, lambda folder: run_search(folder, 1)):
        with pytest.raises(CorruptFile, match=r"study\.db cannot be read"):
            reader(tmp_path)


def test_a_parameter_that_is_no_json_is_a_message(tmp_path: Path, play: Any) -> None:
    play(by_rate)
    run_search(tmp_path, 2)
    with closing(sqlite3.connect(tmp_path / search_results.STUDY)) as study:
        study.execute(
            "UPDATE trial_params SET param_value = ? WHERE param_name = 'train.lr'", (b"\xff",)
        )
        study.commit()
    with pytest.raises(CorruptFile, match=r"params\.\S+ is b'\\xff', not a number"):
        search_results.show(tmp_path, Console(quiet=True))
