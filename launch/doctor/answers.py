"""Checks of the answers in the chat template: tool calls, thoughts, refused rows, ends of turns.

Each says what share of the answers of the sampled conversations is concerned.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from outrider.conf.quantities import format_count
from outrider.data.conversations import RULES, Conversation, Message
from outrider.data.lost_turns import LOSSES
from outrider.data.rendered_text import ClosedThought, ConversationError, has_thought
from outrider.data.template_forms import template_forms
from outrider.data.tokenise import Document, render, with_rendered_part
from outrider.launch.doctor.finding import Finding, State
from outrider.models.target.chat_template import thinking_is_off
from outrider.models.target.load import LoadedTarget, stop_ids

Dialogue: TypeAlias = Sequence[Message]
ENDED = 0.9  # expected share of answers that end with a stop token
CLOSED = "contradiction"  # counted like the rules of LOSSES


@dataclass
class AnswerCounts:
    """Numbers of answers by what happens to them; `rendered` are the conversations that remain."""

    answers: int = 0
    cases: Counter[str] = field(default_factory=Counter)
    refused_rows: int = 0
    reason: str = ""  # of the first refusal
    ends: Counter[bool] = field(default_factory=Counter)  # the last token is a stop token
    rendered: list[Conversation] = field(default_factory=list)


def count_answers(loaded: LoadedTarget, dialogues: Sequence[Dialogue]) -> AnswerCounts:
    """Render each conversation as training does, and count its answers."""
    counts, tokenizer = AnswerCounts(), loaded.tokenizer
    stops = stop_ids(tokenizer, loaded.target)
    for dialogue in dialogues:
        total = _answers(dialogue)
        counts.answers += total
        attempt = partial(_render, tokenizer, stops)
        try:
            document, part, rules = with_rendered_part(tokenizer, dialogue, attempt)
        except ClosedThought:
            counts.cases[CLOSED] += sum(map(has_thought, dialogue))
        except ConversationError as error:
            counts.cases["refused"] += total
            counts.refused_rows += 1
            counts.reason = counts.reason or error.message.partition("\n")[0]
        else:
            if rules:
                counts.cases[rules[-1]] += total - _answers(part)
            if document is None:
                continue
            counts.rendered.append(part)
            counts.ends.update(_ends_with_stop(document, set(stops)))
            _count_losses(counts, tokenizer, part)
    return counts


def _render(tokenizer: Any, stops: Sequence[int], part: Conversation) -> Document:
    return render(tokenizer, part, max_length=2**31, stops=stops)


def _answers(dialogue: Dialogue) -> int:
    return sum(turn["role"] == "assistant" for turn in dialogue)


def _count_losses(counts: AnswerCounts, tokenizer: Any, part: Conversation) -> None:
    if not getattr(tokenizer, "chat_template", None):
        return
    forms = template_forms(tokenizer)
    if part.tools and not forms.tools:
        counts.cases["tools ignored"] += _answers(part)
    if forms.removes_thoughts:
        answers = [turn for turn in part if turn["role"] == "assistant"]
        counts.cases["thoughts removed"] += sum(map(has_thought, answers))


def _ends_with_stop(document: Document, stops: set[int]) -> list[bool]:
    """Return for each run of supervised tokens whether its last token is a stop token."""
    last = np.flatnonzero(document.answer & ~np.append(document.answer[1:], False))
    return [int(token) in stops for token in document.ids[last]]


def check_answers(
    loaded: LoadedTarget, counts: AnswerCounts, skip_bad: int, thinking: bool | None
) -> list[Finding]:
    """Return the findings `calls`, `thoughts`, `refused` and `ends`."""
    off = "target.thinking=false" if thinking_is_off(loaded.tokenizer) else "the chat template"
    closed = (
        f"they have a thought, and the generation prompt of {off} closes it: training ends there",
        "Set target.thinking=true" if thinking is False else "Remove the thoughts from the text",
    )
    rules = {rule: (RULES[rule], fix) for rule, fix in LOSSES.items()}
    rules[CLOSED] = (closed[0], f"{closed[1]}, or train on the target's own answers: data=self.")
    calls = _finding(counts, "calls", ("calls not rendered", "tools ignored"), rules)
    thoughts = ("thoughts not taken", "thoughts removed", CLOSED)
    return [
        calls, _finding(counts, "thoughts", thoughts, rules), _check_refused(counts, skip_bad),
        _check_ends(counts),
    ]  # fmt: skip


def _finding(
    counts: AnswerCounts, name: str, cases: Sequence[str], rules: dict[str, tuple[str, str]]
) -> Finding:
    found = {case: counts.cases[case] for case in cases if counts.cases[case]}
    facts = _facts(counts, sum(found.values()), {"cases": found})
    if not found:
        return Finding(name, "ok", f"no {name[:-1]} is lost in {counts.answers:,} answers", facts)
    lines = [f"{_share(counts, n)}, {case}: {rules[case][0]}" for case, n in found.items()]
    fix = " ".join(dict.fromkeys(rules[case][1] for case in found))
    return Finding(name, "wrong" if CLOSED in found else "note", "\n".join(lines), facts, fix)


def _check_refused(counts: AnswerCounts, skip_bad: int) -> Finding:
    refused, rows = counts.cases["refused"], counts.refused_rows
    facts = _facts(counts, refused, {"conversations": rows, "skip_bad": skip_bad})
    if not refused:
        message = f"the template refuses none of {counts.answers:,} answers"
        return Finding("refused", "ok", message, facts)
    where = format_count(rows, "conversation")
    message = f"{_share(counts, refused)} (in {where}): {counts.reason}"
    state: State = "wrong" if rows > skip_bad else "note"
    fix = f"Leave such rows out with data.skip_bad={rows} or more, or remove the turns in question."
    return Finding("refused", state, message, facts, fix)


def _check_ends(counts: AnswerCounts) -> Finding:
    total = counts.ends.total()
    open_ended = counts.ends[False]
    facts = {"answers": total, "concerned": open_ended, "share": open_ended / max(1, total)}
    message = f"{total - open_ended:,} of {total:,} rendered answers end with a stop token"
    if open_ended <= (1 - ENDED) * total:
        return Finding("ends", "ok", message, facts)
    fix = (
        "The drafter does not learn to stop there: compare eos_token_id of generation_config.json "
    )
    fix += "with the token that the template writes after an answer."
    return Finding("ends", "note", message, facts, fix)


def _facts(counts: AnswerCounts, concerned: int, more: dict[str, Any]) -> dict[str, Any]:
    share = concerned / max(1, counts.answers)
    return {"answers": counts.answers, "concerned": concerned, "share": share, **more}


def _share(counts: AnswerCounts, concerned: int) -> str:
    return f"{concerned / max(1, counts.answers):.0%} of {counts.answers:,} answers"
