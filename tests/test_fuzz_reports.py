"""Fuzz tests of run folders: mutated files are shown, or refused with an error of the project."""

import copy
import io
import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import optuna
import pytest
from hypothesis import strategies as st
from jinja2 import Environment
from omegaconf import OmegaConf

from outrider.conf.command_settings import PublishConfig, ReportConfig
from outrider.conf.console import Console
from outrider.conf.decode_settings import DecodeConfig
from outrider.conf.errors import ConfigError, RunError, exit_on_error
from outrider.conf.schema import Config
from outrider.eval import compare, metrics, rank_tables, search_results
from outrider.eval.page import build, comparison, figures, run_files
from outrider.eval.page.elements import Listing, Page, Section
from outrider.eval.page.write import as_html, as_markdown
from outrider.eval.publish import card, verify_folder
from outrider.eval.run_results import all_reports, load_runs
from outrider.launch.cli import main
from outrider.models.decode.acceptance import Acceptance, RequestAcceptance
from outrider.models.decode.from_config import policy_of
from outrider.models.target.load import load_tokenizer
from outrider.train.settings import load_run, parse, read_saved_config
from tests.mutations import (
    HOSTILE,
    fuzz,
    mutated_bytes,
    mutated_json,
    mutated_value,
    replace_file,
)
from tests.test_page import write_run, write_search

pytestmark = pytest.mark.untyped
ERRORS = (ConfigError, RunError)
TABLE = [[0.5, 0.25], [0.5, 0.25]]
BINS = [[[4.0, 2.0]] * 10] * 2
RANKS = {
    "format": rank_tables.FORMAT, "rows": [9, 9], **dict.fromkeys(rank_tables.TABLES, TABLE),
    "best@0 by confidence": BINS, "drawn@1 by confidence": BINS,
}  # fmt: skip
GOLDEN = {"sha256": {"config.json": "0" * 64}, "kind": "golden"}
SIDECAR = {"tensors": {"fc.weight": {"dtype": "F32", "shape": [2, 2]}}}
OBJECTS = (
    "training.json", "manifest.json", "calibration.json", "eval/chain-t0.json", "plan/plan.json",
)  # fmt: skip
LINES = ("metrics.jsonl", "eval/chain-t0.outputs.jsonl")
PRINTED = set[str]()  # runs, which most examples have in common


class Run:
    """A run whose files can be replaced for one example."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder, self.config = folder, config
        files = [file for file in folder.rglob("*.*") if file.suffix != ".png"]
        self.valid = {str(file.relative_to(folder)): file.read_bytes() for file in files}

    def show(self, file: str, content: bytes) -> None:
        """Show the run with this content of a file on the page, in tables and in the card."""
        replace_file(self.folder / file, content)
        try:
            for shown in VIEWS if file in OBJECTS else [show_page]:
                with suppress(*ERRORS):
                    shown(self)
        finally:
            replace_file(self.folder / file, self.valid[file])


def show_page(run: Run) -> None:
    page = build._run_page(run.config, ReportConfig(), Console(quiet=True))
    as_html(page).encode()
    as_markdown(page).encode()


def show_tables(run: Run) -> None:
    console = Console(file=io.StringIO(), width=160)
    runs, *_ = load_runs([run.folder])
    if repr(runs) in PRINTED:
        return
    for shown in (compare.overview(runs), *compare.warnings(runs)):
        console.print(shown)
    console.print(compare.side_by_side(all_reports(runs)))
    assert "\x1b" not in console.file.getvalue()  # type: ignore[attr-defined]
    PRINTED.add(repr(runs))


def write_card(run: Run) -> None:
    drafter: Any = SimpleNamespace(
        parameters=list, vocab=[1], taps=[1], max_depth=3, state_dict=dict,
        describe_target_change=lambda: None,
    )  # fmt: skip
    target: Any = SimpleNamespace(name="target", vocab_size=9)
    subject = card.CardSubject(
        run.config, PublishConfig(), drafter, run.config.drafter, target, "sglang", "same tokens",
        *card.read_reports(run.folder, drafter),
    )  # fmt: skip
    card.write_card(subject, None).encode()


def convert(*values: Any, **_: Any) -> list[Any]:
    return [np.asarray(value, float) for value in values[:2]]


AXES = MagicMock()
AXES.get_legend_handles_labels.return_value = ([], [])
for method in ("plot", "barh", "scatter"):
    getattr(AXES, method).side_effect = convert
AXES.imshow.return_value = SimpleNamespace(cmap=lambda _: (0.5, 0.5, 0.5, 1.0), norm=float)


def paint_numbers(paint: Any, theme: Any) -> str:
    """Paint on axes that only convert what they are given, since matplotlib is slow."""
    if theme is figures.LIGHT:
        AXES.reset_mock()
        paint(AXES, theme)
    return "data:,"


VIEWS = (show_page, show_tables, write_card)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = write_run(tmp_path_factory.mktemp("runs") / "run")
    (folder / "ranks.json").write_text(json.dumps(RANKS))
    config, text = load_run(str(folder), []), (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(text[: text.rindex(b"\n") + 1])
    for file in (folder / "eval").glob("chain-t1*"):
        file.unlink()
    tokenizer = load_tokenizer(config.target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "RESAMPLES", 20)
        patch.setattr(build, "_tokenizer", lambda *_: tokenizer)
        patch.setattr(figures, "_svg", paint_numbers)
        # to read the whole file in every example takes more time than all else
        saved = OmegaConf.create({"drafter": {"name": config.drafter.name}})
        patch.setattr(run_files, "read_saved_config", lambda _folder: saved)
        patch.setattr(search_results, "png", lambda _figure: b"")
        patch.setattr(card, "target_fingerprint", lambda _target: "0123")
        patch.setattr(card, "fingerprint", lambda _tensors: "d")
        patch.setattr(card, "Environment", once(Environment))  # which holds compiled templates
        yield Run(folder, config)


def once(make: Any) -> Any:
    """Return a function whose result for the same positional arguments is made once, and copied."""
    made = dict[str, Any]()

    def get(*values: Any, **options: Any) -> Any:
        if (key := repr(values)) not in made:
            made[key] = make(*values, **options)
        return copy.copy(made[key])

    return get


def mutated_file(run: Run, file: str) -> st.SearchStrategy[bytes]:
    """Return mutations of a file of the run: of its values, or of its bytes."""
    valid = run.valid[file]
    if file.endswith(".json"):
        return mutated_json(json.loads(valid))
    rows = [json.loads(line) for line in valid.splitlines()]
    values = mutated_value(rows).map(lambda changed: changed if isinstance(changed, list) else rows)
    return values.map(lambda rows: "\n".join(map(json.dumps, rows)).encode()) | mutated_bytes(valid)


@pytest.mark.parametrize("file", [*OBJECTS, *LINES])
@fuzz(data=st.data())
def test_any_file_of_a_run_is_shown_or_refused(run: Run, file: str, data: st.DataObject) -> None:
    run.show(file, data.draw(mutated_file(run, file)))


def test_the_valid_run_is_shown(run: Run) -> None:
    """Otherwise the tests above would pass for any error."""
    for shown in VIEWS:
        shown(run)


@fuzz(data=st.data())
def test_any_saved_configuration_is_shown_or_refused(run: Run, data: st.DataObject) -> None:
    file = run.folder / "config.yaml"
    replace_file(file, data.draw(mutated_bytes(run.valid["config.yaml"])))
    with suppress(*ERRORS):
        saved = read_saved_config(run.folder)
        parse(saved)
        section = Section("origin", "", [Listing("config.yaml", OmegaConf.to_yaml(saved))])
        as_html(Page("", [], [section], "")).encode()
    replace_file(file, run.valid["config.yaml"])


@fuzz(data=mutated_json(RANKS))
def test_any_table_of_ranks_gives_a_tree_or_is_refused(run: Run, data: bytes) -> None:
    replace_file(run.folder / "ranks.json", data)
    decode = DecodeConfig(name="static_tree", depth=2, width=2, nodes=3)
    with suppress(*ERRORS):
        tables = rank_tables.read_tables(run.folder)
        for temperature in (0.0, 1.0):
            policy_of(replace(decode, temperature=temperature), tables)
        for table in (tables or {}).values():
            estimate = RequestAcceptance(Acceptance(table=table))
            assert all(0 <= estimate.given(1, c) <= 1 for c in (0.0, 0.5, 1.0))
            assert 0 <= estimate.mean(1) <= 1


# ---- searches ----


@fuzz(data=st.data())
def test_any_search_is_shown_or_refused(run: Run, data: st.DataObject) -> None:
    folder = run.folder.parent / "search"
    folder.mkdir(exist_ok=True)
    valid = json.loads((write_search(folder) / "search.json").read_text())
    replace_file(folder / "search.json", data.draw(mutated_json(valid)))
    with suppress(*ERRORS):
        page = build._page("", [], [comparison.search_section(folder, "search")], [folder])
        as_html(page).encode()
        as_markdown(page).encode()


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study of a search with five trials."""
    folder = tmp_path_factory.mktemp("study")
    storage = f"sqlite:///{folder / search_results.STUDY}"
    made = optuna.create_study(storage=storage, study_name="search", direction="maximize")
    made.set_user_attr("metric", "tau")
    made.set_user_attr("overrides", ["drafter=eagle3"])
    for value in range(5):
        trial = made.ask()
        trial.suggest_float("train.lr", 1e-4, 1e-2, log=True)
        trial.suggest_categorical("drafter.loss", ['["tv"]', '["kl"]'])
        for name, attribute in (("words", ["train.lr=0.001"]), ("seconds", 60.0)):
            trial.set_user_attr(name, attribute)
        made.tell(trial, float(value))
    return folder / search_results.STUDY


COLUMNS = [
    ("study_user_attributes", "value_json"), ("study_user_attributes", "key"),
    ("trial_user_attributes", "value_json"), ("trial_user_attributes", "key"),
    ("trial_params", "distribution_json"), ("trial_params", "param_value"),
    ("trial_params", "param_name"), ("trial_values", "value"), ("trial_values", "value_type"),
    ("trials", "state"), ("trials", "number"), ("studies", "study_name"),
    ("study_directions", "direction"), ("version_info", "schema_version"),
]  # fmt: skip
TEXTS = st.sampled_from(HOSTILE).map(json.dumps) | st.sampled_from(["", "{", "COMPLETE", "RUNNING"])


@fuzz(data=st.data())
def test_any_study_is_shown_or_refused(study: Path, run: Run, data: st.DataObject) -> None:
    file = run.folder / search_results.STUDY
    if data.draw(st.booleans()):
        file.write_bytes(data.draw(mutated_bytes(study.read_bytes())))
    else:
        shutil.copyfile(study, file)
        table, column = data.draw(st.sampled_from(COLUMNS))
        value = data.draw(TEXTS | st.sampled_from([None, 0, -7, 2**40, 1e300, b"\xff"]))
        with closing(sqlite3.connect(file)) as base, suppress(sqlite3.Error):
            rows = f"SELECT rowid FROM {table} ORDER BY rowid LIMIT {data.draw(st.integers(1, 3))}"
            base.execute(f"UPDATE {table} SET {column} = ? WHERE rowid IN ({rows})", (value,))
            base.commit()
    try:
        with suppress(*ERRORS):
            search_results.show(run.folder, Console(file=io.StringIO(), width=160))
    finally:
        file.unlink()


# ---- published folders ----


@fuzz(data=st.data())
def test_any_published_folder_is_verified_or_refused(run: Run, data: st.DataObject) -> None:
    folder = run.folder.parent / "published"
    folder.mkdir(exist_ok=True)
    header = json.dumps({"fc.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}})
    files = {"golden.json": json.dumps(GOLDEN), "outrider.json": json.dumps(SIDECAR),
             "model.safetensors": header}  # fmt: skip
    changed = data.draw(st.sampled_from(list(files)))
    for name, text in files.items():
        content = data.draw(mutated_json(json.loads(text))) if name == changed else text.encode()
        if name == "model.safetensors":
            content = len(content).to_bytes(8, "little") + content + bytes(16)
        replace_file(folder / name, content)
    assert verify_folder.main([str(folder)]) in (0, 1)


# ---- the commands ----


@pytest.mark.parametrize("verb", ["report", "compare"])
@fuzz(data=st.data(), share=0.25)
def test_a_command_shows_the_run_or_exits_with_a_message(
    run: Run, verb: str, data: st.DataObject, capsys: pytest.CaptureFixture[str]
) -> None:
    file = data.draw(st.sampled_from([*OBJECTS, *LINES, "config.yaml"]))
    yaml = mutated_bytes(run.valid["config.yaml"])
    content = data.draw(yaml if file == "config.yaml" else mutated_file(run, file))
    replace_file(run.folder / file, content)
    words = [f"run.dir={run.folder}"] if verb == "report" else [str(run.folder)]
    stopped = ""
    try:
        with exit_on_error(f"outrider {verb}"):
            assert main([verb, *words]) == 0
    except SystemExit as stop:
        stopped = f"{stop.code}"
    finally:
        replace_file(run.folder / file, run.valid[file])
    if stopped:
        shown = capsys.readouterr().err
        assert stopped == "2"
        assert shown.startswith(f"outrider {verb}")
        assert str(run.folder) in shown or "config error" in shown
