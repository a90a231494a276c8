r"""Where the answers are in what a chat template renders, in tokens.

The template says itself what an answer is:

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
turn, for a drafter must learn to stop. What the template puts after that is not part of it. The
text is cut where an answer starts if a token would straddle the place (an answer that begins with
a newline, behind ChatML's own), for at decoding the prompt ends there. In ChatML:

    <|im_start|> user \n 2+2? <|im_end|> \n <|im_start|> assistant \n 4 <|im_end|> \n
         .        .   .    .       .      .       .          .      .  x     x       .
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

from jinja2 import TemplateError

from outrider.conf.errors import RunError
from outrider.data.conversations import Message

Tokenizer: TypeAlias = Any  # a transformers PreTrainedTokenizerBase; importing it costs seconds
Span: TypeAlias = tuple[int, int]  # first index inside, first index behind
OPEN, CLOSE, MARK = "\ufdd0", "\ufdd1", "\ufdd2"  # noncharacters: Unicode keeps them out of text


@dataclass(frozen=True)
class Template:
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
            raise refused(messages, f"is refused by the chat template: {error}", fix) from None

    def answers(self, messages: list[Message]) -> tuple[list[int], list[Span], int]:
        """Token ids of the whole conversation, the spans of its answers, and how many of them had
        to be sought in the text.
        """
        text = self.text(messages)
        places = [place for place, turn in enumerate(messages) if turn["role"] == "assistant"]
        letters, rewritten = self.marked(messages, text), 0
        if letters is None:
            ids = self.ids(text)
            found = [self.by_tokens(messages, place, text, ids) for place in places]
            spans = [span for span in found if span is not None]
            rewritten = len(places) - len(spans)
            if rewritten:
                letters = [self.by_text(messages, place, text) for place in places]
        if letters is not None:
            ids, spans = self.to_tokens(text, letters)
        return ids, [self.to_end(messages, ids, span) for span in spans], rewritten

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

    def by_text(self, messages: list[Message], place: int, text: str) -> Span:
        """The characters of answer `place`: by prefixes, or by where a mark comes out instead."""
        before = self.text(messages[:place], prompt=True)
        after = self.text(messages[: place + 1])
        sides = self.around(messages, place)
        if sides and not (text.startswith(sides[0]) and text[len(sides[0]) :].endswith(sides[1])):
            sides = None
        start = len(before) if text.startswith(before) else sides and len(sides[0])
        end = len(after) if text.startswith(after) else sides and len(text) - len(sides[1])
        if end and not text.startswith(after):
            end += self.closing(messages, text[end:])
        if start is None or end is None or start > end:
            reason = f"is rewritten by the chat template so that answer {place} is not found"
            fix = "Use a template with {% generation %} marks, or drop the earlier turns."
            raise refused(messages, reason, fix)
        return start, end

    def around(self, messages: list[Message], place: int) -> tuple[str, str] | None:
        """The rendered text before and behind the content of turn `place`; None if not shown."""
        mark = Message(role=messages[place]["role"], content=MARK)
        text = self.text([*messages[:place], mark, *messages[place + 1 :]])
        head, found, tail = text.partition(MARK)
        return (head, tail) if found else None

    def closing(self, messages: list[Message], text: str) -> int:
        """How many characters behind the content of an answer belong to its end."""
        ends = "|".join(map(re.escape, self.tokenizer.convert_ids_to_tokens(list(self.special))))
        found = re.match(rf"\s*({ends})", text)
        return found.end() if found and self.closes(messages) else 0

    def closes(self, messages: list[Message]) -> bool:
        """Whether the template ends an answer with a special token, as ChatML and Llama-3 do."""
        answers = [place for place, turn in enumerate(messages) if turn["role"] == "assistant"]
        sides = self.around(messages[: answers[-1] + 1], answers[-1]) if answers else None
        return sides is not None and self.after_blanks(self.ids(sides[1]), 0) is not None

    def to_tokens(self, text: str, spans: list[Span]) -> tuple[list[int], list[Span]]:
        """Token ids of the text, and for each span of characters the tokens wholly inside."""
        ids, bounds = self.coded(text, [])
        cuts = [first for first, _ in spans if any(start < first < end for start, end in bounds)]
        if cuts:
            ids, bounds = self.coded(text, cuts)
        found = list[Span]()
        for first, last in spans:
            begin = next((j for j, (start, _) in enumerate(bounds) if start >= first), len(ids))
            end = begin
            while end < len(ids) and bounds[end][1] <= last:
                end += 1
            found.append((begin, end))
        return ids, found

    def coded(self, text: str, cuts: list[int]) -> tuple[list[int], list[Span]]:
        """Token ids, none of them across a cut, and the characters of each token."""
        ids, bounds, before = list[int](), list[Span](), 0
        for left, right in pairwise([0, *cuts, len(text)]):
            for token, start, end in self.offsets(text[left:right]):
                own = start if start < end else before - left  # a trimmed blank says (5, 5)
                ids.append(token)
                bounds.append((left + own, left + end))
                before = max(before, left + end)
        return ids, bounds

    def offsets(self, text: str) -> list[tuple[int, int, int]]:
        """(token, first character inside, first character behind) of each token."""
        try:
            coded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        except NotImplementedError:
            message = "This tokenizer gives no character offsets, which its chat template needs"
            raise RunError(message, "Use the model's fast tokenizer (tokenizer.json).") from None
        spans = coded["offset_mapping"]
        return [(i, *span) for i, span in zip(coded["input_ids"], spans, strict=True)]

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


def plain(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[list[int], list[Span]]:
    """Ids and answer spans without a template; the end token closes an answer in last place."""
    pieces = in_pieces(tokenizer, messages)
    end_token = tokenizer.eos_token_id
    if messages and messages[-1]["role"] == "assistant":
        pieces[-1] = ([] if end_token is None else [end_token], True)
    ids, spans = list[int](), list[Span]()
    for piece, is_answer in pieces:
        if is_answer:
            spans.append((len(ids), len(ids) + len(piece)))
        ids += piece
    return ids, spans


def in_pieces(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[tuple[list[int], bool]]:
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


def refused(messages: Sequence[Message], reason: str, fix: str) -> RunError:
    shown = "\n".join(f"    {turn['role']}: {turn['content'][:400]}" for turn in messages)
    return RunError(f"This conversation {reason}\n{shown}", fix)
