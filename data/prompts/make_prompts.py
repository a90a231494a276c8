"""Writes `general.jsonl`: the prompts a target answers when the user brings none.

    python -m outrider.data.prompts.make_prompts                      # the committed file
    python -m outrider.data.prompts.make_prompts --count 20000 --out more.jsonl

A row is {"id", "category", "turns"}: one or two user turns in the style of everyday use of an
instruct model. The text is our own; names, places and figures are invented, apart from the real
topics of the general questions. Every hundred rows hold each category in the same shares, in
shuffled order, and a longer file begins with the shorter one: so the first n rows are a balanced
sample for any n. One seed, no clock, no set order: the same bytes on every machine.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from outrider.data.prompts import (
    analysis,
    creative,
    german,
    news,
    passages,
    school,
    topics,
    words,
)
from outrider.data.prompts.writer import Writer

SEED = "outrider prompts 1"
COUNT = 4200
FILE = Path(__file__).with_name("general.jsonl")
HELD_OUT = Path(__file__).with_name("eval.jsonl")

# Rows of each category in every hundred.
SHARES: dict[str, tuple[int, Callable[[Writer], list[str]]]] = {
    "math": (25, school.math),
    "general": (14, topics.general),
    "qa": (6, topics.quick),
    "writing": (8, creative.writing),
    "roleplay": (4, creative.roleplay),
    "coding": (8, creative.coding),
    "summarization": (10, news.summarization),
    "translation": (8, german.translation),
    "rag": (8, passages.rag),
    "extraction": (5, analysis.extraction),
    "reasoning": (4, analysis.reasoning),
}
LISTS = {
    "general": topics.QUICK,
    "qa": topics.QUICK,
    "writing": creative.LISTS,
    "roleplay": creative.LISTS,
    "coding": creative.LISTS,
    "summarization": news.LISTS,
    "translation": german.LISTS,
    "rag": {**news.LISTS, **passages.LISTS},
    "extraction": {**news.LISTS, **analysis.LISTS},
    "reasoning": analysis.LISTS,
}

Row = dict[str, str | list[str]]


def grams(turns: list[str], size: int = 8) -> set[tuple[str, ...]]:
    """The runs of `size` words of a prompt, lower case, without stops; all of it if shorter."""
    clean = "".join(c if c.isalnum() else " " for c in " ".join(turns).lower()).split()
    return {tuple(clean[i : i + size]) for i in range(max(1, len(clean) - size + 1))}


def held_out() -> set[tuple[str, ...]]:
    """The 8-grams of the held-out suite; a generated prompt may share few of them."""
    rows = HELD_OUT.read_text("utf-8").splitlines()
    return set().union(*(grams(json.loads(row)["turns"]) for row in rows))


def distinct(category: str, taken: set[tuple[str, ...]]) -> Iterator[list[str]]:
    """Prompts of one category without end, none twice, none close to the held-out suite.

    Raises:
        RuntimeError: a thousand draws in a row brought nothing new: the grammar is exhausted.
    """
    writer = Writer(f"{SEED}/{category}", {**words.WORDS, **LISTS.get(category, {})})
    seen: set[str] = set()
    misses = 0
    while misses < 1000:
        turns = SHARES[category][1](writer)
        own = grams(turns)
        if turns[0].lower() in seen or len(own & taken) * 4 >= len(own):
            misses += 1
            continue
        seen.add(turns[0].lower())
        misses = 0
        yield turns
    raise RuntimeError(f"the grammar of {category!r} is exhausted after {len(seen)} prompts")


def rows() -> Iterator[Row]:
    """The rows in their fixed order, without end."""
    taken = held_out()
    sources = {category: distinct(category, taken) for category in SHARES}
    order = Writer(f"{SEED}/order", {})
    number = 0
    while True:
        hundred = [category for category, (share, _) in SHARES.items() for _ in range(share)]
        order.random.shuffle(hundred)
        for category in hundred:
            yield {"id": f"g{number:05d}", "category": category, "turns": next(sources[category])}
            number += 1


def text(count: int) -> str:
    """The first `count` rows as jsonl."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in islice(rows(), count))


def main() -> None:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Write the prompts for self-generation.")
    parser.add_argument("--count", type=int, default=COUNT, help="rows to write")
    parser.add_argument("--out", type=Path, default=FILE, help="the file to write")
    options = parser.parse_args()
    if options.count < 1:
        parser.error(f"--count {options.count}: at least one row must be written")
    partial = options.out.with_name(options.out.name + ".partial")
    partial.write_text(text(options.count), encoding="utf-8", newline="\n")
    partial.replace(options.out)


if __name__ == "__main__":
    main()
