"""`outrider bench soak`: the schedule of faults, and a run with faults equals one without."""

import json
from pathlib import Path

import pytest

from outrider.conf.errors import ConfigError
from outrider.launch.bench.soak import FAULTS, Options, _schedule, soak


def test_schedule_has_all_faults_equally_often() -> None:
    names = _schedule(Options(faults=20))
    assert len(names) == 20
    assert {names.count(name) for name in FAULTS} <= {2, 3}
    assert names == _schedule(Options(faults=20))
    assert names != _schedule(Options(faults=20, seed=1))


@pytest.mark.parametrize("word", ["fault=3", "faults=0", "faults=many"])
def test_invalid_options_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="fault"):
        soak([word])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_with_faults_is_bit_equal(tmp_path: Path) -> None:
    """Two ranks and four faults; the default is twenty faults."""
    out = tmp_path / "soak.json"
    assert soak(["faults=4", f"dir={tmp_path / 'runs'}", f"out={out}"]) == 0
    result = json.loads(out.read_text())
    assert result["weights_equal"]
    assert result["log_equal"]
    assert len(result["faults"]) == 4
