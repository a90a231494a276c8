"""The page of `outrider report`: self-contained, escaped, with the numbers of its files."""

import base64
import itertools
import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure as Canvas
from rich.table import Table as ConsoleTable
from rich.text import Text

from outrider.conf.command_settings import ReportConfig, read_report
from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import write_json
from outrider.conf.schema import to_yaml
from outrider.eval.metrics import Record, predicted_speedups, summarise
from outrider.eval.page import run_files as folders
from outrider.eval.page.answers import answer_parts
from outrider.eval.page.build import report
from outrider.eval.page.comparison import comparison_sections
from outrider.eval.page.elements import (
    Collapsible,
    Figure,
    Page,
    Part,
    Section,
    Table,
    from_console_table,
    text_table,
)
from outrider.eval.page.figures import LIGHT, are_several, bars, curves, draw, points
from outrider.eval.page.run_files import RunFiles, answer_rounds, read_run_files
from outrider.eval.page.write import as_html, as_markdown, code, markdown
from outrider.eval.plan.surface import FORMAT as PLAN
from outrider.eval.report import Report, load, save
from outrider.eval.run_results import read_results
from outrider.launch.cli import main
from outrider.launch.compare import compare
from outrider.models.decode.round_times import RoundTimes
from outrider.train.settings import parse
from tests.runs import SMALL

MARKUP = "<script>alert('x')</script>|`$\x00&amp;"
VOID = {"meta", "img", "source"}
SETTING = {
    "drafter": "eagle3", "target": "tiny", "policy": "chain", "depth": 3, "width": 1, "nodes": 3,
    "temperature": 0.0, "verify": "greedy", "draft": "best", "max_new_tokens": 8, "seed": 3,
    "dtype": "float32", "device": "cpu", "threads": 1, "left_out": [],
    "fingerprints": {"target": "t", "drafter": "d", "template": "c" * 64, "prompts": "p" * 64},
}  # fmt: skip
ANSWERS: list[tuple[str, str, tuple[int, ...]]] = [
    ("one", "story", (3, 1)), ("two", MARKUP, (0, 2, 3)), ("talk", "story", (2, 2)),
    ("talk/2", "story", (3, 3, 3, 0)),
]  # fmt: skip


def measured(**setting: Any) -> Report:
    """Four prompts, two of them one dialogue; a round takes half a second, a token a third."""
    records, outputs = [], []
    for name, category, accepted in ANSWERS:
        origins = ["first"]
        for a in accepted:
            origins += ["accepted"] * a + ["bonus" if a == 3 else "correction"]
        count, rounds = len(origins), len(accepted)
        spent = rounds / 2
        clock = RoundTimes(0.1, spent / 4, spent / 2, spent / 8, spent / 16, spent)
        plain = RoundTimes(prefill=0.1, rounds=(count - 1) / 3)
        records.append(
            Record(name, name.partition("/")[0], category, count, accepted, (3,) * rounds,
                   3 * rounds, clock, count, plain)
        )  # fmt: skip
        outputs.append(
            {"id": name, "category": category, "prompt": MARKUP, "prompt_ids": [5] * 20,
             "output_ids": list(range(10, 10 + count)), "baseline_ids": [], "origins": origins,
             "accepted": list(accepted), "rejected": [None if a == 3 else 9 for a in accepted]}
        )  # fmt: skip
    total = summarise(records, 3, seed=3)
    kinds = dict.fromkeys(record.category for record in records)
    parts = {k: summarise([r for r in records if r.category == k], 3, 3) for k in kinds}
    chosen = {**SETTING, **setting}
    exact = None if chosen["temperature"] else True
    return Report(
        total, parts, exact, [], predicted_speedups(total, 3, True), chosen, outputs, total.tau
    )


def write_run(run: Path) -> Path:
    """A finished run with every file that a page reads."""
    config = parse(compose(["target=tiny"]))
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(config))
    log = [
        {"step": step, "kind": kind, "objective": 9.0 - step, "loss@1": 3.0 - step, "alpha@1": 0.5,
         "agree@1": 0.5, "accept_length": 1.0 + step, "accept_length_sampling": 1.5}
        for step in (0, 1, 2)
        for kind in ("train", "held")
    ]  # fmt: skip
    lines = "".join(json.dumps(line) + "\n" for line in log)
    (run / "metrics.jsonl").write_text(lines + '{"step": 3, "ki')  # cut off by a crash
    write_json(run / "training.json", {
        "parameters": 2_000_000, "steps": 3, "seconds": 61.5, "tokens": 4096, "best_step": 2,
        "phases": {"steps": 50.0, MARKUP: 11.5}, "held_out": {"alpha@1": 0.875},
    })  # fmt: skip
    write_json(run / "manifest.json", {"argv": ["train.py", MARKUP], "config": {}, "git": {}})
    save(measured(), run / "eval", "chain-t0")
    save(measured(temperature=1.0, verify="ratio", draft="drawn"), run / "eval", "chain-t1")
    shape = {"depth": 0, "width": 0, "nodes": 0, "shape": MARKUP}
    row = {"batch": 1, "context": 64, **shape, "tau": 1.0}
    times = {"draft_ms": 0.0, "verify_ms": 1.0, "round_ms": 1.0, "plain_ms": 1.0, "speedup": 1.0}
    rows = [row | times, row | times | {"depth": 2, "width": 1, "tau": 2.5, "speedup": 1.625}]
    check = {"shape": "chain 2", "batch": 1, "context": 64, "tau": 2.0, "tau_predicted": 2.5,
             "speedup": 1.5, "speedup_predicted": 1.625, "error": 0.0833}  # fmt: skip
    write_json(run / "plan" / "plan.json", {
        "format": PLAN, "machine": MARKUP, "assumptions": [MARKUP], "rows": rows,
        "recommended": rows[1:], "checks": [check],
    })  # fmt: skip
    bins = [{"from": 0.5, "guesses": 4, "confidence": 0.55, "right": 0.5}]
    write_json(run / "calibration.json", {
        "format": "outrider-calibration-1", "report": "chain-t0", "drafter": "d",
        "depths": [{"depth": 1, "guesses": 4, "error": 0.05, "bins": bins}],
    })  # fmt: skip
    return run


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in a folder with markup in its name, and its page."""
    run = write_run(tmp_path_factory.mktemp("runs") / "<i>run")
    assert main(["report", f"run.dir='{run}'", "report.examples=2"]) == 0
    return run


class Reader(HTMLParser):
    """Checks that tags are closed in order; collects attributes, texts and definitions."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.definitions = "", list[str]()
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if dict(attrs).get("class") == "definition":
            self.definitions.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open[-2:] == ["details", "p"]:
            self.definitions[-1] += data


# ---- html and Markdown ---------------------------------------------------------------------------


def test_page_parses_and_every_figure_has_a_definition(written: Path) -> None:
    page = Reader((written / "report.html").read_text())
    figures = [attrs for tag, attrs in page.tags if tag == "figure"]
    assert len(figures) == len(page.definitions) > 15
    assert all(len(definition) > 10 for definition in page.definitions)
    assert len([tag for tag, _ in page.tags if tag == "img"]) >= 12


def test_definitions_are_folded_and_tables_scroll_in_boxes(written: Path) -> None:
    """Every figure has a title, an image or a box that the keyboard scrolls, and a closed fold."""
    page = (written / "report.html").read_text()
    box = r'<div class="wide" tabindex="0" role="group" aria-label="[^"]+"><table>.*</table></div>'
    picture = r'<picture>\s<source [^>]+>\s<img [^>]+ alt="[^"]+">\s</picture>'
    content = rf"\s*<figcaption>[^<]+</figcaption>\s*({box}|{picture})\s*"
    fold = r'<details class="definition"><summary>Definition</summary><p>[^<]+</p></details>\s*'
    figures = re.findall(r"<figure [^>]+>(.*?)</figure>", page, re.DOTALL)
    assert len(figures) == page.count("<figure ") > 15
    for figure in figures:
        assert re.fullmatch(content + fold, figure, re.DOTALL), figure[:300]
    assert page.count("<table>") == page.count('class="wide"')
    assert " open>" not in page
    style = page.partition("</style>")[0]
    assert re.search(r"\.wide \{\s+overflow-x: auto;", style)
    assert "Scroll sideways" in style


def test_headings_are_in_order(written: Path) -> None:
    """One h1, then sections; no level is left out."""
    tags = [tag for tag, _ in Reader((written / "report.html").read_text()).tags]
    levels = [int(tag[1]) for tag in tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_page_has_no_scripts_and_no_external_resources(written: Path) -> None:
    text = (written / "report.html").read_text()
    page = Reader(text)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "iframe", "object", "embed", "form", "base", "i"}
    for tag, attrs in page.tags:
        assert not [name for name in attrs if name.startswith("on") or name == "style"]
        for name in ("src", "srcset", "href"):
            if (value := attrs.get(name)) is not None:
                assert value.startswith("data:image/svg+xml;base64," if tag != "a" else "#")
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_markup_in_texts_is_escaped(written: Path) -> None:
    """The text is unchanged, except for characters that are invalid in a page."""
    page = Reader((written / "report.html").read_text())
    shown = MARKUP.replace("\x00", "\ufffd")
    assert page.text.count(shown) >= 8  # categories, prompts, machine, phase, arguments
    assert "<i>run" in page.text
    tables = (written / "report.md").read_text()
    assert "<" not in re.sub(r"(?<!\\)`[^`\n]*`", "", tables)
    assert "&lt;script&gt;" in tables


def test_figures_with_escaped_labels_are_valid_svg(written: Path) -> None:
    """Labels come from files too; a browser shows nothing for an invalid SVG."""
    from xml.etree import ElementTree

    page = Reader((written / "report.html").read_text())
    for tag, attrs in page.tags:
        if tag in ("img", "source"):
            data = attrs["src" if tag == "img" else "srcset"] or ""
            drawing = ElementTree.fromstring(base64.b64decode(data.partition(",")[2]))
            assert not [part for part in drawing.iter() if part.tag.endswith("}script")]


def test_markup_in_decoded_tokens_is_escaped(tmp_path: Path) -> None:
    class Words:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            return "".join(f"{MARKUP}{token}" for token in token_ids)

    run = read_run_files(write_run(tmp_path / "run"))
    section = Section("answers", "Answers", list(answer_parts(run, Words(), 4)))
    text = as_html(Page("\ud800", [MARKUP], [section], MARKUP))
    page = Reader(text)
    assert "script" not in {tag for tag, _ in page.tags}
    assert "alert('x')</script>|`$\ufffd&amp;11" in page.text
    assert "\ufffd\n" in page.text
    origins = {attrs.get("class") for tag, attrs in page.tags if tag == "span"}
    assert {"first", "accepted", "correction", "bonus", "rejected"} <= origins


def test_page_is_reproducible(written: Path) -> None:
    before = (written / "report.html").read_bytes()
    assert report(written, ReportConfig(examples=2), [f"run.dir='{written}'"]) == 0
    assert (written / "report.html").read_bytes() == before


def test_light_and_dark_figures_differ_only_in_colours() -> None:
    figure = draw("a", "b", curves({"x$\x00": [(0.0, 1.0), (1.0, 2.0)]}, "<step>", "y"))
    light, dark = (
        base64.b64decode(uri.partition(",")[2]).decode() for uri in (figure.light, figure.dark)
    )
    assert light != dark
    blank = [re.sub(r"#[0-9a-f]{6}|\bp[0-9a-f]{10}|m[0-9a-f]{10}", "", x) for x in (light, dark)]
    assert blank[0] == blank[1]
    assert "&lt;step&gt;" in light


def test_markdown_escapes_cell_separators() -> None:
    assert markdown("a|b\n# _c_ d_e") == r"a\|b \# \_c\_ d_e"
    assert code("x ` y") == "`` x ` y ``"


# ---- contents ------------------------------------------------------------------------------------


def test_report_round_trip(tmp_path: Path) -> None:
    original = measured()
    save(original, tmp_path, "eval")
    loaded = load(tmp_path, "eval")
    definitions = loaded.setting.pop("definitions")
    assert "bootstrap" in definitions["tau_95"]
    outputs = json.loads(json.dumps(original.outputs))
    assert (loaded.summary, loaded.categories, loaded.setting) == (
        original.summary, original.categories, original.setting,
    )  # fmt: skip
    assert (loaded.outputs, loaded.verdict()) == (outputs, original.verdict())


def test_intervals_from_outputs_equal_those_of_the_report(tmp_path: Path) -> None:
    """The same dialogues, resampled with the same seed, give the interval of the report."""
    run = read_run_files(write_run(tmp_path / "run"))
    loaded = run.reports["chain-t0"]
    rounds = answer_rounds(loaded)
    assert [answer.dialogue for answer in rounds] == ["one", "two", "talk", "talk"]
    everywhere = folders.emitted_after(0, 10**9)
    assert folders.interval(loaded, rounds, everywhere) == loaded.summary.tau_95
    assert folders.ratio_of_sums(rounds, everywhere) == loaded.summary.tau
    assert (
        folders.ratio_of_sums(rounds, folders.accepted_at_least(2, 1)) == loaded.summary.cond_at[1]
    )


def test_answer_rounds_prefix_lengths(tmp_path: Path) -> None:
    """A prompt of 20 and the first token, then 3 + 1; the last round has no bonus."""
    row = measured().outputs[0] | {"output_ids": [1] * 6, "accepted": [3, 1], "id": "x/7"}
    original = measured()
    (answer,) = answer_rounds(Report(**{**vars(original), "outputs": [row]}))
    assert (answer.dialogue, answer.prefix_lengths, answer.emitted) == ("x/7", [21, 25], [4, 1])


def test_page_shows_measured_values(written: Path) -> None:
    total = load(written / "eval", "chain-t0").summary
    text = Reader((written / "report.html").read_text()).text
    low, high = total.tau_95 or (0, 0)
    assert f"{total.tau:.2f}" in text
    assert f"{low:.2f}-{high:.2f}" in text
    for shown in ("2.00", "61.5", "0.875", "1.62x", "+8.3%", "chain, depth 3, temperature 1"):
        assert shown in text
    tables = (written / "report.md").read_text()
    assert f"{total.tau:.2f} ({low:.2f}-{high:.2f})" in tables
    assert "data:" not in tables


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures empty: matplotlib takes most of the time of a page."""
    monkeypatch.setattr("outrider.eval.page.figures._svg", lambda *_: "data:,")


# ---- missing and damaged files -------------------------------------------------------------------


def test_missing_measurements_are_listed_with_their_commands(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(parse(compose([f"run.dir={run}"]))))
    assert report(run, ReportConfig(), [f"run.dir={run}"]) == 0
    text = Reader((run / "report.html").read_text()).text
    for command in ("outrider eval", "outrider plan", "outrider report"):
        assert f"{command} run.dir={run}" in text
    for file in ("metrics.jsonl", "training.json", "manifest.json"):
        assert file in text
    headings = re.findall("^## (.*)$", (run / "report.md").read_text(), re.MULTILINE)
    missing, definitions = "Without data", "Definitions of all numbers"
    assert headings == ["Configuration and fingerprints", missing, definitions]


def test_two_points_have_no_line_between_them() -> None:
    def lines(count: int) -> list[str]:
        curve = {"loss": [(float(i), float(i)) for i in range(count)]}
        axes = Canvas().subplots()
        curves(curve, "step", "nats")(axes, LIGHT)
        points({"trials": curve["loss"]}, "minutes", "tau", front=curve["loss"])(axes, LIGHT)
        return [line.get_linestyle() for line in axes.lines]

    assert lines(2) == ["None", "None"]
    assert lines(3) == ["-", "-"]


def test_runs_are_compared_by_drafter_rate_and_draft_time(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("one", "two")]
    for run, lr in zip(runs, (1e-3, 5e-4), strict=True):
        write_json(run / "manifest.json", {"config": {"train": {"lr": lr}}})
    results = [read_results(run) for run in runs]
    sections = comparison_sections(results, [])
    figures = {part.title for s in sections for part in s.parts if isinstance(part, Figure)}
    assert {"tau against draft time", "predicted and decoded tau"} <= figures
    tables = {part.title: part for s in sections for part in s.parts if isinstance(part, Table)}
    for title in ("training", "decoding"):
        assert tables[title].head[:3] == ["run", "drafter", "lr"]
        cells = [[cell.text for cell in row[:3]] for row in tables[title].rows]
        assert cells == [["one", "eagle3", "0.001"], ["two", "eagle3", "0.0005"]]


def test_report_without_outputs_has_no_intervals(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "eval" / "chain-t0.outputs.jsonl").unlink()
    assert report(run, ReportConfig(), [f"run.dir={run}"]) == 0
    assert "chain-t0 has no file of outputs" in (run / "report.md").read_text()


def truncate(text: str) -> str:
    return text[: len(text) // 2]


def wrong_format(_: str) -> str:
    return '{"tau": 1}'


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("metrics.jsonl", lambda text: "nonsense\n" + text),
        ("training.json", truncate),
        ("training.json", lambda _: '{"seconds": "long"}'),
        ("manifest.json", truncate),
        ("eval/chain-t0.json", truncate),
        ("eval/chain-t0.json", wrong_format),
        ("eval/chain-t0.json", lambda text: text.replace('"alpha"', '"beta"')),
        ("eval/chain-t0.outputs.jsonl", truncate),
        ("eval/chain-t0.outputs.jsonl", wrong_format),
        ("eval/chain-t0.outputs.jsonl", lambda text: "".join(text.splitlines(True)[:2])),
        ("plan/plan.json", truncate),
        ("plan/plan.json", wrong_format),
        ("plan/plan.json", lambda _: json.dumps({"format": PLAN})),
        ("calibration.json", truncate),
        ("calibration.json", wrong_format),
    ],
)
def test_damaged_file_raises_an_error_with_its_name(
    tmp_path: Path, name: str, damage: Callable[[str], str]
) -> None:
    run = write_run(tmp_path / "run")
    file = run / name
    file.write_text(damage(file.read_text(errors="surrogateescape")), errors="surrogateescape")
    with pytest.raises(RunError) as caught:
        report(run, ReportConfig(), [f"run.dir={run}"])
    stem = name.rpartition("/")[2].partition(".")[0].replace("plan", "*")
    assert stem in str(caught.value) or name in str(caught.value)
    assert not (run / "report.html").exists()


# ---- several runs, searches, the command line ----------------------------------------------------


def test_plans_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """Their checks have other names; the page shows the same numbers."""
    folder = write_run(tmp_path / "run")
    file = folder / "plan" / "plan.json"
    plan, text = read_run_files(folder).plans, file.read_text()
    for new, old in (("tau_predicted", "tau_foreseen"), ("speedup_predicted", "speedup_foreseen"),
                     ("error", "off")):  # fmt: skip
        text = text.replace(f'"{new}"', f'"{old}"')
    assert '"off"' in text
    file.write_text(text)
    assert read_run_files(folder).plans == plan


def test_folder_of_runs_gives_a_comparison_page(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / "sweep" / name)
    folder = tmp_path / "sweep"
    assert report(folder, ReportConfig(), [f"run.dir={folder}"]) == 0
    page = Reader((folder / "report.html").read_text())
    assert "sweep: 2 runs compared" in page.text
    assert "chain@1 speedup" in page.text
    assert "chain@0: chains decoded at temperature 0" in page.text
    assert page.text.count("seconds of initialisation;") == 1, "the cost legend appears once"
    assert "1.62" not in page.text, "plans belong to one run"
    assert len([tag for tag, _ in page.tags if tag == "img"]) == 5  # speedup, tau (three), curves


def test_reports_without_a_run_have_a_page(tmp_path: Path) -> None:
    """`outrider eval drafter=suffix` writes reports, and no config.yaml."""
    for name in ("ngram", "suffix"):
        save(measured(drafter=name), tmp_path / name / "eval", "chain")
    for folder, title in ((tmp_path / "suffix", "suffix: reports"), (tmp_path, "2 runs compared")):
        assert report(folder, ReportConfig(), [f"run.dir={folder}"]) == 0
        page = Reader((folder / "report.html").read_text())
        assert title in page.text
        assert f"{measured().summary.speedup:.2f}" in page.text


@pytest.mark.usefixtures("undrawn")
def test_warnings_keep_the_case_of_names(tmp_path: Path) -> None:
    """Names are not capitalised at the beginning of a sentence."""
    for name, threads in (("one", 1), ("two", 2)):
        run = write_run(tmp_path / "Sweep" / name)
        for file in (run / "eval").glob("*.json"):
            file.write_text(json.dumps({**json.loads(file.read_text()), "threads": threads}))
    folder = tmp_path / "Sweep"
    assert report(folder, ReportConfig(), [f"run.dir={folder}"]) == 0
    text = Reader((folder / "report.html").read_text()).text
    assert "chain@1: not the same conditions: threads (1 | 2)" in text


def test_figure_height_grows_with_the_number_of_bars() -> None:
    def height(runs: int) -> float:
        names = [f"run {i}" for i in range(runs)]
        figure = draw("t", "d", bars(names, {"a": [1.0] * runs, "b": [None] * runs}, "x"))
        match = re.search(r'height="([\d.]+)pt"', svg(figure))
        assert match is not None
        return float(match[1])

    assert height(2) == height(4)
    assert height(40) > 2 * height(4)


def svg(figure: Figure) -> str:
    return base64.b64decode(figure.light.partition(",")[2]).decode()


def test_one_report_has_no_chart_of_a_single_bar(tmp_path: Path) -> None:
    """One bar is a number of the table; several values of one report are named bars."""
    from outrider.eval.page import speed

    run = write_run(tmp_path / "run")
    (run / "eval" / "chain-t1.json").unlink()
    single = read_run_files(run)
    assert [part.kind for part in speed.speed_parts(single)] == ["table"]
    times = {part.title: svg(part) for part in speed.time_parts(single) if isinstance(part, Figure)}
    assert set(times) == {"time of a round", "measured and predicted speedup"}
    for name in ("draft", "target", "verify", "commit", "other"):
        assert f">{name}</text>" in times["time of a round"]
    assert ">free verification</text>" in times["measured and predicted speedup"]
    assert not [drawing for drawing in times.values() if "chain-t0" in drawing]
    assert are_several({"a": [1.0], "b": [2.0]})
    assert not are_several({"a": [1.0, None], "b": [0.0, None]})


def test_intervals_of_a_single_name_belong_to_their_bars() -> None:
    values: dict[str, list[float | None]] = {"a": [1.0], "b": [2.0]}
    known = {"b": [(1.5, 2.5)]}
    single = svg(draw("t", "d", bars(["run"], values, "x", known)))
    rows: dict[str, list[float | None]] = {"run": [1.0, 2.0]}
    assert single == svg(draw("t", "d", bars(["a", "b"], rows, "x", {"run": [None, (1.5, 2.5)]})))


def test_a_single_step_has_one_tick() -> None:
    drawing = svg(draw("t", "d", curves({"loss": [(40.0, 2.0)]}, "step", "nats", marks=True)))
    assert re.findall(r"<g id=\"xtick_\d+\">", drawing) == ['<g id="xtick_1">']
    assert ">40</text>" in drawing


def test_the_row_of_all_prompts_is_not_marked_as_best() -> None:
    console = ConsoleTable("prompts of", "tau")
    console.add_row("story", Text("2.00", style="bold green"))
    console.add_row("all", "1.50", style="bold")
    rows = from_console_table(console, "t", "d").rows
    assert [[cell.best for cell in row] for row in rows] == [[False, True], [False, False]]


@pytest.mark.usefixtures("undrawn")
def test_compare_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(write_run(tmp_path / name)) for name in ("one", "two")]
    assert compare([*runs, f"to={tmp_path / 'both'}"]) == 0
    assert "written:" in capsys.readouterr().out
    assert "2 runs compared" in (tmp_path / "both" / "report.md").read_text()


def write_search(folder: Path) -> Path:
    trial = {"params": {"train.lr": 1e-3}, "words": ["train.lr=0.001"], "seconds": 120.0}
    write_json(folder / "search.json", {
        "format": "outrider-search-1", "metric": "accept_length", "overrides": ["drafter=eagle3"],
        "importance": {"train.lr": 0.75, MARKUP: 0.25}, "best": 1,
        "trials": [
            trial | {"number": 0, "state": "COMPLETE", "value": 2.5},
            trial | {"number": 1, "state": "COMPLETE", "value": 3.25, "decoded tau": 3.0},
            trial | {"number": 2, "state": "PRUNED", "value": None},
        ],
    })  # fmt: skip
    return folder


def test_search_page_lists_the_best_trial_first(tmp_path: Path) -> None:
    folder = write_search(tmp_path / "search")
    assert report(folder, ReportConfig(), [f"run.dir={folder}"]) == 0
    text = (folder / "report.md").read_text()
    assert "`outrider train drafter=eagle3 train.lr=0.001`" in text
    rows = re.findall(r"^\| (\d) \| (\w+) \|", text, re.MULTILINE)
    assert rows == [("1", "complete"), ("0", "complete"), ("2", "pruned")]
    assert "75.0%" in text
    Reader((folder / "report.html").read_text())
    (folder / "search.json").write_text('{"format": "outrider-search-1"}')
    with pytest.raises(RunError, match=r"search\.json"):
        report(folder, ReportConfig(), [f"run.dir={folder}"])


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run"):
        report(tmp_path, ReportConfig(), [f"run.dir={tmp_path}"])
    folder = write_search(tmp_path / "search")
    with pytest.raises(ConfigError, match=r"report\.measure"):
        report(folder, ReportConfig(measure=True), [])
    with pytest.raises(ConfigError, match=r"target\.path"):
        report(folder, ReportConfig(), ["run.dir=x", "target.path=y"])


@pytest.mark.parametrize(
    "words", [[], ["run.dir=x", "report.measur=true"], ["run.dir=x", "eval.limit=3"],
              ["run.dir=x", "report.examples=0"], ["run.dir=x", "report.measure=often"]],
)  # fmt: skip
def test_unknown_report_keys_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        read_report(words)


@pytest.mark.usefixtures("undrawn")
def test_every_table_and_figure_has_a_title_and_a_definition(tmp_path: Path) -> None:
    """Figures and tables of every section, those of collapsible parts included."""
    from outrider.eval.page import acceptance, plans, speed, training

    run: RunFiles = read_run_files(write_run(tmp_path / "run"))
    builders: list[Callable[[RunFiles], Iterator[Part]]] = [
        speed.speed_parts, speed.time_parts, acceptance.acceptance_parts,
        acceptance.context_parts, acceptance.temperature_parts, plans.plan_parts,
        plans.calibration_parts, training.curve_parts, training.cost_parts,
        training.provenance_parts,
    ]  # fmt: skip
    for build in builders:
        parts = list(build(run))
        assert parts
        for part in parts:
            if isinstance(part, Collapsible):
                parts += part.parts
            elif isinstance(part, Figure) or part.kind == "table":
                assert part.definition  # type: ignore[union-attr]
                assert part.title  # type: ignore[union-attr]


def test_markdown_has_only_tables_each_defined_once() -> None:
    """Figures are left out, so a table cannot refer to a figure's definition."""
    figure = draw("f", "What it is.", curves({"a": [(0.0, 1.0)]}, "x", "y"))
    numbers = text_table("n", ["a"], [["1"]], "What it is.")
    sections = [
        Section("s", "Figure", [figure]),
        Section("t", "Tables", [figure, numbers, numbers]),
    ]
    page = Page("t", [], sections, "")
    text = as_markdown(page)
    assert re.findall(r"^## (\w+)", text, re.MULTILINE) == ["Tables"]
    assert (text.count("What it is."), text.count("Defined above.")) == (1, 1)
    assert (as_html(page).count("What it is."), as_html(page).count("Defined above.")) == (4, 0)


@pytest.mark.slow
def test_page_of_a_trained_run_is_complete(tmp_path: Path) -> None:
    """Six steps of training, two prompts decoded, the calibration measured."""
    run = tmp_path / "run"
    few = ["eval.limit=2", "eval.max_new_tokens=48", "eval.grid=[chain@0,chain@1]", "eval.warmup=0"]
    assert main(["train", *SMALL, "train.quick_eval=true", *few, f"run.dir={run}"]) == 0
    assert main(["report", f"run.dir={run}", "report.measure=true"]) == 0
    text = Reader((run / "report.html").read_text()).text
    assert text.count("outrider ") == text.count("outrider plan") + 1, "only a plan is missing"
    for shown in ("chain-t0", "time by phase", "accuracy over confidence", "rejected"):
        assert shown in text
    assert len(read_run_files(run).calibration["depths"]) == 2  # type: ignore[index]
