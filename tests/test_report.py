"""Reports: tables, verdict, files, comparison of runs."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outrider.conf.errors import RunError
from outrider.conf.files import write_json
from outrider.eval.compare import decoding_label, overview, ranking, report_table, warnings
from outrider.eval.metrics import METRICS, Record, predicted_speedups, summarise
from outrider.eval.page.acceptance import acceptance_parts
from outrider.eval.page.elements import Collapsible, Figure
from outrider.eval.page.run_files import RunFiles
from outrider.eval.page.speed import speed_parts
from outrider.eval.page.training import cost_parts
from outrider.eval.report import Mismatch, Report, load, save
from outrider.eval.report_tables import explain_metrics, show, show_and_save, show_grid
from outrider.eval.run_results import all_reports, load_runs, read_results
from outrider.launch.compare import compare
from outrider.models.decode.round_times import RoundTimes

SETTING = {
    "drafter": "eagle3",
    "target": "tiny",
    "policy": "chain",
    "depth": 3,
    "width": 1,
    "nodes": 3,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "max_new_tokens": 8,
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "left_out": [],
    "fingerprints": {"target": "t", "drafter": "d", "template": "c" * 64, "prompts": "p" * 64},
}


def record(name: str, plain_seconds: float | None, accepted: tuple[int, ...] = (3, 1)) -> Record:
    """Two rounds of half a second each that emit six tokens."""
    return Record(
        id=name,
        dialogue=name,
        category=name,
        tokens=sum(accepted) + len(accepted) + 1,
        accepted=accepted,
        drafted=(3,) * len(accepted),
        steps=3 * len(accepted),
        times=RoundTimes(
            prefill=0.1, draft=0.25, target=0.5, verify=0.125, commit=0.125, rounds=1.0
        ),
        baseline_tokens=0 if plain_seconds is None else 7,
        baseline=None if plain_seconds is None else RoundTimes(prefill=0.1, rounds=plain_seconds),
    )


def report(*seconds: float | None, mismatches: tuple[Mismatch, ...] = (), **setting: Any) -> Report:
    """One prompt per plain time; speculation takes one second for each."""
    records = [record(f"p{i}", plain) for i, plain in enumerate(seconds)]
    total = summarise(records, depth=3)
    compared = None not in seconds and setting.get("temperature", 0) == 0
    return Report(
        summary=total,
        categories={r.category: summarise([r], depth=3) for r in records},
        exact=not mismatches if compared else None,
        mismatches=list(mismatches),
        theory=predicted_speedups(total, 3, chain=True),
        setting={**SETTING, **setting},
        outputs=[{"id": r.id, "prompt": "caf\u00e9", "output_ids": [1]} for r in records],
    )


def printed(result: Report, width: int = 140, in_full: bool = False) -> str:
    stream = io.StringIO()
    show(result, Console(file=stream, width=width), in_full=in_full)
    return stream.getvalue()


def test_verdict_has_speedup_tau_and_times() -> None:
    verdict = report(2.0, 2.0).verdict()
    assert verdict.startswith("2.00x (95 %: 2.00-2.00), faster: tau 3.00 at 500.0 ms per round")
    assert "333.3 ms per plain token" in verdict
    assert "all 2 answers equal plain decoding" in verdict


def test_verdict_reports_a_slowdown() -> None:
    assert "0.50x (95 %: 0.50-0.50), slower" in report(0.5, 0.5).verdict()


def test_verdict_of_an_interval_around_one() -> None:
    assert "about as fast, within noise: tau" in report(0.5, 0.5, 2.0, 2.0).verdict()


def test_one_prompt_has_no_interval_and_no_verdict() -> None:
    verdict = report(2.0).verdict()
    assert verdict.startswith("2.00x, without an interval, which needs more prompts: tau 3.00")
    assert "faster" not in verdict


def test_a_speedup_above_tau_is_called_noise() -> None:
    """Tau is 3; a plain second per token against a sixth of one is a speedup of 6."""
    noise = "is noise: a round takes at least a plain step."
    assert noise not in report(3.0, 3.0).verdict()
    assert report(6.0, 6.0).verdict().endswith(f"Speedup above tau {noise}")
    assert "Speedup above tau is noise" in " ".join(printed(report(6.0)).split())
    stream = io.StringIO()
    grid = {"a": report(9.0), "b": report(6.0), "c": report(2.0)}
    show_grid(grid, Path("run/eval"), Console(file=stream, width=140))
    text = " ".join(stream.getvalue().split())
    assert f"plain decoding. Speedup above tau {noise}" in text  # of the fastest, a
    assert f"b: Speedup above tau {noise}" in text
    assert "c: Speedup" not in text
    one_category = report(0.5, 4.0)
    assert one_category.summary.speedup == pytest.approx(2.25)
    assert one_category.verdict().endswith(f"Speedup above tau in p1 {noise}")


def test_verdict_without_baseline() -> None:
    verdict = report(None).verdict()
    assert "speedup unknown without a baseline" in verdict
    assert "plain decoding was not run" in verdict


def test_any_float32_mismatch_exceeds_rounding() -> None:
    result = report(2.0, mismatches=(Mismatch("p0", 4, 7, 9, 0.0),))
    assert result.exact is False
    assert result.exceeds_rounding
    assert "MORE THAN ROUNDING" in result.verdict()


@pytest.mark.parametrize(("gap", "broken"), [(0.125, False), (3.0, True)])
def test_bfloat16_mismatch_is_rounding_if_the_gap_is_small(gap: float, broken: bool) -> None:
    """One unit in the last place of a bfloat16 logit between 16 and 32 is 0.125."""
    result = report(2.0, 2.0, mismatches=(Mismatch("p0", 4, 7, 9, gap),), dtype="bfloat16")
    assert result.exact is False
    assert result.exceeds_rounding is broken
    assert ("rounding in bfloat16" in result.exactness()) is not broken
    assert "1 of 2 answers differ from plain decoding" in result.exactness()


def test_sampled_answers_are_not_compared() -> None:
    result = report(2.0, temperature=1.0)
    assert result.exact is None
    assert "sampled" in result.exactness()


def test_speed_table_has_every_category() -> None:
    text = printed(report(2.0, 4.0), in_full=True)
    line = {
        words[0]: words
        for words in (line.replace("\u2502", " ").split() for line in text.splitlines())
        if words
    }
    assert line["p0"][1:7] == ["1", "7", "3.00", "500.0", "333.3", "2.00x"]
    assert line["p1"][1:7] == ["1", "7", "3.00", "500.0", "666.7", "4.00x"]
    assert line["all"][1:7] == ["2", "14", "3.00", "500.0", "500.0", "3.00x"]


def test_verdict_is_printed_first_and_definitions_on_request() -> None:
    measured = report(2.0)
    text = printed(measured)
    assert " ".join(text.split()).startswith(measured.verdict())
    assert not any(metric.definition in text for metric in METRICS)
    stream = io.StringIO()
    explain_metrics(Console(file=stream, width=140))
    for metric in METRICS:
        assert metric.name in stream.getvalue()
        assert metric.definition in stream.getvalue()


def test_left_out_prompts_are_printed() -> None:
    assert "left out, longer than the target's context: p7, p9" in printed(
        report(2.0, left_out=["p7", "p9"])
    )


def test_drafts_deeper_than_training_are_printed_with_their_acceptance() -> None:
    """Two rounds of depth 3 accept 3 and 1 tokens: token 2 follows token 1 in one of them."""
    text = printed(report(2.0, trained_depths=1))
    note = "decode.depth=3 exceeds drafter.depths=1: after accepted parents, draft tokens 2 to 3"
    assert f"{note} are accepted with 0.50, 1.00; token 1 with 1.00" in text
    assert "exceeds drafter.depths" not in printed(report(2.0, trained_depths=3))
    assert "exceeds drafter.depths" not in printed(report(2.0, trained_depths=None))
    assert not report(2.0, trained_depths=1, auto={}).beyond_training()


def test_theory_table_has_measured_and_predicted_speedups() -> None:
    """Per round: 500 ms, of which 125 are verify and commit; tau x plain step = 3 x 333.3 ms."""
    text = printed(report(2.0), in_full=True)
    for name, factor in (
        ("measured", "2.00x"),
        ("from times", "2.00x"),
        ("without overhead", "2.67x"),
    ):
        assert any(name in line and factor in line for line in text.splitlines())


def test_report_files_are_complete(tmp_path: Path) -> None:
    result = report(2.0, 2.0, mismatches=(Mismatch("p0", 4, 7, 9, 0.25),), dtype="bfloat16")
    stream = io.StringIO()
    show_and_save(result, tmp_path / "eval", "quick", Console(file=stream, width=140))
    assert "quick.json" in stream.getvalue()
    content = json.loads((tmp_path / "eval" / "quick.json").read_text())
    assert content["tau"] == 3.0
    assert content["speedup"] == pytest.approx(2.0)
    assert content["ms"]["round"] == 500.0
    assert content["mismatches"][0] == {
        "id": "p0", "position": 4, "token": 7, "baseline_token": 9, "gap": 0.25,
    }  # fmt: skip
    assert set(content["categories"]) == {"p0", "p1"}
    lines = (tmp_path / "eval" / "quick.outputs.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == result.outputs
    assert (tmp_path / "eval" / "quick.png").read_bytes().startswith(b"\x89PNG")


def test_report_without_baseline_has_a_plot(tmp_path: Path) -> None:
    save(report(None), tmp_path, "alone")
    assert json.loads((tmp_path / "alone.json").read_text())["speedup"] is None
    assert (tmp_path / "alone.png").stat().st_size > 1000


def measured(folder: Path, out: str = "eval", *seconds: float, **setting: Any) -> str:
    write_json(folder / "eval" / f"{out}.json", report(*seconds, **setting).fields())
    return str(folder)


def test_compare_has_a_column_per_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = measured(tmp_path / "one", "eval", 2.0)
    two = measured(tmp_path / "two", "eval", 4.0)
    assert compare([one, two], explain=True) == 0
    text = capsys.readouterr().out
    full = text[text.index("reports side by side") :]
    speeds = next(line for line in full.splitlines() if "speedup" in line)
    assert "2.00" in speeds
    assert "4.00" in speeds
    assert "not the same conditions" not in text
    measured(tmp_path / "two", "tree", 3.0)
    assert compare([two], explain=True) == 0
    text = capsys.readouterr().out
    full = text[text.index("reports side by side") :]
    speeds = next(line for line in full.splitlines() if "speedup" in line)
    assert "4.00" in speeds
    assert "3.00" in speeds


def test_overview_has_a_row_per_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training cost where recorded, tau and speedup of each shape, the best marked."""
    for name, plain, rate in (("one", 2.0, 0.5), ("two", 4.0, 0.75)):
        measured(tmp_path / name, "chain-t0", plain)
        measured(tmp_path / name, "chain-t1", 2 * plain, temperature=1.0)
        held_out = {"alpha@1": rate, "alpha@2": rate / 2}
        cost = {"parameters": 2e6, "tokens_per_second": 800, "peak_memory_bytes": 3e8}
        write_json(tmp_path / name / "training.json", {**cost, "held_out": held_out})
    measured(tmp_path / "bare", "chain-t0", 1.0)
    runs = [read_results(tmp_path / name) for name in ("one", "two", "bare")]
    training, decoding, _ = overview(runs).renderables
    cells = {
        str(column.header): [getattr(cell, "plain", cell) for cell in column.cells]
        for table in (training, decoding)
        for column in table.columns  # type: ignore[union-attr]
    }
    assert cells["run"] == ["one", "two", "bare"]
    assert cells["M params"] == ["2.00", "2.00", "-"]
    assert cells["tokens/s"] == ["800", "800", "-"]
    assert cells["peak MB"] == ["300", "300", "-"]
    assert cells["alpha@2"] == ["0.250", "0.375", "-"]
    assert cells["chain@0 speedup"] == ["2.00", "4.00", "1.00"]
    assert cells["chain@1 speedup"] == ["4.00", "8.00", "-"]
    best = [
        str(column.header)
        for table in (training, decoding)
        for column in table.columns  # type: ignore[union-attr]
        if getattr(list(column.cells)[1], "style", "")
    ]
    assert best == ["chain@0 speedup"], "all runs have it; a run lacks chain@1"
    assert compare([str(run.folder) for run in runs]) == 0
    assert "temperature (0.0 | 1.0)" not in capsys.readouterr().out.split("reports side")[0]


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("dtype", "bfloat16", "dtype (float32 | bfloat16)"),
        ("threads", 2, "threads (1 | 2)"),
        ("temperature", 1.0, "temperature (0.0 | 1.0)"),
        ("policy", "dynamic_tree", "policy (chain, depth 3 | dynamic_tree, depth 3"),
        ("fingerprints", {**SETTING["fingerprints"], "template": "e" * 64}, "template (cccccccc"),  # type: ignore[dict-item]
        ("fingerprints", {**SETTING["fingerprints"], "prompts": "q" * 64}, "prompt file (pppppppp"),  # type: ignore[dict-item]
    ],
)
def test_compare_prints_different_conditions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: Any, shown: str
) -> None:
    runs = [
        measured(tmp_path / "one", "eval", 2.0),
        measured(tmp_path / "two", "eval", 2.0, **{name: value}),
    ]
    compare(runs, explain=True)
    assert shown in " ".join(capsys.readouterr().out.split())


def test_comparison_calls_a_difference_of_rounding_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gap of 0.01 logits is bridged in bfloat16, and is an error in float32."""
    runs = [tmp_path / name for name in ("fine", "bridged", "wrong")]
    for run, dtype in zip(runs, ("float32", "bfloat16", "float32"), strict=True):
        mismatches = () if run.name == "fine" else (Mismatch("p0", 4, 7, 9, 0.01),)
        save(report(2.0, 2.0, mismatches=mismatches, dtype=dtype), run / "eval", "eval")
    compare([*map(str, runs)])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    words = {row[0]: row[-1] for row in rows if row and "chain@0" in row[1:2]}
    assert words == {"fine": "yes", "bridged": "rounding", "wrong": "NO"}


def test_two_reports_of_one_decoding_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("shallow", "deep"):
        measured(tmp_path / "run", name, 2.0)
    measured(tmp_path / "run", "tree", 2.0, policy="dynamic_tree")
    compare([str(tmp_path / "run")])
    text = capsys.readouterr().out
    assert "run shallow chain@0" in text
    assert "run deep " in text
    assert "run tree" not in text


def trained(folder: Path, tau: float, plain: float, **more: Any) -> str:
    """A run with a report, and acceptance predicted for two depths on the target's own text."""
    target = more.pop("target", "t")
    prompts, text = more.pop("prompts", "p") * 64, more.pop("text", "same")
    held_out = {"alpha@1": tau / 4, "alpha@2": tau / 8, "accept_length": tau - 0.5}
    own = {**held_out, "accept_length": tau} if more.pop("own", True) else None
    cost = {"held_out": held_out, "budget": {"text": text}}
    write_json(folder / "training.json", cost | ({"own_text": own} if own else {}))
    hashes = {**SETTING["fingerprints"], "target": target, "prompts": prompts}  # type: ignore[dict-item]
    return measured(folder, "eval", plain, plain, fingerprints=hashes, **more)


def greens(text: str) -> int:
    return text.count("\x1b[1;32m")


@pytest.mark.parametrize(("changes", "line", "best"), [
    ({}, "ranked by speedup of chain@0 on the same prompts: two 1.50, one 1.00", True),
    ({"threads": 2}, "ranked by tau of chain@0 on the same prompts: one 3.00, two 3.00", False),
    ({"prompts": "q"}, "ranked by predicted tau on the target's own text, chains of 2 (chain@0 "
                       "differs in prompt file): one 2.50, two 2.25", True),
    ({"prompts": "q", "own": False, "text": "other"}, "not ranked: chain@0 differs in prompt "
     "file; no acceptance on the target's own text in two", False),
    ({"target": "u"}, "not ranked: chain@0 differs in target weights; the targets differ", False),
    ({"policy": "dynamic_tree", "text": "other"}, "ranked by predicted tau on the target's own "
     "text, chains of 2 (there is no decoding that all runs have): one 2.50, two 2.25", True),
])  # fmt: skip
def test_runs_are_ranked_by_numbers_on_the_same_text_only(
    tmp_path: Path, changes: dict[str, Any], line: str, best: bool
) -> None:
    """Run two decodes faster and predicts less; shown are both in any case."""
    paths = [tmp_path / "one", tmp_path / "two"]
    trained(paths[0], 2.5, 1.0)
    trained(paths[1], 2.25, 1.5, **changes)
    runs = [read_results(path) for path in paths]
    assert ranking(runs) == [line]
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    console.print(overview(runs), report_table(all_reports(runs)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert (greens(text) > 0) is best
    assert "1.00" in text
    assert "1.50" in text
    assert ranking(runs[:1]) == []


def test_runs_of_one_folder_name_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "other"]
    for path in paths:
        trained(path, 2.5, 1.0)
    runs, _, _ = load_runs([*paths, paths[0]])
    assert [run.name for run in runs] == ["a/run", "b/run", "other", "a/run"]


def test_self_generated_text_is_the_targets_own(tmp_path: Path) -> None:
    for name in ("one", "two"):
        trained(tmp_path / name, 2.0, 1.0, own=False, prompts=name[0], text=name)
        write_json(tmp_path / name / "manifest.json", {"data": {"source": "self"}})
    runs = [read_results(tmp_path / name) for name in ("one", "two")]
    (line,) = ranking(runs)
    assert line.startswith("ranked by predicted tau on the target's own text")
    mixed = {"data": {"source": "self", "given": "hash"}}
    write_json(tmp_path / "two" / "manifest.json", mixed)
    (line,) = ranking([runs[0], read_results(tmp_path / "two")])
    assert line.endswith("no acceptance on the target's own text in two")


def test_predicted_and_decoded_tau_stand_beside_their_depths(tmp_path: Path) -> None:
    """The drafter was trained for two depths, and chains of three were decoded."""
    run = tmp_path / "run"
    trained(run, 2.5, 1.0)
    training, decoding, _ = overview([read_results(run)]).renderables
    cells = {
        str(column.header): str(next(iter(column.cells)))
        for table in (training, decoding)
        for column in table.columns  # type: ignore[union-attr]
    }
    assert (cells["depths"], cells["tau greedy"], cells["own tau"]) == ("2", "2.00", "2.50")
    assert (cells["chain@0 depth"], cells["chain@0 tau"]) == ("3", "3.00")


def test_reports_without_a_round_have_no_rates_and_no_curve(tmp_path: Path) -> None:
    """Every answer is one token: no rate is 0, since nothing was measured."""
    one = Record("a", "a", "a", 1, (), (), 0, RoundTimes())
    row = {"id": "a", "category": "a", "prompt": "", "prompt_ids": [1], "output_ids": [1],
           "accepted": []}  # fmt: skip
    empty = replace(report(None), summary=summarise([one], 3), categories={}, outputs=[row])
    save(empty, tmp_path, "eval")
    loaded = load(tmp_path, "eval")
    assert loaded.summary.accept_at == [None, None, None]
    run = RunFiles(tmp_path, "eagle3", "", [], None, None, {"one": loaded, "two": loaded}, {}, None)
    parts = list(acceptance_parts(run))
    assert parts
    assert not any(isinstance(part, Figure) for part in parts)


def test_page_shows_predictions_on_both_texts_with_their_depth() -> None:
    training = {"best_step": 3, "held_out": {"alpha@1": 0.5, "alpha@2": 0.25, "accept_length": 1.5},
                "own_text": {"alpha@1": 0.125, "alpha@2": 0.0, "accept_length": 1.125}}  # fmt: skip
    parts = cost_parts(RunFiles(Path(), "eagle3", "", [], training, None, {}, {}, None))
    tables = {part.title: part.parts[0] for part in parts if isinstance(part, Collapsible)}
    names = ("held-out text", "the target's own answers to held-out prompts")
    assert list(tables) == [f"{name}, best step (3), drafts of 2 tokens" for name in names]
    assert "1.125" in str(tables[f"{names[1]}, best step (3), drafts of 2 tokens"])


def test_compare_names_drafter_and_rate_of_every_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As columns where they differ, else in a line below the table."""
    for name, rate in (("one", 1e-3), ("two", 2e-3)):
        measured(tmp_path / name, "eval", 2.0)
        write_json(tmp_path / name / "manifest.json", {"config": {"train": {"lr": rate}}})
    assert compare([str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    shown = capsys.readouterr().out
    assert "run decoding lr" in " ".join(shown.split())
    assert "one chain@0  0.001 " in shown
    assert f"drafter {SETTING['drafter']}, training cost" in shown
    assert compare([str(tmp_path / "two")]) == 0
    assert f"drafter {SETTING['drafter']}, lr 0.002, training" in capsys.readouterr().out


def test_template_hashes_of_older_reports_are_marked(tmp_path: Path) -> None:
    """They have another length, so a difference from a new one has no meaning."""
    new = {**SETTING["fingerprints"], "template": "d" * 16}  # type: ignore[dict-item]
    measured(tmp_path / "old", "eval", 2.0)
    measured(tmp_path / "new", "eval", 2.0, fingerprints=new)
    (line,) = ranking([read_results(tmp_path / name) for name in ("old", "new")])
    assert line.startswith("not ranked: chain@0 differs in template;")
    (warning,) = warnings([read_results(tmp_path / name) for name in ("old", "new")])
    assert "template (cccccccc (older hash) | dddddddd)" in warning.plain


def test_named_prompts_of_another_version_are_another_file(tmp_path: Path) -> None:
    for name in ("one", "two"):
        hashes = {**SETTING["fingerprints"], "prompts": f"mt_bench {'0' * 60}{name}"}  # type: ignore[dict-item]
        measured(tmp_path / name, "eval", 2.0, fingerprints=hashes)
    (line,) = ranking([read_results(tmp_path / name) for name in ("one", "two")])
    assert line.startswith("not ranked: chain@0 differs in prompt file;")


def test_compare_of_a_missing_run_lists_others(tmp_path: Path) -> None:
    measured(tmp_path / "good", "eval", 2.0)
    with pytest.raises(RunError, match=r"bad does not exist(.|\n)*good"):
        compare([str(tmp_path / "good"), str(tmp_path / "bad")])
    (tmp_path / "fresh").mkdir()
    assert compare([str(tmp_path / "good"), str(tmp_path / "fresh")]) == 0  # the other is left out
    with pytest.raises(RunError, match="has no report yet"):
        compare([str(tmp_path / "fresh")])


def test_damaged_report_raises(tmp_path: Path) -> None:
    run = measured(tmp_path / "run", "eval", 2.0)
    file = tmp_path / "run" / "eval" / "eval.json"
    file.write_text(file.read_text()[:50])
    with pytest.raises(RunError, match="cannot be read"):
        compare([run])
    file.write_text('{"tau": 1}')
    with pytest.raises(RunError, match=r"eval.json: .* is missing"):
        compare([run])


def test_compare_separates_verification_rules(tmp_path: Path) -> None:
    """One shape and temperature, three rules: three columns, and the lossy one marked."""
    warm = {"policy": "chain", "temperature": 1.0, "draft": "drawn"}
    kinds = {"usual": "ratio", "block": "block", "typical": "lossy_typical"}
    for name, verify in kinds.items():
        folder = measured(tmp_path / "run", name, 2.0, verify=verify, **warm)
    run = read_results(Path(folder))
    names = {decoding_label(report_fields) for report_fields in run.reports.values()}
    assert names == {"chain@1", "chain@1 (block)", "chain@1 (lossy_typical)"}
    top_k = {**warm, "draft": "best", "verify": "match"}
    assert decoding_label({**run.reports["usual"], **top_k}) == "chain@1 (best, match)"
    tree = {**run.reports["usual"], **top_k, "policy": "dynamic_tree"}
    assert decoding_label(tree) == "dynamic_tree@1"


def test_lossy_report_is_marked() -> None:
    result = report(2.0, temperature=1.0, lossy=True, verify="lossy_typical")
    assert "LOSSY by choice (lossy_typical)" in result.verdict()
    assert "chain, depth 3, LOSSY (lossy_typical), temperature 1" in printed(result)
    assert "LOSSY" not in printed(report(2.0, temperature=1.0, lossy=False, verify="ratio"))
    run = RunFiles(
        Path(), "eagle3", "", [], None, None, {"eval": result, "usual": report(2.0)}, {}, None
    )
    parts = [str(part) for part in speed_parts(run)]
    assert any("LOSSY (lossy_typical)" in part for part in parts)
