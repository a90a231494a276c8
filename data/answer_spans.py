r"""Token spans of the answers in the text that a chat template renders.

Cases:

1. A template with `{% generation %}` blocks marks the answers itself.
2. Otherwise the conversation up to an answer (generation prompt included) and the conversation up
   to its end are rendered. Both must be prefixes of the whole in tokens; the answer is between.
3. A template that rewrites earlier turns (it removes their thinking, for instance) breaks 2. Then
   the same prefixes are compared as text, an answer whose end was rewritten is found by rendering
   a mark in its place, and token offsets turn characters into tokens.
   In a conversation of many answers, cases 2 and 3 render windows of neighbouring turns instead of
   prefixes, so that time grows with the turns and not with their square. A window must reproduce
   its part of the whole text; if it does not, prefixes are used, up to MOST answers.
4. Without a template the text is the turns joined by newlines, each piece tokenised on its own; the
   end token closes the last answer.

An answer is its text and the special token that ends the turn, since a drafter must learn to stop.
Text that the template adds after that token is excluded. A token that would straddle the start of
an answer (an answer that begins with a newline, after ChatML's own) is split there, since at
decoding the prompt ends there. In ChatML, x marks the answer:

    <|im_start|> user \n 2+2? <|im_end|> \n <|im_start|> assistant \n 4 <|im_end|> \n
         .        .   .    .       .      .       .          .      .  x     x       .
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

from jinja2 import TemplateError

from outrider.conf.errors import RunError
from outrider.data.conversations import Message
from outrider.models import chat_template

Tokenizer: TypeAlias = Any  # a transformers PreTrainedTokenizerBase; importing it costs seconds
Span: TypeAlias = tuple[int, int]  # start, end (exclusive)
WINDOW, MARGIN = 8, 2  # answers of a window, and further ones on either side of them
MANY, MOST = 64, 500  # answers from which on windows are used; and that prefixes can find
SHOWN = 8  # turns of a conversation in a message, from either end
OPEN, CLOSE, MARK = "\ufdd0", "\ufdd1", "\ufdd2"  # noncharacters: Unicode keeps them out of text


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer with a chat template; `on_turn` is called with the turns that are done."""

    tokenizer: Tokenizer
    on_turn: Callable[[int], object] = lambda turns: None

    @cached_property
    def special(self) -> set[int]:
        added = self.tokenizer.added_tokens_decoder
        named = {index for index, token in added.items() if token.special}
        return named | set(self.tokenizer.all_special_ids)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, messages: list[Message], *, prompt: bool = False, **more: Any) -> str:
        try:
            return chat_template.render(
                self.tokenizer, messages, add_generation_prompt=prompt, **more
            )
        except TemplateError as error:
            reason = f"is refused by the chat template: {error}"
            fix = "Remove such conversations (or such turns), or use another chat template."
        except Exception as error:  # a template is a program: whatever it does
            reason = f"makes the chat template fail: {type(error).__name__}: {str(error)[:400]}"
            fix = "Use another chat template, or correct the one of target.path."
        raise conversation_error(messages, reason, fix)

    def answers(
        self, messages: list[Message], last_only: bool = False
    ) -> tuple[list[int], list[Span], int]:
        """Return tokens, spans of the answers, and the number of answers that case 3 found.

        With `last_only` and MANY answers, only the last one is searched.
        """
        text = self.text(messages)
        turns = [i for i, turn in enumerate(messages) if turn["role"] == "assistant"]
        turns = turns[-1:] if last_only and len(turns) >= MANY else turns
        characters, rewritten = self.generation_blocks(messages, text), 0
        if characters is None and len(turns) >= MANY and getattr(self.tokenizer, "is_fast", False):
            characters, rewritten = self.spans_in_windows(messages, turns, text)
        if characters is None:
            ids = self.ids(text)
            exact = [self.span_in_tokens(self.prefixes(messages, i), text, ids) for i in turns]
            spans = [span for span in exact if span is not None]
            rewritten = len(turns) - len(spans)
            if rewritten:
                pairs = (self.prefixes(messages, i) for i in turns)
                characters = [
                    self.span_in_text(messages, i, pair, text)
                    for i, pair in zip(turns, pairs, strict=True)
                ]
        if characters is not None:
            ids, spans = self.token_spans(text, characters)
        special_end = cache(lambda: self.ends_with_special(messages))
        spans = [self.include_end_token(ids, span, special_end) for span in spans]
        return ids, spans, rewritten

    def spans_in_windows(
        self, messages: list[Message], turns: list[int], text: str
    ) -> tuple[list[Span] | None, int]:
        """Return the characters of every answer, and the number of rewritten ones, by windows.

        None if a window does not reproduce its part of the text and MOST answers can be searched
        by prefixes. Raises RunError if there are more.
        """
        system = messages[:1] if messages[0]["role"] == "system" else []
        spans, rewritten = list[Span](), 0
        for first in range(0, len(turns), WINDOW):
            # with the answer before, whose place in the text is known
            in_window = turns[max(0, first - 1) : first + WINDOW]
            begin = turns[first - 1 - MARGIN] + 1 if first > MARGIN else 0
            behind = first + WINDOW + MARGIN  # the first answer behind the window
            end = turns[behind] if behind < len(turns) else len(messages)
            head = system if begin else []
            window, offset = [*head, *messages[begin:end]], begin - len(head)
            part = self.text(window)
            pairs = [self.prefixes(window, turn - offset) for turn in in_window]
            located = [
                self.span_in_text(window, turn - offset, pair, part)
                for turn, pair in zip(in_window, pairs, strict=True)
            ]
            shift, start = (spans[-1][0] - located[0][0], located[0][0]) if first else (0, 0)
            if text[start + shift : located[-1][1] + shift] != part[start : located[-1][1]]:
                if len(turns) <= MOST:
                    return None, 0
                reason = f"has {len(turns)} answers, and its template changes them by distant turns"
                fix = f"Split it into conversations of at most {MOST} answers."
                raise conversation_error(messages, reason, fix)
            ids = self.ids(part)
            new = slice(bool(first), None)
            exact = [self.span_in_tokens(pair, part, ids) for pair in pairs[new]]
            rewritten += exact.count(None)
            spans += [(a + shift, b + shift) for a, b in located[new]]
            self.on_turn(in_window[-1] + 1)
        return spans, rewritten

    def generation_blocks(self, messages: list[Message], text: str) -> list[Span] | None:
        """Return the characters inside `{% generation %}`; None for a template without such blocks.

        Each block is replaced by a filter that puts OPEN before it and CLOSE after it. A filter is
        a block too, so Jinja trims white space as before. (transformers' assistant mask runs on to
        the end of the conversation when the last character of a block belongs to no token, and so
        marks the next question.)
        """
        wrap = f"filter reverse|replace('','{CLOSE}',1)|reverse|replace('','{OPEN}',1)"
        tag = r"(\{%%[-+]?\s*)%s(\s*[-+]?%%\})"
        template = self.tokenizer.get_chat_template()
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

    def prefixes(self, messages: list[Message], turn: int) -> tuple[str, str]:
        """Return the text up to an answer, generation prompt included, and up to its end."""
        return self.text(messages[:turn], prompt=True), self.text(messages[: turn + 1])

    def span_in_tokens(self, prefixes: tuple[str, str], text: str, ids: list[int]) -> Span | None:
        """Return the tokens of an answer by prefixes in tokens (case 2); None if one differs."""
        before = self.ids(prefixes[0])
        after = ids if prefixes[1] == text else self.ids(prefixes[1])
        exact = ids[: len(before)] == before and ids[: len(after)] == after
        return (len(before), len(after)) if exact and len(before) < len(after) else None

    def span_in_text(
        self, messages: list[Message], turn: int, prefixes: tuple[str, str], text: str
    ) -> Span:
        """Return the characters of an answer by prefixes of the text, or by a mark (case 3)."""
        before, after = prefixes
        if text.startswith(before) and text.startswith(after) and len(before) <= len(after):
            return len(before), len(after)
        sides = self.text_around(messages, turn)
        if sides and not (text.startswith(sides[0]) and text[len(sides[0]) :].endswith(sides[1])):
            sides = None
        start = len(before) if text.startswith(before) else sides and len(sides[0])
        end = len(after) if text.startswith(after) else sides and len(text) - len(sides[1])
        if end and not text.startswith(after):
            end += self.end_token_length(messages, text[end:])
        if start is None or end is None or start > end:
            reason = f"is rewritten by the chat template so that answer {turn} is not found"
            fix = "Use a template with {% generation %} marks, or drop the earlier turns."
            raise conversation_error(messages, reason, fix)
        return start, end

    def text_around(self, messages: list[Message], turn: int) -> tuple[str, str] | None:
        """Return the text before and after the content of a turn; None if it is not rendered."""
        mark = Message(role=messages[turn]["role"], content=MARK)
        text = self.text([*messages[:turn], mark, *messages[turn + 1 :]])
        head, mark_in_text, tail = text.partition(MARK)
        return (head, tail) if mark_in_text else None

    def end_token_length(self, messages: list[Message], text: str) -> int:
        """Return the characters up to the end of the end token after an answer, or 0."""
        ends = "|".join(map(re.escape, self.tokenizer.convert_ids_to_tokens(list(self.special))))
        match = re.match(rf"\s*({ends})", text)
        return match.end() if match and self.ends_with_special(messages) else 0

    def ends_with_special(self, messages: list[Message]) -> bool:
        """Return whether the template ends answers with a special token (ChatML, Llama-3)."""
        turns = [i for i, turn in enumerate(messages) if turn["role"] == "assistant"]
        sides = self.text_around(messages[: turns[-1] + 1], turns[-1]) if turns else None
        return sides is not None and self.next_special(self.ids(sides[1]), 0) is not None

    def token_spans(self, text: str, spans: list[Span]) -> tuple[list[int], list[Span]]:
        """Return the tokens of a text, and for each span of characters the tokens wholly inside."""
        ids, bounds = self.encode(text, [])
        starts = list(accumulate((start for start, _ in bounds), max))
        ends = list(accumulate((end for _, end in bounds), max))
        inside = [bisect_left(starts, first) for first, _ in spans]  # tokens that start before
        cuts = [
            first for (first, _), count in zip(spans, inside, strict=True)
            if count and ends[count - 1] > first
        ]  # fmt: skip
        if cuts:
            ids, bounds = self.encode(text, cuts)
            starts = list(accumulate((start for start, _ in bounds), max))
        out = list[Span]()
        for first, last in spans:
            begin = bisect_left(starts, first)
            end = begin
            while end < len(ids) and bounds[end][1] <= last:
                end += 1
            out.append((begin, end))
        return ids, out

    def encode(self, text: str, cuts: list[int]) -> tuple[list[int], list[Span]]:
        """Return tokens, none of them across a cut, and the characters of each token."""
        ids, bounds, before = list[int](), list[Span](), 0
        for left, right in pairwise([0, *cuts, len(text)]):
            for token, start, end in self.offsets(text[left:right]):
                first = start if start < end else before - left  # trimmed blank: (5, 5)
                ids.append(token)
                bounds.append((left + first, left + end))
                before = max(before, left + end)
        return ids, bounds

    def offsets(self, text: str) -> list[tuple[int, int, int]]:
        """Return (token, start, end) in characters; the end is exclusive."""
        try:
            coded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        except NotImplementedError:
            message = "This tokenizer gives no character offsets, which its chat template needs"
            raise RunError(message, "Use the model's fast tokenizer (tokenizer.json).") from None
        spans = coded["offset_mapping"]
        return [(i, *span) for i, span in zip(coded["input_ids"], spans, strict=True)]

    def include_end_token(
        self, ids: list[int], span: Span, special_end: Callable[[], bool]
    ) -> Span:
        """Return the span without blanks at its end, and with the token that ends the turn."""
        start, end = span
        while end > start and self.is_blank(ids[end - 1]):
            end -= 1
        ended = end > start and ids[end - 1] in self.special
        if not ended and special_end():
            special = self.next_special(ids, end)
            end = end if special is None else special + 1
        return start, end

    def next_special(self, ids: list[int], index: int) -> int | None:
        """Return the index of the next special token if only white space comes before it."""
        while index < len(ids) and self.is_blank(ids[index]):
            index += 1
        return index if index < len(ids) and ids[index] in self.special else None

    def is_blank(self, token: int) -> bool:
        return not str(self.tokenizer.decode([token])).strip()


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


def conversation_error(messages: Sequence[Message], reason: str, fix: str) -> RunError:
    lines = [f"    {turn['role']}: {turn['content'][:400]}" for turn in messages]
    if (left_out := len(lines) - 2 * SHOWN) > 0:
        lines[SHOWN:-SHOWN] = [f"    ... {left_out} more turns ..."]
    text = "\n".join(lines)
    return RunError(f"This conversation {reason}\n{text}", fix)
