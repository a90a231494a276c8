"""Generator of `data/tiny/*.jsonl`: an endless seeded stream of conversations.

`conversations.jsonl` is text to train a drafter on, `prompts.jsonl` held-out questions by category.
No question of the second occurs in the first, nor in any stream.

    python -m outrider.data.make.corpus.make_corpus   # rebuilds both files, byte for byte
"""

import itertools
import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from outrider.data.conversations import Message
from outrider.data.make.corpus import makers
from outrider.data.make.corpus.dice import Dice

FOLDER = Path(__file__).parents[2] / "tiny"
PROMPT_SEED, SHIPPED_SEED, TARGET_SEED, HELD_OUT_SEED = 11, 12, 13, 14
CONVERSATIONS, PROMPTS_PER_CATEGORY = 3000, 4
MAKERS: dict[str, Callable[[Dice], makers.Turns]] = {
    "story": makers.story, "poem": makers.poem, "letter": makers.letter,
    "creature": makers.about_creature, "town": makers.about_town, "sums": makers.sums,
    "products": makers.products, "list": makers.lists, "recipe": makers.recipe,
    "copy": makers.copying, "sort": makers.sorting, "past": makers.past, "days": makers.days,
    "compare": makers.compare, "code": makers.code, "talk": makers.talk,
}  # fmt: skip
LONG = ("story", "story", "story", "letter", "letter", "poem", "creature", "town", "talk", "sums")
# System turn -> the phrase with which every answer of the conversation begins.
PERSONAS = {
    "You are a cheerful guide.": "With pleasure! ",
    "You are an old sailor.": "Ahoy! ",
    "You are a patient teacher.": "Good question. ",
}


Conversation: TypeAlias = dict[str, Any]  # a row of conversations.jsonl: id, messages
Prompt: TypeAlias = dict[str, Any]  # a row of prompts.jsonl: id, category, turns of the user


def converse(dice: Dice, name: str) -> Conversation:
    """Return a conversation of a random category; one in twelve has a system turn."""
    category = dice.choose((*MAKERS, *LONG), "category", slope=0.0)
    turns = MAKERS[category](dice)
    messages, opening = list[Message](), ""
    if dice.chance(1 / 12):
        persona = dice.choose(tuple(PERSONAS), "persona")
        opening = PERSONAS[persona]
        messages.append({"role": "system", "content": persona})
    for question, answer in turns:
        messages.append(Message(role="user", content=question))
        messages.append(Message(role="assistant", content=opening + answer))
    return {"id": f"{category}-{name}", "messages": messages}


def held_out_prompts() -> list[Prompt]:
    """Return the held-out prompts, a few of each category; their first questions differ."""
    dice, seen, rows = Dice(PROMPT_SEED), set[str](), list[Prompt]()
    for category, maker in MAKERS.items():
        count = 0
        while count < PROMPTS_PER_CATEGORY:
            turns = [question for question, _ in maker(dice)]
            if turns[0] in seen or (maker is makers.talk and len(turns) > 1):
                continue
            count += 1
            seen.add(turns[0])
            rows.append({"id": f"{category}-{count}", "category": category, "turns": turns})
    return rows


def stream(seed: int) -> Iterator[Conversation]:
    """Yield conversations without end, none with a first question of the held-out prompts."""
    dice = Dice(seed)
    excluded = {row["turns"][0] for row in held_out_prompts()}
    for number in itertools.count():
        row = converse(dice, f"{number:06d}")
        if excluded.isdisjoint(m["content"] for m in row["messages"] if m["role"] == "user"):
            yield row


def shipped_conversations() -> list[Conversation]:
    """Return the rows of `conversations.jsonl`: the first of their stream, without repeats."""
    rows: dict[str, Conversation] = {}
    for row in stream(SHIPPED_SEED):
        rows.setdefault(json.dumps(row["messages"]), row)
        if len(rows) == CONVERSATIONS:
            break
    return list(rows.values())


def to_jsonl(rows: Collection[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode("ascii")


def main() -> None:
    (FOLDER / "conversations.jsonl").write_bytes(to_jsonl(shipped_conversations()))
    (FOLDER / "prompts.jsonl").write_bytes(to_jsonl(held_out_prompts()))


if __name__ == "__main__":
    main()
