"""The invented world: its people, towns, creatures and things, and what is true of each.

Everything is made up for this project. A fact is the first choice of its subject (`dice.ranked`),
so the world is the same in every conversation and a model can learn it.
"""

from collections.abc import Sequence

from outrider.data.tiny.dice import ranked

WOMEN = ("Mara", "Elsie", "Junia", "Petra", "Wren", "Dilys")
MEN = ("Tobin", "Rafi", "Oskar", "Silas", "Anselm", "Bram")
PEOPLE = WOMEN + MEN
TOWNS = (
    "Willowmere", "Hartsend", "Copper Bay", "Oldbridge", "Reedwater", "Stonecross",
    "Larkfield", "Pine Hollow", "Gullrock", "Amberton", "Foxley", "Mossgate",
)  # fmt: skip
CREATURES = (
    "murlo", "tandrel", "quibbet", "sollow", "fendrake", "brindlehorn", "glimmel", "gorrow",
    "vaskit", "pimber", "hollun", "sedgeling", "moxel", "cragpup", "windle", "tarnfish",
    "yubbin", "ploomer", "nettlecat", "zorrel", "kivvy", "duskhare",
)  # fmt: skip
TRADES = ("baker", "weaver", "sailor", "teacher", "clockmaker", "gardener", "painter", "miller")
THINGS = (
    "brass key", "paper map", "glass lantern", "wooden flute", "silver bell", "blue kite",
    "small boat", "old clock", "warm scarf", "clay jar", "red wagon", "tin whistle",
)  # fmt: skip
GOODS = (
    "apples", "pears", "plums", "shells", "buttons", "candles", "eggs", "coins", "books",
    "marbles", "stamps", "ribbons", "carrots", "cookies",
)  # fmt: skip
WEATHER = ("sunny", "rainy", "windy", "foggy", "snowy", "cloudy", "stormy", "mild")
SEASONS = ("spring", "summer", "autumn", "winter")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

CREATURE_FACTS: dict[str, Sequence[str]] = {
    "home": (
        "in deep caves", "in tall pine trees", "along muddy rivers", "on windy cliffs",
        "in dry grass", "under old roofs", "in cold lakes", "at the edge of the forest",
    ),
    "food": (
        "berries and seeds", "small fish", "moss and bark", "beetles", "sweet roots",
        "pond weed", "fallen nuts", "honey and flowers",
    ),
    "coat": (
        "soft grey fur", "bright green feathers", "smooth silver scales", "a striped brown coat",
        "long white hair", "a spotted yellow skin", "thick black wool",
    ),
    "size": ("a thimble", "an egg", "a cat", "a sheep", "a horse", "a barn"),
    "sound": ("a low hum", "a sharp whistle", "a soft purr", "a loud croak", "a ringing song"),
    "habit": (
        "sleeps through the winter", "hunts only at night", "sings before the rain",
        "collects shiny stones", "hides when it hears thunder", "dances in the first snow",
        "builds round nests", "follows travellers for miles",
    ),
    "young": ("one", "two", "three", "four", "five", "six"),
}  # fmt: skip
TOWN_FACTS: dict[str, Sequence[str]] = {
    "land": (
        "by the northern sea", "in the green valley", "at the foot of the mountains",
        "in the middle of the plains", "on the western coast", "beside the great lake",
    ),
    "fame": (
        "its tall clock tower", "its painted doors", "its floating market", "its stone bridges",
        "its apple orchards", "its glass makers", "its old library", "its kite makers",
    ),
    "dish": (
        "onion pie", "barley soup", "smoked fish", "plum cake", "pepper stew", "honey bread",
    ),
    "feast": (
        "the Lantern Night", "the Harvest Walk", "the Boat Race", "the Day of Bells",
        "the Snow Fair", "the Kite Feast",
    ),
    "season": SEASONS,
}  # fmt: skip


def creature(name: str) -> dict[str, str]:
    """Everything that is true of a creature, one entry for each key of `CREATURE_FACTS`."""
    return {key: ranked(options, name, key)[0] for key, options in CREATURE_FACTS.items()}


def town(name: str) -> dict[str, str]:
    """Everything that is true of a town, one entry for each key of `TOWN_FACTS`."""
    return {key: ranked(options, name, key)[0] for key, options in TOWN_FACTS.items()}


def person(name: str) -> dict[str, str]:
    """Pronouns, trade and home town of a person."""
    she = name in WOMEN
    return {
        "name": name,
        "they": "she" if she else "he",
        "They": "She" if she else "He",
        "their": "her" if she else "his",
        "them": "her" if she else "him",
        "trade": ranked(TRADES, name)[0],
        "town": ranked(TOWNS, name)[0],
    }


def a(noun: str) -> str:
    """The noun with its indefinite article, chosen by the first letter."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
