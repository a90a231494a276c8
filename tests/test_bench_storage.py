"""`outrider bench storage`: what a setting's words mean, and what is made of the numbers."""

from typing import Any

import pytest

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError
from outrider.launch.bench import storage as bench_storage
from outrider.train.settings import parse


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("bf16", ("bf16", 0, 0.5)),
        ("int8-top16", ("int8", 16, 0.5)),
        ("coded0.7-top32", ("coded", 32, 0.7)),
        ("coded1.0", ("coded", 0, 1.0)),
    ],
)
def test_a_setting_is_its_parts(setting: str, told: tuple[str, int, float]) -> None:
    config = parse(compose(["target=tiny", *bench_storage._words(setting)]))
    record = config.record
    assert config.data.mode == "recorded"
    assert (record.states, record.top, record.step) == told


def test_online_records_nothing() -> None:
    assert parse(compose(bench_storage._words("online"))).data.mode == "online"


@pytest.mark.parametrize("bad", ["coded", "int8-rank5", "bf16,", "bf8", "coded7", "top16"])
def test_what_is_no_setting_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="is no setting"):
        bench_storage.storage([f"settings={bad}"])


def test_what_is_lost_is_relative_to_sixteen_bits(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    lengths = {"bf16": 2.0, "int8": 1.9}

    def measured(setting: str, _options: dict[str, Any]) -> dict[str, float]:
        return {**dict.fromkeys(bench_storage.MEASURED, 1.0), "accept_length": lengths[setting]}

    monkeypatch.setattr(bench_storage, "_measure", measured)
    assert bench_storage.storage(["settings=bf16,int8"]) == 0
    said = capsys.readouterr().out
    assert "+0.0%" in said
    assert "+5.0%" in said
