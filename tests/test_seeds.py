"""Runs of several seeds: which are joined, and intervals over seeds and dialogues."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.conf.files import write_json
from outrider.eval.metrics import Record, bootstrap, crossed_bootstrap, summarise
from outrider.eval.report import Report, save
from outrider.eval.run_results import read_results
from outrider.eval.seeds import seed_rows
from outrider.launch.compare import compare
from outrider.models.decode.round_times import RoundTimes
from tests.test_report import SETTING


def write_run(
    folder: Path,
    seed: int,
    accepted: int,
    lr: float = 1e-3,
    first: int = 0,
    plain: bool = True,
    **setting: Any,
) -> str:
    """A run whose four answers have two rounds of half a second, with so many drafts accepted."""
    records = [
        Record(
            id=f"p{i}", dialogue=f"p{i}", category="all", tokens=2 * (accepted + 1) + 1,
            accepted=(accepted, accepted), drafted=(3, 3), steps=6,
            times=RoundTimes(draft=0.25, rounds=1.0), baseline_tokens=5,
            baseline=RoundTimes(rounds=2.0) if plain else None, room=(9, 9),
        )
        for i in range(first, first + 4)
    ]  # fmt: skip
    outputs: list[dict[str, Any]] = [
        {
            "id": one.id, "dialogue": one.dialogue, "category": one.category, "prompt": "",
            "prompt_ids": [1], "output_ids": [1] * one.tokens, "accepted": one.accepted,
            "drafted": one.drafted, "room": one.room, "steps": one.steps,
            "seconds": asdict(one.times), "baseline_ids": [1] * 5,
            "baseline_seconds": None if one.baseline is None else asdict(one.baseline),
        }
        for one in records
    ]  # fmt: skip
    summary = summarise(records, depth=3)
    measured = Report(summary, {}, True, [], None, SETTING | setting, outputs)
    save(measured, folder / "eval", "chain")
    settings = {"run": {"seed": seed, "dir": str(folder)}, "train": {"lr": lr}}
    write_json(folder / "manifest.json", {"config": settings})
    write_json(folder / "training.json", {"parameters": 2e6})
    return str(folder)


def rows_of(*folders: str) -> list[Any]:
    return seed_rows([read_results(Path(folder)) for folder in folders])


def test_equal_settings_are_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / f"s{seed}", seed, accepted=seed + 1) for seed in range(3)]
    (row,) = rows_of(*runs)
    assert (row.name, row.seeds, row.label) == ("s0", [0, 1, 2], "chain@0")
    assert (row.tau, row.tau_95) == (3.0, (2.0, 4.0))  # rounds of 2, 3 and 4 tokens
    # plain: 4 tokens in 2 seconds; drafted: 4, 6 and 8 tokens in one
    assert (row.speedup, row.speedup_95) == (3.0, (2.0, 4.0))
    assert row.draft == pytest.approx(125.0)
    assert row.parameters == 2e6
    assert compare([*runs, f"to={tmp_path}"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "over the seeds" in shown
    assert "over the seeds" in (tmp_path / "report.md").read_text()
    assert "s0 0, 1, 2 chain@0 3.00 2.00-4.00 3.00x 2.00-4.00 125.0 2.00" in shown


def test_other_settings_seeds_or_dialogues_are_not_joined(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", 0, 1)
    assert rows_of(run) == []
    assert rows_of(run, write_run(tmp_path / "rate", 1, 1, lr=2e-3)) == []
    assert rows_of(run, write_run(tmp_path / "again", 0, 1)) == []
    assert rows_of(run, write_run(tmp_path / "deeper", 1, 1, depth=5)) == []
    assert rows_of(run, write_run(tmp_path / "warm", 1, 1, temperature=1.0)) == []
    assert rows_of(run, write_run(tmp_path / "longer", 1, 1, max_new_tokens=9)) == []
    assert rows_of(run, write_run(tmp_path / "text", 1, 1, first=1)) == []
    assert rows_of(run, write_run(tmp_path / "text-seed", "1", 1)) == []  # type: ignore[arg-type]
    strange = write_run(tmp_path / "strange", 1, 1)
    outputs = tmp_path / "strange" / "eval" / "chain.outputs.jsonl"
    outputs.write_text(outputs.read_text().replace('"draft":', '"coffee":'))
    assert rows_of(run, strange) == []
    other = write_run(tmp_path / "b", 1, 1)
    assert len(rows_of(run, other)) == 1
    (tmp_path / "b" / "eval" / "chain.outputs.jsonl").unlink()
    assert rows_of(run, other) == []


def test_without_a_baseline_there_is_tau_alone(tmp_path: Path) -> None:
    (row,) = rows_of(*(write_run(tmp_path / f"{i}", i, 1, plain=False) for i in range(2)))
    assert (row.tau, row.speedup, row.speedup_95) == (2.0, None, None)


def test_times_of_other_machines_have_no_speedup(tmp_path: Path) -> None:
    (row,) = rows_of(*(write_run(tmp_path / f"{i}", i, 1, threads=i + 1) for i in range(2)))
    assert (row.tau, row.speedup) == (2.0, None)


def test_a_repeated_seed_counts_once(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, seed, 1) for name, seed in (("a", 0), ("b", 1), ("c", 1))]
    (row,) = rows_of(*runs)
    assert row.seeds == [0, 1]


def test_equal_seeds_have_the_interval_of_the_dialogues() -> None:
    terms = np.random.default_rng(0).uniform(1, 5, (12, 2))
    expected = bootstrap(terms, range(12), 0)
    found = crossed_bootstrap(np.stack([terms] * 3), 0)
    assert expected is not None
    assert found == pytest.approx(expected, rel=0.02)


def test_seeds_widen_the_interval() -> None:
    """Dialogues that agree leave the seeds: of two, each is drawn twice in a quarter of cases."""
    one, two = np.full((5, 2), [1.0, 2.0]), np.full((5, 2), [4.0, 2.0])
    assert crossed_bootstrap(np.stack([one, two]), 0) == (0.5, 2.0)
    assert bootstrap(one + two, range(5), 0) == (1.25, 1.25)


def test_one_seed_or_one_dialogue_has_no_interval() -> None:
    assert crossed_bootstrap(np.ones((1, 5, 2)), 0) is None
    assert crossed_bootstrap(np.ones((5, 1, 2)), 0) is None
    assert crossed_bootstrap(np.zeros((2, 2, 2)), 0) is None
