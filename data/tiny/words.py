"""Word classes of the corpus, and `spell`, which turns a template into a sentence.

In a template `[adj]` takes a word of a class named here, `[red|blue]` one of the phrases given,
and `{name}` a word from the cast of the tale. An option may be empty, and brackets may nest.
"""

import re
from collections.abc import Mapping

from outrider.data.tiny.dice import Dice

CLASSES: dict[str, tuple[str, ...]] = {
    "adj": (
        "little", "strange", "golden", "quiet", "dusty", "round", "wild", "gentle", "broken",
        "shining", "heavy", "lost", "secret", "crooked", "pale", "famous", "simple", "frozen",
        "hidden", "clever",
    ),
    "adv": (
        "slowly", "quickly", "carefully", "softly", "bravely", "gladly", "at once", "in silence",
        "without a word", "with a smile", "again and again", "for a long time",
    ),
    "time": (
        "that night", "the next morning", "an hour later", "before long", "at noon", "at last",
        "by evening", "three days later", "after the rain", "when the bells rang", "soon",
    ),
    "noun": (
        "song", "dream", "shadow", "bridge", "letter", "door", "fire", "stone", "secret", "river",
        "candle", "road", "storm", "garden", "star", "wheel", "voice", "window", "basket", "cloud",
    ),
    "nouns": (
        "stars", "lamps", "stones", "birds", "leaves", "shadows", "boats", "bells", "roads",
        "clouds", "children", "old men", "windows", "flowers", "dreams", "stories",
    ),
    "spot": (
        "under the bridge", "behind the mill", "on the beach", "in the attic", "near the well",
        "at the market", "in the forest", "beside the river", "on the hill", "in the garden",
        "by the gate", "in the kitchen", "across the field", "on the stairs",
    ),
    "go": (
        "walked", "ran", "climbed", "hurried", "wandered", "rode", "sailed", "crept", "danced",
        "travelled",
    ),
    "do": (
        "opened", "cleaned", "painted", "hid", "carried", "mended", "sold", "watched", "drew",
        "shook", "followed", "remembered",
    ),
    "say": ("said", "whispered", "cried", "answered", "sang", "laughed", "called", "thought"),
    "see": ("saw", "noticed", "met", "heard", "spotted", "found", "remembered", "passed"),
    "feel": (
        "happy", "tired", "proud", "curious", "calm", "nervous", "brave", "quiet", "hungry",
        "lonely", "thankful", "surprised", "cold", "free",
    ),
    "food": (
        "bread", "soup", "cheese", "plum cake", "roast fish", "honey", "apples", "hot tea",
        "onion pie", "milk", "nuts", "porridge",
    ),
    "virtue": (
        "kind", "honest", "patient", "brave", "generous", "careful", "curious", "gentle", "calm",
        "faithful",
    ),
}  # fmt: skip
GROUP = re.compile(r"\[([^\[\]]*)\]")


def spell(dice: Dice, template: str, cast: Mapping[str, object], *context: object) -> str:
    """The template with a choice for each bracket, and the cast's words for the braces.

    Each choice leans on the context and on the words just before it, so the text is uneven in
    ways that a model can learn. The first letter becomes a capital.
    """
    text = template.format(**cast)
    while match := GROUP.search(text):
        options = CLASSES.get(match[1]) or tuple(match[1].split("|"))
        before = text[: match.start()]
        word = dice.lean(options, before[-8:], *context, slope=0.8)
        text = before + word + text[match.end() :]
    text = re.sub(r" +", " ", text).strip()
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
    return text[0].upper() + text[1:]
