"""The invented world of `world.yaml` and its template grammar.

A fact is the first choice of its subject (`dice.ranked`), so the world is the same in every
conversation and a model can learn it.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from outrider.data.make.corpus.dice import Dice, ranked
from outrider.data.make.resources import load

WORLD = load(Path(__file__).with_name("world.yaml"))
PEOPLE = WORLD["women"] + WORLD["men"]
CREATURES, THINGS, WEATHER = WORLD["creatures"], WORLD["things"], WORLD["weather"]
GOODS, NUMBERS = WORLD["goods"], WORLD["numbers"]
GROUP = re.compile(r"\[([^\[\]]*)\]")


def facts_of(kind: str, name: str) -> dict[str, str]:
    """Return one entry for each key of `creature_facts` or `town_facts`."""
    return {key: ranked(facts, name, key)[0] for key, facts in WORLD[f"{kind}_facts"].items()}


def person(name: str) -> dict[str, str]:
    they, their, them = ("she", "her", "her") if name in WORLD["women"] else ("he", "his", "him")
    trade, town = (ranked(WORLD[options], name)[0] for options in ("trades", "towns"))
    pronouns = {"they": they, "They": they.title(), "their": their, "them": them}
    return {"name": name, **pronouns, "trade": trade, "town": town}


def other_person(dice: Dice, name: str, *context: object) -> str:
    return dice.choose([other for other in PEOPLE if other != name], name, *context)


def a(noun: str) -> str:
    """Return the noun with its indefinite article, chosen by the first letter."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def spell(dice: Dice, template: str, words: Mapping[str, object], *context: object) -> str:
    """Return the template as a sentence with a capital letter.

    `[adj]` is a word of a class of `world.yaml`, `[red|blue]` one of the options (an option may be
    empty, and brackets may nest), `{name}` an entry of `words`. A choice depends on the context and
    on the text just before it, so that a model can learn it.
    """
    text = template.format(**words)
    while match := GROUP.search(text):
        options = WORLD["classes"].get(match[1]) or tuple(match[1].split("|"))
        before = text[: match.start()]
        word = dice.choose(options, before[-8:], *context, slope=0.8)
        text = before + word + text[match.end() :]
    text = re.sub(r" +", " ", text).strip()
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
    return text[0].upper() + text[1:]
