"""The corpus: an endless seeded stream of conversations, and the two files that ship.

`conversations.jsonl` holds text to train a drafter on, `prompts.jsonl` held-out questions by
category. No question of the second occurs in the first, nor in any stream made here.

    python -m outrider.data.tiny.make_corpus   # rebuilds both files, byte for byte
"""

import itertools
import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TypedDict

from outrider.data.tiny import tales, tasks
from outrider.data.tiny.dice import Dice

HERE = Path(__file__).parent
PROMPT_SEED, SHIPPED_SEED, TARGET_SEED, HELD_OUT_SEED = 11, 12, 13, 14
CONVERSATIONS, PROMPTS_PER_CATEGORY = 3000, 4
MAKERS: dict[str, Callable[[Dice], tales.Turns]] = {
    "story": tales.story,
    "poem": tales.poem,
    "letter": tales.letter,
    "creature": tales.about_creature,
    "town": tales.about_town,
    "sums": tasks.sums,
    "products": tasks.products,
    "list": tasks.lists,
    "recipe": tasks.recipe,
    "copy": tasks.copying,
    "sort": tasks.sorting,
    "past": tasks.past,
    "days": tasks.days,
    "compare": tasks.compare,
    "code": tasks.code,
    "talk": tasks.talk,
}
LONG = ("story", "story", "story", "letter", "letter", "poem", "creature", "town", "talk", "sums")
# A system turn asks for an opening phrase, and every answer then begins with it.
PERSONAS = {
    "You are a cheerful guide.": "With pleasure! ",
    "You are an old sailor.": "Ahoy! ",
    "You are a patient teacher.": "Good question. ",
}


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


class Conversation(TypedDict):
    """A row of `conversations.jsonl`."""

    id: str
    messages: list[Message]


class Prompt(TypedDict):
    """A row of `prompts.jsonl`: user turns only."""

    id: str
    category: str
    turns: list[str]


def converse(dice: Dice, name: str) -> Conversation:
    """One conversation: a category by weight, one in twelve with a system turn."""
    category = dice.lean((*MAKERS, *LONG), "category", slope=0.0)
    turns = MAKERS[category](dice)
    messages: list[Message] = []
    opening = ""
    if dice.chance(1 / 12):
        persona = dice.lean(tuple(PERSONAS), "persona")
        opening = PERSONAS[persona]
        messages.append({"role": "system", "content": persona})
    for asked, answer in turns:
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": opening + answer})
    return {"id": f"{category}-{name}", "messages": messages}


def questions(conversation: Conversation) -> list[str]:
    """The texts of the user turns."""
    return [turn["content"] for turn in conversation["messages"] if turn["role"] == "user"]


def prompts() -> list[Prompt]:
    """The held-out prompts, a few of each category; first questions are all different."""
    dice, seen, rows = Dice(PROMPT_SEED), set[str](), list[Prompt]()
    for category, maker in MAKERS.items():
        kept = 0
        while kept < PROMPTS_PER_CATEGORY:
            turns = [asked for asked, _ in maker(dice)]
            if turns[0] in seen or (maker is tasks.talk and len(turns) > 1):
                continue
            kept += 1
            seen.add(turns[0])
            rows.append({"id": f"{category}-{kept}", "category": category, "turns": turns})
    return rows


def stream(seed: int, avoid: Collection[str] | None = None) -> Iterator[Conversation]:
    """Conversations without end, none with a first question in `avoid` (default: the prompts)."""
    dice = Dice(seed)
    banned = {row["turns"][0] for row in prompts()} if avoid is None else set(avoid)
    for number in itertools.count():
        row = converse(dice, f"{number:06d}")
        if banned.isdisjoint(questions(row)):
            yield row


def shipped() -> list[Conversation]:
    """The rows of `conversations.jsonl`: the first of their stream, without exact repeats."""
    rows: dict[str, Conversation] = {}
    for row in stream(SHIPPED_SEED):
        rows.setdefault(json.dumps(row["messages"]), row)
        if len(rows) == CONVERSATIONS:
            break
    return list(rows.values())


def encoded(rows: Collection[Conversation] | Collection[Prompt]) -> bytes:
    """Rows as jsonl, one object per line, ASCII."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode("ascii")


def main() -> None:
    """Write both files beside this script."""
    (HERE / "conversations.jsonl").write_bytes(encoded(shipped()))
    (HERE / "prompts.jsonl").write_bytes(encoded(prompts()))


if __name__ == "__main__":
    main()
