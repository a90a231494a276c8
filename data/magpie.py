"""Prompts that the target writes itself: no data set is needed at all.

An instruct model that is given nothing but the opening of a user's turn goes on as a user would.
What it writes there is kept if it is a text that ended, says something and was not said before;
what is left out is counted by reason. The prompts do not depend on how many are asked for: the
first hundred of a thousand are the hundred.

Source: Xu et al. 2024, "Magpie", arXiv:2406.08464, section 2.1 (temperature 1, no nucleus).
Differs: no second model judges quality or difficulty; near duplicates are found by 5-grams of
words instead of embeddings.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice

from outrider.conf.errors import ConfigError, RunError
from outrider.data.answer_spans import MARK, Tokenizer
from outrider.data.contamination import Seen, grams, words
from outrider.data.conversations import Message, Prompt
from outrider.data.generate import SHARD, Answering, Question, write_answers
from outrider.data.tokenise import turn_edges
from outrider.data.traces import Store, Written

LONGEST = 256  # tokens of a prompt
TEMPERATURE = 1.0
FEWEST = 2  # words that say something
REPEATS = 0.5  # share of different 5-grams below which a text goes round in circles
MOST = 20  # texts written per prompt wanted before we give up


def bare(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The template's tokens before a user's words, and the tokens that may end these.

    Raises:
        ConfigError: the tokenizer has no chat template, or its user turns have no end.
    """
    edges = turn_edges(tokenizer, Message(role="user", content=MARK))
    if edges is None or not edges[0]:
        why = "The target has no chat template that opens a user's turn."
        fix = "Take an instruct model, or bring prompts: data.path=..."
        raise ConfigError("data.generate.self_prompted", True, why, fix)
    head, tail = edges
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return head, [token for token in tail if token in special][:1]


def write_prompts(
    store: Store,
    writer: Answering,
    tokenizer: Tokenizer,
    wanted: int,
    ends: Sequence[int],
) -> tuple[list[Prompt], Counter[str]]:
    """The first `wanted` usable prompts, and what was left out for which reason.

    Goes on where an earlier call was stopped, by the same steps from the first on.

    Raises:
        RunError: hardly any text is usable.
    """
    head, asked = bare(tokenizer)[0], 0
    while True:
        questions = [Question(i, f"own prompt {i}", head) for i in range(asked)]
        write_answers(writer, questions, store)
        answers = [answer for answer in store.answers() if answer.place < asked]
        kept, reasons = sift(tokenizer, answers, ends, wanted)
        if len(kept) == wanted:
            return kept, reasons
        if asked >= max(MOST * wanted, SHARD):
            raise RunError(
                f"Of {asked} texts that the target wrote as a user, {len(kept)} are prompts "
                f"({said(reasons)}).",
                "Take an instruct model, or bring prompts: data.path=...",
            )
        asked += max(SHARD, 2 * (wanted - len(kept)))


def sift(
    tokenizer: Tokenizer, answers: Iterable[Written], ends: Sequence[int], wanted: int
) -> tuple[list[Prompt], Counter[str]]:
    """The first `wanted` usable prompts in the order of their places; what others lacked."""
    seen, kept, reasons = Seen(), list[Prompt](), Counter[str]()
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    for answer in sorted(answers, key=lambda a: a.place):
        if len(kept) == wanted:
            break
        ids = answer.ids[answer.prompt :]
        text = str(tokenizer.decode(ids[:-1], skip_special_tokens=False)).strip()
        if ids[-1] not in ends:
            reasons["without end"] += 1
        elif special & set(ids[:-1]):
            reasons["with marks of the template"] += 1
        elif lacking := degenerate(text):
            reasons[lacking] += 1
        elif not seen.add(text):
            reasons["nearly as one before"] += 1
        else:
            kept.append(Prompt(f"own-{answer.place}", "own", [text]))
    return kept, reasons


def degenerate(text: str) -> str:
    """Why a text asks nothing; "" if it may."""
    if "\ufffd" in text or not all(c.isprintable() or c in "\n\t" for c in text):
        return "not text"
    said = words(text)
    if len(said) < FEWEST:
        return "too short"
    runs = len(said) - 4  # of five words
    return "in circles" if runs > 8 and len(grams(text)) < REPEATS * runs else ""


def said(reasons: Counter[str]) -> str:
    """Counts by reason, for people."""
    return ", ".join(f"{count} {reason}" for reason, count in islice(reasons.most_common(), 9))
