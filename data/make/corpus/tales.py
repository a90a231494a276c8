"""Stories, poems, letters, and facts about creatures and towns (templates in `tales.yaml`).

Each maker returns one conversation: (user, assistant) turns in order.
"""

from collections.abc import Container
from pathlib import Path
from typing import Any

from outrider.data.make.corpus.dice import Dice
from outrider.data.make.corpus.world import (
    CREATURES,
    PEOPLE,
    THINGS,
    WEATHER,
    WORLD,
    a,
    creature,
    other_person,
    person,
    spell,
    town,
)
from outrider.data.make.resources import load

Turns = list[tuple[str, str]]
TALES = load(Path(__file__).with_name("tales.yaml"))


def cast(dice: Dice) -> dict[str, str]:
    """Return the words that a tale may use; each depends on the words chosen before it."""
    hero = person(dice.choose(PEOPLE, "hero", slope=0.5))
    name = hero["name"]
    beast = dice.choose(CREATURES, name, "meets", slope=0.7)
    noun = dice.choose(THINGS, name, "owns", slope=0.7)
    season = dice.choose(WORLD["seasons"], hero["town"])
    other = dice.choose([place for place in WORLD["towns"] if place != hero["town"]], beast)
    weather = [sky for sky in WEATHER if (sky, season) != ("snowy", "summer")]
    chosen = {
        "creature": beast,
        "thing": a(noun),
        "the": f"the {noun}",
        "season": season,
        "weather": dice.choose(weather, season),
        "friend": other_person(dice, name, "friend"),
        "other": other,
        "count": dice.choose(("two", "three", "four", "five", "six"), other),
    }
    return hero | creature(beast) | chosen


def sentences(
    dice: Dice,
    parts: tuple[tuple[str, ...], ...],
    words: dict[str, str],
    twice: Container[int] = (),
) -> list[str]:
    """Return a sentence from each part, or two from a part in `twice`."""
    result: list[str] = []
    for index, part in enumerate(parts):
        count = 2 if index in twice and dice.chance(0.3) else 1
        templates = dice.several(part, count, words["creature"], index)
        result += [spell(dice, template, words, words["name"]) for template in templates]
    return result


def story(dice: Dice) -> Turns:
    """A story of seven to eleven sentences, sometimes with a question about it."""
    words = cast(dice)
    question = spell(dice, dice.choose(TALES["story_questions"], "story"), words)
    body = sentences(dice, TALES["story"], words, TALES["story_twice"])
    turns = [(question, " ".join(body))]
    if dice.chance(0.3):
        answer = "{name} [comes from|lives in] {town} and is a [virtue] {trade}."
        turns.append((f"Who is {words['name']}?", spell(dice, answer, words)))
    return turns


def poem(dice: Dice) -> Turns:
    """One or two verses of four lines about a town."""
    words = cast(dice)
    question = spell(dice, "[Write|Make|I want] a poem about {town} in {season}.", words)
    count = dice.number(1, 2)
    verses = ["\n".join(sentences(dice, TALES["poem"], words)) for _ in range(count)]
    return [(question, "\n\n".join(verses))]


def letter(dice: Dice) -> Turns:
    """A short letter from one person to another."""
    words = cast(dice)
    question = "[Write|I need] a [short|long|kind|funny] letter "
    question += "[|about {thing} ]from {name} to {friend}."
    body = " ".join(sentences(dice, TALES["letter"], words))
    closing = dice.choose(
        ("Your friend", "With love", "See you soon", "Best wishes"), words["name"]
    )
    text = f"Dear {words['friend']},\n{body}\n{closing},\n{words['name']}"
    return [(spell(dice, question, words), text)]


def describe(
    dice: Dice, facts: dict[str, str], templates: dict[str, str], count: int, opening: str
) -> str:
    """Return an opening and `count` facts, in an order that depends on the subject."""
    keys = dice.several(tuple(templates), count, facts["it"])
    chosen = [opening, *(templates[key] for key in keys)]
    return " ".join(spell(dice, template, facts, facts["it"]) for template in chosen)


def about_creature(dice: Dice) -> Turns:
    """One question about a creature, or a description, and follow-ups that say `it`."""
    templates: dict[str, Any] = TALES["creature"]
    name = dice.choose(CREATURES, "asked", slope=0.5)
    facts = creature(name) | {"it": f"the {name}", "name": name}
    keys = tuple(templates["facts"])

    def turn(key: str, it: str) -> tuple[str, str]:
        question = spell(dice, templates["questions"][key], facts | {"it": it})
        return question, spell(dice, templates["facts"][key], facts, name)

    if dice.chance(0.6):
        request = "[Tell me about {it}.|Describe {it}.|What do you know about {it}?]"
        question = spell(dice, request, facts)
        opening = "The {name} is a [adj] [animal|wonder|guest|beast|friend of the [nouns]]."
        turns = [(question, describe(dice, facts, templates["facts"], dice.number(3, 5), opening))]
    else:
        turns = [turn(dice.choose(keys, name), facts["it"])]
    while dice.chance(0.4) and len(turns) < 3:
        turns.append(turn(dice.choose(keys, name, len(turns)), "it"))
    return turns


def about_town(dice: Dice) -> Turns:
    """A question about a town, or a description of it."""
    templates: dict[str, Any] = TALES["town"]
    name = dice.choose(WORLD["towns"], "asked", slope=0.5)
    facts = town(name) | {"it": name}
    if dice.chance(0.7):
        opening = "{it} is a [adj] town[| of [nouns] and [nouns]| with a [adj] [noun]]."
        text = describe(dice, facts, templates["facts"], dice.number(3, 5), opening)
        return [(spell(dice, templates["open_question"], facts), text)]
    key = dice.choose(tuple(templates["facts"]), name)
    question = spell(dice, templates["questions"][key], facts)
    return [(question, spell(dice, templates["facts"][key], facts, name))]
