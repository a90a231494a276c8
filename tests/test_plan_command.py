"""`outrider plan`, `bench rounds` and `bench batch` on a run folder."""

import dataclasses
import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.command_settings import PlanConfig
from outrider.conf.compose import compose, verb_group
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.schema import Config, to_yaml
from outrider.eval import run as eval_run
from outrider.eval.open_drafter import load_run_models
from outrider.eval.plan import command
from outrider.eval.plan.show import Check
from outrider.eval.plan.surface import surface
from outrider.eval.run import evaluate
from outrider.launch.bench import batch, rounds
from outrider.launch.compare import compare
from outrider.models import drafters
from outrider.models.decode.acceptance import AcceptanceTable
from outrider.models.decode.auto.policy import Auto
from outrider.models.decode.costs.cost_table import FILE
from outrider.models.decode.costs.forward_times import measure_forwards
from outrider.models.decode.costs.round_costs import Grid, MeasuredTimes
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.decode.request import Output, Request
from outrider.models.decode.round_times import RoundTimes
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.formats import native
from outrider.models.target.load import load_target
from outrider.train.settings import parse
from tests import tiny
from tests.families import small_model
from tests.test_eval_run import SUITE, VOCAB, configured, tokenizer, workspace  # noqa: F401 - a fixture
from tests.test_plan_surface import TABLE, TAU, FakeTimes

SMALL = [
    "plan.depths=[1,2,9]", "plan.widths=[1,2]", "plan.nodes=[2,3,4,5]", "plan.batches=[1,2]",
    "plan.contexts=[8,24]", "plan.prompts=2", "plan.new_tokens=8", "plan.repeats=1", "plan.check=2",
]  # fmt: skip
LARGE = [
    "plan.machine=h100", "plan.target_params=8", "plan.target_layers=32", "plan.target_width=4096",
    "plan.target_kv_width=1024", "plan.drafter_params=0.4",
]  # fmt: skip


@pytest.fixture
def run(workspace: Path) -> Config:  # noqa: F811
    """The run, without cost tables, and with prompts that its small target can read."""
    (workspace / "run" / FILE).unlink(missing_ok=True)
    config = configured(workspace)
    written = parse(compose([
        "target=hf", f"target.path={workspace / 'target'}", "target.dtype=float32",
        f"run.dir={workspace / 'run'}", f"eval.prompts={workspace / 'suite.jsonl'}",
    ], "train"))  # fmt: skip
    (workspace / "run" / "config.yaml").write_text(to_yaml(written))
    return config


def planned(run: Config, *words: str) -> dict[str, object]:
    assert command.plan(run, verb_group(PlanConfig, "plan", [*SMALL, *words])[0]) == 0
    content: dict[str, object] = json.loads((Path(run.run.dir) / "plan" / "plan.json").read_text())
    return content


def test_plan_is_checked_by_decoding(run: Config, capsys: pytest.CaptureFixture[str]) -> None:
    content = planned(run)
    printed = capsys.readouterr().out
    assert "depths [9] left out" in printed
    assert "Checked by decoding 2 other settings" in printed
    assert "Trees are static" not in printed  # assumptions: --explain
    checks = content["checks"]
    assert isinstance(checks, list)
    # all others calibrate the prediction
    free = [("tree 2x2, 4 nodes", 2), ("tree 2x2, 4 nodes", 1)]
    assert [(check["shape"], check["batch"]) for check in checks] == free
    for check in checks:
        assert check["error"] == pytest.approx(check["speedup_predicted"] / check["speedup"] - 1)
        assert check["tau"] >= 1
    decoded = content["times"]["decoded"]  # type: ignore[index]
    assert {batch: len(rounds) for batch, rounds in decoded.items()} == {"1": 6, "2": 6}


def costs_of(run: Config, slots: int, rows: int) -> tuple[MeasuredTimes, list[str]]:
    """Return the times that decode=auto uses in the run, and its notes on them."""
    loaded, drafter = load_run_models(run)
    auto = Auto(file=Path(run.run.dir) / FILE)
    auto.wrap(drafter, loaded.target)
    auto.prepare(loaded.target, slots, rows)
    assert auto.controller is not None
    return auto.controller.costs.times, auto.notes


def test_automatic_drafts_decide_with_the_times_of_a_plan(
    run: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(run, "plan.contexts=[8,64]")
    printed = " ".join(capsys.readouterr().out.split())
    assert "decode=auto decides with these times, up to 128 tokens." in printed
    times, notes = costs_of(run, 2, 64)
    assert notes == []
    assert times.target.axes["context"] == (8, 64)


@pytest.mark.parametrize("word", ["plan.contexts=[8,24]", "plan.contexts=[64]", "plan.batches=[2]"])
def test_automatic_drafts_do_not_decide_with_other_times(
    run: Config, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    """Texts of 128 tokens need two contexts, the longer one of 64 or more, and single requests."""
    planned(run, "plan.contexts=[8,64]", word)
    assert "decode=auto" not in capsys.readouterr().out
    _, (note,) = costs_of(run, 1, 64)
    assert "kept in" in note


def test_a_plan_keeps_the_times_of_other_settings(run: Config) -> None:
    before, _ = costs_of(run, 3, 64)
    planned(run, "plan.contexts=[8,64]")
    assert costs_of(run, 2, 64)[0].target.axes["context"] == (8, 64)
    after, notes = costs_of(run, 3, 64)
    assert (notes, after.target) == ([], before.target)


def test_a_plan_times_no_row_beyond_the_positions(
    run: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 128, of which a plan leaves its deepest draft and 8; decode=auto has trees of 31 nodes."""
    tokens = list[int]()
    longest = 128 - 9 - 8

    def counted(target: Any, drafter: Any, name: str, counts: list[int], *of: Any) -> Any:
        tokens.extend(counts)
        return measure_forwards(target, drafter, name, counts, *of)

    monkeypatch.setattr("outrider.eval.plan.command.measure_forwards", counted)
    planned(run, f"plan.contexts=[8,{longest}]", "plan.batches=[1]")
    assert 9 <= max(tokens) <= 128 - longest


def test_a_plan_for_recurrent_layers_has_chains_alone(tmp_path: Path) -> None:
    """Their rounds are decoded and timed with the rows that are read again."""
    small_model("lfm2", vocab_size=VOCAB).save_pretrained(tmp_path / "target")
    tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "suite.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUITE))
    run = parse(compose([
        "target=hf", f"target.path={tmp_path / 'target'}", "target.dtype=float32",
        f"run.dir={tmp_path / 'run'}", f"eval.prompts={tmp_path / 'suite.jsonl'}",
    ], "train"))  # fmt: skip
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(run))
    target = load_target(run.target).target
    drafter = drafters.build(run.drafter, target, DraftVocab.identity(VOCAB))
    native.save(drafter, tmp_path / "run" / "drafter", target, run.drafter, {})
    content = planned(run)
    rows = content["rows"]
    assert isinstance(rows, list)
    assert {(row["depth"], row["nodes"]) for row in rows} == {(0, 0), (1, 1), (2, 2)}


def test_no_check_if_all_shapes_calibrate(run: Config, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(run, "plan.nodes=[3]")["checks"] == []
    assert "used to calibrate" in capsys.readouterr().out


def test_runs_with_a_plan_can_be_compared(run: Config, capsys: pytest.CaptureFixture[str]) -> None:
    planned(run, "plan.check=0")
    evaluate(run)
    assert compare([run.run.dir]) == 0
    assert "chain@0" in capsys.readouterr().out


def test_other_machines_and_models_are_predicted(
    run: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    own, other = planned(run, "plan.machine=h100"), planned(run, *LARGE)
    assert own["times"]["target"]["parameters"] < 1e6  # type: ignore[index]
    assert other["times"]["target"]["parameters"] == 8e9  # type: ignore[index]
    assert other["times"]["target"]["kv"] == 2 * 1024 * 32 * 2  # type: ignore[index]
    assert other["checks"] == []
    short = planned(run, *LARGE, "plan.contexts=[1024]", "plan.budget=16")
    assert short["times"]["budget"] == 16  # type: ignore[index]
    assert "H100" in capsys.readouterr().out
    assert own["warnings"] == []
    assert not any("Acceptance is that of" in text for text in own["assumptions"])  # type: ignore[attr-defined]
    assert any("Acceptance is that of" in text for text in other["assumptions"])  # type: ignore[attr-defined]
    words = ("plan.machine=rtx4090", "plan.target_params=70", "plan.batches=[1,4]", "plan.fixed=0")
    tight = planned(run, *LARGE, *words)
    assert tight["times"]["machine"]["fixed"] == 0  # type: ignore[index]
    warnings: list[str] = tight["warnings"]  # type: ignore[assignment]
    assert [text[:20] for text in warnings] == ["Batch 1 with 8 token", "Batch 1 with 24 toke"]
    assert "RTX 4090 has 24 GB" in capsys.readouterr().out.replace("\n", " ")
    faster = planned(run, *LARGE, *words, "plan.bandwidth=1.1")  # another rate, the same memory
    assert len(faster["warnings"]) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["depths", "batches", "contexts"])
def test_empty_list_raises(run: Config, name: str) -> None:
    with pytest.raises(ConfigError, match="The list is empty"):
        planned(run, f"plan.{name}=[]")


def test_incomplete_model_or_machine_raises(run: Config) -> None:
    with pytest.raises(ConfigError, match="need all of"):
        planned(run, "plan.machine=h100", "plan.target_params=8")
    with pytest.raises(ConfigError, match="needs both"):
        planned(run, "plan.bandwidth=2")
    with pytest.raises(ConfigError, match="measured here"):
        planned(run, "plan.fixed=20")
    for words in (LARGE[1:], ["plan.budget=16"]):
        with pytest.raises(ConfigError, match="only for a given machine"):
            planned(run, *words)


def test_relative_error_of_a_check() -> None:
    (row,) = (row for row in surface(TABLE, TAU, FakeTimes(), Grid([1])) if row.depth)
    assert Check(row, tau=1.5, speedup=row.speedup / 1.1).error == pytest.approx(0.1)


def test_unfinished_run_raises(run: Config, tmp_path: Path) -> None:
    empty = dataclasses.replace(run, run=dataclasses.replace(run.run, dir=str(tmp_path)))
    with pytest.raises(RunError, match="not finished"):
        command.plan(empty, PlanConfig())


# ---- benches -------------------------------------------------------------------------------------


GREEDY, USUAL, COUPLED = ("greedy",) * 3, ("ratio", "match", "match"), ("coupled",) * 3


def test_bench_rounds_parts_sum_to_the_round(run: Config, tmp_path: Path) -> None:
    out = tmp_path / "rounds.json"
    words = [f"run.dir={run.run.dir}", "limit=3", "tokens=6", "repeats=1", f"out={out}"]
    assert rounds.rounds(words) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["temperature"], row["shape"], row["rule"]) for row in rows] == [
        (heat, shape, rule)
        for heat, rules in ((0, GREEDY), (1, USUAL), (1, COUPLED))
        for shape, rule in zip(rounds.SHAPES, rules, strict=True)
    ]
    for row in rows:
        parts = sum(row[part] for part in (*rounds.PARTS, "other"))
        assert parts == pytest.approx(row["round"])
        assert 0 < row["overhead"] < 1


def test_bench_rounds_without_a_round_raises(run: Config) -> None:
    """The only token is emitted by the prefill."""
    with pytest.raises(RunError, match="ended with its first token"):
        rounds.rounds([f"run.dir={run.run.dir}", "limit=2", "tokens=1", "repeats=1"])


def measured(run: Config, tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    """Return the rows of `bench batch`."""
    out = tmp_path / "batch.json"
    words = (f"run.dir={run.run.dir}", "limit=3", "tokens=6", "repeats=1", f"out={out}", *words)
    assert batch.batch([*words]) == 0
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


def test_bench_batch_equals_single_prompts_in_every_shape(run: Config, tmp_path: Path) -> None:
    """Prompts repeat, so that ended requests of a batch are replaced."""
    rows = measured(run, tmp_path, "batches=1,3,4")
    assert sorted(row["batch"] for row in rows) == [1, 3, 4]
    shapes = len(batch.FIXED) + 1
    requests = {1: 3, 3: 12, 4: 16}
    assert all(row["same"] == row["answers"] == requests[row["batch"]] * shapes for row in rows)
    for row in rows:
        fixed = {batch.PLAIN: 1.0, **row["speedup"]}
        auto = fixed.pop(batch.AUTO)
        assert row["best x"] == max(fixed.values()) == fixed[row["best"]]
        assert row["auto x"] == auto
        assert row["auto of best"] == pytest.approx(auto / row["best x"])  # of one repetition
        assert row["auto of chosen"] == row["auto of best"]
    assert [row["auto of best"] for row in rows] == sorted(row["auto of best"] for row in rows)


def test_a_repetition_is_compared_with_the_best_shape_of_the_others() -> None:
    """Fixed shapes that are equal but for chance: the best of each repetition is not the choice."""
    fixed = {"plain": [10.0, 10.0, 10.0], "a": [12.0, 11.0, 9.0], "b": [9.0, 12.0, 13.0]}
    speeds = batch.Speeds({**fixed, "auto": [11.0, 11.0, 11.0]})
    # without the first turn b is the best (1.25), without the second b, without the third a
    assert speeds.of_chosen("auto") == sorted([11 / 9, 11 / 12, 11 / 9])[1]
    assert speeds.best() == "b"


def test_bench_batch_with_some_fixed_shapes(run: Config, tmp_path: Path) -> None:
    (row,) = measured(run, tmp_path, "batches=1", "shapes=chain of 2")
    assert {*row["speedup"]} == {"chain of 2", batch.AUTO}
    with pytest.raises(ConfigError, match="No shape has this name"):
        measured(run, tmp_path, "batches=1", "shapes=chain of 9")


@pytest.mark.parametrize("weights", ["random", "foreign", "changing"])
def test_bench_batch_with_drafts_that_are_rejected(
    run: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    before = (Path(run.run.dir) / "costs.json").exists()
    (row,) = measured(run, tmp_path, "batches=2", "shapes=chain of 2", f"weights={weights}")
    assert row["same"] == row["answers"]
    assert (Path(run.run.dir) / "costs.json").exists() == before


def test_bench_batch_keeps_the_settings_measured_before_it_is_interrupted(
    run: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = batch._measure

    def interrupted(of: Any, setting: batch.Setting, *args: Any) -> Any:
        if setting.batch == 2:
            raise KeyboardInterrupt
        return real(of, setting, *args)

    monkeypatch.setattr(batch, "_measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measured(run, tmp_path, "batches=1,2", "shapes=chain of 2")
    (row,) = json.loads((tmp_path / "batch.json").read_text())["rows"]
    assert row["batch"] == 1


def test_bench_batch_by_kind_context_and_temperature(run: Config, tmp_path: Path) -> None:
    words = "temperatures=0,1", "contexts=0,16", "batches=2", "per_slot=1"
    rows = measured(run, tmp_path, *words)
    found = {(row["temperature"], row["context"]) for row in rows}
    assert found == {(0, 0), (0, 16), (1, 0), (1, 16)}
    assert all(("same" in row) == (row["temperature"] == 0) for row in rows)


def test_after_other_prompts_answers_do_not_end(
    run: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token is an end token here."""
    monkeypatch.setattr(rounds, "stop_ids", lambda tokenizer, target: range(target.vocab_size))
    with pytest.raises(RunError, match="first token"):
        measured(run, tmp_path, "batches=1", "shapes=chain of 2")
    (row,) = measured(run, tmp_path, "contexts=16", "batches=1", "shapes=chain of 2")
    assert row["same"] == row["answers"] > 0


def test_the_time_in_which_the_drafter_reads_prompts_counts() -> None:
    """A drafter of decode=auto reads them in a round, others before the first."""
    before = Output([1, 2, 3, 4], times=RoundTimes(prefill=5.0, prompt=0.5, rounds=1.0))
    within = Output([1, 2, 3, 4], times=RoundTimes(prefill=4.5, rounds=1.5))
    for out in before, within:
        out.accepted.append(2)
        assert rounds.tokens_per_second([out]) == 2
    target = tiny.target()
    engine = Engine(target, tiny.drafter("eagle3", target), Chain(2))
    times = engine.generate([1, 2, 3, 4], 4).times
    assert 0 < times.prompt < times.prefill


def test_context_puts_other_prompts_before_a_prompt() -> None:
    requests = {"all": [Request([1, 2, 3], 4), Request([5], 4)]}
    found = batch.with_context(requests, batch.Setting("all", 6, 0.0, 1))
    assert [one.prompt for one in found] == [[1, 2, 3, 1, 2, 3], [1, 2, 3, 5, 1, 5]]
    alone = batch.with_context(requests, batch.Setting("all", 2, 0.0, 1))
    assert [one.prompt for one in alone] == [[1, 2, 3], [1, 5]]


def test_commands_exempt_what_they_have_loaded_from_garbage_collection(
    run: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is measured."""
    exempted = list[str]()
    for module in (rounds, command, eval_run):
        monkeypatch.setattr(module, "exempt_objects", partial(exempted.append, module.__name__))
    measured(run, tmp_path, "batches=1")
    evaluate(run)
    assert exempted == [rounds.__name__, eval_run.__name__]


def test_bench_batch_of_an_unknown_kind_raises(run: Config) -> None:
    with pytest.raises(ConfigError, match=r"No prompt has this category\.\s+Use all, copying, or"):
        batch.batch([f"run.dir={run.run.dir}", "kinds=poetry"])


def test_bench_batch_decodes_as_eval(run: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the acceptance and the costs beside the run, but for impaired drafters."""
    tables = {name: AcceptanceTable(TABLE) for name in ("best@0", "drawn@1")}
    monkeypatch.setattr(batch, "tables_for", lambda config: tables)
    words = [f"run.dir={run.run.dir}", "limit=1"]
    for weights, temperature in product(("trained", "random"), (0.0, 1.0)):
        loaded = rounds.LoadedRun([*words, f"weights={weights}"], batch.Options)
        auto = batch.automatic_drafts(loaded, temperature)
        assert isinstance(auto, Auto)
        if weights == "trained":
            assert auto.table is tables["drawn@1" if temperature else "best@0"]
            assert auto.file == loaded.folder / "costs.json"
        else:
            assert (auto.table, auto.file) == (None, None)


def test_bench_batch_without_auto() -> None:
    """An early exit takes part in every round."""
    target = tiny.target()
    early = tiny.drafter("layerskip", target, exit_layer=1)
    shapes = batch.shapes_of(target, early, None)
    assert [*shapes] == [batch.PLAIN, *batch.FIXED]
    assert batch.AUTO in batch.shapes_of(target, tiny.drafter("eagle3", target), Auto())
    row = {"kind": "all", "context": 0, "temperature": 0.0, "batch": 1, "plain/s": 9.0}
    table = batch.table_of([{**row, "best": "plain", "best x": 1.0, "same": 1, "answers": 1}])
    last = [next(iter(column.cells)) for column in table.columns[-5:]]
    assert last == ["-", "-", "-", "-", "1/1"]
