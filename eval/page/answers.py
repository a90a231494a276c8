"""Answers section of a report page: every token in the colour of its origin.

Answers are chosen by tokens per round, from the highest to the lowest in equal steps, so that
neither the best nor the worst stand for all.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from outrider.eval.page.elements import AnnotatedAnswer, Collapsible, Note, Part, Section
from outrider.eval.page.run_files import RunFiles
from outrider.eval.token_origins import TextDecoder, origin_spans

TITLE = "Answers: origin of each token"
LEGEND = (
    ("first", "the prompt's forward"),
    ("accepted", "the drafter, accepted"),
    ("rejected", "the drafter, rejected (recorded for chains)"),
    ("correction", "the target, in place of a rejected token"),
    ("bonus", "the target, after accepted tokens"),
)


def answers_section(run: RunFiles, tokenizer: TextDecoder | str, count: int) -> Section:
    """Return `count` answers of every report.

    Args:
        tokenizer: the target's, or why there is none.
        count: of each report.
    """
    if isinstance(tokenizer, str):
        return Section("answers", TITLE, [Note(f"No answers: {tokenizer}.")])
    parts: list[Part] = []
    for out, report in run.reports.items():
        rows = [row for row in report.outputs if "origins" in row and "rejected" in row]
        if not rows:
            command = f"outrider eval run.dir={run.folder} eval.out={out}"
            parts.append(Note(f"{out} has no origins of its tokens.", command))
            continue
        answers = [_answer(row, tokenizer) for row in _evenly_ranked(rows, count)]
        parts += answers if not parts else [Collapsible(out, answers)]
    return Section("answers", TITLE, parts)


def _evenly_ranked(rows: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    ranked = sorted(rows, key=lambda row: -_tau(row))
    last, number = len(ranked) - 1, min(count, len(ranked))
    return [ranked[round(i * last / max(1, number - 1))] for i in range(number)]


def _tau(row: dict[str, Any]) -> float:
    return (len(row["output_ids"]) - 1) / max(1, len(row["accepted"]))


def _answer(row: dict[str, Any], tokenizer: TextDecoder) -> AnnotatedAnswer:
    groups = groupby(origin_spans(row, tokenizer), key=lambda span: span[1])
    spans = [("".join(text for text, _ in group), origin) for origin, group in groups]
    rounds = len(row["accepted"])
    name = f"{row['id']} ({row['category']}): {len(row['output_ids'])} tokens, {rounds} rounds, "
    return AnnotatedAnswer(f"{name}tau {_tau(row):.2f}", row["prompt"], spans)
