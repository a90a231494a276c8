"""Conversations to token ids, and which of the tokens are answers.

What an answer is, and how it is found in what a chat template renders, stands in `spans.py`.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from outrider.data.answer_spans import Template, Tokenizer, in_pieces, plain, refused
from outrider.data.conversations import Message, Summary


@dataclass(frozen=True, eq=False)
class Document:
    """One conversation as the target reads it; of a long text there are many in memory.

    Attributes:
        ids: tokens.
        answer: True where the token belongs to an answer.
        key: names the conversation (see `key_of`); decides on which side of the split it falls.
        cut: how many tokens behind `max_length` were left out.
        source: where it came from, in a word.
        rewritten: answers that begin otherwise in the whole (`spans.py`, 3).
    """

    ids: Int32[np.ndarray, " S"]
    answer: Bool[np.ndarray, " S"]
    key: str
    cut: int = 0
    source: str = ""
    rewritten: int = 0

    @classmethod
    def of(cls, ids: Sequence[int], answer: Sequence[bool], key: str, cut: int = 0) -> "Document":
        return cls(np.array(ids, dtype=np.int32), np.array(answer, dtype=bool), key, cut)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Document) and self._plain() == other._plain()

    def _plain(self) -> tuple[list[int], list[bool], str, int]:
        return self.ids.tolist(), self.answer.tolist(), self.key, self.cut


def key_of(messages: Sequence[Message]) -> str:
    """sha256 of roles and contents, in hex: the same for every tokenizer and length."""
    text = json.dumps([[turn["role"], turn["content"]] for turn in messages])
    return hashlib.sha256(text.encode()).hexdigest()


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    max_length: int,
    template_args: dict[str, Any] | None = None,
    last_only: bool = False,
) -> Document:
    """The conversation in tokens, cut to its first `max_length`, with its answers flagged.

    Answers that lie behind the cut leave a document without any; `render_all` drops those.

    Args:
        tokenizer: of the target, with or without a chat template.
        messages: turns as `sources.conversation` returns them.
        max_length: in tokens, at least 1.
        template_args: what the template takes besides the turns (`enable_thinking`, ...).
        last_only: the last answer alone counts as one.

    Raises:
        RunError: no token is an answer, the template refuses the conversation, or the answers
            cannot be found in what it renders.
    """
    if getattr(tokenizer, "chat_template", None):
        chat = Template(tokenizer, template_args or {})
        ids, spans, rewritten = chat.answers(list(messages))
    else:
        ids, spans, rewritten = *plain(tokenizer, messages), 0
    spans = spans[-1:] if last_only else spans
    answer = [False] * len(ids)
    for start, end in spans:
        answer[start:end] = [True] * (end - start)
    if True not in answer:
        raise refused(messages, "holds no answer token", "Remove it, or give it an answer.")
    cut = max(0, len(ids) - max_length)
    out = Document.of(ids[:max_length], answer[:max_length], key_of(messages), cut)
    return replace(out, rewritten=rewritten)


def render_all(
    tokenizer: Tokenizer,
    conversations: Iterable[Sequence[Message]],
    *,
    max_length: int,
    template_args: dict[str, Any] | None = None,
    summary: Summary | None = None,
    limit: int | None = None,
    supervise: str = "all",
    cut: bool = True,
) -> list[Document]:
    """`render` for each; the cut ones are counted, those cut before any answer also dropped.

    Args:
        limit: stop reading when so many are kept; None renders all.
        supervise: all answers, the last one, or each in a row of its own, in which nothing comes
            after it (a template may show earlier turns differently then).
        cut: keep the head of what is too long, instead of leaving it out.
    """
    summary, kept = Summary() if summary is None else summary, list[Document]()
    for messages in conversations:
        if limit is not None and len(kept) >= limit:
            break
        for part in _parts(messages, supervise, summary):
            document = render(
                tokenizer, part, max_length=max_length, template_args=template_args,
                last_only=supervise != "all",
            )  # fmt: skip
            if document.cut:
                summary.add("cut" if cut else "too long")
            if document.rewritten:
                summary.add("rewritten")
            if document.cut and not cut:
                continue
            if document.answer.any():  # rows of one conversation stay on one side of the split
                kept.append(replace(document, key=key_of(messages)))
            else:
                summary.add("answers cut off")
    return kept[:limit]


def _parts(
    messages: Sequence[Message], supervise: str, summary: Summary
) -> Iterator[Sequence[Message]]:
    """The conversation, or, for rows of one answer, what it was after every answer."""
    if supervise != "each":
        yield messages
        return
    for place, turn in enumerate(messages):
        if turn["role"] == "assistant":
            summary.add("rows of one answer")
            yield messages[: place + 1]


def prompt_ids(
    tokenizer: Tokenizer,
    messages: Sequence[Message] | Sequence[str],
    template_args: dict[str, Any] | None = None,
) -> list[int]:
    """What the target reads before it writes the next answer; rendered with generation prompt.

    Args:
        tokenizer: of the target.
        messages: the dialogue so far, the question last; plain strings are user, assistant,
            user, ... in turn.
        template_args: as in `render`.
    """
    said: list[Message | str] = list(messages)
    turns = [_turn(place, turn) for place, turn in enumerate(said)]
    if getattr(tokenizer, "chat_template", None):
        chat = Template(tokenizer, template_args or {})
        return chat.ids(chat.text(turns, prompt=True))
    return [token for piece, _ in in_pieces(tokenizer, turns) for token in piece]


def told(
    tokenizer: Tokenizer, messages: Sequence[Message], *, prompt: bool
) -> tuple[str, list[int]]:
    """What the chat template, which there must be, makes of these turns: text and tokens.

    Args:
        prompt: with the generation prompt, as before an answer.

    Raises:
        RunError: the template refuses them.
    """
    chat = Template(tokenizer, {})
    text = chat.text(list(messages), prompt=prompt)
    return text, chat.ids(text)


def turn_edges(tokenizer: Tokenizer, turn: Message) -> tuple[list[int], list[int]] | None:
    """The tokens that a template puts before and behind the content of a first turn.

    Args:
        turn: with MARK as its content.

    Returns:
        None without a template, or with one that does not show the content as it is.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    chat = Template(tokenizer, {})
    sides = chat.around([turn], 0)
    return None if sides is None else (chat.ids(sides[0]), chat.ids(sides[1]))


def _turn(place: int, turn: Message | str) -> Message:
    if isinstance(turn, str):
        return Message(role=("user", "assistant")[place % 2], content=turn)
    return turn


def coloured(tokenizer: Tokenizer, document: Document, brackets: bool = False) -> Text:
    """The document's text, answers green, the rest dim.

    Args:
        brackets: around the answers too, for eyes and files without colour.
    """
    text = Text()
    flagged = zip(document.answer.tolist(), document.ids.tolist(), strict=True)
    for is_answer, run in groupby(flagged, itemgetter(0)):
        words = tokenizer.decode([token for _, token in run])
        words = f"[{words}]" if is_answer and brackets else words
        text.append(words, style="green" if is_answer else "dim")
    return text


def show_samples(
    console: Console, tokenizer: Tokenizer, documents: Sequence[Document], n: int = 2
) -> None:
    """Print the first `n` documents, so that a wrong answer mask is seen before training."""
    for document in documents[:n]:
        marked = document.ids[document.answer].tolist()
        first, last = (repr(tokenizer.decode([token])) for token in (marked[0], marked[-1]))
        title = Text(
            f"{len(marked)} of {len(document.ids)} tokens are supervised, from {first} to {last}"
        )
        shown = coloured(tokenizer, document, brackets=console.color_system is None)
        console.print(Panel(shown, title=title, title_align="left"))
