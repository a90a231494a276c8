"""Checks of the chat template: prefix stability, the thinking flag, today's date, the answers.

A drafter is trained on whole conversations and decodes after their first turns. Both have the same
tokens only if the first turns render to a prefix of the whole. Templates break that if they drop
earlier thoughts, put an empty thought in front of an answer that the generation prompt lacks, or
insert today's date. `data/answer_spans.py` still finds the answers, but supervised tokens then
follow other tokens than at decoding; these checks count how often.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

from outrider.conf.errors import RunError
from outrider.conf.quantities import format_count
from outrider.conf.schema import Config, TargetConfig
from outrider.conf.template_args import THINKING_ARG
from outrider.data.conversations import (
    Conversation,
    Message,
    RuleCounts,
    read_conversations,
)
from outrider.data.lost_turns import OWN_TEXT
from outrider.data.reporter import Reporter
from outrider.data.self_generated import conversation_source, load_prompts
from outrider.data.sources import data_source
from outrider.data.template_forms import template_forms
from outrider.data.tokenise import Document, conversation_key, render, render_prompt
from outrider.launch.doctor.answers import check_answers, count_answers
from outrider.launch.doctor.finding import Finding
from outrider.launch.doctor.tokenizer import check_chat_template
from outrider.models.target.load import LoadedTarget

Dialogue = Sequence[Message]
NEAR = 6  # tokens shown on either side of a difference
THOUGHT_TAGS = ("<think>", "<|begin_of_thought|>", "<thinking>")
CASES = {
    "turn": "an earlier turn renders differently once others follow",
    "prompt": "the generation prompt differs from the text before an answer of the whole",
    "tokens": "the text continues, but tokens merge across the boundary",
}
FIXES = {
    "turn": "Set data.supervise=each to train every answer after the turns as they are decoded.",
    "prompt": "Set target.thinking or target.template_args so that both are equal.",
    "tokens": "Use a tokenizer whose turns end in special tokens.",
}


class PrefixMismatch(NamedTuple):
    """A dialogue whose first turns do not render to a prefix of the whole."""

    case: str  # of CASES
    before: str  # text around the first difference, of the first turns and of the whole
    after: str


def check_template(
    config: Config, loaded: LoadedTarget, documents: Sequence[Document], count: int
) -> list[Finding]:
    """Run all checks of this file on the first `count` conversations of each source."""
    tokenizer, dialogues = loaded.tokenizer, _sample(config, loaded, documents, count)
    counts = count_answers(loaded, dialogues)
    prefix = check_prefix(tokenizer, counts.rendered, config.data.max_length)
    thinking = check_thinking(tokenizer, config.target, dialogues)
    answers = check_answers(loaded, counts, config.data.skip_bad, config.target.thinking)
    return [check_chat_template(tokenizer), prefix, thinking, check_date(tokenizer), *answers]


def _sample(
    config: Config, loaded: LoadedTarget, documents: Sequence[Document], count: int
) -> list[Dialogue]:
    """Return the first conversations of the data; with data=self those with generated answers."""
    data = config.data
    if data.name != "self":
        return list(islice(read_conversations(conversation_source(data), RuleCounts()), count))
    dialogues: list[Dialogue] = list(islice(_generated(config, loaded, documents), count))
    if data.given is not None:
        given = data_source(data.given, "data.given", skip_bad=data.skip_bad)
        dialogues += islice(read_conversations(given, RuleCounts()), count)
    return dialogues


def _generated(
    config: Config, loaded: LoadedTarget, documents: Sequence[Document]
) -> Iterator[Dialogue]:
    assert config.data.generate is not None, "data=self has it"
    prompts = load_prompts(config, loaded, config.data.generate.samples, Reporter.silent())
    known = {document.key: document for document in documents}
    for prompt in prompts:
        opening = prompt.first_messages()
        if (document := known.get(conversation_key(opening))) is not None:
            ids = document.ids[document.answer].tolist()
            answer = loaded.tokenizer.decode(ids, skip_special_tokens=True)
            yield [*opening, Message(role="assistant", content=answer)]


def _without_system(dialogue: Dialogue) -> Conversation:
    return Conversation(
        (turn for turn in dialogue if turn["role"] != "system"),
        dialogue.tools if isinstance(dialogue, Conversation) else None,
    )


def _find_mismatch(tokenizer: Any, dialogue: Dialogue) -> PrefixMismatch | None:
    """Return the first turns that do not render to a prefix of one turn more, or None.

    First turns before an answer include the generation prompt, as at decoding.
    """
    for turns in range(1, len(dialogue)):
        if not _without_system(dialogue[:turns]):
            continue  # templates may refuse a conversation of only a system turn
        answered = dialogue[turns]["role"] == "assistant"
        short, short_ids = render_prompt(tokenizer, dialogue[:turns], prompt=answered)
        long, ids = render_prompt(tokenizer, dialogue[: turns + 1], prompt=False)
        if ids[: len(short_ids)] == short_ids:
            continue
        case = "tokens" if long.startswith(short) else "prompt" if answered else "turn"
        if answered and case == "prompt":
            bare = render_prompt(tokenizer, dialogue[:turns], prompt=False)[1]
            case = "prompt" if ids[: len(bare)] == bare else "turn"
        pairs = enumerate(zip(short_ids, ids, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(short_ids), len(ids)))
        window = slice(max(0, at - NEAR), at + NEAR)
        before, after = (tokenizer.decode(part[window]) for part in (short_ids, ids))
        return PrefixMismatch(case, before, after)
    return None


def check_prefix(tokenizer: Any, dialogues: Sequence[Dialogue], max_length: int) -> Finding:
    """Check that first turns render to prefixes, and count the answers where they do not."""
    if not getattr(tokenizer, "chat_template", None):
        message = "plain text: each turn is a prefix of the whole"
        return Finding("prefix", "ok", message, {"dialogues": 0, "breaks": 0})
    more = [[*one, *_without_system(other)] for one, other in pairwise(dialogues)]
    more += [[*one[:-1], Message(role="assistant", content="")] for one in dialogues[:1]]
    try:
        parts = [_find_mismatch(tokenizer, dialogue) for dialogue in dialogues]
        rendered = [render(tokenizer, dialogue, max_length=max_length) for dialogue in dialogues]
    except RunError as error:
        facts: dict[str, Any] = {"dialogues": len(dialogues) + len(more)}
        return Finding("prefix", "wrong", error.message, facts, error.fix)
    for dialogue in more:
        with suppress(RunError):  # the template need not render dialogues that the data lacks
            parts.append(_find_mismatch(tokenizer, dialogue))
    mismatches = [part for part in parts if part is not None]
    cases = Counter(part.case for part in mismatches)
    facts = {"dialogues": len(parts), "breaks": len(mismatches), "cases": dict(cases)}
    if not mismatches:
        count = format_count(len(parts), "dialogue")
        message = f"{count}: first turns always render to a prefix of the whole"
        return Finding("prefix", "ok", message, facts)
    _, before, after = mismatches[0]
    searched = sum(document.rewritten for document in rendered)
    answers = len(_answers(dialogues))
    facts |= {"before": before, "after": after, "answers": answers,
              "answers_sought_in_text": searched}  # fmt: skip
    lines = [f"{count} of {len(parts)} dialogues: {CASES[case]}" for case, count in cases.items()]
    lines += [
        f"{before!r} becomes {after!r}",
        f"{searched} of {answers} answers follow other tokens than at decoding; they are "
        "supervised where the rendered text has them",
    ]
    removes = template_forms(tokenizer).removes_thoughts
    fixes = {**FIXES, "prompt": f"{OWN_TEXT}."} if removes else FIXES
    fix = " ".join(fixes[case] for case in cases)
    return Finding("prefix", "note", "\n".join(lines), facts, fix)


def _answers(dialogues: Sequence[Dialogue]) -> list[Message]:
    turns = chain.from_iterable(dialogues)
    return [turn for turn in turns if turn["role"] == "assistant"]


def _has_thought(answer: Message) -> bool:
    in_content = any(tag in answer["content"] for tag in THOUGHT_TAGS)
    return in_content or "reasoning_content" in answer


def check_thinking(tokenizer: Any, target: TargetConfig, dialogues: Sequence[Dialogue]) -> Finding:
    """Compare target.thinking with the thoughts in the answers."""
    answers = _answers(dialogues)
    thinking_answers = sum(map(_has_thought, answers))
    share = thinking_answers / max(1, len(answers))
    supported = THINKING_ARG in str(getattr(tokenizer, "chat_template", None))
    facts = {"template_asks": supported, "flag": target.thinking, "share_of_answers": share}
    flag = "not set" if target.thinking is None else str(target.thinking).lower()
    message = f"target.thinking is {flag}; {share:.0%} of {len(answers)} answers contain thoughts"
    if not supported:
        lacks = f"the template has no {THINKING_ARG}"
        if not thinking_answers:
            return Finding("thinking", "ok", lacks, facts)
        return Finding("thinking", "note", f"{message}; {lacks}", facts)
    fix = {
        None: f"The template's default of {THINKING_ARG} applies: set target.thinking.",
        True: "The drafter is trained without thoughts: use data=self, or target.thinking=false.",
        False: "The drafter is trained on thoughts, the target omits them: target.thinking=true.",
    }[target.thinking]
    fits = target.thinking is not None and (thinking_answers > 0) == target.thinking
    return Finding("thinking", "ok" if fits else "note", message, facts, fix)


def check_date(tokenizer: Any) -> Finding:
    """Check whether the template inserts today's date, which makes text differ from day to day."""
    template = str(getattr(tokenizer, "chat_template", None))
    changing = "strftime_now" in template and "{% set date_string" not in template
    facts = {"inserts_today": changing}
    if not changing:
        return Finding("date", "ok", "the template does not insert today's date", facts)
    fix = "Fix the date: target.template_args=['date_string=26 Jul 2024']."
    if "date_string" not in template:
        fix = "The template takes no date_string: use a copy of the target without the date."
    message = "the template inserts today's date: the text differs tomorrow, and is rendered again"
    return Finding("date", "note", message, facts, fix)
