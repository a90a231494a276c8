"""The prompt categories: how each one turns its templates (`*.yaml`) into user turns."""

import re
from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from outrider.data.make.prompts.grammar import Grammar, Range
from outrider.data.make.resources import load

WORDS, MATH, TOPICS, ARTICLES, GERMAN, PASSAGES, CREATIVE, ANALYSIS = (
    load(Path(__file__).with_name(f"{name}.yaml"))
    for name in (
        "words", "math", "topics", "articles", "german", "passages", "creative", "analysis",
    )
)  # fmt: skip


class Passage(NamedTuple):
    """A text about an invented thing, and questions that its facts answer."""

    title: str
    facts: tuple[str, ...]
    questions: tuple[str, ...]


WORD_PROBLEMS, EXERCISES = (  # each a template and the ranges of its numbers
    tuple((row["text"], tuple(row["numbers"].items())) for row in MATH[kind])
    for kind in ("word_problems", "exercises")
)
EVENTS = tuple(map(itemgetter("leads", "details", "outlooks"), ARTICLES["kinds"]))
ENTRIES = tuple(Passage(**row) for row in PASSAGES["passages"])

LENGTH: dict[str, Range] = {"words": (80, 250, 10)}  # of a text to write

# Figures and days are drawn anew in every sentence; names hold for the whole article.
FIGURE = re.compile(r"\{(few|tens|hundreds|thousands|percent|weekday|month|year)(\d*)\}")


def math(grammar: Grammar) -> list[str]:
    """A word problem (four times in five) or a school exercise; one in twelve has a second turn."""
    template, numbers = grammar.draw(WORD_PROBLEMS if grammar.chance(0.8) else EXERCISES)
    text = grammar.fill(template, **grammar.numbers(dict(numbers)))
    return [text, grammar.draw(MATH["follow_ups"])] if grammar.chance(1 / 12) else [text]


def general(grammar: Grammar) -> list[str]:
    """One question on one topic; every fifth has a second turn."""
    field = TOPICS["fields"][grammar.draw(tuple(TOPICS["fields"]))]
    pattern = grammar.draw(field["questions"])
    question = grammar.fill(pattern, topic=grammar.draw(field["topics"]))
    if not grammar.chance(0.2):
        return [question]
    return [question, grammar.fill(grammar.draw(TOPICS["follow_ups"]))]


def quick(grammar: Grammar) -> list[str]:
    """A question with a short factual answer; some in lower case, as people type them."""
    question = grammar.fill(grammar.draw(TOPICS["quick"]["questions"]))
    if grammar.chance(0.25):
        return [question.lower().rstrip("?")]
    if grammar.chance(0.25):
        return [grammar.fill("[Answer in one sentence|Quick question|For a quiz]: ") + question]
    return [question]


def task(
    grammar: Grammar, kind: Mapping[str, Any], share: float, numbers: Mapping[str, Range]
) -> list[str]:
    """One filled template, with a second turn in this share of the cases."""
    template = grammar.draw(kind["tasks"])
    first = grammar.fill(template, **grammar.numbers(numbers)).strip()
    if not grammar.chance(share):
        return [first]
    return [first, grammar.fill(grammar.draw(kind["follow_ups"]))]


def coding(grammar: Grammar) -> list[str]:
    """A small program, a query or a page; one in five is a concept to explain."""
    kind = "concepts" if grammar.chance(0.2) else "programs"
    return task(grammar, CREATIVE[kind], 0.3, LENGTH)


def article(grammar: Grammar) -> str:
    """A news article of 120 to 250 words with one set of names and figures."""
    leads, details, outlooks = grammar.draw(EVENTS)
    body = grammar.sample(details, grammar.number(4, 6))
    for quote in grammar.sample(ARTICLES["quotes"], grammar.number(1, 2)):
        body.insert(grammar.number(2, len(body)), quote)
    parts = [grammar.draw(leads), *body, grammar.draw(outlooks)]
    numbered = (FIGURE.sub(rf"{{\1\g<2>{index}}}", part) for index, part in enumerate(parts))
    text = grammar.fill(" ".join(numbered))
    return text if 120 <= len(text.split()) <= 250 else article(grammar)


def summarization(grammar: Grammar) -> list[str]:
    return [grammar.fill(grammar.draw(ARTICLES["tasks"]), article=article(grammar))]


def translation(grammar: Grammar) -> list[str]:
    """One or two German sentences, some with spaces before the stops as in news corpora."""
    count = 2 if grammar.chance(0.3) else 1
    text = " ".join(grammar.fill(grammar.draw(GERMAN["sentences"])) for _ in range(count))
    if grammar.chance(0.3):
        for stop in ",.;":
            text = text.replace(stop, f" {stop}")
    return [grammar.fill(grammar.draw(GERMAN["tasks"]), text=text)]


def passage(grammar: Grammar) -> tuple[str, str]:
    """A passage with its title, and one question about it with the same invented names."""
    entry = grammar.draw(ENTRIES)
    question = grammar.draw(entry.questions)
    filled = grammar.fill("\n".join([entry.title, " ".join(entry.facts), question]))
    title, body, question = filled.split("\n")
    return f"{title[0].upper()}{title[1:]}\n{body}", question


def rag(grammar: Grammar) -> list[str]:
    """Two to four passages in any order and a question; 6 % have no passage with the answer."""
    relevant, question = passage(grammar)
    if grammar.chance(0.06):
        relevant = passage(grammar)[0]
    count = 1 + grammar.chance(0.3) + grammar.chance(0.1)
    distractors = [passage(grammar)[0] for _ in range(count)]
    texts = [*distractors[1:], relevant, *distractors[:1]]
    if grammar.chance(0.5):
        texts.reverse()
    template = grammar.draw(PASSAGES["tasks"])
    return [grammar.fill(template, texts="\n\n".join(texts), question=question)]


class Category(NamedTuple):
    """A kind of prompt."""

    share: int  # rows in every hundred
    turns: Callable[[Grammar], list[str]]
    lists: Mapping[str, tuple[Any, ...]] = {}  # word lists beside those of words.yaml


CATEGORIES: dict[str, Category] = {
    "math": Category(25, math),
    "general": Category(14, general),
    "qa": Category(6, quick, TOPICS["quick"]["lists"]),
    "writing": Category(8, lambda g: task(g, CREATIVE["writing"], 0.3, LENGTH), CREATIVE["lists"]),
    "roleplay": Category(
        4, lambda g: task(g, CREATIVE["roleplay"], 0.4, LENGTH), CREATIVE["lists"]
    ),
    "coding": Category(8, coding, CREATIVE["lists"]),
    "summarization": Category(10, summarization, ARTICLES["lists"]),
    "translation": Category(8, translation, GERMAN["lists"]),
    "rag": Category(8, rag, {**ARTICLES["lists"], **PASSAGES["lists"]}),
    "extraction": Category(
        5, lambda g: task(g, ANALYSIS["extraction"], 0.25, {}),
        {**ARTICLES["lists"], **ANALYSIS["lists"]},
    ),
    "reasoning": Category(4, lambda g: task(g, ANALYSIS["reasoning"], 0.25, {}), ANALYSIS["lists"]),
}  # fmt: skip
