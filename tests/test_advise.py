"""`outrider advise`: pilots are runs on nested parts of the text; forecasts have ranges."""

import json
from pathlib import Path

import pytest

from outrider.conf.command_settings import AdviseConfig
from outrider.conf.console import Console
from outrider.conf.errors import ConfigError
from outrider.data.pack import split_holdout
from outrider.data.training_data import TrainingData
from outrider.launch import advise as verb
from outrider.launch import cli
from outrider.launch.advise import (
    Pilot,
    choose_pilots,
    run_pilot,
    take_tokens,
    verdict,
    write_advice,
)
from outrider.launch.scaling_law import Forecast, ScalingFit
from outrider.models.target.load import LoadedTarget
from tests.runs import SMALL, config

TRUE = ScalingFit("saturating", 2.6, 0.7, 0.5, 2e3, 3.0)


def test_pilots_are_nested_and_have_the_configured_shares(
    made: TrainingData, tmp_path: Path
) -> None:
    train, _ = split_holdout(made.documents, 0.05)
    whole = sum(len(document.ids) for document in train)
    settings = AdviseConfig(shares=(0.5, 0.25), repeats=2)
    pilots = choose_pilots(train, config(tmp_path), settings)
    assert [(p.share, p.repeat) for p, _ in pilots] == [(0.25, 0), (0.5, 0), (0.25, 1), (0.5, 1)]
    keys = [{document.key for document in part} for _, part in pilots]
    assert keys[0] < keys[1]
    assert keys[2] < keys[3]
    assert keys[0] != keys[2], "repeats have different text"
    longest = max(len(document.ids) for document in train)
    for pilot, part in pilots:
        assert pilot.tokens == sum(len(document.ids) for document in part)
        assert pilot.share * whole <= pilot.tokens < pilot.share * whole + longest


def test_documents_are_added_until_there_are_enough_tokens(made: TrainingData) -> None:
    lengths = [len(document.ids) for document in made.documents]
    assert len(take_tokens(made.documents, lengths[0])) == 1
    assert len(take_tokens(made.documents, lengths[0] + 1)) == 2
    assert len(take_tokens(made.documents, 0)) == 1, "at least one"
    assert len(take_tokens(made.documents, 1e9)) == len(made.documents)


def test_a_share_smaller_than_one_step_is_refused(made: TrainingData, tmp_path: Path) -> None:
    train, _ = split_holdout(made.documents, 0.05)
    with pytest.raises(ConfigError, match="a step takes 4") as caught:
        choose_pilots(train, config(tmp_path), AdviseConfig(shares=(0.01, 0.5)))
    assert caught.value.key == "advise.shares"
    assert "Use shares from about" in caught.value.fix


def test_a_single_size_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["advise", "advise.shares=[0.1,0.1]"])
    assert stopped.value.code == 2
    assert "advise.shares" in capsys.readouterr().err


def test_the_scaling_law_is_printed_and_plotted(tmp_path: Path) -> None:
    pilots = [
        Pilot(share, 0, 10, round(share * 2e5), TRUE.at(share * 2e5), 50)
        for share in (0.01, 0.02, 0.04, 0.08)
    ]
    console = Console(record=True, width=120)
    cfg = config(tmp_path, "drafter.depths=2")
    write_advice(console, tmp_path, cfg, AdviseConfig(), pilots, whole=200_000)
    printed, advice = console.export_text(), json.loads((tmp_path / "advise.json").read_text())
    assert advice["fit"]["a"] == pytest.approx(TRUE.a, abs=1e-2)
    assert advice["all_text"]["gain"] == pytest.approx(TRUE.at(4e5) - TRUE.at(2e5), abs=5e-3)
    assert f"{advice['all_text']['now']:.2f}" in printed
    assert "larger shares give a better prediction" in printed
    assert (tmp_path / "advise.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [(0.0, 0.01, "little"), (0.05, 0.2, "helps: by at least 0.05"), (-0.1, 0.3, "do not show")],
)
def test_the_verdict_depends_on_the_range(low: float, high: float, message: str) -> None:
    assert message in verdict(Forecast(1e5, 2.0, 1.9, 2.1, 2.1, 0.1, low, high), 5e4)


@pytest.mark.slow
def test_a_second_call_reuses_finished_pilots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["advise", *SMALL, f"run.dir={tmp_path}", "advise.shares=[0.3,0.6]"]
    words += ["advise.steps=4", "advise.repeats=1"]
    assert cli.main(words) == 0
    first = json.loads((tmp_path / "advise" / "advise.json").read_text())
    assert [p["share"] for p in first["pilots"]] == [0.3, 0.6]
    assert all(1 <= p["accept_length"] <= 3 for p in first["pilots"])
    assert first["fit"]["kind"] == "line"
    assert "written" in capsys.readouterr().out
    pilot = tmp_path / "advise" / "steps-4" / "share-0.3-0"
    log = (pilot / "metrics.jsonl").read_bytes()
    assert cli.main(words) == 0
    assert (pilot / "metrics.jsonl").read_bytes() == log, "no pilot is trained again"
    assert json.loads((tmp_path / "advise" / "advise.json").read_text()) == first


def test_a_stopped_pilot_ends_the_command(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.train.loop.fit", lambda *_, **__: None)
    pilot = Pilot(0.5, 0, 1, 1)
    assert run_pilot(config(tmp_path), AdviseConfig(), loaded, made, pilot) is None
    monkeypatch.setattr(verb, "run_pilot", lambda *_: None)
    words = [*SMALL, f"run.dir={tmp_path}", "advise.shares=[0.3,0.6]"]
    assert cli.main(["advise", *words]) == 130
