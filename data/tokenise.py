"""Conversations in tokens, with a mask of the answers.

`answer_spans.py` defines what an answer is and finds it in the rendered text.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter

import numpy as np
from jaxtyping import Bool, Int32
from rich.panel import Panel
from rich.text import Text

from outrider.data.answer_spans import (
    MOST,
    ChatTemplate,
    Tokenizer,
    conversation_error,
    plain_answer_spans,
    plain_pieces,
)
from outrider.data.conversations import Message, RuleCounts
from outrider.data.reporter import Reporter, TokenProgress


@dataclass(frozen=True, eq=False)
class Document:
    """One conversation in tokens. Arrays rather than lists: there are many in memory."""

    ids: Int32[np.ndarray, " S"]
    answer: Bool[np.ndarray, " S"]  # the token belongs to an answer
    key: str  # `conversation_key`; decides the side of the holdout split
    cut: int = 0  # number of tokens removed after `max_length`
    source: str = ""  # name of the data set
    rewritten: int = 0  # answers found by case 3 of answer_spans.py

    @classmethod
    def of(cls, ids: Sequence[int], answer: Sequence[bool], key: str, cut: int = 0) -> "Document":
        return cls(np.array(ids, dtype=np.int32), np.array(answer, dtype=bool), key, cut)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Document) and self._fields() == other._fields()

    def _fields(self) -> tuple[list[int], list[bool], str, int]:
        return self.ids.tolist(), self.answer.tolist(), self.key, self.cut


def conversation_key(messages: Sequence[Message]) -> str:
    """Return the sha256 of roles and contents in hex; it does not depend on the tokenizer."""
    text = json.dumps([[turn["role"], turn["content"]] for turn in messages])
    return hashlib.sha256(text.encode()).hexdigest()


def render(
    tokenizer: Tokenizer, messages: Sequence[Message], *, max_length: int, last_only: bool = False,
    on_turn: Callable[[int], object] = lambda turns: None,
) -> Document:  # fmt: skip
    """Return a conversation in tokens, cut to its first `max_length`, with its answers marked.

    If all answers are cut off, no token is marked. `last_only` marks only the last answer.
    `on_turn` is called with the number of turns that are done, if there are many.

    Raises RunError if the template refuses the conversation, or no answer is found in its text.
    """
    if getattr(tokenizer, "chat_template", None):
        ids, spans, rewritten = ChatTemplate(tokenizer, on_turn).answers(list(messages), last_only)
    else:
        ids, spans, rewritten = *plain_answer_spans(tokenizer, messages), 0
    answer = [False] * len(ids)
    for start, end in spans[-1:] if last_only else spans:
        answer[start:end] = [True] * (end - start)
    if True not in answer:
        fix = "Remove it, or give it an answer."
        raise conversation_error(messages, "has no answer token", fix)
    cut = max(0, len(ids) - max_length)
    out = Document.of(ids[:max_length], answer[:max_length], conversation_key(messages), cut)
    return replace(out, rewritten=rewritten)


def render_all(
    tokenizer: Tokenizer, conversations: Iterable[Sequence[Message]], *, max_length: int,
    summary: RuleCounts | None = None, limit: int | None = None, supervise: str = "all",
    cut: bool = True, reporter: Reporter | None = None,
) -> list[Document]:  # fmt: skip
    """`render` each conversation; count the cut ones, drop those without any answer left.

    Args:
        limit: documents to return; None returns all.
        supervise: "all" answers, the "last" one, or "each" in a row that ends with it (a template
            may show earlier turns differently then).
        cut: keep the head of too long conversations instead of dropping them.
        reporter: shows the progress in turns; None shows nothing.
    """
    summary, documents = RuleCounts() if summary is None else summary, list[Document]()
    turns, reporter = 0, Reporter.silent() if reporter is None else reporter
    with reporter.progress("tokenising", None, "turns") as bar:
        for messages in conversations:
            if limit is not None and len(documents) >= limit:
                break
            key = conversation_key(messages)  # its rows stay on one side of the split
            head = ""  # text before an answer that was cut off; so are later ones after it
            for part in _supervised_parts(messages, supervise, summary):
                if head and _text(tokenizer, part).startswith(head):
                    document = Document.of([], [], key, cut=1)
                else:
                    document = render(
                        tokenizer, part, max_length=max_length, last_only=supervise != "all",
                        on_turn=partial(_show_turns, bar, turns),
                    )  # fmt: skip
                turns += len(part)
                bar.update(turns, bar.tokens + len(document.ids))
                if supervise == "each" and not head and not document.answer.any():
                    head = _text(tokenizer, part[:-1])
                if document.cut:
                    summary.add("cut" if cut else "too long")
                if document.rewritten:
                    summary.add("rewritten")
                if document.cut and not cut:
                    continue
                if document.answer.any():
                    documents.append(replace(document, key=key))
                else:
                    summary.add("answers cut off")
    return documents[:limit]


def _show_turns(bar: TokenProgress, before: int, done: int) -> None:
    bar.update(before + done, bar.tokens)


def _text(tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
    if getattr(tokenizer, "chat_template", None):
        return ChatTemplate(tokenizer).text(list(messages))
    return "\n".join(turn["content"] for turn in messages)


def _supervised_parts(
    messages: Sequence[Message], supervise: str, summary: RuleCounts
) -> Iterator[Sequence[Message]]:
    """Yield the conversation, or with supervise="each" its prefixes that end with an answer."""
    if supervise != "each":
        yield messages
        return
    answers = [index for index, turn in enumerate(messages) if turn["role"] == "assistant"]
    for index in answers[:MOST]:
        summary.add("rows of one answer")
        yield messages[: index + 1]
    if len(answers) > MOST:
        summary.add("far answers", len(answers) - MOST)


def prompt_ids(tokenizer: Tokenizer, messages: Sequence[Message | str]) -> list[int]:
    """Return the tokens before the next answer, generation prompt included.

    The question is last; plain strings are user, assistant, user, ... in turn.
    """
    turns = [
        Message(role=("user", "assistant")[i % 2], content=turn) if isinstance(turn, str) else turn
        for i, turn in enumerate(messages)
    ]
    if getattr(tokenizer, "chat_template", None):
        return render_prompt(tokenizer, turns, prompt=True)[1]
    return [token for piece, _ in plain_pieces(tokenizer, turns) for token in piece]


def render_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], *, prompt: bool
) -> tuple[str, list[int]]:
    """Return the text and the tokens that the chat template makes of these turns.

    `prompt` appends the generation prompt. Raises RunError if the template refuses the turns.
    """
    chat = ChatTemplate(tokenizer)
    text = chat.text(list(messages), prompt=prompt)
    ids = chat.ids(text)
    if prompt and not ids:
        fix = "Use another chat template, or correct the one of target.path."
        raise conversation_error(messages, "becomes no text in the chat template", fix)
    return text, ids


def highlight_answers(tokenizer: Tokenizer, document: Document, brackets: bool = False) -> Text:
    """Return the document's text with green answers, also in brackets for output without colour."""
    text = Text()
    flagged = zip(document.answer.tolist(), document.ids.tolist(), strict=True)
    for is_answer, run in groupby(flagged, itemgetter(0)):
        part = tokenizer.decode([token for _, token in run])
        part = f"[{part}]" if is_answer and brackets else part
        text.append(part, style="green" if is_answer else "dim")
    return text


def show_samples(
    reporter: Reporter, tokenizer: Tokenizer, documents: Sequence[Document], n: int = 2
) -> None:
    """Print the first `n` documents, so that a wrong answer mask is seen before training."""
    if not reporter.main:
        return
    for document in documents[:n]:
        answer = document.ids[document.answer].tolist()
        first, last = (repr(tokenizer.decode([token])) for token in (answer[0], answer[-1]))
        counts = f"{len(answer)} of {len(document.ids)} tokens"
        title = Text(f"{counts} are supervised, from {first} to {last}")
        text = highlight_answers(tokenizer, document, reporter.console.color_system is None)
        reporter.print(Panel(text, title=title, title_align="left"))
