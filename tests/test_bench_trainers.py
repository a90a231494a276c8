"""`outrider bench trainers`: the recipes, what speculators is given, and the ratios."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_from_disk
from safetensors.torch import load_file

from outrider.conf.errors import ConfigError
from outrider.data.tokenise import Document
from outrider.launch.bench import speculators_data, trainers
from outrider.launch.bench.trainers import Options, contenders, summarise
from tests import tiny


def test_speculators_runs_at_every_rate_with_and_without_its_norm() -> None:
    ours, *theirs = contenders(Options(rates=(1e-3, 1e-2)))
    assert ours.name == "outrider"
    assert [one.words for one in theirs] == [
        ("--lr", "0.001", "--norm-before-fc"),
        ("--lr", "0.001", "--no-norm-before-fc"),
        ("--lr", "0.01", "--norm-before-fc"),
        ("--lr", "0.01", "--no-norm-before-fc"),
    ]


def test_ratio_is_of_sums_and_its_interval_is_paired() -> None:
    """Every dialogue has 3 tokens per round here and 2 there: 1.5 times as many, without spread."""
    key = "chain 4, T=0"
    ours = {f"d{i}": [3.0 * i, float(i)] for i in range(1, 9)}
    theirs = {name: [2.0 * rounds, rounds] for name, (_, rounds) in ours.items()}
    results: dict[str, Any] = {
        "outrider": {
            "decoded": {key: ours}, "taus": {key: [3.0]},
            "seconds": [5.0, 7.0, 30.0], "mib": [300.0, 310.0, 320.0],
        },
        "speculators": {
            "decoded": {key: theirs}, "taus": {key: [2.0]},
            "seconds": [10.0, 7.0, 40.0], "mib": [600.0, 620.0, 640.0],
        },
    }  # fmt: skip
    rows = summarise(results)
    assert rows["outrider"]["seconds"]["median"] == 7.0
    assert rows["speculators"]["seconds"]["ratio"] == 0.75, "the median of .5, .75 and 1"
    assert rows["speculators"]["mib"]["ratio"] == 0.5
    assert rows["outrider"][key]["ratio_95"] is None
    row = rows["speculators"][key]
    assert (row["tau"], row["seeds"], row["ratio"]) == (2.0, [2.0], 1.5)
    assert row["ratio_95"] == pytest.approx((1.5, 1.5))


def test_trainings_take_turns_and_finished_ones_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = list[str]()

    def train(contender: Any, options: Any, run: Path, seed: int, python: str) -> None:
        order.append(f"{contender.trainer} {seed}")
        subprocess.run([sys.executable, "-c", "import time; time.sleep(0.3)"], check=True)

    monkeypatch.setattr(trainers, "_train_ours", train)
    monkeypatch.setattr(trainers, "_train_theirs", train)
    monkeypatch.setattr(trainers, "_write_data", lambda options: None)
    monkeypatch.setattr(trainers, "_decode", lambda *_: {"d1": (6.0, 2.0), "d2": (4.0, 2.0)})
    python = _python(tmp_path, has_speculators=True)
    words = [f"python={python}", f"folder={tmp_path / 'runs'}", "rates=1e-2", "norms=false"]
    out = tmp_path / "out.json"
    assert trainers.trainers([*words, "seeds=0,1", f"out={out}"]) == 0
    assert order == ["outrider 0", "speculators 0", "outrider 1", "speculators 1"]
    rows = json.loads(out.read_text())["rows"]
    assert all(
        row["mib"]["median"] > 2 and len(row["seconds"]["seeds"]) == 2 for row in rows.values()
    )
    assert trainers.trainers([*words, "seeds=0,1"]) == 0
    assert len(order) == 4
    interrupted = tmp_path / "runs" / "outrider-seed-1"
    (interrupted / trainers.COST).rename(interrupted / "checkpoint")
    assert trainers.trainers([*words, "seeds=0,1"]) == 0
    assert order[4:] == ["outrider 1"]
    assert [path.name for path in interrupted.iterdir()] == [trainers.COST], "begun anew"


def test_layers_and_the_state_before_the_final_norm_are_written(tmp_path: Path) -> None:
    """Training conversations first; the head on the last normed state gives the target's logits."""
    target = tiny.target()
    target.set_taps((0,))
    train = [
        Document.of([5, 6, 7, 8], [False, True, True, True], "a"),
        Document.of([3, 4], [False, True], "b"),
    ]
    held = [Document.of([9, 8, 7], [False, True, True], "c")]
    speculators_data.write(tmp_path / "data", train, held, target, (1, 2))
    table = load_from_disk(str(tmp_path / "data"))
    split = json.loads((tmp_path / "data" / speculators_data.SPLIT).read_text())
    assert [row["input_ids"].tolist() for row in table] == [[5, 6, 7, 8], [3, 4], [9, 8, 7]]
    assert table[0]["loss_mask"].tolist() == [0, 1, 1, 1]
    assert (split["documents"], split["tokens"], int(split["share"] * 3)) == (2, 6, 2)
    assert target.taps == (0,)
    first = load_file(tmp_path / "data" / "hidden_states" / "hs_0.safetensors")
    ids, states = first["token_ids"], first["hidden_states"]
    assert states.shape == (4, 3, target.shape().hidden)
    last = target.final_norm(states[None, :, -1])
    expected = target.model(ids[None]).logits
    torch.testing.assert_close(target.logits(last), expected, atol=1e-4, rtol=1e-4)


def _python(folder: Path, has_speculators: bool) -> Path:
    """Write a program that ends as the question for the package does."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\nexit {int(not has_speculators)}\n")
    python.chmod(0o755)
    return python


@pytest.mark.parametrize("exists", [False, True])
def test_a_missing_environment_is_named_before_anything_runs(exists: bool, tmp_path: Path) -> None:
    python = _python(tmp_path, has_speculators=False) if exists else tmp_path / "python"
    with pytest.raises(ConfigError, match="make engines ENGINES=speculators"):
        trainers.trainers([f"python={python}", f"folder={tmp_path / 'runs'}"])
    assert not (tmp_path / "runs").exists()
