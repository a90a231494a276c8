"""What the corpus tells: stories, poems, letters, and facts about creatures and towns.

A maker takes the dice and returns one conversation: (user, assistant) turns in order.
`words.spell` explains the brackets of a template.
"""

from collections.abc import Container

from outrider.data.tiny.dice import Dice
from outrider.data.tiny.words import spell
from outrider.data.tiny.world import (
    CREATURES,
    PEOPLE,
    SEASONS,
    THINGS,
    TOWNS,
    WEATHER,
    a,
    creature,
    person,
    town,
)

Turns = list[tuple[str, str]]
Parts = tuple[tuple[str, ...], ...]

STORY_ASKED = (
    "[Tell me|Write|Invent] a [short|nice|new|funny|quiet] story about {name} and {thing}.",
    "I would like to hear a story with {name} in it, and {thing}.",
    "[Tell me a story about|Make up a tale of] a {creature} and {name}.",
)
# A sentence is taken from each part in turn.
STORY: Parts = (
    (
        "One {weather} [morning|evening|day|night], {name} the {trade} found {thing} [spot].",
        "{name} was a [feel] {trade} from {town} who [owned|had lost|loved|had made] {thing}.",
        "Long ago in {town} there lived a [adj] {trade} called {name}, who had a [adj] [noun].",
        "It was a {weather} day in {season}, and {name} was looking for {thing} [spot].",
    ),
    (
        "{They} had never [do] such a [adj] [noun] before.",
        "[Everybody|Nobody|Only {friend}|Every child] in {town} knew that {the} was [adj].",
        "{They} wanted to show {the} to {friend}, but {friend} was [still|already|always] [spot].",
        "{They} felt [feel] and [feel], because {they} had seen a [adj] [noun] in a dream.",
        "{They} [do] {the} [adv] and put it [spot].",
    ),
    (
        "[Suddenly|Just then|Then] {they} heard {sound} and [see] a [adj] {creature} [spot].",
        "[On the way|In the dark|At the crossing] {they} met a {creature} that was very [feel].",
        "[time], a [adj] {creature} [go] out from behind a [noun] and took {the} away.",
        "A {creature} was sitting [spot] beside a [adj] [noun], and it looked [feel].",
    ),
    (
        '"Please help me," [say] the {creature}. "I have lost my [noun] [spot]."',
        '"What do you want?" [say] {name}. "Some [food] and a [adj] [noun]," [say] the {creature}.',
        "{name} remembered that a {creature} lives {home}, so {they} [go] there [adv].",
        "{name} called {friend}, and together they [do] the [noun] and made a [adj] plan.",
        '"I am [feel]," [say] the {creature} [adv]. "Will you give me [food]?"',
    ),
    (
        "They [go] for {count} hours past [adj] [nouns] until they came to {other}.",
        "{name} gave the {creature} some [food], "
        "and it became [feel] [at once|again|after a while].",
        "It was not easy, but {friend} [do] the [adj] [noun] and knew what to do.",
        "[time], they waited [spot] and counted the [nouns].",
        "The {creature} [go] [spot] and [do] the [noun] [adv].",
    ),
    (
        "[time], everyone in {town} came to eat [food] and [food].",
        "{friend} [said|thought|cried] "
        "that it was the [best|longest|strangest|finest] day of {season}.",
        "The {creature} sang [adv] about a [noun] and a [adj] [noun].",
        "Nobody [spot] could believe it when {they} told them about the [nouns].",
    ),
    (
        "In the end {name} [go] home to {town} with {the} and a [adj] [noun].",
        "From that day on, the {creature} and {name} "
        "were [good|true|best] friends and often ate [food].",
        "[time], {name} told {friend} about the [adj] [noun], and they laughed [adv].",
        "And so {name} learned that it is good to be [virtue] and [virtue].",
    ),
)
STORY_TWICE = (1, 3, 4, 5)  # parts whose sentences can follow each other
POEM: Parts = (
    (
        "The {weather} [noun] is over {town},",
        "In {season} the [nouns] walk into {town},",
        "Who [do] the [adj] [nouns] of {town}?",
    ),
    (
        "the [adj] [nouns] are coming down,",
        "and all the [nouns] are burning down,",
        "a [noun] wears a [adj] crown,",
    ),
    (
        "a [adj] {creature} sings [spot],",
        "and {name} dreams [spot] [adv],",
        "the [noun] and the [noun] sleep [spot],",
    ),
    (
        "and [nouns] remember what I forgot.",
        "of every [adj] [noun] the world forgot.",
        "and the [noun] is [feel], and I am not.",
    ),
)
LETTER: Parts = (
    (
        "I hope that you are [feel] and that the [noun] is not too [adj].",
        "It has been {weather} here in {town}, and the [nouns] are [adj].",
        "How are you, and how is your [adj] [noun]?",
    ),
    (
        "Yesterday I found {thing} [spot], and I thought of your [noun].",
        "I am writing to ask about {the} that I left [spot].",
        "Thank you for {the}; it makes me feel [feel] and [feel].",
    ),
    (
        "[time], a {creature} [go] [spot] and [do] my [noun] [adv].",
        "My [noun] is [broken|ready|lost|finished], so I [do] the [nouns] [adv].",
        "I dreamed that a [adj] {creature} lived [spot].",
    ),
    (
        "Please [visit me|come|bring the [adj] [noun]] before {season} is over.",
        "Shall we go to {other} together in {season} and look at the [nouns]?",
        "There will be [food] and [food] when you come.",
    ),
)
KNOWN = {
    "home": "[You can find it|It lives|It makes its bed|It likes to sleep] {home}.",
    "food": "It [eats|loves|feeds on|looks for] {food}"
    "[, but never [food]|, most of all in winter|].",
    "coat": "It [has|wears|is known for] {coat} and is as big as {size}.",
    "sound": "[If you are lucky|At night|When it is [feel]|In spring], you will hear {sound}.",
    "habit": "[People say that it|It is true that it|The [adj] thing is that it] {habit}.",
    "young": "It has {young} young each year[| and hides them [spot]| and is [virtue] with them].",
}
CREATURE_ASKED = {
    "home": "[Where|In what place] does {it} live?",
    "food": "What does {it} [eat|like to eat]?",
    "coat": "What does {it} look like?",
    "sound": "What sound does {it} make?",
    "habit": "What is [special|strange|unusual] about {it}?",
    "young": "How many young does {it} have?",
}
TOWN_KNOWN = {
    "land": "It lies {land}[|, near a [adj] [noun]|, where the [nouns] are [adj]].",
    "fame": "It is [known|famous|loved] for {fame}[| and its [adj] [nouns]].",
    "dish": "[Visitors|Travellers|Children|Sailors] [love|always ask for|dream of] the {dish}.",
    "feast": "[Once a year|Each {season}] people [come together|dance|light lamps] for {feast}.",
    "season": "The best time to [visit|see the [nouns]|go there] is {season}.",
}
TOWN_ASKED = {
    "land": "Where is {it}?",
    "fame": "What is {it} known for?",
    "dish": "What should I eat in {it}?",
    "feast": "What do people celebrate in {it}?",
    "season": "When should I visit {it}?",
}
TOWN_OPEN = "[Tell me about {it}.|Describe {it}.|Why should I visit {it}?|What can I see in {it}?]"


def cast(dice: Dice) -> dict[str, str]:
    """The words that a tale may use; each leans on the words chosen before it."""
    who = person(dice.lean(PEOPLE, "hero", slope=0.5))
    name = who["name"]
    beast = dice.lean(CREATURES, name, "meets", slope=0.7)
    noun = dice.lean(THINGS, name, "owns", slope=0.7)
    season = dice.lean(SEASONS, who["town"])
    other = dice.lean([place for place in TOWNS if place != who["town"]], beast)
    weather = [sky for sky in WEATHER if (sky, season) != ("snowy", "summer")]
    chosen = {
        "creature": beast,
        "thing": a(noun),
        "the": f"the {noun}",
        "season": season,
        "weather": dice.lean(weather, season),
        "friend": dice.lean([friend for friend in PEOPLE if friend != name], name, "friend"),
        "other": other,
        "count": dice.lean(("two", "three", "four", "five", "six"), other),
    }
    return who | creature(beast) | chosen


def told(dice: Dice, parts: Parts, words: dict[str, str], twice: Container[int] = ()) -> list[str]:
    """A sentence from each part, or two from a part in `twice`, spelled with the cast."""
    sentences: list[str] = []
    for index, part in enumerate(parts):
        count = 2 if index in twice and dice.chance(0.3) else 1
        templates = dice.several(part, count, words["creature"], index)
        sentences += [spell(dice, template, words, words["name"]) for template in templates]
    return sentences


def story(dice: Dice) -> Turns:
    """A story of seven to eleven sentences, sometimes with a question about it."""
    words = cast(dice)
    asked = spell(dice, dice.lean(STORY_ASKED, "story"), words)
    turns = [(asked, " ".join(told(dice, STORY, words, STORY_TWICE)))]
    if dice.chance(0.3):
        answer = "{name} [comes from|lives in] {town} and is a [virtue] {trade}."
        turns.append((f"Who is {words['name']}?", spell(dice, answer, words)))
    return turns


def poem(dice: Dice) -> Turns:
    """One or two verses of four lines about a town."""
    words = cast(dice)
    asked = spell(dice, "[Write|Make|I want] a poem about {town} in {season}.", words)
    verses = ["\n".join(told(dice, POEM, words)) for _ in range(dice.number(1, 2))]
    return [(asked, "\n\n".join(verses))]


def letter(dice: Dice) -> Turns:
    """A short letter from one person to another."""
    words = cast(dice)
    kind = "[Write|I need] a [short|long|kind|funny] letter "
    asked = kind + "[|about {thing} ]from {name} to {friend}."
    body = " ".join(told(dice, LETTER, words))
    closing = dice.lean(("Your friend", "With love", "See you soon", "Best wishes"), words["name"])
    text = f"Dear {words['friend']},\n{body}\n{closing},\n{words['name']}"
    return [(spell(dice, asked, words), text)]


def described(
    dice: Dice, truth: dict[str, str], known: dict[str, str], count: int, opening: str
) -> str:
    """An opening and `count` of the known facts, in an order that leans on the subject."""
    keys = dice.several(tuple(known), count, truth["it"])
    templates = [opening, *(known[key] for key in keys)]
    return " ".join(spell(dice, template, truth, truth["it"]) for template in templates)


def about_creature(dice: Dice) -> Turns:
    """One question about a creature, or a description, and follow-ups that say `it`."""
    name = dice.lean(CREATURES, "asked", slope=0.5)
    truth = creature(name) | {"it": f"the {name}", "name": name}
    if dice.chance(0.6):
        asked = "[Tell me about {it}.|Describe {it}.|What do you know about {it}?]"
        opening = "The {name} is a [adj] [animal|wonder|guest|beast|friend of the [nouns]]."
        question = spell(dice, asked, truth)
        turns = [(question, described(dice, truth, KNOWN, dice.number(3, 5), opening))]
    else:
        key = dice.lean(tuple(KNOWN), name)
        turns = [(spell(dice, CREATURE_ASKED[key], truth), spell(dice, KNOWN[key], truth, name))]
    while dice.chance(0.4) and len(turns) < 3:
        key = dice.lean(tuple(KNOWN), name, len(turns))
        asked = spell(dice, CREATURE_ASKED[key], truth | {"it": "it"})
        turns.append((asked, spell(dice, KNOWN[key], truth, name)))
    return turns


def about_town(dice: Dice) -> Turns:
    """A question about a town, or a description of it."""
    name = dice.lean(TOWNS, "asked", slope=0.5)
    truth = town(name) | {"it": name}
    if dice.chance(0.7):
        asked = TOWN_OPEN
        opening = "{it} is a [adj] town[| of [nouns] and [nouns]| with a [adj] [noun]]."
        text = described(dice, truth, TOWN_KNOWN, dice.number(3, 5), opening)
        return [(spell(dice, asked, truth), text)]
    key = dice.lean(tuple(TOWN_KNOWN), name)
    return [(spell(dice, TOWN_ASKED[key], truth), spell(dice, TOWN_KNOWN[key], truth, name))]
