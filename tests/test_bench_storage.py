"""`outrider bench storage`: the parts of a setting, and the loss relative to bf16."""

from typing import Any

import pytest

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError
from outrider.launch.bench import storage
from outrider.train.settings import parse


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("bf16", ("bf16", 0, 0.5)),
        ("int8-top16", ("int8", 16, 0.5)),
        ("coded0.7-top32", ("coded", 32, 0.7)),
        ("coded1.0", ("coded", 0, 1.0)),
    ],
)
def test_setting_gives_its_overrides(setting: str, parts: tuple[str, int, float]) -> None:
    config = parse(compose(["target=tiny", *storage.overrides(setting)]))
    record = config.record
    assert config.data.mode == "recorded"
    assert (record.states, record.top, record.step) == parts


def test_online_setting_does_not_record() -> None:
    assert parse(compose(storage.overrides("online"))).data.mode == "online"


@pytest.mark.parametrize("setting", ["coded", "int8-rank5", "bf16,", "bf8", "coded7", "top16"])
def test_unknown_setting_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="no such setting"):
        storage.storage([f"settings={setting}"])


def test_loss_is_relative_to_bf16(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    lengths = {"bf16": 2.0, "int8": 1.9}

    def measured(setting: str, _options: storage.Options) -> dict[str, float]:
        return {**dict.fromkeys(storage.MEASURED, 1.0), "accept_length": lengths[setting]}

    monkeypatch.setattr(storage, "_measure", measured)
    assert storage.storage(["settings=bf16,int8"]) == 0
    output = capsys.readouterr().out
    assert "+0.0%" in output
    assert "+5.0%" in output
