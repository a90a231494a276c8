"""Prompts that the target generates, so that no data set is needed.

Given only the tokens that open a user's turn, an instruct model continues as a user would. The text
is kept when it has ended, has words and is no near duplicate of an earlier one. Texts that are left
out are counted by reason. A larger number of prompts begins with those of a smaller number.

Source: Xu et al. 2024, "Magpie", arXiv:2406.08464, section 2.1 (temperature 1, no nucleus).
Differs: no second model rates quality or difficulty; near duplicates are found by 5-grams of
words instead of embeddings.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from outrider.conf.errors import ConfigError, RunError
from outrider.data.answer_spans import ChatTemplate
from outrider.data.contamination import NearDuplicateFilter, ngrams, split_words
from outrider.data.conversations import Message, Prompt
from outrider.data.generate import SHARD, AnswerBackend, PromptTokens, generate_missing
from outrider.data.generated_store import GeneratedAnswer, GeneratedStore
from outrider.data.rendered_text import MARK, Tokenizer

MAX_TOKENS = 256  # of a prompt
TEMPERATURE = 1.0
MIN_WORDS = 2
MIN_DISTINCT = 0.5  # share of distinct 5-grams below which a text counts as repetitive
MAX_ATTEMPTS = 20  # generated texts per requested prompt


def user_turn_prefix(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the template's tokens before a user's text, and the tokens that may end the text."""
    chat = ChatTemplate(tokenizer)
    turn = [Message(role="user", content=MARK)]
    sides = chat.text_around(turn, 0) if getattr(tokenizer, "chat_template", None) else None
    if sides is None or not sides[0]:
        why = "The target has no chat template that opens a user's turn."
        fix = "Use an instruct model, or give prompts: data.path=..."
        raise ConfigError("data.generate.self_prompted", True, why, fix)
    ends = [token for token in chat.ids(sides[1]) if token in chat.special]
    return chat.ids(sides[0]), ends[:1]


def generate_prompts(
    store: GeneratedStore, backend: AnswerBackend, tokenizer: Tokenizer, count: int,
    ends: Sequence[int],
) -> tuple[list[Prompt], Counter[str]]:  # fmt: skip
    """Return the first `count` usable prompts, and the number of texts left out by reason.

    A call that continues after a kill takes the same steps and uses the texts in the store. Raises
    RunError if too few of `MAX_ATTEMPTS` texts per prompt are usable.
    """
    head, total = user_turn_prefix(tokenizer)[0], 0
    while True:
        openings = [PromptTokens(i, f"own prompt {i}", head) for i in range(total)]
        generate_missing(backend, openings, store)
        answers = [answer for answer in store.answers() if answer.index < total]
        prompts, reasons = filter_prompts(tokenizer, answers, ends, count)
        if len(prompts) == count:
            return prompts, reasons
        if total >= max(MAX_ATTEMPTS * count, SHARD):
            why = (
                f"Of {total} texts that the target generated as a user, {len(prompts)} are prompts"
            )
            fix = "Use an instruct model, or give prompts: data.path=..."
            raise RunError(f"{why} ({format_reasons(reasons)}).", fix)
        total += max(SHARD, 2 * (count - len(prompts)))


def filter_prompts(
    tokenizer: Tokenizer, answers: Iterable[GeneratedAnswer], ends: Sequence[int], count: int
) -> tuple[list[Prompt], Counter[str]]:
    """Return the first `count` usable prompts by index, and what the others lacked."""
    distinct, prompts, reasons = NearDuplicateFilter(), list[Prompt](), Counter[str]()
    special = ChatTemplate(tokenizer).special
    for answer in sorted(answers, key=lambda a: a.index):
        if len(prompts) == count:
            break
        ids = answer.ids[answer.prompt_length :]
        text = str(tokenizer.decode(ids[:-1], skip_special_tokens=False)).strip()
        if ids[-1] not in ends:
            reasons["without end"] += 1
        elif special & set(ids[:-1]):
            reasons["with special tokens"] += 1
        elif reason := rejection_reason(text):
            reasons[reason] += 1
        elif not distinct.add(text):
            reasons["near duplicates"] += 1
        else:
            prompts.append(Prompt(f"own-{answer.index}", "own", [text]))
    return prompts, reasons


def rejection_reason(text: str) -> str:
    """Return why a text is no question; "" if it may be one."""
    if "\ufffd" in text or not all(c.isprintable() or c in "\n\t" for c in text):
        return "not text"
    words = split_words(text)
    if len(words) < MIN_WORDS:
        return "too short"
    runs = len(words) - 4  # of five words
    return "repetitive" if runs > 8 and len(ngrams(text)) < MIN_DISTINCT * runs else ""


def format_reasons(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(9))
