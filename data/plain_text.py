"""Tokens and answers of a conversation without a chat template: turns joined by newlines."""

from collections.abc import Sequence
from typing import TypeAlias

from outrider.data.conversations import Message
from outrider.data.rendered_text import Tokenizer

Span: TypeAlias = tuple[int, int]  # start, end (exclusive)


def plain_answer_spans(
    tokenizer: Tokenizer, messages: Sequence[Message]
) -> tuple[list[int], list[Span]]:
    """Return tokens and answer spans without a template; the end token closes a last answer."""
    pieces = plain_pieces(tokenizer, messages)
    end_token = tokenizer.eos_token_id
    if messages and messages[-1]["role"] == "assistant":
        pieces[-1] = ([] if end_token is None else [end_token], True)
    ids, spans = list[int](), list[Span]()
    for piece, is_answer in pieces:
        if is_answer:
            spans.append((len(ids), len(ids) + len(piece)))
        ids += piece
    return ids, spans


def plain_pieces(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[tuple[list[int], bool]]:
    """Return (tokens, is an answer) of the text before each answer, the answer, the last text."""
    empty = list(tokenizer("")["input_ids"])
    head = empty[:1] if empty and empty[0] == tokenizer.bos_token_id else []
    texts, before = list[tuple[str, bool]](), ""
    for turn in messages:
        if turn["role"] == "assistant":
            texts += [(before, False), (turn["content"], True)]
            before = "\n"
        else:
            before += f"{turn['content']}\n"
    return [(head, False)] + [
        (list(tokenizer(text, add_special_tokens=False)["input_ids"]), is_answer)
        for text, is_answer in (*texts, (before, False))
    ]
