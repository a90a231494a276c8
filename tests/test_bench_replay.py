"""`outrider bench replay`: both ways give the tokens of plain decoding; what each keeps."""

import json
from pathlib import Path

import pytest

from outrider.conf.errors import ConfigError
from outrider.launch.bench.replay import replay

SMALL = [
    "hidden=128", "layers=4", "drafts=4", "batches=2", "new_tokens=16", "repeats=1", "threads=1",
]  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3_5", "bamba"])
def test_both_ways_are_exact_and_a_state_per_row_needs_more(family: str, tmp_path: Path) -> None:
    out = tmp_path / "replay.json"
    assert replay([*SMALL, f"family={family}", f"out={out}"]) == 0
    found = json.loads(out.read_text())
    modes = {row["mode"]: row for row in found["rounds"]}
    assert modes.keys() == {"replay", "rows"}
    assert modes["rows"]["MB"] > 3 * modes["replay"]["MB"]  # six copies of the states, not one
    for row in found["decoding"]:
        assert row["exact"]
        assert row["tau"] > 2


@pytest.mark.parametrize(
    ("word", "reason"),
    [("family=llama", "no such model here"), ("hidden=200", "no multiple of 128")],
)
def test_models_that_it_does_not_have_are_refused(word: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        replay([word])
