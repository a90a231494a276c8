"""`outrider bench train-step`: all paths compute the same thing; the table; the options."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from outrider.conf.console import Console
from outrider.conf.errors import ConfigError
from outrider.launch.bench.train_step import Options, build_case, compare_paths, train_step

SMALL = Options(
    hidden=32, intermediate=48, heads=4, kv_heads=2, vocab=300, draft_vocab=100, rows=2, length=24,
    repeats=2, depths=(2,), precision=("fp32",),
)  # fmt: skip


@pytest.mark.parametrize("path_name", ["fast", "recorded"])
@pytest.mark.parametrize("drafter", ["eagle3", "dspark", "p_eagle"])
def test_paths_agree_in_loss_and_gradient(
    path_name: Literal["fast", "recorded"], drafter: str
) -> None:
    results = []
    for path in (path_name, "reference"):
        case = build_case(SMALL, 2, "fp32", path, drafter)
        loss, _ = case.objective(case.trace, torch.ones(2))
        loss.backward()
        gradients = [p.grad for p in case.objective.parameters()]
        grads = torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])
        results.append((loss.detach(), grads))
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["eagle3", "dflash", "dspark", "p_eagle"])
def test_half_of_the_rows_are_trained_at_every_depth(name: str) -> None:
    case = build_case(SMALL, 2, "fp32", "fast", name)
    drafter, trace = case.objective.drafter, case.trace
    trained = [int(drafter.trained_mask(trace, depth).sum()) for depth in (1, 2)]
    # a block needs an anchor with a supervised guess of depth 1
    assert trained == [2 * 12, 2 * (12 if name == "eagle3" else 11)]


def test_the_number_of_layers_is_an_option() -> None:
    drafter = build_case(replace(SMALL, layers=3), 2, "fp32", "fast", "dspark").objective.drafter
    assert len(drafter.get_submodule("layers")._modules) == 3


@pytest.mark.slow
def test_result_is_written_with_the_machine(tmp_path: Path) -> None:
    console = Console(record=True, width=120)
    assert compare_paths(replace(SMALL, out=str(tmp_path / "out.json")), console) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert [row["path"] for row in result["results"]] == ["recorded", "fast", "reference"]
    assert all(row["seconds"] > 0 and row["peak_mb"] >= 0 for row in result["results"])
    assert torch.__version__ in console.export_text()


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("coffee=1", "no such key"),
        ("rows=four", "whole number"),
        ("depths=3,x", "whole number"),
        ("precision=fp8", "fp8"),
        ("paths=fast,slow", "slow"),
        ("drafters=ngram", "no such drafter with a training step"),
    ],
)
def test_invalid_options_are_refused(word: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        train_step([word])
