"""`train -m`: expansion of overrides into runs, and handling of failed runs."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import ConfigError
from outrider.launch.combinations import expand_overrides
from outrider.launch.job_pool import JobPool
from outrider.launch.processes import INTERRUPTED
from outrider.launch.sweep import sweep

DRAFTERS = "drafter=eagle,medusa"
DISTINCT = "run.dir='{folder}/${{drafter.name}}'"


def test_comma_lists_are_expanded_and_bracket_lists_are_values() -> None:
    jobs = expand_overrides(["drafter=eagle,hass", "drafter.loss=[tv,0.1*soft_ce]", "run.seed=1,2"])
    assert [[job[0], job[2]] for job in jobs] == [
        ["drafter=eagle", "run.seed=1"],
        ["drafter=eagle", "run.seed=2"],
        ["drafter=hass", "run.seed=1"],
        ["drafter=hass", "run.seed=2"],
    ]
    assert {job[1] for job in jobs} == {"drafter.loss=[tv,0.1*soft_ce]"}


def test_a_sweep_of_one_value_is_one_run() -> None:
    assert expand_overrides(["train.lr=1e-3"]) == [["train.lr=1e-3"]]


def test_runs_with_a_common_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.dir"):
        sweep([DRAFTERS, f"run.dir={tmp_path}"])


def test_an_invalid_run_is_refused_before_any_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobPool, "run", lambda *_: pytest.fail("a run was started"))
    with pytest.raises(ConfigError, match="egle3"):
        sweep(["drafter=eagle,egle3"])


def started(monkeypatch: pytest.MonkeyPatch, codes: dict[str, int]) -> list[str]:
    """Make runs return the code of their drafter; return the list of started drafters."""
    names: list[str] = []

    def run(_pool: JobPool, verb: str, job: list[str], *_: object) -> int:
        names.append(job[0].partition("=")[2])
        return codes.get(names[-1], 0)

    monkeypatch.setattr(JobPool, "run", run)
    return names


def test_a_failed_run_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = started(monkeypatch, {"eagle": 2})
    assert sweep([DRAFTERS, DISTINCT.format(folder=tmp_path)]) == 2
    assert names == ["eagle", "medusa"]
    assert "failed with exit code 2" in capsys.readouterr().out


def test_ctrl_c_stops_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = started(monkeypatch, {"eagle": INTERRUPTED})
    assert sweep([DRAFTERS, DISTINCT.format(folder=tmp_path)]) == INTERRUPTED
    assert names == ["eagle"]


def test_runs_of_a_bakeoff_differ_only_in_the_drafter() -> None:
    from outrider.conf.compose import compose
    from outrider.models import drafters
    from outrider.train.settings import parse

    # the experiments reduce the draft vocabulary, which layerskip refuses
    names = ",".join(name for name in drafters.trained_names() if name != "layerskip")
    for experiment in ("bakeoff_tiny", "bakeoff_smollm2"):
        runs: list[dict[str, Any]] = []
        for job in expand_overrides([f"drafter={names}", f"experiment={experiment}"]):
            config = asdict(parse(compose(job)))
            assert str(config["run"].pop("dir")).endswith(config["drafter"]["name"])
            runs.append({name: part for name, part in config.items() if name != "drafter"})
        assert all(run == runs[0] for run in runs)


@pytest.mark.slow
def test_two_drafters_are_trained_and_compared(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Real runs, each in its own process."""
    short = ["experiment=smoke", "train.max_steps=2", "eval.limit=1", "eval.max_new_tokens=8"]
    assert sweep([DRAFTERS, *short, DISTINCT.format(folder=tmp_path)]) == 0
    table = capfd.readouterr().out.rpartition("tokens/s exact")[2]  # of compare
    assert "eagle" in table
    assert "medusa" in table
    assert (tmp_path / "eagle" / "training.json").is_file()
