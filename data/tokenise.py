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
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Bool, Int32
from rich.panel import Panel
from rich.text import Text

from outrider.data.answer_spans import MOST, ChatTemplate
from outrider.data.conversations import Conversation, Message, RuleCounts, up_to_last_answer
from outrider.data.lost_turns import lost_turn
from outrider.data.plain_text import plain_answer_spans, plain_pieces
from outrider.data.rendered_text import (
    AnswerNotFound,
    ConversationError,
    Tokenizer,
    conversation_error,
    skippable,
)
from outrider.data.reporter import Reporter, TokenProgress
from outrider.data.template_forms import END_TAG, template_forms

Result = TypeVar("Result")


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
    """Return the sha256 of turns and tools in hex; it does not depend on the tokenizer."""
    turns: list[object] = [
        [turn["role"], turn["content"], *([turn] if len(turn) > 2 else ())] for turn in messages
    ]
    tools = _tools(messages)
    text = json.dumps(turns if tools is None else [*turns, tools], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _tools(messages: Sequence[Message]) -> list[dict[str, Any]] | None:
    return messages.tools if isinstance(messages, Conversation) else None


def render(
    tokenizer: Tokenizer, messages: Sequence[Message], *, max_length: int, last_only: bool = False,
    stops: Sequence[int] | None = None, on_turn: Callable[[int], object] = lambda turns: None,
) -> Document:  # fmt: skip
    """Return a conversation in tokens, cut to its first `max_length`, with its answers marked.

    If all answers are cut off, no token is marked. `last_only` marks only the last answer.
    `stops` are the tokens at which decoding ends (default: the tokenizer's end token). `on_turn` is
    called with the number of turns that are done, if there are many.

    Raises ConversationError if the template refuses the conversation, or an answer is not found.
    """
    if getattr(tokenizer, "chat_template", None):
        chat = ChatTemplate(tokenizer, on_turn, _tools(messages), stops)
        ids, spans, rewritten = chat.answers(list(messages), last_only)
    else:
        ids, spans, rewritten = *plain_answer_spans(tokenizer, messages), 0
        spans = spans[-1:] if last_only else spans
    answer = [False] * len(ids)
    for start, end in spans:
        answer[start:end] = [True] * (end - start)
    if True not in answer:
        fix = "Remove it, or give it an answer"
        raise conversation_error(messages, "has no answer token", fix)
    cut = max(0, len(ids) - max_length)
    out = Document.of(ids[:max_length], answer[:max_length], conversation_key(messages), cut)
    return replace(out, rewritten=rewritten)


def rendered_part(
    tokenizer: Tokenizer, messages: Sequence[Message]
) -> tuple[Conversation, str | None]:
    """Return the turns up to the last answer that is rendered whole, and the rule that ended them.

    An answer with tool calls or a thought, or after the results of tools, that the template renders
    in part would be trained as a text that the target does not write.
    """
    templated = getattr(tokenizer, "chat_template", None)
    if templated and any(END_TAG in turn["content"] for turn in messages):
        forms = template_forms(tokenizer)
        whole = Conversation(map(forms.without_tags, messages), _tools(messages))
    else:
        whole = Conversation(messages, _tools(messages))
    if all(len(turn) == 2 and turn["role"] != "tool" for turn in whole):
        return whole, None
    if templated:
        lost = lost_turn(ChatTemplate(tokenizer, tools=whole.tools).text, whole)
    else:  # plain text has no place for a call, a result or a thought
        special = (i for i, turn in enumerate(whole) if len(turn) > 2 or turn["role"] == "tool")
        index = next(special)
        rule = "thoughts not taken" if "reasoning_content" in whole[index] else "calls not rendered"
        lost = index, rule
    if lost is None:
        return whole, None
    return up_to_last_answer(whole[: lost[0]]), lost[1]


def with_rendered_part(
    tokenizer: Tokenizer, messages: Sequence[Message], attempt: Callable[[Conversation], Result]
) -> tuple[Result | None, Conversation, list[str]]:
    """Call `attempt` with the turns of `rendered_part`; return its result, the turns and the rules.

    If it does not find an answer with calls or after results, the turns before it are next.
    """
    part, rule = rendered_part(tokenizer, messages)
    rules = [] if rule is None else [rule]
    while part:
        try:
            return attempt(part), part, rules
        except AnswerNotFound as error:
            if "tool_calls" not in part[error.turn] and part[error.turn - 1]["role"] != "tool":
                raise
            part = up_to_last_answer(part[: error.turn])
            rules.append("calls not rendered")
    return None, part, rules


def render_all(
    tokenizer: Tokenizer, conversations: Iterable[Sequence[Message]], *, max_length: int,
    summary: RuleCounts | None = None, limit: int | None = None, supervise: str = "all",
    cut: bool = True, stops: Sequence[int] | None = None, skip_bad: int = 0,
    reporter: Reporter | None = None,
) -> list[Document]:  # fmt: skip
    """`render` each conversation; count the cut ones, drop those without any answer left.

    Args:
        limit: documents to return; None returns all.
        supervise: "all" answers, the "last" one, or "each" in a row that ends with it (a template
            may show earlier turns differently then).
        cut: keep the head of too long conversations instead of dropping them.
        stops: tokens at which decoding ends; None: the end token of the tokenizer.
        skip_bad: conversations that may be skipped, with the bad rows that `summary` has counted,
            because the template refuses them.
        reporter: shows the progress in turns; None shows nothing.

    Raises:
        ConversationError: the template refuses more conversations than that.
    """
    summary, documents = RuleCounts() if summary is None else summary, list[Document]()
    reporter = Reporter.silent() if reporter is None else reporter
    rows = _Rows(tokenizer, max_length, supervise, cut, stops, summary)
    with reporter.progress("tokenising", None, "turns") as bar:
        for messages in conversations:
            if limit is not None and len(documents) >= limit:
                break
            try:
                documents += rows.documents(messages, bar)
            except ConversationError as error:
                skipped = summary.counts["refused"] + summary.counts["bad row"] + 1
                if skipped > skip_bad:
                    origin = messages.origin if isinstance(messages, Conversation) else ""
                    raise skippable(error, origin, skipped) from None
                summary.add("refused")
    return documents[:limit]


@dataclass(frozen=True)
class _Rows:
    """The documents of conversations, with the arguments of `render_all`."""

    tokenizer: Tokenizer
    max_length: int
    supervise: str
    cut: bool
    stops: Sequence[int] | None
    summary: RuleCounts

    def documents(self, messages: Sequence[Message], bar: TokenProgress) -> list[Document]:
        """Return the documents of one conversation; count what was done to it."""
        key = conversation_key(messages)  # its rows stay on one side of the split
        attempt = partial(self._rows, key=key, bar=bar)
        result, part, rules = with_rendered_part(self.tokenizer, messages, attempt)
        self.summary.counts.update(rules[-1:])
        if result is None:
            self.summary.add("no turns")
            return []
        self._count_losses(part)
        documents, cases = result
        self.summary.counts.update(cases.counts)
        return documents

    def _rows(
        self, messages: Conversation, key: str, bar: TokenProgress
    ) -> tuple[list[Document], RuleCounts]:
        """Return the documents of turns that are rendered whole, and what was done to them."""
        turns, documents, cases = int(bar.done), list[Document](), RuleCounts()
        head = ""  # text before an answer that was cut off; so are later ones after it
        for part in _supervised_parts(messages, self.supervise, cases):
            if head and _text(self.tokenizer, part).startswith(head):
                document = Document.of([], [], key, cut=1)
            else:
                document = render(
                    self.tokenizer, part, max_length=self.max_length,
                    last_only=self.supervise != "all", stops=self.stops,
                    on_turn=partial(_show_turns, bar, turns),
                )  # fmt: skip
            turns += len(part)
            bar.update(turns, bar.tokens + len(document.ids))
            if self.supervise == "each" and not head and not document.answer.any():
                head = _text(self.tokenizer, part[:-1])
            if document.cut:
                cases.add("cut" if self.cut else "too long")
            if document.rewritten:
                cases.add("rewritten")
            if document.cut and not self.cut:
                continue
            if document.answer.any():
                documents.append(replace(document, key=key))
            else:
                cases.add("answers cut off")
        return documents, cases

    def _count_losses(self, messages: Conversation) -> None:
        """Count what the template leaves out of conversations that are trained all the same."""
        if not getattr(self.tokenizer, "chat_template", None):
            return
        forms = template_forms(self.tokenizer)
        if messages.tools and not forms.tools:
            self.summary.add("tools ignored")
        if forms.removes_thoughts and any(
            turn["role"] == "assistant" and END_TAG in turn["content"] for turn in messages
        ):
            self.summary.add("thoughts removed")


def _show_turns(bar: TokenProgress, before: int, done: int) -> None:
    bar.update(before + done, bar.tokens)


def _text(tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
    if getattr(tokenizer, "chat_template", None):
        return ChatTemplate(tokenizer, tools=_tools(messages)).text(messages)
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
    turns = Conversation(
        (
            Message(role=("user", "assistant")[i % 2], content=turn)
            if isinstance(turn, str)
            else turn
            for i, turn in enumerate(messages)
        ),
        messages.tools if isinstance(messages, Conversation) else None,
    )
    if getattr(tokenizer, "chat_template", None):
        return render_prompt(tokenizer, turns, prompt=True)[1]
    return [token for piece, _ in plain_pieces(tokenizer, turns) for token in piece]


def render_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], *, prompt: bool
) -> tuple[str, list[int]]:
    """Return the text and the tokens that the chat template makes of these turns.

    `prompt` appends the generation prompt. Raises RunError if the template refuses the turns.
    """
    chat = ChatTemplate(tokenizer, tools=_tools(messages))
    text = chat.text(messages, prompt=prompt)
    ids = chat.ids(text)
    if prompt and not ids:
        fix = "Use another chat template, or correct the one of target.path"
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
