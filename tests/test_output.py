"""Results on the console: verdict first, at most 15 lines of 80 columns, and no number is lost."""

import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from outrider.conf.command_settings import AdviseConfig
from outrider.conf.console import Console
from outrider.conf.files import write_json
from outrider.data.reporter import Reporter
from outrider.eval.plan.show import Check, print_plan, write_plan
from outrider.eval.plan.surface import make_plan
from outrider.eval.rank_tables import TABLES
from outrider.eval.ranks import print_ranks
from outrider.eval.report import Mismatch
from outrider.eval.report_tables import show_and_save, show_grid
from outrider.launch.advise import Pilot, write_advice
from outrider.launch.compare import compare
from outrider.launch.memory import memory
from outrider.models.decode import tree_shapes
from outrider.models.decode.costs.round_costs import Grid
from tests.runs import config
from tests.test_plan_surface import FakeTimes
from tests.test_report import measured, report

LINES, WIDTH = 15, 80
RUN = Path("runs/eagle3-tiny")
Shown = Callable[[Console], object]


@pytest.fixture(params=["terminal", "pipe"])
def printed(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Callable[[Shown], str]:
    """Return what is printed on a terminal of 80 columns, and into a pipe."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.chdir(tmp_path)

    def show(shown: Shown) -> str:
        if request.param == "terminal":
            console = Console(file=io.StringIO(), width=WIDTH, force_terminal=True, no_color=True)
            shown(console)
            text = console.file.getvalue()  # type: ignore[attr-defined]
            return re.sub(r"\x1b\[[0-9;]*m", "", text)
        shown(Console())
        return capsys.readouterr().out

    return show


def lines(text: str) -> int:
    """Return the lines that a text takes on the terminal."""
    return sum(max(1, math.ceil(len(line) / WIDTH)) for line in text.rstrip("\n").split("\n"))


def has_numbers(text: str, *numbers: str) -> bool:
    """Return whether each number is printed whole, as often as it is given."""
    words = re.split(r"[\s*()]+", text)
    missing = [number for number in {*numbers} if words.count(number) < numbers.count(number)]
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert not missing
    return True


def leaves(content: Any, form: str) -> list[str]:
    """Return all numbers of nested lists, formatted."""
    if isinstance(content, list):
        return [text for part in content for text in leaves(part, form)]
    return ["-" if content is None else format(content, form)]


# ---- tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_table_that_is_too_wide_is_printed_in_parts(width: int) -> None:
    """Every cell of 12 columns is there, the first column in every part."""
    table = Table("run", *(Column(f"c{k}", justify="right") for k in range(12)), title="numbers")
    for row in range(3):
        table.add_row(f"r{row}", *(f"{row}.{k:02}" for k in range(12)))
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert has_numbers(text.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " "), *(
        f"{row}.{k:02}" for row in range(3) for k in range(12)
    ))  # fmt: skip
    assert text.count("r0") == text.count("r2") == {20: 12, 40: 3, 80: 2}[width], text
    assert text.count("numbers") == 1


@pytest.mark.parametrize("wrap", [str, Text])
def test_a_title_is_a_line_of_its_own(wrap: Callable[[str], Any]) -> None:
    """A narrow table does not squeeze it."""
    title = "conversations: 3,000 read = 3,000 used + 0 left out"
    table = Table("case", "count", title=wrap(title))
    table.add_row("used", "3,000")
    console = Console(file=io.StringIO(), width=WIDTH)
    console.print(Group(table, "below"))
    first, *rest = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert first.rstrip() == title
    assert max(map(len, rest[:-1])) < 20


def test_text_is_wrapped_and_numbers_are_whole() -> None:
    table = Table(Column("name"), Column("number", justify="right"), box=None)
    table.add_row("word " * 40, "1234567890.5")
    table.add_row("x" * 200, "2.5")
    console = Console(file=io.StringIO(), width=60)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert has_numbers(text, "1234567890.5", "2.5")
    assert text.count("word") == 40
    assert text.count("x") == 200


# ---- results -------------------------------------------------------------------------------------


def test_report(printed: Callable[[Shown], str]) -> None:
    result = report(*[2.0, 3.0] * 40, left_out=[f"prompt-{k}" for k in range(30)])
    text = printed(lambda console: show_and_save(result, RUN / "eval", "quick", console))
    assert " ".join(text.split()).startswith(result.verdict())
    assert lines(text) <= LINES, text
    assert text.splitlines()[-1].startswith(f"report: {RUN}/eval/quick.json")
    saved = json.loads((RUN / "eval" / "quick.json").read_text())
    assert has_numbers(text, *leaves(saved["accept_at"], ".2f"), *leaves(saved["cond_at"], ".2f"))
    times = [saved["ms"][part] for part in saved["shares"]]
    assert has_numbers(text, *leaves(times, ".2f"), f"{saved['overhead']:.1%}")
    names = "tau", "speedup", "tokens_per_second", "baseline_tokens_per_second"
    tau, speedup, fast, plain = (saved[name] for name in names)
    interval = "{:.2f}-{:.2f}".format(*saved["speedup_95"])
    row = f"{tau:.2f}", f"{speedup:.2f}x", interval, f"{fast:.1f}", f"{plain:.1f}"
    assert has_numbers(text, *row, str(saved["prompts"]), str(saved["tokens"]))


def test_report_of_a_long_chain(printed: Callable[[Shown], str]) -> None:
    """The acceptance of 12 of 16 draft tokens; all are printed in full, and in the file."""
    result = report(*[2.0, 3.0] * 40, forecast=None, depth=16)
    rates: list[float | None] = [1 - k / 20 for k in range(16)]
    result = replace(result, summary=replace(result.summary, accept_at=rates, cond_at=rates))
    shown = partial(show_and_save, result, RUN / "eval", "quick")
    text = printed(shown)
    assert lines(text) <= LINES, text
    assert "k, 12 of 16" in text
    assert has_numbers(text, *leaves(rates[:12], ".2f"))
    assert "0.25" not in text.split()
    assert has_numbers(printed(lambda console: shown(console, in_full=True)), "0.25")


def test_report_in_full(printed: Callable[[Shown], str], tmp_path: Path) -> None:
    """Every category, the shares of a round, and the predicted speedups."""
    result = report(2.0, 3.0)
    text = printed(lambda console: show_and_save(result, tmp_path, "quick", console, True))
    saved = json.loads((tmp_path / "quick.json").read_text())
    for name, part in saved["categories"].items():
        (line,) = (line.split() for line in text.splitlines() if line.startswith(name))
        assert line[6] == f"{part['speedup']:.2f}x"
    assert has_numbers(text, *(f"{share:.1%}" for share in saved["shares"].values()))
    factors = [saved["theory"][name] for name in ("from_times", "no_overhead", "free_verify")]
    assert has_numbers(text, *(f"{factor:.2f}x" for factor in factors))


def test_next_step_follows_from_the_result(printed: Callable[[Shown], str], tmp_path: Path) -> None:
    wrong = (Mismatch("p0", 4, 7, 9, 3.0),)
    for result, step in (
        (report(2.0, 2.0), "To use it: outrider chat, or outrider publish, run.dir="),
        (report(0.5, 0.5), "To find a faster draft: outrider plan run.dir="),
        (report(0.5, 0.5, drafter="layerskip"), "To find a faster draft: outrider eval run.dir="),
        (report(2.0, mismatches=wrong), "Do not use it: the answers are not the target's."),
        (report(2.0, mismatches=wrong, dtype="bfloat16"), "measure with target.dtype=float32"),
    ):
        assert step in printed(partial(show_and_save, result, tmp_path / "eval", "out"))
    for speed, step in (
        (2.0, "To use it: outrider chat with the same drafter"),
        (0.5, "To find a faster draft: the same command with decode.depth=2."),
    ):
        result = report(speed, speed)
        result = replace(result, setting={**result.setting, "untrained": True})
        assert step in printed(partial(show_and_save, result, tmp_path / "eval", "out"))


@pytest.mark.parametrize("content", ['{"held_out": [1]}', '{"held', None])
def test_a_report_is_written_beside_damaged_files(
    content: str | None, printed: Callable[[Shown], str], tmp_path: Path
) -> None:
    if content:
        (tmp_path / "training.json").write_text(content)
    text = printed(partial(show_and_save, report(0.5, 0.5), tmp_path / "eval", "out"))
    assert "To find a faster draft: outrider plan" in text
    assert (tmp_path / "eval" / "out.json").is_file()


@pytest.mark.parametrize(("own", "is_named"), [(1.1, True), (1.9, False)])
def test_a_drafter_of_other_text_should_be_trained_on_the_targets(
    own: float, is_named: bool, printed: Callable[[Shown], str], tmp_path: Path
) -> None:
    names = {"run": {}, "target": {}, "drafter": {}, "data": {"path": "mine.jsonl"}}
    (tmp_path / "config.yaml").write_text(json.dumps(names))
    summary = {"held_out": {"accept_length": 2.0}, "own_text": {"accept_length": own}}
    (tmp_path / "training.json").write_text(json.dumps(summary))
    text = printed(partial(show_and_save, report(0.5, 0.5), tmp_path / "eval", "out"))
    assert ("data=self data.path=mine.jsonl" in text) == is_named
    assert ("outrider plan" in text) != is_named


def test_grid(printed: Callable[[Shown], str]) -> None:
    """A row per report, and the fastest one's verdict first; a wrong one is named."""
    wrong = (Mismatch("p0", 4, 7, 9, 3.0),)
    reports = {
        "chain-t0": report(2.0, 3.0), "dynamic_tree-t0": report(3.0, 3.0),
        "chain-t1": report(0.5, 0.5, temperature=1.0), "tree": report(2.0, mismatches=wrong),
    }  # fmt: skip
    text = printed(lambda console: show_grid(reports, RUN / "eval", console))
    assert text.startswith("dynamic_tree-t0: 3.00x")
    assert lines(text) <= LINES, text
    assert "tree: 1 of 1 answers differ from plain decoding: MORE THAN ROUNDING" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines()[-5:-1]}
    assert [rows[name][-1] for name in reports] == ["yes", "yes", "-", "NO"]
    for name, one in reports.items():
        assert rows[name][1:4] == [f"{one.summary.tau:.2f}", "500.0", f"{one.summary.speedup:.2f}x"]


@pytest.mark.parametrize("depths", [4, 16])
def test_ranks(printed: Callable[[Shown], str], depths: int) -> None:
    rates = torch.rand(depths, 10, generator=torch.Generator().manual_seed(depths)) / 10
    tables = dict.fromkeys(TABLES, rates.double())
    trees = {name: tree_shapes.best_first(table, 8) for name, table in tables.items()}
    for in_full in (False, True):
        show = partial(print_ranks, folder=RUN, tables=tables, trees=trees, search="outrider plan")
        text = printed(partial(show, in_full=in_full))
        assert "To see what is faster: outrider plan" in text
        tree = tree_shapes.expected(trees["best@0"], tables["best@0"])
        start = f"Best tree of 8: {tree:.2f} tokens per round, chain of {depths}: "
        assert text.startswith(start)
        assert in_full or lines(text) <= LINES, text
        shown = rates if in_full or depths == 4 else rates[:, :1]
        assert has_numbers(text, *leaves(shown.tolist(), ".3f"))


def test_plan(printed: Callable[[Shown], str], tmp_path: Path) -> None:
    table = torch.tensor([[0.6, 0.2, 0.1, 0.05]] * 4)
    grid = Grid([1, 2, 3, 4], [2, 4], [4, 8, 16], [1, 4, 16], [64, 65536])
    plan = make_plan(
        table, partial(tree_shapes.expected, table=table), FakeTimes(factor=40.0), grid
    )
    checks = [Check(row, row.tau, row.speedup / 1.05) for row in plan.rows if row.depth][:5]
    write_plan(tmp_path, plan)
    saved = json.loads((tmp_path / "plan.json").read_text())
    text = printed(lambda console: print_plan(console, plan, checks, "run.dir=runs/x"))
    assert text.startswith("Fastest at batch 1, context 64, on fake: ")
    assert lines(text) < LINES, "the last line names the file"
    assert has_numbers(text, *(f"{row['speedup']:.2f}x" for row in saved["recommended"]))
    full = printed(lambda console: print_plan(console, plan, checks, "", True))
    assert has_numbers(full, *(f"{r['speedup']:.2f}" for r in saved["rows"] if r["depth"]))
    assert has_numbers(full, *(f"{check.speedup:.2f}x" for check in checks))


def test_advice(printed: Callable[[Shown], str]) -> None:
    pilots = [
        Pilot(share, repeat, round(1e6 * share), round(1e9 * share), 2 + share + repeat / 100, 150)
        for share in (0.01, 0.02, 0.04) for repeat in (0, 1)
    ]  # fmt: skip
    settings, cfg = AdviseConfig(), config(RUN, "drafter.depths=4")
    text = printed(
        lambda console: write_advice(console, RUN / "advise", cfg, settings, pilots, 1_000_000_000)
    )
    saved = json.loads((RUN / "advise" / "advise.json").read_text())
    assert text.startswith(("More text", "These pilots"))
    assert lines(text) <= LINES, text
    assert has_numbers(text, *(f"{pilot['accept_length']:.3f}" for pilot in saved["pilots"]))
    for forecast in (saved["largest_pilot"], saved["all_text"]):
        now = f"{forecast['tokens']:,.0f}", f"{forecast['now']:.2f}", f"{forecast['gain']:+.2f}"
        assert has_numbers(text, *now, "{now_low:.2f}-{now_high:.2f}".format(**forecast))


@pytest.mark.parametrize("count", [1, 6, 30])
def test_comparison(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    paths = [tmp_path / f"run-{k}-with-a-long-name" for k in range(count)]
    for k, path in enumerate(paths):
        measured(path, "eval", 2.0 + k, 3.0 + k)
        measured(path, "tree", 1.5 + k, 2.5 + k, policy="dynamic_tree", threads=2 + k)
        write_json(path / "training.json", {"parameters": 1e6 * (k + 1)})
    assert compare([*map(str, paths)]) == 0
    text = capsys.readouterr().out
    fastest = range(count)[::-1][:8] if count > 8 else range(count)
    assert lines(text) <= LINES, text
    assert text.startswith(("fastest decoding of run-0", "ranked by", "not ranked"))
    assert " ".join(text.split()).endswith("conditions: --explain, or to=FOLDER for a page")
    assert has_numbers(text, *(f"{2.5 + k:.2f}x" for k in fastest))
    assert has_numbers(text, *(f"{2 + k:.2f}-{3 + k:.2f}" for k in fastest))
    if count <= 6:
        assert compare([*map(str, paths)], explain=True) == 0
        full = capsys.readouterr().out
        assert has_numbers(full, *(f"{2.0 + k:.2f}" for k in range(count)))
        assert "tokens of the rounds / rounds" in " ".join(full.split())


@pytest.mark.parametrize("size", ["8b", "70b", "235b"])
def test_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    words = ["drafter=eagle3", "launch=zero2", "train.batch_tokens=65536", "memory.gpus=64"]
    assert memory([*words, f"memory.model={size}"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(("Fits with target.place=", "No placement fits"))
    assert lines(text) <= LINES, text
    rows = [line.split() for line in text.splitlines()][-9:]
    assert [len(row) for row in rows] == [10, *[8] * 7, 10]


# ---- progress ------------------------------------------------------------------------------------


def test_progress_in_a_pipe_has_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("outrider.data.reporter.time.monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=WIDTH)
    with Reporter(console).progress("decoding", 8, "draft shapes") as bar:
        for _ in range(4):
            now[0] += 65.0
            bar.advance(1)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "decoding: 2/8 draft shapes, about 6 min left\n" in text
    assert "tokens" not in text


def test_estimate_counts_earlier_units_and_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("outrider.data.reporter.time.monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=WIDTH)
    reporter = Reporter(console)
    for options, left in (({"before": 90}, 10), ({"before": 90, "seconds": 300.0}, 4)):
        now[0] = 0.0
        with reporter.progress("searching", 100, "candidates", **options) as bar:
            now[0] = 65.0
            bar.advance(1)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert f"searching: 91/100 candidates, about {left} min left\n" in text
        assert "left" not in text.splitlines()[-1], "the work has ended"
