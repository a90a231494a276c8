"""Rows from Python: `train(config, rows=...)`."""

import json
import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.schema import Config
from outrider.data.conversations import RuleCounts, read_conversations
from outrider.data.python_rows import with_rows
from outrider.data.self_generated import conversation_source
from outrider.launch.train import train
from outrider.train.resume import require_equal_ranks
from outrider.train.settings import parse

PAGE = Path(__file__).parent.parent / "docs" / "your_model.md"
DIALOGUE = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rows"


def config_of(*words: str) -> Config:
    return parse(compose(["target=tiny", "data=jsonl", *words]))


def conversations(config: Config) -> list[Any]:
    return list(read_conversations(conversation_source(config.data), RuleCounts()))


def once(count: int = 3) -> Iterator[dict[str, Any]]:
    yield from ({"messages": DIALOGUE, "id": number} for number in range(count))


def sums(count: int) -> Iterator[dict[str, Any]]:
    yield from ({"prompt": f"{n}+{n}?", "completion": f"{2 * n}"} for n in range(count))


def silent(_message: str) -> None: ...


def test_rows_that_can_be_read_once_are_a_text_that_can_be_read_again(cache: Path) -> None:
    notes = list[str]()
    config = with_rows(config_of(), once(), notes.append)
    assert conversations(config) == conversations(config) == [DIALOGUE] * 3
    (file,) = cache.iterdir()
    assert notes == [f"text: 3 rows from Python, kept in {file}"]
    assert with_rows(config_of(), list(once()), silent) == config, "equal rows are one file"
    assert with_rows(config_of(), once(4), silent).data.path != config.data.path


def test_processes_of_one_number_write_files_of_their_own(cache: Path) -> None:
    """Ranks in containers that share a cache often have the same process number."""

    def during() -> Iterator[dict[str, Any]]:
        yield {"messages": DIALOGUE}
        with_rows(config_of(), once(), silent)
        yield {"messages": DIALOGUE}

    config = with_rows(config_of(), during(), silent)
    assert conversations(config) == [DIALOGUE] * 2
    assert len(list(cache.iterdir())) == 2


def test_a_dataset_is_read_with_columns_of_its_own() -> None:
    dataset = Dataset.from_list([{"dialogue": DIALOGUE, "day": date(2026, 1, 2)}] * 2)
    for rows in (dataset, dataset.to_iterable_dataset(), dataset.with_format("numpy")):
        config = with_rows(config_of("data.columns={messages: dialogue}"), rows, silent)
        assert conversations(config) == [DIALOGUE] * 2


def test_a_dataset_of_no_known_shape_is_refused_with_its_first_row() -> None:
    config = with_rows(config_of(), Dataset.from_list([{"dialogue": "2+2?"}]), silent)
    with pytest.raises(RunError, match=r"unknown shape: 1.*dialogue") as error:
        conversations(config)
    assert "data.columns={messages: NAME}" in error.value.fix


def test_what_json_does_not_have_is_not_text() -> None:
    """The conversation ends before such a turn."""
    turns = [*DIALOGUE, {"role": "user", "content": date(2026, 1, 2)}, DIALOGUE[1]]
    numbers = {"n": np.float32(0.5), "m": np.arange(2)}
    config = with_rows(config_of(), [{"messages": turns, **numbers}], silent)
    assert conversations(config) == [DIALOGUE]
    row = json.loads(Path(str(config.data.path)).read_text())
    assert (row["n"], row["m"]) == (0.5, [0, 1])


class Broken(Exception):
    pass


def failing(error: Exception) -> Iterator[dict[str, Any]]:
    yield from once(2)
    raise error


@pytest.mark.parametrize("error", [Broken("at line 7"), OSError(5, "unplugged")])
def test_a_generator_that_fails_is_named_and_nothing_is_kept(cache: Path, error: Exception) -> None:
    name = type(error).__name__
    with pytest.raises(RunError, match=f"failed after 2 rows: {name}: ") as caught:
        with_rows(config_of(), failing(error), silent)
    assert caught.value.__cause__ is error
    assert list(cache.iterdir()) == []


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no rows"),
        (iter([]), "read once"),
        ([{"messages": DIALOGUE}, ["2+2?"]], "Row 2 of rows is of type list"),
        (["2+2?"], "Row 1 of rows is of type str"),
        ([{(1, 2): "x"}], "Row 1 of rows cannot be stored"),
    ],
)
def test_rows_that_are_none_are_refused(rows: Any, message: str) -> None:
    with pytest.raises(RunError, match=message):
        with_rows(config_of(), rows, silent)


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("chats.jsonl", r"Use data\.path"),
        (Path("chats.jsonl"), r"Use data\.path"),
        (DatasetDict(train=Dataset.from_list([{"a": 1}])), r"mapping of train"),
        ({"messages": []}, "mapping of messages"),
        (7, "cannot be iterated"),
    ],
)
def test_what_is_no_iterable_of_rows_is_refused(rows: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_rows(config_of(), rows, silent)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["data=jsonl", "data.path=a.jsonl"], "data.path"),
        (["data=jsonl", "data.traces=a"], "data.traces"),
        (["data=jsonl", "data.split=test"], "data.split"),
        (["data=tiny"], "data"),
        (
            ["data=self", "data.generate.self_prompted=true", "data.generate.samples=9"],
            "data.generate.self_prompted",
        ),
    ],
)
def test_rows_beside_another_text_are_refused(words: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        with_rows(parse(compose(words)), once(), silent)
    assert error.value.key == key


def test_without_rows_a_configuration_without_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\(config, rows="):
        train(config_of(f"run.dir={tmp_path}"))


def test_a_run_is_continued_with_equal_rows_and_refused_with_others(tmp_path: Path) -> None:
    words = [f"run.dir={tmp_path / 'run'}", "train.max_minutes=null", "train.quick_eval=false"]
    words += ["train.own_prompts=0", "train.batch_tokens=256", "data.max_length=64"]
    assert train(config_of(*words, "train.max_steps=1"), rows=sums(60)) == 0
    assert train(config_of(*words, "train.max_steps=2"), rows=sums(60)) == 0
    with pytest.raises(ConfigError, match=r"began with data\.path") as error:
        train(config_of(*words, "train.max_steps=3"), rows=sums(61))
    assert error.value.key == "data.path"


@pytest.mark.untyped
def test_ranks_with_different_text_are_refused() -> None:
    def run(*hashes: str) -> Any:
        numbers = torch.tensor([int(one[:15], 16) for one in hashes])
        accelerator = SimpleNamespace(gather=lambda own: torch.cat([own, numbers]))
        data = SimpleNamespace(about={"sha256_documents": "f" * 64})
        device = SimpleNamespace(device="cpu")
        return SimpleNamespace(accelerator=accelerator, data=data, target=device)

    require_equal_ranks(run("f" * 64))
    with pytest.raises(RunError, match="different training text"):
        require_equal_ranks(run("f" * 64, "f" * 14 + "e" * 50))


@pytest.mark.slow
def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    section = PAGE.read_text().partition("### Rows from Python")[2].partition("\n### ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert len(blocks) == 2
    for run in ("from-python", "from-dataset"):
        assert (tmp_path / "runs" / run / "drafter" / "model.safetensors").is_file()
