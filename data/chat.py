r"""Conversations to token ids, and which of the tokens are answers.

The tokenizer's own chat template renders the text, and says itself what an answer is:

1. A template with `{% generation %}` marks the answers.
2. Any other template is rendered turn by turn. What the conversation up to an answer renders to,
   generation prompt included, must be a prefix of the whole in tokens; so must the conversation up
   to the answer's end. The answer lies between the two.
3. A template that rewrites earlier turns (it drops their thinking, say) breaks 2. Then the same
   prefixes are sought in the text, an answer whose end was rewritten is found by rendering a mark
   in its place, and the offsets of the tokens turn characters into tokens.
4. A tokenizer without a template gets plain text: the turns joined by newlines, each piece
   tokenised on its own, the text's end closed by the end token.

An answer is what the target writes after the prompt: its text and the special token that ends the
turn, for a drafter must learn to stop. What the template puts after that is not part of it, and
neither is a token that straddles the start (at decoding the prompt ends there). In ChatML:

    <|im_start|> user \n 2+2? <|im_end|> \n <|im_start|> assistant \n 4 <|im_end|> \n
         .        .   .    .       .      .       .          .      .  x     x       .
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeAlias

from jinja2 import TemplateError
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from outrider.data.sources import Message, Summary
from outrider.train.errors import RunError

Tokenizer: TypeAlias = Any  # a transformers PreTrainedTokenizerBase; importing it costs seconds
Span: TypeAlias = tuple[int, int]  # first index inside, first index behind
OPEN, CLOSE, MARK = "\ue000", "\ue001", "\ue002"  # private use: no text has a meaning for them


@dataclass(frozen=True)
class Document:
    """One conversation as the target reads it.

    Attributes:
        ids: token ids, S of them.
        answer: S flags, True where the token belongs to an answer.
        key: names the conversation (see `key_of`); decides on which side of the split it falls.
        cut: how many tokens behind `max_length` were left out.
    """

    ids: list[int]
    answer: list[bool]
    key: str
    cut: int = 0


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
        chat = _Chat(tokenizer, template_args or {})
        ids, spans = chat.answers(list(messages))
    else:
        ids, spans = _plain(tokenizer, messages)
    spans = spans[-1:] if last_only else spans
    answer = [False] * len(ids)
    for start, end in spans:
        answer[start:end] = [True] * (end - start)
    if not any(answer):
        raise _refused(messages, "holds no answer token", "Remove it, or give it an answer.")
    cut = max(0, len(ids) - max_length)
    return Document(ids[:max_length], answer[:max_length], key_of(messages), cut)


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
            if document.cut and not cut:
                continue
            if any(document.answer):  # rows of one conversation stay on one side of the split
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
        chat = _Chat(tokenizer, template_args or {})
        return chat.ids(chat.text(turns, prompt=True))
    return [token for piece, _ in _pieces(tokenizer, turns) for token in piece]


def turn_edges(tokenizer: Tokenizer, turn: Message) -> tuple[list[int], list[int]] | None:
    """The tokens that a template puts before and behind the content of a first turn.

    Args:
        turn: with MARK as its content.

    Returns:
        None without a template, or with one that does not show the content as it is.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    chat = _Chat(tokenizer, {})
    sides = chat.around([turn], 0)
    return None if sides is None else (chat.ids(sides[0]), chat.ids(sides[1]))


def _turn(place: int, turn: Message | str) -> Message:
    if isinstance(turn, str):
        return Message(role=("user", "assistant")[place % 2], content=turn)
    return turn


@dataclass(frozen=True)
class _Chat:
    """A tokenizer with a chat template, and the arguments the template is rendered with."""

    tokenizer: Tokenizer
    args: dict[str, Any]

    @cached_property
    def special(self) -> set[int]:
        added = self.tokenizer.added_tokens_decoder
        named = {index for index, token in added.items() if token.special}
        return named | set(self.tokenizer.all_special_ids)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, messages: list[Message], *, prompt: bool = False, **more: Any) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=prompt, **{**self.args, **more}
                )
            )
        except TemplateError as error:
            fix = "Remove such conversations (or such turns), or use another chat template."
            raise _refused(messages, f"is refused by the chat template: {error}", fix) from None

    def answers(self, messages: list[Message]) -> tuple[list[int], list[Span]]:
        """Token ids of the whole conversation, and the spans of its answers."""
        text = self.text(messages)
        ids = self.ids(text)
        marked = self.marked(messages, text)
        if marked is not None:
            spans = self.to_tokens(text, ids, marked) if marked else []
        else:
            spans = [
                self.by_tokens(messages, place, text, ids)
                or self.by_text(messages, place, text, ids)
                for place, turn in enumerate(messages)
                if turn["role"] == "assistant"
            ]
        return ids, [self.to_end(messages, ids, span) for span in spans]

    def marked(self, messages: list[Message], text: str) -> list[Span] | None:
        """The characters inside `{% generation %}`; None when the template has no such block.

        Each block is replaced by a filter that puts OPEN before it and CLOSE behind it; being a
        block too, the filter leaves Jinja's trimming of white space as it was. (transformers'
        own assistant mask runs on to the end of the conversation when the last character of a
        block belongs to no token, and so supervises the next question.)
        """
        template = self.tokenizer.get_chat_template(self.args.get("chat_template"))
        wrap = f"filter reverse|replace('','{CLOSE}',1)|reverse|replace('','{OPEN}',1)"
        tag = r"(\{%%[-+]?\s*)%s(\s*[-+]?%%\})"
        tagged, blocks = re.subn(tag % "generation", rf"\g<1>{wrap}\g<2>", template)
        if not blocks:
            return None
        tagged = re.sub(tag % "endgeneration", r"\g<1>endfilter\g<2>", tagged)
        spans, plain, start = list[Span](), "", 0
        for piece in re.split(f"([{OPEN}{CLOSE}])", self.text(messages, chat_template=tagged)):
            if piece == OPEN:
                start = len(plain)
            elif piece == CLOSE:
                spans.append((start, len(plain)))
            else:
                plain += piece
        return spans if plain == text else None

    def by_tokens(
        self, messages: list[Message], place: int, text: str, ids: list[int]
    ) -> Span | None:
        """Answer `place` by true token prefixes; None when either is not one."""
        before = self.ids(self.text(messages[:place], prompt=True))
        ended = self.text(messages[: place + 1])
        after = ids if ended == text else self.ids(ended)
        true = ids[: len(before)] == before and ids[: len(after)] == after
        return (len(before), len(after)) if true and len(before) < len(after) else None

    def by_text(self, messages: list[Message], place: int, text: str, ids: list[int]) -> Span:
        """Answer `place` by prefixes of the text, or by where a mark in its place comes out."""
        before = self.text(messages[:place], prompt=True)
        after = self.text(messages[: place + 1])
        sides = self.around(messages, place)
        if sides and not (text.startswith(sides[0]) and text[len(sides[0]) :].endswith(sides[1])):
            sides = None
        start = len(before) if text.startswith(before) else sides and len(sides[0])
        end = len(after) if text.startswith(after) else sides and len(text) - len(sides[1])
        if start is None or end is None or start > end:
            reason = f"is rewritten by the chat template so that answer {place} is not found"
            fix = "Use a template with {% generation %} marks, or drop the earlier turns."
            raise _refused(messages, reason, fix)
        return self.to_tokens(text, ids, [(start, end)])[0]

    def around(self, messages: list[Message], place: int) -> tuple[str, str] | None:
        """The rendered text before and behind the content of turn `place`; None if not shown."""
        mark = Message(role=messages[place]["role"], content=MARK)
        text = self.text([*messages[:place], mark, *messages[place + 1 :]])
        head, found, tail = text.partition(MARK)
        return (head, tail) if found else None

    def closes(self, messages: list[Message]) -> bool:
        """Whether the template ends an answer with a special token, as ChatML and Llama-3 do."""
        answers = [place for place, turn in enumerate(messages) if turn["role"] == "assistant"]
        sides = self.around(messages[: answers[-1] + 1], answers[-1]) if answers else None
        return sides is not None and self.after_blanks(self.ids(sides[1]), 0) is not None

    def to_tokens(self, text: str, ids: list[int], spans: list[Span]) -> list[Span]:
        """The tokens that lie wholly inside each span of characters."""
        try:
            coded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        except NotImplementedError:
            message = "This tokenizer gives no character offsets, which its chat template needs"
            raise RunError(message, "Use the model's fast tokenizer (tokenizer.json).") from None
        found, bounds, before = list[Span](), list[Span](), 0
        for start, end in coded["offset_mapping"]:  # a trimmed blank says (5, 5) for (4, 5)
            bounds.append((start if start < end else before, end))
            before = max(before, end)
        for first, last in spans:
            begin = next((j for j, (start, _) in enumerate(bounds) if start >= first), len(ids))
            end = begin
            while end < len(ids) and bounds[end][1] <= last:
                end += 1
            found.append((begin, end))
        return found

    def to_end(self, messages: list[Message], ids: list[int], span: Span) -> Span:
        """The span without blanks behind the answer, and with the token that ends the turn."""
        start, end = span
        while end > start and self.blank(ids[end - 1]):
            end -= 1
        ended = end > start and ids[end - 1] in self.special
        if not ended and self.closes(messages):
            behind = self.after_blanks(ids, end)
            end = end if behind is None else behind + 1
        return start, end

    def after_blanks(self, ids: list[int], place: int) -> int | None:
        """Where the next special token is, when nothing but white space comes before it."""
        while place < len(ids) and self.blank(ids[place]):
            place += 1
        return place if place < len(ids) and ids[place] in self.special else None

    def blank(self, token: int) -> bool:
        return not str(self.tokenizer.decode([token])).strip()


def _plain(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[list[int], list[Span]]:
    """Ids and answer spans without a template; the end token closes an answer in last place."""
    pieces = _pieces(tokenizer, messages)
    end_token = tokenizer.eos_token_id
    if messages and messages[-1]["role"] == "assistant":
        pieces[-1] = ([] if end_token is None else [end_token], True)
    ids, spans = list[int](), list[Span]()
    for piece, is_answer in pieces:
        if is_answer:
            spans.append((len(ids), len(ids) + len(piece)))
        ids += piece
    return ids, spans


def _pieces(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[tuple[list[int], bool]]:
    """(ids, is an answer) in turn: the text up to an answer, the answer, ...; a text is last."""
    bare = list(tokenizer("")["input_ids"])
    head = bare[:1] if bare and bare[0] == tokenizer.bos_token_id else []
    texts, asked = list[tuple[str, bool]](), ""
    for turn in messages:
        if turn["role"] == "assistant":
            texts += [(asked, False), (turn["content"], True)]
            asked = "\n"
        else:
            asked += f"{turn['content']}\n"
    texts.append((asked, False))
    coded = [
        (list(tokenizer(text, add_special_tokens=False)["input_ids"]), is_answer)
        for text, is_answer in texts
    ]
    return [(head, False), *coded]


def _refused(messages: Sequence[Message], reason: str, fix: str) -> RunError:
    shown = "\n".join(f"    {turn['role']}: {turn['content'][:400]}" for turn in messages)
    return RunError(f"This conversation {reason}\n{shown}", fix)


def coloured(tokenizer: Tokenizer, document: Document) -> Text:
    """The document's text, answers green, the rest dim."""
    text = Text()
    for is_answer, run in groupby(zip(document.answer, document.ids, strict=True), itemgetter(0)):
        words = tokenizer.decode([token for _, token in run])
        text.append(words, style="green" if is_answer else "dim")
    return text


def show_samples(
    console: Console, tokenizer: Tokenizer, documents: Sequence[Document], n: int = 3
) -> None:
    """Print the first `n` documents, so that a wrong answer mask is seen before training."""
    for document in documents[:n]:
        title = f"{sum(document.answer)} of {len(document.ids)} tokens are supervised"
        console.print(Panel(coloured(tokenizer, document), title=title, title_align="left"))
