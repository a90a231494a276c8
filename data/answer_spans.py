r"""Token spans of the answers in the text that a chat template renders.

Cases:

1. A template with `{% generation %}` blocks marks the answers itself (generation_blocks.py).
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

An answer is what the target would generate in that place, up to and with its stop token: its
thought and tool calls included. In this order, an answer ends with

- the first stop token in it (`stops`: those of the tokenizer and of the generation settings);
- the special token that closes the turn, if the answer also ends with it when it is the last one
  (the history of Harmony closes answers with <|end|>, for which the target generates <|return|>);
- the stop token that opens the next turn (GLM: <|user|> or <|observation|>). Such a template writes
  it once a turn follows, so that it is added behind the last answer.

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
from functools import cache
from itertools import accumulate, pairwise
from typing import TypeAlias

from outrider.conf.errors import RunError
from outrider.data.conversations import Message
from outrider.data.generation_blocks import generation_blocks
from outrider.data.rendered_text import (
    MARK,
    AnswerNotFound,
    ClosedThought,
    RenderedText,
    conversation_error,
    has_thought,
    thought_of,
)
from outrider.data.template_forms import END_TAG
from outrider.models.target import chat_template

Span: TypeAlias = tuple[int, int]  # start, end (exclusive)
WINDOW, MARGIN = 8, 2  # answers of a window, and further ones on either side of them
MANY, MOST = 64, 500  # answers from which on windows are used; and that prefixes can find


def lacks_result(messages: list[Message], turn: int) -> bool:
    """Return whether a turn with calls is followed by another turn than a result.

    The target would have opened the results, so a stop token that opens that turn is none of its.
    """
    after = messages[turn + 1 : turn + 2]
    return "tool_calls" in messages[turn] and bool(after) and after[0]["role"] != "tool"


@dataclass(frozen=True)
class ChatTemplate(RenderedText):
    """The answers of one conversation in the text of its template."""

    def answers(
        self, messages: list[Message], last_only: bool = False
    ) -> tuple[list[int], list[Span], int]:
        """Return tokens, spans of the answers, and the number of answers that case 3 found.

        With `last_only` only the last one is searched.
        """
        text = self.text(messages)
        if not self.forms.text:
            reason = "loses the text of its answers in the chat template"
            fix = "Use a chat template that takes content as text, not as a list of parts alone"
            raise conversation_error(messages, reason, fix)
        turns = [i for i, turn in enumerate(messages) if turn["role"] == "assistant"]
        turns = turns[-1:] if last_only else turns
        characters, rewritten = generation_blocks(self, messages, text, last_only=last_only), 0
        marked = characters is not None
        if marked and (len(turns) < MANY or any(map(has_thought, messages))):  # blocks do not tell
            rewritten = sum(not self.continues(messages, turn, text) for turn in turns)
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
        own_end = cache(lambda: self.own_end(messages))
        unanswered = [lacks_result(messages, turn) for turn in turns]
        if len(unanswered) != len(spans):  # blocks of the template
            unanswered = [False] * len(spans)
        spans = [
            self.include_end_token(ids, span, own_end, () if lacking else self.stop_tokens)
            for span, lacking in zip(spans, unanswered, strict=True)
        ]
        return *self.closed(messages, ids, spans, own_end), rewritten

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
            while begin and messages[begin]["role"] != "user":
                begin -= 1  # results of tools follow their calls
            behind = first + WINDOW + MARGIN  # the first answer behind the window
            end = turns[behind] if behind < len(turns) else len(messages)
            head = system if begin else []
            window, offset = [*head, *messages[begin:end]], begin - len(head)
            part = self.text(window)
            pairs = [self.prefixes(window, turn - offset) for turn in in_window]
            try:
                located = [
                    self.span_in_text(window, turn - offset, pair, part)
                    for turn, pair in zip(in_window, pairs, strict=True)
                ]
            except AnswerNotFound:
                if len(turns) > MOST:
                    raise
                return None, 0
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

    def continues(self, messages: list[Message], turn: int, text: str) -> bool:
        """Return whether the whole continues the text before an answer and that up to its end.

        Raises ClosedThought as `require_open_thought` does.
        """
        before, after = self.prefixes(messages, turn)
        if not text.startswith(before):
            self.require_open_thought(messages, turn, before, text)
        return text.startswith(before) and text.startswith(after)

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
        if not text.startswith(before):
            self.require_open_thought(messages, turn, before, text)
        sides = self.text_around(messages, turn)
        if sides and not (text.startswith(sides[0]) and text[len(sides[0]) :].endswith(sides[1])):
            sides = None
        start = len(before) if text.startswith(before) else sides and len(sides[0])
        if start is None:
            start = self.start_by_prompt(messages, turn, before, text)
        end = len(after) if text.startswith(after) else sides and len(text) - len(sides[1])
        if end is None and start is not None:
            end = self.end_by_stop(text, start)
        if start is None or end is None or start > end:
            reason = f"is rewritten by the chat template so that answer {turn} is not found"
            fix = "Use a template with {% generation %} marks, or data.supervise=each"
            error = conversation_error(messages, reason, fix, AnswerNotFound)
            error.turn = turn
            raise error
        return start, end

    def require_open_thought(
        self, messages: list[Message], turn: int, before: str, text: str
    ) -> None:
        """Raise ClosedThought if the text has a thought that the generation prompt has closed."""
        thought = thought_of(messages[turn])
        prompt = before.removeprefix(self.text_or_none(messages[:turn]) or "")
        if thought and thought in text and END_TAG in prompt:
            off = "target.thinking=false" if chat_template.thinking_is_off(self.tokenizer) else ""
            reason = f"has a thought in turn {turn}, and the generation prompt of "
            reason += f"{off or 'the chat template'} closes the thought before the answer"
            fix = "Set target.thinking=true, remove the thoughts from the text, or use data=self"
            raise conversation_error(messages, reason, fix, ClosedThought)

    def start_by_prompt(
        self, messages: list[Message], turn: int, before: str, text: str
    ) -> int | None:
        """Return the end of the generation prompt before an answer in the text, or None.

        The turns before are rendered with another answer: they may change once one follows.
        """
        other = [*messages[:turn], Message(role="assistant", content=MARK)]
        bare, head = self.text_or_none(messages[:turn]), self.text_or_none(other)
        if bare is None or head is None or not before.startswith(bare):
            return None
        prompt, head = before[len(bare) :], head.partition(MARK)[0]
        at = head.rfind(prompt) + len(prompt) if prompt and prompt in head else None
        return at if at is not None and text.startswith(head[:at]) else None

    def end_by_stop(self, text: str, start: int) -> int | None:
        """Return the end of the first stop token after the start of an answer, or None."""
        names = map(str, self.tokenizer.convert_ids_to_tokens(self.stop_tokens))
        found = re.compile("|".join(map(re.escape, names))).search(text, start)
        return found.end() if found and self.stop_tokens else None

    def own_end(self, messages: list[Message]) -> int | None:
        """Return the special token that closes the last answer when nothing follows, or None."""
        turns = [i for i, turn in enumerate(messages) if turn["role"] == "assistant"]
        sides = self.text_around(messages[: turns[-1] + 1], turns[-1]) if turns else None
        ids = self.ids(sides[1]) if sides else []
        index = self.next_token(ids, 0)
        return ids[index] if index is not None and ids[index] in self.special else None

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
        self, ids: list[int], span: Span, own_end: Callable[[], int | None], stops: Sequence[int]
    ) -> Span:
        """Return the span up to and with the token that ends the answer (head of this file).

        Args:
            stops: stop tokens that may open the next turn.
        """
        start, end = span
        inside = ids[start:end]
        if places := [inside.index(stop) for stop in self.stop_tokens if stop in inside]:
            return start, start + min(places) + 1
        while end > start and self.is_blank(ids[end - 1]):
            end -= 1
        if end == start or ids[end - 1] != own_end():
            index = self.next_token(ids, end)
            if index is not None and ids[index] in (*stops, own_end()):
                end = index + 1
        return start, end

    def closed(
        self, messages: list[Message], ids: list[int], spans: list[Span],
        own_end: Callable[[], int | None],
    ) -> tuple[list[int], list[Span]]:  # fmt: skip
        """Return tokens and spans with the stop token after the last answer.

        Only where the template leaves it to the next turn: a turn that follows is rendered.
        """
        if not spans or messages[-1]["role"] != "assistant":
            return ids, spans
        start, end = spans[-1]
        if end > start and ids[end - 1] in self.stop_tokens:
            return ids, spans
        if self.next_token(ids, end) is not None or own_end() is not None:
            return ids, spans
        stop = self.stop_of_next_turn("tool" if "tool_calls" in messages[-1] else "user")
        return (
            (ids, spans) if stop is None else ([*ids, stop], [*spans[:-1], (start, len(ids) + 1)])
        )

    def stop_of_next_turn(self, role: str) -> int | None:
        """Return the stop token that opens a turn of this role after an answer, or None."""
        turns = [Message(role="user", content="?"), Message(role="assistant", content="?")]
        if role == "tool":
            function = {"name": "f", "arguments": {"x": "y"}}
            turns[1]["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
        longer = self.text_or_none([*turns, Message(role=role, content=MARK)])
        text = self.text_or_none(turns)
        if text is None or longer is None or not longer.startswith(text):
            return None
        ids = self.ids(longer[len(text) :])
        return ids[0] if ids and ids[0] in self.stop_tokens else None
