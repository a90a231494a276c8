"""`outrider bench drafting` on the embedded target: its rows, and what counts as attention."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.launch.bench import common, drafting
from outrider.launch.cli import main
from outrider.models.cache.layer_rows import LayerRows
from tests import tiny


def test_every_drafter_and_context_has_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    depths = {"eagle3": 7, "ngram": 7, "sparse_kv": 7, "lookahead": 4}  # its n-grams end there
    names, out = tuple(depths), tmp_path / "out.json"
    words = [
        f"drafters={','.join(names)}",
        "contexts=40,80",
        "rounds=2",
        "depth=7",
        "draft_vocab=64",
    ]
    assert main(["bench", "drafting", *words, f"out={out}"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["drafter"], row["context"]) for row in rows] == [
        (name, context) for name in names for context in (40, 80)
    ]
    assert {row["drafter"]: row["depth"] for row in rows} == depths
    for row in rows:
        assert row["draft"] == pytest.approx(row["attention"] + row["rest"])
        assert row["target"] > 0
        assert (row["attention"] > 0) == (row["drafter"] in ("eagle3", "sparse_kv"))
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)


def test_a_draft_vocabulary_is_the_first_tokens() -> None:
    target = tiny.target()
    assert len(common.default_drafter("eagle3", target).vocab) == target.vocab_size
    assert len(common.default_drafter("eagle3", target, 50).vocab) == 50


def test_attention_of_the_drafter_alone_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention that takes 20 ms longer, inside and outside of a draft."""
    attend = LayerRows.attend

    def slow(*args: Any) -> Tensor:
        time.sleep(0.02)
        return attend(*args)

    monkeypatch.setattr(LayerRows, "attend", slow)
    target = tiny.target()
    drafter = tiny.drafter("eagle3", target).eval()
    target.set_taps(drafter.taps)
    rows = tiny.verified_rows(tiny.packed_trace(target), 0, 0, 6)
    with torch.no_grad(), drafting.timed_attention(drafter, target.device) as seconds:
        drafter.absorb_batch([None], [rows])
        assert len(seconds) == 1
        assert sum(seconds) >= 0.02
        _rows().attend(torch.zeros(1, 1, 2), None)
    assert len(seconds) == 1  # outside of a draft


def _rows() -> LayerRows:
    row = torch.zeros(1, 1, 2)
    return LayerRows.empty_like(row, row).append(row, row)


def test_an_unknown_drafter_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "drafting", "drafters=eagle9"])
    assert "drafters[0] = 'eagle9'" in capsys.readouterr().err
