"""Generator of `data/prompts/general.jsonl`, the prompts of `data=self`.

    python -m outrider.data.make.prompts.make_prompts                      # the committed file
    python -m outrider.data.make.prompts.make_prompts --count 20000 --out more.jsonl

A row is {"id", "category", "turns"}: one or two user turns in the style of everyday use of an
instruct model. Names, places and figures are invented, apart from the topics of the general
questions. Every hundred rows contain each category in the same shares, in shuffled order, and a
longer file begins with the shorter one: the first n rows are a balanced sample for any n. Equal
versions write equal bytes on every machine.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from outrider.conf.files import write
from outrider.data.make.prompts.categories import CATEGORIES, WORDS
from outrider.data.make.prompts.grammar import Grammar

SEED = "outrider prompts 1"
COUNT = 4200
FILE = Path(__file__).parents[2] / "prompts" / "general.jsonl"
HELD_OUT = Path(__file__).parents[2] / "prompts" / "eval.jsonl"

Row = dict[str, str | list[str]]


def grams(turns: list[str], size: int = 8) -> set[tuple[str, ...]]:
    """Return the word n-grams of a prompt, lower case, without stops; all of it if shorter."""
    clean = "".join(c if c.isalnum() else " " for c in " ".join(turns).lower()).split()
    return {tuple(clean[i : i + size]) for i in range(max(1, len(clean) - size + 1))}


def held_out() -> set[tuple[str, ...]]:
    """Return the 8-grams of the held-out suite; a generated prompt may share few of them."""
    rows = HELD_OUT.read_text("utf-8").splitlines()
    return set().union(*(grams(json.loads(row)["turns"]) for row in rows))


def distinct(category: str, excluded: set[tuple[str, ...]]) -> Iterator[list[str]]:
    """Yield prompts of one category without end, none twice, none close to the held-out suite.

    A prompt is skipped if a quarter of its 8-grams are among the excluded ones. Raises RuntimeError
    when a thousand draws in a row gave nothing new.
    """
    kind = CATEGORIES[category]
    grammar = Grammar(f"{SEED}/{category}", {**WORDS, **kind.lists})
    seen, misses = set[str](), 0
    while misses < 1000:
        turns = kind.turns(grammar)
        own = grams(turns)
        if turns[0].lower() in seen or len(own & excluded) * 4 >= len(own):
            misses += 1
            continue
        seen.add(turns[0].lower())
        misses = 0
        yield turns
    raise RuntimeError(f"the grammar of {category!r} is exhausted after {len(seen)} prompts")


def rows() -> Iterator[Row]:
    excluded = held_out()
    sources = {category: distinct(category, excluded) for category in CATEGORIES}
    order = Grammar(f"{SEED}/order", {})
    number = 0
    while True:
        hundred = [name for name, kind in CATEGORIES.items() for _ in range(kind.share)]
        order.random.shuffle(hundred)
        for category in hundred:
            yield {"id": f"g{number:05d}", "category": category, "turns": next(sources[category])}
            number += 1


def text(count: int) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in islice(rows(), count))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the prompts for self-generation.")
    parser.add_argument("--count", type=int, default=COUNT, help="rows to write")
    parser.add_argument("--out", type=Path, default=FILE, help="the file to write")
    options = parser.parse_args()
    if options.count < 1:
        parser.error(f"--count {options.count}: must be at least 1")
    write(options.out, text(options.count).encode())


if __name__ == "__main__":
    main()
