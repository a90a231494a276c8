"""The prompts for self-generation and the held-out suite, and the grammar that writes them."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.data.make.prompts import categories, make_prompts
from outrider.data.make.prompts.grammar import Grammar
from outrider.data.make.resources import load

Turns = list[str]


def read(path: Path) -> list[dict[str, str | Turns]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


GENERAL = read(make_prompts.FILE)
HELD_OUT = read(make_prompts.HELD_OUT)

SHARES = {
    "math": 25,
    "general": 14,
    "qa": 6,
    "writing": 8,
    "roleplay": 4,
    "coding": 8,
    "summarization": 10,
    "translation": 8,
    "rag": 8,
    "extraction": 5,
    "reasoning": 4,
}


def word_8_grams(turns: object) -> set[str]:
    """Return runs of eight words; independent of the generator's implementation."""
    assert isinstance(turns, list)
    words = re.findall(r"\w+", " ".join(turns).lower())
    return {" ".join(words[i : i + 8]) for i in range(max(1, len(words) - 7))}


def prompts(category: str) -> Iterator[str]:
    """Yield the first turns of one category of the committed file."""
    for row in GENERAL:
        if row["category"] == category:
            yield row["turns"][0]


def test_the_script_writes_the_committed_file_byte_for_byte() -> None:
    assert make_prompts.text(make_prompts.COUNT).encode() == make_prompts.FILE.read_bytes()


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_the_command_line_writes_the_same_rows_under_any_hash_seed(
    hash_seed: str, tmp_path: Path
) -> None:
    """Set and dict order of strings differs between processes; the file does not."""
    out = tmp_path / "some.jsonl"
    subprocess.run(
        [sys.executable, "-m", make_prompts.__name__, "--count", "250", "--out", str(out)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        cwd=Path(__file__).parents[1],
        check=True,
    )
    assert out.read_bytes() == b"".join(make_prompts.FILE.read_bytes().splitlines(True)[:250])
    assert list(tmp_path.iterdir()) == [out]


def test_the_file_is_small_enough_to_be_committed() -> None:
    assert make_prompts.FILE.stat().st_size <= 1_200_000


@pytest.mark.parametrize("rows", [GENERAL, HELD_OUT], ids=["general", "held out"])
def test_every_row_has_an_id_a_category_and_one_or_two_turns(
    rows: list[dict[str, str | Turns]],
) -> None:
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        assert list(row) == ["id", "category", "turns"]
        assert len(row["turns"]) in (1, 2)
        assert all(turn == turn.strip() and turn for turn in row["turns"])


def test_first_turns_are_unique() -> None:
    for rows in (GENERAL, HELD_OUT):
        firsts = Counter(row["turns"][0].lower() for row in rows)
        assert firsts.most_common(1)[0][1] == 1


def test_every_hundred_rows_hold_the_same_shares() -> None:
    assert len(GENERAL) == make_prompts.COUNT
    assert sum(SHARES.values()) == 100
    for start in range(0, len(GENERAL), 100):
        assert Counter(row["category"] for row in GENERAL[start : start + 100]) == SHARES


def test_the_order_within_a_hundred_is_shuffled() -> None:
    first = [row["category"] for row in GENERAL[:100]]
    assert first != [row["category"] for row in GENERAL[100:200]]
    assert len(set(first[:20])) >= 6, "twenty rows in a row show most kinds of prompt"


def test_the_held_out_suite_has_ten_prompts_in_each_of_eight_categories() -> None:
    expected = {"writing", "reasoning", "math", "coding", "extraction", "translation"}
    expected |= {"summarization", "qa"}
    assert Counter(row["category"] for row in HELD_OUT) == dict.fromkeys(expected, 10)
    assert {row["category"] for row in HELD_OUT[:8]} == expected, "the first rows are balanced"


def test_no_prompt_shares_half_of_its_runs_of_eight_words_with_the_other_file() -> None:
    for rows, others in ((GENERAL, HELD_OUT), (HELD_OUT, GENERAL)):
        excluded = set().union(*(word_8_grams(row["turns"]) for row in others))
        for row in rows:
            own = word_8_grams(row["turns"])
            assert len(own & excluded) < 0.5 * len(own), row


def test_a_held_out_prompt_with_one_word_changed_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: the category draws a near copy first; the other prompt is yielded."""
    known = next(row["turns"] for row in HELD_OUT if row["category"] == "summarization")
    near = [known[0].replace("notebook", "diary", 1)]
    assert near != known
    turns = iter([near, ["Something that neither file contains, not even in similar words."]])
    math = categories.Category(1, lambda _: next(turns))
    monkeypatch.setitem(categories.CATEGORIES, "math", math)
    assert next(make_prompts.distinct("math", make_prompts.held_out()))[0].startswith("Something")


def test_an_exhausted_grammar_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = categories.Category(1, lambda _: ["Always the same?"])
    monkeypatch.setitem(categories.CATEGORIES, "qa", quick)
    source = make_prompts.distinct("qa", set())
    assert next(source) == ["Always the same?"]
    with pytest.raises(RuntimeError, match="'qa' is exhausted after 1 prompts"):
        next(source)


def test_the_text_contains_no_grammar_syntax() -> None:
    """Braces, brackets, markers of plural and article, and an article that does not fit."""
    leftover = re.compile(
        r"[{}\[\]]|\(s\)|\(n\)|\\n|  |\b[Aa] (apple|orange|alpaca|onion|electrician)\b"
    )
    for row in GENERAL:
        for turn in row["turns"]:
            assert not leftover.search(turn), turn


def test_articles_have_120_to_250_words() -> None:
    """The request around the article has at most eleven more words."""
    for prompt in prompts("summarization"):
        assert 120 <= len(prompt.split()) <= 261, prompt


def test_retrieval_prompts_hold_two_to_four_titled_passages() -> None:
    """A passage is a title without a stop, then a line that ends with one."""
    counts = Counter(len(re.findall(r"^[^.\n]+\n.+\.$", text, re.M)) for text in prompts("rag"))
    assert set(counts) <= {2, 3, 4}
    assert min(counts[2], counts[3], counts[4]) > 0


def test_every_retrieval_question_shares_a_name_with_its_passage() -> None:
    """A common name identifies the passage."""
    assert len(categories.ENTRIES) >= 12
    for entry in categories.ENTRIES:
        facts = " ".join([entry.title, *entry.facts]).lower()
        assert len(entry.questions) == 3
        for question in entry.questions:
            slots = re.findall(r"\{\w+\}", question.lower())
            assert slots, question
            assert all(slot in facts for slot in slots), question


def test_forty_word_problems_use_all_of_their_numbers() -> None:
    problems = categories.WORD_PROBLEMS
    assert len({text for text, _ in problems}) == len(problems) >= 40
    for text, ranges in (*problems, *categories.EXERCISES):
        slots = set(re.findall(r"\{(\w+)\}", text))
        numbers = {name for name, _ in ranges}
        assert numbers <= slots, "a number that the text does not use"
        named = {re.sub(r"\d", "", slot).lower() for slot in slots - numbers}
        assert named <= set(categories.WORDS), "a slot without a list"


def test_several_hundred_distinct_topics() -> None:
    every = [topic for field in categories.TOPICS["fields"].values() for topic in field["topics"]]
    assert len(every) > 400
    assert len(set(every)) == len(every)


def test_every_german_slot_has_words() -> None:
    for sentence in categories.GERMAN["sentences"]:
        for slot in re.findall(r"\{(\w+?)\d*\}", sentence):
            assert categories.GERMAN["lists"][slot.lower()], slot


def test_no_item_repeats_before_the_deck_is_empty() -> None:
    grammar = Grammar("any", {})
    items = tuple("abcdefg")
    assert sorted(grammar.draw(items) for _ in items) == list(items)
    assert sorted(grammar.draw(items) for _ in items) == list(items)


def test_a_slot_keeps_its_word_and_a_digit_selects_another() -> None:
    grammar = Grammar("any", {"pet": ("cat", "dog"), "who": ("the {pet}",)})
    first, again, other = grammar.fill("{pet} {Pet} {pet2}").split()
    assert again == first.capitalize()
    assert {first, other} == {"cat", "dog"}
    assert grammar.fill("{who}, {pet}, {pet}").count("cat") in (0, 3)


def test_articles_and_plurals_match_the_chosen_word() -> None:
    grammar = Grammar("any", {"x": ("owl",), "y": ("bench",), "z": ("daisy",), "toy": ("toy",)})
    assert grammar.fill("a(n) {x}, a(n) {y}. A(n) 8-day trip") == "an owl, a bench. An 8-day trip"
    assert grammar.fill("{x}(s) {y}(s) {z}(s) {toy}(s)") == "owls benches daisies toys"


def test_given_values_are_inserted_literally() -> None:
    """Code and quoted texts may hold brackets and braces."""
    assert Grammar("any", {}).fill("[go|go]: {code}", code="{a[0]|b}") == "go: {a[0]|b}"


def test_a_multiple_can_be_shared_without_remainder() -> None:
    grammar = Grammar("any", {})
    for _ in range(100):
        values = grammar.numbers({"n": (3, 7), "total": ("n", 2, 9), "even": (2, 8, 2)})
        assert values["total"] % values["n"] == 0
        assert 2 <= values["total"] // values["n"] <= 9
        assert values["even"] in (2, 4, 6, 8)


def test_a_range_of_numbers_is_a_word_list() -> None:
    grammar = Grammar("any", {"day": (2, 4), "year": (1871, 1875, 2)})
    assert grammar.lists == {"day": ("2", "3", "4"), "year": ("1871", "1873", "1875")}


def test_resources_are_read_as_tuples_lines_and_texts(tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    file.write_text("a: [x y, '${p}']\nb: |\n  one\n  two\\n3\nc: |-\n  d\n  e\nf: {g: [1, 2]}\n")
    lines = ("one", "two\n3")
    assert load(file) == {"a": ("x y", "${p}"), "b": lines, "c": "d\ne", "f": {"g": (1, 2)}}
