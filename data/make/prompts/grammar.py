"""A small text grammar: templates with slots and alternatives, filled from shuffled decks.

    [buys|picks] a {fruit}        square brackets: one alternative; braces: one word of a list
    {town} and {town2}            a digit selects a different word of the same list
    {Tool} ... {tool}             a capital letter capitalises the same word
    a(n) {animal}, {animal}(s)    "a" or "an" by the word that follows; the regular plural

Words are drawn from a list without replacement until it is empty, so a large sample contains all
words about equally often. All randomness comes from one seeded `random.Random`, whose `random`,
`randrange`, `choice` and `shuffle` have used the same algorithms since Python 3.2: equal seeds give
equal text on every platform.
"""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Range = tuple[int, int] | tuple[int, int, int] | tuple[str, int, int]

ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")
SLOT = re.compile(r"\{(\w+?)(\d*)\}")
PLURAL = re.compile(r"(\w+)\(s\)")
VOWELS = "aeiouAEIOU8"  # 8 as in "an 8-day trip"; no list has a word like "unit"
ARTICLE = re.compile(r"\b([Aa])\(n\) (?=(\w))")


def plural(word: re.Match[str]) -> str:
    """Return the regular English plural: bench(s) -> benches, daisy(s) -> daisies."""
    singular = re.sub(r"(?<![aeiou])y$", "ie", word[1])
    return singular + ("es" if singular.endswith(("s", "x", "ch", "sh")) else "s")


def words(items: Sequence[Any]) -> tuple[str, ...]:
    """Return a word list; the numbers [low, high] or [low, high, step] stand for their range."""
    if all(isinstance(item, int) for item in items):
        low, high, *step = items
        return tuple(map(str, range(low, high + 1, *step)))
    return tuple(items)


class Grammar:
    """Seeded choice of words, numbers and alternatives; the module docstring has the syntax.

    `lists` maps a slot's name to words, or to a range of numbers (see `words`).
    """

    def __init__(self, seed: str, lists: Mapping[str, Sequence[Any]]) -> None:
        self.random = random.Random(seed)
        self.lists = {name: words(items) for name, items in lists.items()}
        self.decks: dict[tuple[object, ...], list[int]] = {}

    def draw(self, items: Sequence[T]) -> T:
        """Return the next item of a shuffled deck; no item repeats before all were drawn."""
        key = tuple(items)
        if not self.decks.get(key):
            self.decks[key] = list(range(len(key)))
            self.random.shuffle(self.decks[key])
        return items[self.decks[key].pop()]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """Return `count` different items in the order of the list."""
        indices = list(range(len(items)))
        self.random.shuffle(indices)
        return [items[index] for index in sorted(indices[:count])]

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def number(self, low: int, high: int, step: int = 1) -> int:
        """Return one of low, low + step, ..., high."""
        return self.random.randrange(low, high + 1, step)

    def numbers(self, ranges: Mapping[str, Range]) -> dict[str, int]:
        """Return values of named ranges: (low, high), (low, high, step), or ("n", low, high).

        The last form is a multiple of the number n, which must come earlier in `ranges`: a total
        that n people can share without a remainder.
        """
        values: dict[str, int] = {}
        for name, (first, *rest) in ranges.items():
            if isinstance(first, str):
                values[name] = values[first] * self.number(*rest)
            else:
                values[name] = self.number(first, *rest)
        return values

    def fill(self, template: str, /, **values: object) -> str:
        """Return the template as plain text; `values` override the lists, inserted literally."""
        text = self._expand(template, values, {}, "")
        text = PLURAL.sub(plural, text)
        return ARTICLE.sub(lambda a: a[1] + ("n " if a[2] in VOWELS else " "), text)

    def _expand(
        self, template: str, values: Mapping[str, object], bound: dict[str, str], digit: str
    ) -> str:
        """Choose the alternatives, then fill the slots: unused alternatives draw no word."""
        while match := ALTERNATIVES.search(template):
            choice = self.random.choice(match[1].split("|"))
            template = template[: match.start()] + choice + template[match.end() :]
        return SLOT.sub(lambda slot: self._word(slot, values, bound, digit), template)

    def _word(
        self, slot: re.Match[str], values: Mapping[str, object], bound: dict[str, str], digit: str
    ) -> str:
        """Return the content of a slot: a given value, the word bound to it, or a new word.

        A drawn word may contain slots; they inherit the digit, so that {person2}, which is
        "{woman} {surname}", does not share the names of {person}.
        """
        if slot[1] + slot[2] in values:
            return str(values[slot[1] + slot[2]])
        kind = slot[1].lower()
        name = kind + (slot[2] or digit)
        if name not in bound:
            for _ in self.lists[kind]:
                word = self._expand(self.draw(self.lists[kind]), values, bound, slot[2] or digit)
                if word not in bound.values():
                    break
            bound[name] = word
        word = bound[name]
        return word[0].upper() + word[1:] if slot[1][0].isupper() else word
