"""A small text grammar: templates with slots and alternatives, filled from shuffled decks.

    [buys|picks] a {fruit}        square brackets: one alternative; braces: one word of a list
    {town} and {town2}            a digit asks for a different word of the same list
    {Tool} ... {tool}             a capital only capitalises: both are the same word
    a(n) {animal}, {animal}(s)    "a" or "an" by the word that follows; the regular plural

A word list is drawn like a deck of cards, without replacement until it is empty, so that a
large sample uses all words about equally often. All randomness comes from one seeded
`random.Random`, whose `random`, `randrange`, `choice` and `shuffle` have used the same algorithms
since Python 3.2; so the same seed writes the same text everywhere.
"""

import random
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
Lists = Mapping[str, Sequence[str]]
Range = tuple[int, int] | tuple[int, int, int] | tuple[str, int, int]

ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")
SLOT = re.compile(r"\{(\w+?)(\d*)\}")
PLURAL = re.compile(r"(\w+)\(s\)")
VOWELS = "aeiouAEIOU8"  # an eight; no list has a word like "unit"
ARTICLE = re.compile(r"\b([Aa])\(n\) (?=(\w))")


def listed(text: str) -> tuple[str, ...]:
    """The comma-separated items of a text, white space folded."""
    return tuple(" ".join(item.split()) for item in text.split(",") if item.strip())


def lines(text: str) -> tuple[str, ...]:
    """The lines of a text; one that is indented deeper than the first continues the one before."""
    rows = [row for row in text.split("\n") if row.strip()]
    margin = len(rows[0]) - len(rows[0].lstrip())
    whole: list[str] = []
    for row in rows:
        if row[: margin + 1].strip():
            whole.append(row.strip())
        else:
            whole[-1] += " " + row.strip()
    return tuple(whole)


def plural(word: re.Match[str]) -> str:
    """The regular English plural: bench(s) -> benches, daisy(s) -> daisies, kite(s) -> kites."""
    singular = word[1]
    if singular.endswith(("s", "x", "ch", "sh")):
        return singular + "es"
    if singular.endswith("y") and singular[-2] not in "aeiou":
        return singular[:-1] + "ies"
    return singular + "s"


class Writer:
    """Seeded choice of words, numbers and alternatives; see the module's docstring."""

    def __init__(self, seed: str, lists: Lists) -> None:
        self.random = random.Random(seed)
        self.lists = dict(lists)
        self.decks: dict[tuple[object, ...], list[object]] = {}

    def one(self, items: Sequence[T]) -> T:
        """The next card of the items' deck: every item comes once before any comes twice."""
        key = tuple(items)
        if not self.decks.get(key):
            deck: list[object] = list(range(len(key)))
            self.random.shuffle(deck)
            self.decks[key] = deck
        index = self.decks[key].pop()
        assert isinstance(index, int), "a deck holds places in its list"
        return items[index]

    def some(self, items: Sequence[T], count: int) -> list[T]:
        """`count` different items, in the order of the list."""
        places = list(range(len(items)))
        self.random.shuffle(places)
        return [items[place] for place in sorted(places[:count])]

    def chance(self, share: float) -> bool:
        """True in this share of the calls, on average."""
        return self.random.random() < share

    def number(self, low: int, high: int, step: int = 1) -> int:
        """One of low, low + step, ... up to and with high."""
        return self.random.randrange(low, high + 1, step)

    def numbers(self, ranges: Mapping[str, Range]) -> dict[str, int]:
        """Values for named ranges: (low, high), (low, high, step), or ("n", low, high).

        The last form is a whole multiple of the number called n, which must come earlier: a
        total that n people can share without a remainder.
        """
        values: dict[str, int] = {}
        for name, (first, *rest) in ranges.items():
            if isinstance(first, str):
                values[name] = values[first] * self.number(*rest)
            else:
                values[name] = self.number(first, *rest)
        return values

    def fill(self, template: str, /, **given: object) -> str:
        """The template as plain text. `given` overrides the lists and is inserted literally."""
        text = self._expand(template, given, {}, "")
        text = PLURAL.sub(plural, text)
        return ARTICLE.sub(lambda a: a[1] + ("n " if a[2] in VOWELS else " "), text)

    def _expand(
        self, template: str, given: Mapping[str, object], bound: dict[str, str], digit: str
    ) -> str:
        """Alternatives first, so that a slot in an unused one draws no card; then the slots."""
        while found := ALTERNATIVES.search(template):
            choice = self.random.choice(found[1].split("|"))
            template = template[: found.start()] + choice + template[found.end() :]
        return SLOT.sub(lambda slot: self._word(slot, given, bound, digit), template)

    def _word(
        self, slot: re.Match[str], given: Mapping[str, object], bound: dict[str, str], digit: str
    ) -> str:
        """What stands in one slot: a given value, the word drawn before, or a new one.

        A drawn word may hold slots itself; they inherit the digit, so that {person2} made of
        "{woman} {surname}" does not share the names of {person}.
        """
        if slot[1] + slot[2] in given:
            return str(given[slot[1] + slot[2]])
        kind = slot[1].lower()
        name = kind + (slot[2] or digit)
        if name not in bound:
            for _ in self.lists[kind]:
                word = self._expand(self.one(self.lists[kind]), given, bound, slot[2] or digit)
                if word not in bound.values():
                    break
            bound[name] = word
        word = bound[name]
        return word[0].upper() + word[1:] if slot[1][0].isupper() else word
