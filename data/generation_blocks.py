"""Answers that a chat template marks itself, with `{% generation %}` blocks.

A block is what its author trains, and may differ from what the target generates: it may begin
inside the generation prompt (`<|start|>assistant` of gpt-oss), and an answer may have several
blocks, one of them behind the stop token (the end of text of Phi-3). What the prompt has is no part
of the spans; neighbouring blocks are one, of which `answer_spans.py` takes what ends with the first
stop token.
"""

import re
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import TypeAlias

from outrider.data.conversations import Message
from outrider.data.rendered_text import MARK, RenderedText

Span: TypeAlias = tuple[int, int]  # start, end (exclusive)
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # noncharacters: Unicode keeps them out of text


def generation_blocks(
    chat: RenderedText, messages: Sequence[Message], text: str, *, last_only: bool
) -> list[Span] | None:
    """Return the characters of the answers; None for a template without blocks.

    Neighbouring blocks are one span. With `last_only`, only those of the last answer.
    """
    blocks = _blocks(chat, messages, text)
    if blocks is None:
        return None
    if last_only:
        blocks = _of_last_answer(chat, messages, text, blocks)
    openings = [_opening(chat, messages, role) for role in ("user", "tool")]
    spans = list[Span]()
    for start, end in blocks:
        if spans and not text[spans[-1][1] : start].strip():  # the answer goes on
            spans[-1] = spans[-1][0], end
        else:
            begin = max(_after_prompt(chat, text, (start, end), opening) for opening in openings)
            spans.append((begin, end))
    return spans


def _blocks(chat: RenderedText, messages: Sequence[Message], text: str) -> list[Span] | None:
    """Return the characters inside `{% generation %}`; None for a template without such blocks.

    Each block is replaced by a filter that puts OPEN before it and CLOSE after it. A filter is a
    block too, so Jinja trims white space as before. (transformers' assistant mask runs on to the
    end of the conversation when the last character of a block belongs to no token, and so marks the
    next question.)
    """
    wrap = f"filter reverse|replace('','{CLOSE}',1)|reverse|replace('','{OPEN}',1)"
    tag = r"(\{%%[-+]?\s*)%s(\s*[-+]?%%\})"
    template = chat.tokenizer.get_chat_template(tools=chat.tools)
    tagged, blocks = re.subn(tag % "generation", rf"\g<1>{wrap}\g<2>", template)
    if not blocks:
        return None
    tagged = re.sub(tag % "endgeneration", r"\g<1>endfilter\g<2>", tagged)
    spans, plain, start = list[Span](), "", 0
    for piece in re.split(f"([{OPEN}{CLOSE}])", chat.text(messages, chat_template=tagged)):
        if piece == OPEN:
            start = len(plain)
        elif piece == CLOSE:
            spans.append((start, len(plain)))
        else:
            plain += piece
    return spans if plain == text else None


def _of_last_answer(
    chat: RenderedText, messages: Sequence[Message], text: str, blocks: list[Span]
) -> list[Span]:
    """Return the blocks behind the turn before the last answer."""
    turn = max((n for n, turn in enumerate(messages) if turn["role"] == "assistant"), default=0)
    if not turn:
        return blocks[-1:]
    marked = _with_mark(messages[turn - 1])
    whole = chat.text_or_none([*messages[: turn - 1], marked, *messages[turn:]]) or ""
    head, mark, _ = whole.partition(MARK)
    if not (mark and text.startswith(head)):
        return blocks[-1:]
    return [block for block in blocks if block[0] >= len(head)]


def _opening(chat: RenderedText, messages: Sequence[Message], role: str) -> str:
    """Return the text from the content of a turn of this role to an answer of the target."""
    pairs = pairwise(messages)
    answered = (turn["role"] == role and after["role"] == "assistant" for turn, after in pairs)
    place = next((n for n, found in enumerate(answered) if found), None)
    if place is None:
        return ""
    turns = [*messages[:place], _with_mark(messages[place])]
    return (chat.text_or_none(turns, prompt=True) or "").partition(MARK)[2]


def _with_mark(turn: Message) -> Message:
    return {**turn, "content": MARK}


def _after_prompt(chat: RenderedText, text: str, block: Span, opening: str) -> int:
    """Return the start of a block without what it shares with the generation prompt.

    Example: "hi <end> <assistant> 4", the block "<assistant> 4", the opening " <end> <assistant> ":
    the longest beginning of the opening before the block is " <end> ", and the block goes on as the
    opening does. Where it departs from it, whole tokens and lines are shared: "<" of another tag is
    not.
    """
    start, end = block
    first = max(0, start - len(opening))
    begin = next(n for n in range(first, start + 1) if opening.startswith(text[n:start]))
    rest = opening[start - begin :]
    same = takewhile(lambda pair: pair[0] == pair[1], zip(text[start:end], rest, strict=False))
    shared = "".join(letter for letter, _ in same)
    if shared != rest:
        names = map(str, chat.tokenizer.convert_ids_to_tokens(sorted(chat.special)))
        lines = [r"\s"] if begin < start else []
        whole = re.compile("|".join([*map(re.escape, names), *lines]) or "$")
        shared = shared[: max((found.end() for found in whole.finditer(shared)), default=0)]
    return start + len(shared)
