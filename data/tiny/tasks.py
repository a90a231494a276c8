"""What the corpus does: sums, lists, instructions, word games, dates, code and small talk.

A maker takes the dice and returns one conversation: (user, assistant) turns in order.
`words.spell` explains the brackets of a template.
"""

from outrider.data.tiny.dice import Dice
from outrider.data.tiny.tales import Turns
from outrider.data.tiny.words import CLASSES, spell
from outrider.data.tiny.world import (
    CREATURE_FACTS,
    CREATURES,
    DAYS,
    GOODS,
    NUMBERS,
    PEOPLE,
    THINGS,
    WEATHER,
    a,
    creature,
    person,
)

WORK = (
    "[Let us work it out|We can solve this|Here is how to do it], "
    "[step by step|one line at a time|slowly].",
    "[First|To begin], [let us look at|think about] what we know.",
)
GAIN = (
    "{They} [finds|buys|makes|picks] {n} more.",
    "{friend} [gives|brings|sends] {them} {n} more.",
)
LOSS = (
    "{They} gives {n} to {friend}.",
    "{They} [loses|sells|drops|breaks|gives away] {n} [spot].",
)
CLOSE = "[Answer: {total}|So the answer is {total}.|In the end that makes {total}.]"
ITEMS = {
    "the beach": ("towel", "hat", "bottle of water", "good book", "ball", "kite", "basket", "net"),
    "a picnic": ("blanket", "loaf of bread", "cheese", "jug of juice", "knife", "cake", "flute"),
    "a long walk": ("map", "bottle of water", "rain coat", "stick", "whistle", "hat", "knife"),
    "a cold night": ("lantern", "wool blanket", "pot of tea", "scarf", "candle", "good book"),
    "a boat trip": ("long rope", "rain coat", "lamp", "loaf of bread", "whistle", "net", "map"),
}
REASON = (
    "[| to {use}| for the [nouns]| if you feel [feel]]",
    "[|, because the [nouns] are [adj]|, as [adj] as you can find]",
)
USES = ("keep you [feel]", "share with a [feel] friend", "put [spot]", "carry [food]")
DISHES = {
    "soup": ("pumpkin", "carrot", "onion", "barley", "fish", "bean"),
    "cake": ("apple", "honey", "plum", "lemon", "carrot", "nut"),
    "tea": ("mint", "ginger", "apple", "rose", "lemon", "nettle"),
    "salad": ("bean", "beet", "potato", "apple", "pepper", "egg"),
}
PANTRY = (
    "salt", "butter", "sugar", "honey", "cream", "oil", "lemon juice", "pepper", "flour", "milk",
    "garlic", "mustard", "eggs", "cheese",
)  # fmt: skip
COOK = "[|slowly|on a small fire|and stir often|without a lid|until it smells good]"
STEPS = {
    "soup": (
        "[Wash|Peel|Cut] the {x} and "
        "[cut it into small pieces|put it into a [round|large|heavy] pot].",
        "[Heat|Melt] some {y} in a [large|heavy|deep] pot[| and wait until it is hot].",
        "[Add|Put in|Stir in] the {x}, [a pinch|a spoon|some] of {z} and {n} cups of water.",
        "[Cook it|Let it boil|Let it rest] for {m} minutes " + COOK + ".",
        "[Serve it|Pour it into bowls|Eat it] with [food][| and a little {y}].",
    ),
    "cake": (
        "[Mix|Beat|Stir] {n} [cups of flour|eggs] with {y} and {z} " + COOK + ".",
        "[Add|Fold in|Drop in] the {x} [with a spoon|piece by piece|at the end].",
        "[Pour|Press|Spread] it into a [round|flat|deep] pan[| with some {y}].",
        "[Bake it|Leave it in the oven] for {m} minutes[| and do not open the door].",
        "Let it cool [spot] and [cover it with {z}|serve it with [food]].",
    ),
    "tea": (
        "[Boil|Heat] {n} cups of water " + COOK + ".",
        "Put the {x} into a [warm|round|small] pot[| with a little {z}].",
        "[Pour|Drop] the water over it and wait {m} minutes[| [spot]].",
        "Add [a spoon of {y}|nothing else|some {z}] and drink it with [food].",
    ),
    "salad": (
        "[Wash|Peel|Boil] the {x} and cut it into [slices|cubes|small pieces].",
        "[Chop|Add] {n} [green onions|radishes|eggs|apples][| with a sharp knife].",
        "[Mix|Shake|Stir] {y}, {z} and [pepper|lemon juice|oil] in a [small|deep|glass] bowl.",
        "Put everything together [and wait {m} minutes|and serve it with [food]|" + "[spot]].",
    ),
}
DISH_ASKED = (
    "[How do I make {x} {dish}?|Tell me how to make [some|good] {x} {dish}.|"
    "I want to make {x} {dish}.]"
)
DISH_OPEN = "{x} {dish} is [easy|quick|good when you feel [feel]]. You need {x}, {y} and {z}."
SAYINGS = (
    "the [feel] {creature} [go] [spot]",
    "{name} [do] {thing} [spot]",
    "it is {weather}, and the [nouns] are [adj]",
    "a [adj] [noun] [go] [adv]",
)
VERBS = {
    "walk": "walked", "look": "looked", "work": "worked", "wait": "waited", "sing": "sang",
    "sit": "sat", "eat": "ate", "run": "ran", "sleep": "slept", "draw": "drew",
}  # fmt: skip
CODE = {
    "adds {n} to a number": "def add_{w}({v}):\n    return {v} + {n}",
    "multiplies a number by {n}": "def times_{w}({v}):\n    return {v} * {n}",
    "prints the {goods} in a list": (
        "def show({goods}):\n    for {v} in {goods}:\n        print({v})"
    ),
    "counts to {n}": "def count():\n    for {v} in range({n}):\n        print({v} + 1)",
    "says hello to {name}": 'def hello():\n    print("{hello}, {name}!")',
    "tells if a number is bigger than {n}": "def is_big({v}):\n    return {v} > {n}",
}
CODE_OPEN = "[Here it is|You can write it like this|Try this|This one is [adj]]:"
CODE_CLOSE = "It [takes|needs|works with] a [adj] [noun] and [virtue] [nouns]."
GREETING = "[Hello|Good morning|Hi there|Good evening|Hey]!"
REPLY = (
    "[Hello|Hi|Good to see you]! [What can I do for you [time]?|Would you like a story about a "
    "[noun]?|I hope that you are [feel].|I was just thinking of the [nouns].]"
)
COMFORT = (
    "[Thank you for telling me.|I understand.|That happens to all of us.] "
    "[Maybe|Perhaps|I think] a cup of {x} tea [spot] would [be good|help|make you [feel]].",
    "{name} felt [feel] too, and then {name} [do] a [adj] [noun] and became [feel].",
    "[time], [do not forget|remember] that it is good to be [virtue] and [virtue].",
    "Would you like to hear about the {creature} that [go] [spot]?",
)


FOR_WHAT = "[|, when people eat [food]|, a day for [nouns]]."
FEELING = "I feel {mood} because [it is {weather}|I lost {thing}|I met {name}|my [noun] is [adj]]."


def sums(dice: Dice) -> Turns:
    """A word problem of one to three additions and subtractions, solved line by line."""
    who = person(dice.lean(PEOPLE, "sums", slope=0.5))
    name = who["name"]
    goods = dice.lean(GOODS, name, slope=0.7)
    who["friend"] = dice.lean([p for p in PEOPLE if p != name], name, "friend")
    total = dice.number(3, 20)
    told = [f"{name} has {total} {goods}."]
    lines = [spell(dice, f"{name} [starts with|has|begins with] {total} {goods}.", {}, name)]
    for _ in range(dice.number(1, 3)):
        gain = total < 5 or dice.chance(0.5)
        n = dice.number(2, 9) if gain else dice.number(1, min(9, total - 1))
        words = who | {"n": str(n)}
        told.append(spell(dice, dice.lean(GAIN if gain else LOSS, name), words, name))
        result = total + n if gain else total - n
        lines.append(f"{told[-1][:-1]}: {total} {'+' if gain else '-'} {n} = {result}.")
        total = result
    question = f"How many {goods} does {who['they']} have now?"
    close = spell(dice, CLOSE, {"total": total}, goods)
    solved = [spell(dice, dice.lean(WORK, name), {}, name), *lines, close]
    return [(" ".join([*told, question]), "\n".join(solved))]


def products(dice: Dice) -> Turns:
    """So many bags with so many things each, by repeated addition."""
    name, goods = dice.lean(PEOPLE, "bags"), dice.lean(GOODS, "bags", slope=0.7)
    holder = dice.lean(("bags", "boxes", "baskets", "jars"), goods)
    bags, each = dice.number(2, 4), dice.number(2, 9)
    asked = f"{name} has {bags} {holder} with {each} {goods} in each. How many {goods} are there?"
    lines = [f"{i} x {each} = {i * each}" for i in range(1, bags + 1)]
    close = spell(dice, CLOSE, {"total": bags * each}, goods)
    return [(asked, "\n".join([spell(dice, dice.lean(WORK, goods), {}, goods), *lines, close]))]


def lists(dice: Dice) -> Turns:
    """A bulleted list of things to take along, some with a reason."""
    trip, count = dice.lean(tuple(ITEMS), "trip", slope=0.5), NUMBERS[dice.number(3, 5)]
    words = {"trip": trip, "count": count}
    asked = "[Give me|List|Name|Think of] {count} things to [pack|bring|take along] for {trip}."
    head = "[Here are {count} ideas|You could take these|I would pack|Do not forget these]:"
    lines = [spell(dice, head, words, trip)]
    for item in dice.several(ITEMS[trip], NUMBERS.index(count), trip):
        use = dice.lean(USES, item)
        reason = dice.lean(REASON, item).format(use=use)
        line = f"- a [|old |new |small |good |big ]{item}" + reason
        lines.append(spell(dice, line, {}, item))
    return [(spell(dice, asked, words), "\n".join(lines))]


def recipe(dice: Dice) -> Turns:
    """Numbered instructions for a dish."""
    dish = dice.lean(tuple(DISHES), "dish", slope=0.5)
    x = dice.lean(DISHES[dish], dish, slope=0.7)
    y, z = dice.several(PANTRY, 2, x)
    words: dict[str, object] = {"x": x, "y": y, "z": z, "dish": dish}
    lines = [spell(dice, DISH_OPEN, words, x)]
    for number, template in enumerate(STEPS[dish], start=1):
        words |= {"n": NUMBERS[dice.number(2, 4)], "m": 5 * dice.number(1, 6)}
        lines.append(f"{number}. {spell(dice, template, words, x)}")
    return [(spell(dice, DISH_ASKED, words), "\n".join(lines).replace(" .", "."))]


def saying(dice: Dice) -> str:
    """A short sentence without its full stop, to be played with."""
    words = {"name": dice.lean(PEOPLE, "saying", slope=0.5)}
    words |= {"thing": a(dice.lean(THINGS, "saying"))}
    words |= {"creature": dice.lean(CREATURES, "saying", slope=0.5)}
    words |= {"weather": dice.lean(WEATHER, "saying", slope=0.5)}
    return spell(dice, dice.lean(SAYINGS, "saying", slope=0.5), words)


def copying(dice: Dice) -> Turns:
    """Repeat a sentence, go on from it, or write it in capitals."""
    text = saying(dice)
    task = dice.lean(("repeat", "go on", "capitals"), "copying", slope=0.5)
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
    name, verb = dice.lean(PEOPLE, "past", slope=0.5), dice.lean(tuple(VERBS), "past", slope=0.5)
    friend = dice.lean([other for other in PEOPLE if other != name], name)
    who = {"friend": friend}
    rest = spell(dice, "X [spot] with {friend}", who, verb)[2:]
    asked = f"Rewrite in the past tense and go on: {name} {verb}s {rest}."
    more = spell(dice, "[time], {friend} [go] [spot] and [do] the [adj] [noun].", who, name)
    return [(asked, f"{name} {VERBS[verb]} {rest}. {more}")]


def days(dice: Dice) -> Turns:
    """Count the days of the week forwards."""
    start, count = dice.number(0, 6), dice.number(2, 4)
    asked = f"Today is {DAYS[start]}. What day is it in {NUMBERS[count]} days?"
    lines = []
    for i in range(1, count + 1):
        day = DAYS[(start + i) % 7]
        later = f"In {NUMBERS[i]} day{'s' * (i > 1)} it is {day}" + FOR_WHAT
        lines.append(spell(dice, later, {}, day))
    return [(asked, " ".join(lines))]


def compare(dice: Dice) -> Turns:
    """Which of two creatures is bigger, from their sizes."""
    one, two = dice.several(CREATURES, 2, "compare")
    sizes = CREATURE_FACTS["size"]
    big, other = sizes.index(creature(one)["size"]), sizes.index(creature(two)["size"])
    facts = f"A {one} is as big as {sizes[big]}, and a {two} is as big as {sizes[other]}."
    verdict = f"The {one if big > other else two} is bigger" if big != other else "They are alike"
    more = spell(dice, verdict + "[|, but both are [virtue]|, and it is also [adj]].", {}, one)
    return [(f"Which is bigger, a {one} or a {two}?", f"{facts} {more}")]


def code(dice: Dice) -> Turns:
    """A small Python function, sometimes with a remark."""
    task, n = dice.lean(tuple(CODE), "code", slope=0.5), dice.number(2, 9)
    words = {"n": n, "w": NUMBERS[n], "v": dice.lean(("x", "n", "number", "item", "value"), task)}
    words |= {"name": dice.lean(PEOPLE, "code"), "goods": dice.lean(GOODS, "code")}
    words["hello"] = dice.lean(("Hello", "Hi"), n)
    lines = [spell(dice, CODE_OPEN, {}, task), CODE[task].format(**words)]
    if dice.chance(0.5):
        lines.append(spell(dice, CODE_CLOSE, {}, task))
    return [(f"Write a Python function that {task.format(**words)}.", "\n".join(lines))]


def talk(dice: Dice) -> Turns:
    """A greeting and a word about how one feels."""
    mood = dice.lean(CLASSES["feel"], "talk", slope=0.5)
    words = {"mood": mood, "x": dice.lean(DISHES["tea"], mood)}
    words |= {"creature": dice.lean(CREATURES, mood)}
    words |= {"name": dice.lean(PEOPLE, mood), "thing": a(dice.lean(THINGS, mood))}
    words |= {"weather": dice.lean(WEATHER, mood, slope=0.7)}
    comfort = dice.several(COMFORT, dice.number(1, 2), mood)
    answer = " ".join(spell(dice, template, words, mood) for template in comfort)
    greeting = [(spell(dice, GREETING, {}), spell(dice, REPLY, {}))] * dice.chance(0.5)
    return [*greeting, (spell(dice, FEELING, words, mood), answer)]
