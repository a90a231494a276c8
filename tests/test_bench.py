"""The benchmark measures paths that compute the same thing."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from outrider.conf.errors import ConfigError
from outrider.launch.bench import train_step as bench

SMALL = {
    **bench.SIZES, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "vocab": 300,
    "draft_vocab": 100, "rows": 2, "length": 24, "repeats": 2, "depths": "2", "precision": "fp32",
}  # fmt: skip


@pytest.mark.parametrize("quick", ["fast", "noted"])
def test_all_paths_have_one_loss_and_one_gradient(quick: str) -> None:
    found = []
    for path in (quick, "reference"):
        ready = bench.case(SMALL, 2, "fp32", path)
        divide = torch.ones(2)
        loss, _ = ready.objective(ready.trace, divide)
        loss.backward()
        slopes = [p.grad for p in ready.objective.parameters()]
        grads = torch.cat([slope.flatten() for slope in slopes if slope is not None])
        found.append((loss.detach(), grads))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)


def test_half_of_the_rows_are_supervised_as_the_table_says() -> None:
    trace = bench.case(SMALL, 2, "fp32", "fast").trace
    assert trace.counts(1).sum().item() == 2 * 12


@pytest.mark.slow
def test_the_table_is_written_with_its_machine(tmp_path: Path) -> None:
    console = Console(record=True, width=120)
    assert bench.train_step({**SMALL, "out": str(tmp_path / "out.json")}, console) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert [row["path"] for row in written["results"]] == list(bench.CHOICES["paths"])
    assert all(row["seconds"] > 0 and row["peak_mb"] >= 0 for row in written["results"])
    assert torch.__version__ in console.export_text()


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("coffee=1", "no such option"),
        ("rows=four", "whole number"),
        ("depths=3,x", "whole number"),
        ("precision=fp8", "There is no fp8"),
        ("paths=fast,slow", "There is no slow"),
    ],
)
def test_options_that_mean_nothing_are_refused(word: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        bench.main([word])
