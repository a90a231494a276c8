"""Text and tokens that a chat template makes of the turns of a conversation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from jinja2 import TemplateError

from outrider.conf.errors import RunError
from outrider.data.conversations import Message
from outrider.data.template_forms import END_TAG, TAG, TemplateForms, template_forms
from outrider.models.target import chat_template

Tokenizer: TypeAlias = Any  # a transformers PreTrainedTokenizerBase; importing it costs seconds
SHOWN = 8  # turns of a conversation in a message, from either end
MARK = "\ufdd2"  # a noncharacter: Unicode keeps it out of text


class ConversationError(RunError):
    """A conversation that cannot be rendered, or whose answers are not found.

    `advice` is the fix without its full stop, to be continued; `turn` the answer in question.
    """

    turn = 0

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(message, f"{advice}.")
        self.advice = advice


class AnswerNotFound(ConversationError):
    """An answer that the template rewrites so that it is not found."""


class ClosedThought(ConversationError):
    """A thought after a generation prompt that closes it: target.thinking=false, for instance."""


def has_thought(turn: Message) -> bool:
    return "reasoning_content" in turn or END_TAG in turn["content"]


def thought_of(turn: Message) -> str:
    """Return the thought of an answer, beside its content or in tags in it; "" if it has none."""
    tagged, end, _ = turn["content"].partition(END_TAG)
    tagged = tagged.rpartition(TAG)[2] if end else ""
    return turn.get("reasoning_content", tagged).strip()


def conversation_error(
    messages: Sequence[Message], reason: str, fix: str,
    kind: type[ConversationError] = ConversationError,
) -> ConversationError:  # fmt: skip
    lines = [f"    {turn['role']}: {turn['content'][:400]}" for turn in messages]
    if (left_out := len(lines) - 2 * SHOWN) > 0:
        lines[SHOWN:-SHOWN] = [f"    ... {left_out} more turns ..."]
    text = "\n".join(lines)
    return kind(f"This conversation {reason}\n{text}", fix)


def skippable(error: ConversationError, origin: str, skipped: int) -> ConversationError:
    """Return the error of one of many conversations: where it is, and the option that skips it."""
    message = f"{origin}: {error.message}" if origin else error.message
    return type(error)(message, f"{error.advice}, or leave it out: data.skip_bad={skipped}")


@dataclass(frozen=True)
class RenderedText:
    """A tokenizer with a chat template, for one conversation.

    Attributes:
        on_turn: called with the number of turns that are done.
        tools: described to the target, in OpenAI's form.
        stops: tokens at which decoding ends; by default the end token of the tokenizer.
    """

    tokenizer: Tokenizer
    on_turn: Callable[[int], object] = lambda turns: None
    tools: list[dict[str, Any]] | None = None
    stops: Sequence[int] | None = None

    @cached_property
    def stop_tokens(self) -> list[int]:
        end = self.tokenizer.eos_token_id
        return list(self.stops) if self.stops else [] if end is None else [end]

    @property
    def forms(self) -> TemplateForms:
        return template_forms(self.tokenizer)

    @cached_property
    def special(self) -> set[int]:
        added = self.tokenizer.added_tokens_decoder
        named = {index for index, token in added.items() if token.special}
        return named | set(self.tokenizer.all_special_ids)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, messages: Sequence[Message], *, prompt: bool = False, **more: Any) -> str:
        turns = [self.forms.turn(turn) if len(turn) > 2 else turn for turn in messages]
        if self.tools:
            more["tools"] = self.tools
        try:
            return chat_template.render(self.tokenizer, turns, add_generation_prompt=prompt, **more)
        except TemplateError as error:
            reason = f"is refused by the chat template: {error}"
            fix = "Remove such conversations (or such turns), use another chat template"
        except Exception as error:  # a template is a program: whatever it does
            reason = f"makes the chat template fail: {type(error).__name__}: {str(error)[:400]}"
            fix = "Use another chat template, or correct the one of target.path"
        raise conversation_error(messages, reason, fix)

    def text_or_none(self, messages: Sequence[Message], *, prompt: bool = False) -> str | None:
        try:
            return self.text(messages, prompt=prompt)
        except ConversationError:
            return None

    def text_around(self, messages: list[Message], turn: int) -> tuple[str, str] | None:
        """Return the text before and after the content of a turn; None if it is not rendered."""
        mark = Message(role=messages[turn]["role"], content=MARK)
        text = self.text_or_none([*messages[:turn], mark, *messages[turn + 1 :]]) or ""
        head, mark_in_text, tail = text.partition(MARK)
        return (head, tail) if mark_in_text else None

    def next_token(self, ids: list[int], index: int) -> int | None:
        """Return the index of the next token that is no white space."""
        while index < len(ids) and self.is_blank(ids[index]):
            index += 1
        return index if index < len(ids) else None

    def is_blank(self, token: int) -> bool:
        return not str(self.tokenizer.decode([token])).strip()
