"""The chat template: does it say tomorrow, and of longer dialogues, what it says now?

A drafter is trained on whole conversations and decodes behind their beginnings. Both are the same
text only if every beginning renders to a prefix of the whole, in tokens. Templates break that when
they drop earlier thoughts, put an empty thought in front of an answer that the generation prompt
lacks, or insert today's date. `data/answer_spans.py` finds the answers all the same; what is supervised
then stands behind other tokens than at decoding, and how often is said here.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from typing import Any, NamedTuple

from outrider.conf.errors import RunError
from outrider.data.conversations import Message, Summary, conversations
from outrider.data.self_generated import CONVERSATIONS, questions_for, source_of
from outrider.data.sources import data_source
from outrider.data.tokenise import Document, key_of, render, told
from outrider.launch.doctor.finding import Finding
from outrider.models.chat_template import THINKING
from outrider.models.load import Loaded
from outrider.train.settings import Config, TargetConfig

Talk = Sequence[Message]
NEAR = 6  # tokens shown on either side of a difference
THOUGHT = ("<think>", "<|begin_of_thought|>", "<thinking>")
CASES = {
    "turn": "an earlier turn is shown otherwise once others follow",
    "prompt": "the generation prompt is not what an answer stands behind later",
    "tokens": "the text goes on as it began, but its tokens join across the border",
}
FIXES = {
    "turn": "data.supervise=each teaches every answer behind the turns as they are decoded.",
    "prompt": "Set target.thinking or target.template_args so that both are alike.",
    "tokens": "A tokenizer whose turns end in special tokens does not join them.",
}


class Break(NamedTuple):
    """A dialogue whose beginning is not the beginning of the whole."""

    case: str  # of CASES
    turns: int  # how long the beginning is
    before: str  # the place where they part, as it was and as it became
    after: str


def sample(config: Config, loaded: Loaded, documents: Sequence[Document], count: int) -> list[Talk]:
    """The first conversations of the data, as turns; with data=self what the target answered."""
    talks: list[Talk] = []
    if config.data.name == "self":
        talks += islice(_own(config, loaded, documents), count)
        if config.data.given is not None:
            given = data_source(config.data.given, "data.given", skip_bad=config.data.skip_bad)
            talks += islice(conversations(given, Summary()), count)
    else:
        source = source_of(config.data, str(CONVERSATIONS))
        talks += islice(conversations(source, Summary()), count)
    return talks


def _own(config: Config, loaded: Loaded, documents: Sequence[Document]) -> Iterator[Talk]:
    from rich.console import Console

    assert config.data.generate is not None, "data=self has it"
    limit = config.data.generate.samples
    asked = questions_for(config, loaded, limit, Console(quiet=True), rank=0)
    known = {document.key: document for document in documents}
    for prompt in asked:
        opening = prompt.opening()
        if (found := known.get(key_of(opening))) is not None:
            ids = [i for i, is_answer in zip(found.ids, found.answer, strict=True) if is_answer]
            said = loaded.tokenizer.decode(ids, skip_special_tokens=True)
            yield [*opening, Message(role="assistant", content=said)]


def longer(talks: Sequence[Talk]) -> list[Talk]:
    """What chatting may come to: neighbours as one dialogue, and one whose last answer is empty."""
    joined = [[*one, *_asked(other)] for one, other in pairwise(talks)]
    empty = [[*talk[:-1], Message(role="assistant", content="")] for talk in talks[:1]]
    return [*joined, *empty]


def _asked(talk: Talk) -> list[Message]:
    return [turn for turn in talk if turn["role"] != "system"]


def breaks(tokenizer: Any, talk: Talk) -> Break | None:
    """The first place where a beginning of this dialogue is no beginning of the next longer one.

    Beginnings that end before an answer carry the generation prompt, as they do at decoding.
    """
    for turns in range(1, len(talk)):
        if not _asked(talk[:turns]):
            continue  # templates may refuse a system turn alone
        answered = talk[turns]["role"] == "assistant"
        short, begun = told(tokenizer, talk[:turns], prompt=answered)
        long, whole = told(tokenizer, talk[: turns + 1], prompt=False)
        if whole[: len(begun)] == begun:
            continue
        case = "tokens" if long.startswith(short) else "prompt" if answered else "turn"
        if answered and case == "prompt":
            bare = told(tokenizer, talk[:turns], prompt=False)[1]
            case = "prompt" if whole[: len(bare)] == bare else "turn"
        return Break(case, turns, *_apart(tokenizer, begun, whole))
    return None


def _apart(tokenizer: Any, begun: list[int], whole: list[int]) -> tuple[str, str]:
    pairs = zip(begun, whole, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(begun), len(whole)))
    window = slice(max(0, at - NEAR), at + NEAR)
    return tokenizer.decode(begun[window]), tokenizer.decode(whole[window])


def prefix(tokenizer: Any, talks: Sequence[Talk], max_length: int) -> Finding:
    """Whether beginnings are prefixes, and what the answer mask makes of it where not."""
    if not getattr(tokenizer, "chat_template", None):
        said = "there is none: turns are joined as plain text, each in tokens of its own"
        return Finding("prefix", "ok", said, {"dialogues": 0, "breaks": 0})
    tried = [*talks, *longer(talks)]
    try:
        parts = [breaks(tokenizer, talk) for talk in talks]
        shown = [render(tokenizer, talk, max_length=max_length) for talk in talks]
    except RunError as error:
        return Finding("prefix", "wrong", error.message, {"dialogues": len(tried)}, error.fix)
    for talk in tried[len(talks) :]:
        with suppress(RunError):  # nobody has said that, and the template need not render it
            parts.append(breaks(tokenizer, talk))
    found = [part for part in parts if part is not None]
    cases = Counter(part.case for part in found)
    facts = {"dialogues": len(parts), "breaks": len(found), "cases": dict(cases)}
    if not found:
        said = f"{len(parts)} dialogues: every beginning is a prefix of the whole, in tokens"
        return Finding("prefix", "ok", said, facts)
    facts |= {"before": found[0].before, "after": found[0].after}
    sought, answers = sum(doc.rewritten for doc in shown), sum(map(_answers, talks))
    facts |= {"answers": answers, "answers_sought_in_text": sought}
    lines = [f"{count} of {len(parts)} dialogues: {CASES[case]}" for case, count in cases.items()]
    lines.append(f"{found[0].before!r} becomes {found[0].after!r}")
    lines.append(
        f"of the text's own {answers} answers {sought} do not stand behind what is decoded behind; "
        "they are found in the text and supervised as the whole shows them"
    )
    fix = " ".join(FIXES[case] for case in cases)
    return Finding("prefix", "note", "\n".join(lines), facts, fix)


def _answers(talk: Talk) -> int:
    return sum(turn["role"] == "assistant" for turn in talk)


def thinking(tokenizer: Any, target: TargetConfig, talks: Sequence[Talk]) -> Finding:
    """The thinking flag against what stands in the answers."""
    answers = [t["content"] for talk in talks for t in talk if t["role"] == "assistant"]
    thought = sum(any(mark in answer for mark in THOUGHT) for answer in answers)
    share = thought / max(1, len(answers))
    known = THINKING in str(getattr(tokenizer, "chat_template", None))
    facts = {"template_asks": known, "flag": target.thinking, "share_of_answers": share}
    flag = "not set" if target.thinking is None else str(target.thinking).lower()
    said = f"target.thinking is {flag}; {share:.0%} of {len(answers)} answers hold thoughts"
    if not known:
        if not thought:
            return Finding("thinking", "ok", f"the template has no {THINKING}", facts)
        return Finding("thinking", "note", f"{said}; the template has no {THINKING}", facts)
    fix = {
        None: f"The template decides about {THINKING} as it likes: set target.thinking.",
        True: "The drafter will not have seen thoughts: use data=self, or target.thinking=false.",
        False: "The drafter learns thoughts that the target will not have: target.thinking=true.",
    }[target.thinking]
    fits = target.thinking is not None and (thought > 0) == target.thinking
    return Finding("thinking", "ok" if fits else "note", said, facts, fix)


def date(tokenizer: Any) -> Finding:
    """Whether the template inserts today's date, so that a run of tomorrow learns other text."""
    template = str(getattr(tokenizer, "chat_template", None))
    fixed = "{% set date_string" in template
    changing = "strftime_now" in template and not fixed
    facts = {"inserts_today": changing}
    if not changing:
        return Finding("date", "ok", "the template says the same on every day", facts)
    fix = "Fix it: target.template_args=['date_string=26 Jul 2024']."
    if "date_string" not in template:
        fix = "It asks for no date_string: use a copy of the target whose template has none."
    said = "the template inserts today's date: text of tomorrow is other text, and rendered anew"
    return Finding("date", "note", said, facts, fix)
