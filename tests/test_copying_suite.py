"""The suite of prompts whose answers repeat them: its rows, their length, a measurement."""

import ast
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from outrider.conf.schema import EvalConfig
from outrider.data.conversations import Prompt, read_prompts
from outrider.data.dataset_registry import COPYING, GENERAL
from outrider.data.make.prompts import make_prompts
from outrider.data.sources import suite_source
from outrider.data.tokenise import prompt_ids
from outrider.launch.cli import main
from outrider.models.target.load import LoadedTarget

SUITE = read_prompts(suite_source("copying"))
CATEGORIES = ["summarize", "edit", "retrieve"]


def text_to_copy(prompt: Prompt) -> str:
    """The prompt without its first paragraph, the task."""
    return prompt.turns[0].partition("\n\n")[2]


def test_there_are_eight_prompts_of_each_kind() -> None:
    assert Counter(prompt.category for prompt in SUITE) == dict.fromkeys(CATEGORIES, 8)
    assert [prompt.category for prompt in SUITE] == CATEGORIES * 8  # the first rows are balanced
    assert len({prompt.id for prompt in SUITE}) == 24
    assert all(len(prompt.turns) == 1 for prompt in SUITE)


def test_most_of_a_prompt_is_text_to_copy() -> None:
    for prompt in SUITE:
        assert len(text_to_copy(prompt)) > 0.75 * len(prompt.turns[0]), prompt.id


def test_lengths_suit_a_small_model() -> None:
    """Between 150 and 500 tokens of about four characters; code has shorter ones."""
    for prompt in SUITE:
        pieces = re.findall(r" ?\w+|[^\w\s]+|\s+(?=\S)", prompt.turns[0])
        assert 150 <= len(pieces) <= 500, (prompt.id, len(pieces))
        assert 600 <= len(prompt.turns[0]) <= 2000, prompt.id


def test_every_prompt_fits_the_embedded_target(loaded: LoadedTarget) -> None:
    room = loaded.target.shape().max_positions - EvalConfig().max_new_tokens
    for prompt in SUITE:
        assert len(prompt_ids(loaded.tokenizer, prompt.first_messages())) <= room, prompt.id


def test_programs_can_be_parsed() -> None:
    """Of the eight texts to edit, six are Python; one is SQL, one a page."""
    blocks = [text_to_copy(prompt) for prompt in SUITE if prompt.category == "edit"]
    programs = [block.removeprefix("```\n").removesuffix("\n```") for block in blocks]
    python = [code for code in programs if not code.startswith(("CREATE", "<"))]
    assert len(python) == 6
    for code in python:
        ast.parse(code)


def test_no_prompt_is_close_to_another_shipped_one() -> None:
    """No run of eight words is in the prompts for self-generation or the general suite."""
    rows = [
        *make_prompts.FILE.read_text("utf-8").splitlines(),
        *GENERAL.read_text("utf-8").splitlines(),
    ]
    others = set().union(*(make_prompts.grams(json.loads(row)["turns"]) for row in rows))
    for prompt in SUITE:
        assert not make_prompts.grams(prompt.turns) & others, prompt.id


def test_the_file_has_the_shape_of_the_general_suite() -> None:
    for line in COPYING.read_text("utf-8").splitlines():
        assert list(json.loads(line)) == ["id", "category", "turns"]


@pytest.mark.slow
def test_the_report_has_every_kind(tmp_path: Path) -> None:
    words = ["drafter=ngram", "target=tiny", f"run.dir={tmp_path}", "eval.prompts=copying"]
    assert main(["eval", *words, "eval.limit=3", "eval.max_new_tokens=16", "eval.warmup=0"]) == 0
    report = json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert report["exact"] is True
    assert {*report["categories"]} == {*CATEGORIES}
