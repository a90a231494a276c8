"""Makers of conversations by category (templates in `tales.yaml` and `tasks.yaml`).

Tales are stories, poems, letters, and facts about creatures and towns; tasks are sums, lists,
recipes, word games, dates, code and small talk. Each maker returns one conversation: (user,
assistant) turns in order.
"""

from collections.abc import Container
from pathlib import Path
from typing import Any

from outrider.data.make.corpus.dice import Dice
from outrider.data.make.corpus.world import (
    CREATURES,
    GOODS,
    NUMBERS,
    PEOPLE,
    THINGS,
    WEATHER,
    WORLD,
    a,
    facts_of,
    other_person,
    person,
    spell,
)  # fmt: skip
from outrider.data.make.resources import load

Turns = list[tuple[str, str]]
TALES = load(Path(__file__).with_name("tales.yaml"))
TASKS = load(Path(__file__).with_name("tasks.yaml"))
SUMS, LISTS, RECIPES = TASKS["sums"], TASKS["lists"], TASKS["recipes"]
CODE, TALK = TASKS["code"], TASKS["talk"]


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
        "creature": beast, "thing": a(noun), "the": f"the {noun}", "season": season, "other": other,
        "weather": dice.choose(weather, season),
        "friend": other_person(dice, name, "friend"),
        "count": dice.choose(("two", "three", "four", "five", "six"), other),
    }  # fmt: skip
    return hero | facts_of("creature", beast) | chosen


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
    words = cast(dice)
    question = "[Write|I need] a [short|long|kind|funny] letter "
    question += "[|about {thing} ]from {name} to {friend}."
    body = " ".join(sentences(dice, TALES["letter"], words))
    closings = ("Your friend", "With love", "See you soon", "Best wishes")
    closing = dice.choose(closings, words["name"])
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
    facts = facts_of("creature", name) | {"it": f"the {name}", "name": name}
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
    templates: dict[str, Any] = TALES["town"]
    name = dice.choose(WORLD["towns"], "asked", slope=0.5)
    facts = facts_of("town", name) | {"it": name}
    if dice.chance(0.7):
        opening = "{it} is a [adj] town[| of [nouns] and [nouns]| with a [adj] [noun]]."
        text = describe(dice, facts, templates["facts"], dice.number(3, 5), opening)
        return [(spell(dice, templates["open_question"], facts), text)]
    key = dice.choose(tuple(templates["facts"]), name)
    question = spell(dice, templates["questions"][key], facts)
    return [(question, spell(dice, templates["facts"][key], facts, name))]


def sums(dice: Dice) -> Turns:
    """A word problem of one to three additions and subtractions, solved line by line."""
    owner = person(dice.choose(PEOPLE, "sums", slope=0.5))
    name = owner["name"]
    goods = dice.choose(GOODS, name, slope=0.7)
    owner["friend"] = other_person(dice, name, "friend")
    total = dice.number(3, 20)
    sentences = [f"{name} has {total} {goods}."]
    lines = [spell(dice, f"{name} [starts with|has|begins with] {total} {goods}.", {}, name)]
    for _ in range(dice.number(1, 3)):
        gain = total < 5 or dice.chance(0.5)
        n = dice.number(2, 9) if gain else dice.number(1, min(9, total - 1))
        words = owner | {"n": str(n)}
        change = dice.choose(SUMS["gains" if gain else "losses"], name)
        sentences.append(spell(dice, change, words, name))
        result = total + n if gain else total - n
        lines.append(f"{sentences[-1][:-1]}: {total} {'+' if gain else '-'} {n} = {result}.")
        total = result
    question = f"How many {goods} does {owner['they']} have now?"
    close = spell(dice, SUMS["close"], {"total": total}, goods)
    solved = [spell(dice, dice.choose(SUMS["introductions"], name), {}, name), *lines, close]
    return [(" ".join([*sentences, question]), "\n".join(solved))]


def products(dice: Dice) -> Turns:
    """So many bags with so many things each, by repeated addition."""
    name, goods = dice.choose(PEOPLE, "bags"), dice.choose(GOODS, "bags", slope=0.7)
    holder = dice.choose(("bags", "boxes", "baskets", "jars"), goods)
    bags, each = dice.number(2, 4), dice.number(2, 9)
    question = f"{name} has {bags} {holder} with {each} {goods} in each."
    lines = [f"{i} x {each} = {i * each}" for i in range(1, bags + 1)]
    close = spell(dice, SUMS["close"], {"total": bags * each}, goods)
    first = spell(dice, dice.choose(SUMS["introductions"], goods), {}, goods)
    return [(f"{question} How many {goods} are there?", "\n".join([first, *lines, close]))]


def lists(dice: Dice) -> Turns:
    """A bulleted list of things to take along, some with a reason."""
    trip, count = dice.choose(tuple(LISTS["items"]), "trip", slope=0.5), NUMBERS[dice.number(3, 5)]
    words = {"trip": trip, "count": count}
    question = "[Give me|List|Name|Think of] {count} things to [pack|bring|take along] for {trip}."
    head = "[Here are {count} ideas|You could take these|I would pack|Do not forget these]:"
    lines = [spell(dice, head, words, trip)]
    for item in dice.several(LISTS["items"][trip], NUMBERS.index(count), trip):
        use = dice.choose(LISTS["uses"], item)
        reason = dice.choose(LISTS["reasons"], item).format(use=use)
        line = f"- a [|old |new |small |good |big ]{item}" + reason
        lines.append(spell(dice, line, {}, item))
    return [(spell(dice, question, words), "\n".join(lines))]


def recipe(dice: Dice) -> Turns:
    dish = dice.choose(tuple(RECIPES["dishes"]), "dish", slope=0.5)
    x = dice.choose(RECIPES["dishes"][dish], dish, slope=0.7)
    y, z = dice.several(RECIPES["pantry"], 2, x)
    words: dict[str, object] = {"x": x, "y": y, "z": z, "dish": dish, "cook": RECIPES["cook"]}
    lines = [spell(dice, RECIPES["opening"], words, x)]
    for number, template in enumerate(RECIPES["steps"][dish], start=1):
        words |= {"n": NUMBERS[dice.number(2, 4)], "m": 5 * dice.number(1, 6)}
        lines.append(f"{number}. {spell(dice, template, words, x)}")
    return [(spell(dice, RECIPES["question"], words), "\n".join(lines).replace(" .", "."))]


def saying(dice: Dice) -> str:
    """A short sentence without its full stop, to be played with."""
    words = {
        "name": dice.choose(PEOPLE, "saying", slope=0.5), "thing": a(dice.choose(THINGS, "saying")),
        "creature": dice.choose(CREATURES, "saying", slope=0.5),
        "weather": dice.choose(WEATHER, "saying", slope=0.5),
    }  # fmt: skip
    return spell(dice, dice.choose(TASKS["sayings"], "saying", slope=0.5), words)


def copying(dice: Dice) -> Turns:
    """Repeat a sentence, go on from it, or write it in capitals."""
    text = saying(dice)
    task = dice.choose(("repeat", "go on", "capitals"), "copying", slope=0.5)
    if task == "capitals":
        return [(f"Write this in capital letters: {text}", text.upper())]
    if task == "repeat":
        return [(f"Say this two times: {text}", f"{text}\n{text}")]
    return [(f"Repeat this sentence and add one: {text}.", f"{text}. {saying(dice)}.")]


def sorting(dice: Dice) -> Turns:
    """Put a few words into the order of the alphabet, or turn them around."""
    words = dice.several(GOODS, dice.number(3, 5), "sorting")
    if dice.chance(0.5):
        return [(f"Sort these words: {', '.join(words)}", ", ".join(sorted(words)))]
    return [(f"Write these words in reverse order: {', '.join(words)}", ", ".join(words[::-1]))]


def past(dice: Dice) -> Turns:
    """Move a sentence into the past tense, and go on."""
    verbs = TASKS["past_tense"]
    name = dice.choose(PEOPLE, "past", slope=0.5)
    verb = dice.choose(tuple(verbs), "past", slope=0.5)
    words = {"friend": other_person(dice, name)}
    rest = spell(dice, "X [spot] with {friend}", words, verb)[2:]
    question = f"Rewrite in the past tense and go on: {name} {verb}s {rest}."
    more = spell(dice, "[time], {friend} [go] [spot] and [do] the [adj] [noun].", words, name)
    return [(question, f"{name} {verbs[verb]} {rest}. {more}")]


def days(dice: Dice) -> Turns:
    """Count the days of the week forwards."""
    start, count = dice.number(0, 6), dice.number(2, 4)
    question = f"Today is {WORLD['days'][start]}. What day is it in {NUMBERS[count]} days?"
    lines = []
    for i in range(1, count + 1):
        day = WORLD["days"][(start + i) % 7]
        later = f"In {NUMBERS[i]} day{'s' * (i > 1)} it is {day}" + TASKS["days"]["purpose"]
        lines.append(spell(dice, later, {}, day))
    return [(question, " ".join(lines))]


def compare(dice: Dice) -> Turns:
    """Which of two creatures is bigger, from their sizes."""
    one, two = dice.several(CREATURES, 2, "compare")
    sizes = WORLD["creature_facts"]["size"]
    big, other = (sizes.index(facts_of("creature", name)["size"]) for name in (one, two))
    facts = f"A {one} is as big as {sizes[big]}, and a {two} is as big as {sizes[other]}."
    verdict = f"The {one if big > other else two} is bigger" if big != other else "They are alike"
    more = spell(dice, verdict + "[|, but both are [virtue]|, and it is also [adj]].", {}, one)
    return [(f"Which is bigger, a {one} or a {two}?", f"{facts} {more}")]


def code(dice: Dice) -> Turns:
    """A small Python function, sometimes with a remark."""
    task, n = dice.choose(tuple(CODE["functions"]), "code", slope=0.5), dice.number(2, 9)
    words = {"n": n, "w": NUMBERS[n], "v": dice.choose(("x", "n", "number", "item", "value"), task)}
    words |= {"name": dice.choose(PEOPLE, "code"), "goods": dice.choose(GOODS, "code")}
    words["hello"] = dice.choose(("Hello", "Hi"), n)
    lines = [spell(dice, CODE["opening"], {}, task), CODE["functions"][task].format(**words)]
    if dice.chance(0.5):
        lines.append(spell(dice, CODE["closing"], {}, task))
    return [(f"Write a Python function that {task.format(**words)}.", "\n".join(lines))]


def talk(dice: Dice) -> Turns:
    """A greeting and a word about how one feels."""
    mood = dice.choose(WORLD["classes"]["feel"], "talk", slope=0.5)
    words = {"mood": mood, "x": dice.choose(RECIPES["dishes"]["tea"], mood)}
    words |= {"creature": dice.choose(CREATURES, mood)}
    words |= {"name": dice.choose(PEOPLE, mood), "thing": a(dice.choose(THINGS, mood))}
    words |= {"weather": dice.choose(WEATHER, mood, slope=0.7)}
    comfort = dice.several(TALK["comfort"], dice.number(1, 2), mood)
    answer = " ".join(spell(dice, template, words, mood) for template in comfort)
    greeting = (spell(dice, TALK["greeting"], {}), spell(dice, TALK["reply"], {}))
    return [*[greeting] * dice.chance(0.5), (spell(dice, TALK["feeling"], words, mood), answer)]
