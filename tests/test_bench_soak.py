"""The soak: every fault comes its turn, and a run that was hurt is the run that was not."""

import json
from pathlib import Path

import pytest

from outrider.conf.errors import ConfigError
from outrider.launch.bench.soak import FAULTS, Options, _schedule, soak


def test_every_fault_comes_as_often_as_the_others() -> None:
    names = _schedule(Options(faults=20))
    assert len(names) == 20
    assert {names.count(name) for name in FAULTS} <= {2, 3}
    assert names == _schedule(Options(faults=20))
    assert names != _schedule(Options(faults=20, seed=1))


@pytest.mark.parametrize("word", ["fault=3", "faults=0", "faults=many"])
def test_wrong_options_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="fault"):
        soak([word])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_of_two_ranks_is_hurt_four_times_and_ends_bit_equal(tmp_path: Path) -> None:
    """`outrider bench soak` does so twenty times."""
    out = tmp_path / "soak.json"
    assert soak(["faults=4", f"dir={tmp_path / 'runs'}", f"out={out}"]) == 0
    found = json.loads(out.read_text())
    assert found["weights_equal"]
    assert found["log_equal"]
    assert len(found["faults"]) == 4
