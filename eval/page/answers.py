"""Answers section of a report page: every token in the colour of its origin.

Answers are chosen by tokens per round, from the highest to the lowest in equal steps.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from outrider.eval.page.elements import AnnotatedAnswer, Collapsible, Figure, Note, Part
from outrider.eval.page.figures import curves, draw
from outrider.eval.page.run_files import RunFiles
from outrider.eval.token_origins import TextDecoder, origin_spans

LEGEND = (
    ("first", "the prompt's forward"),
    ("accepted", "the drafter, accepted"),
    ("rejected", "the drafter, rejected (recorded for chains)"),
    ("correction", "the target, in place of a rejected token"),
    ("bonus", "the target, after accepted tokens"),
)


def answer_parts(run: RunFiles, tokenizer: TextDecoder | str, count: int) -> Iterator[Part]:
    """Yield `count` answers of every report; a string as `tokenizer` is the reason for none."""
    if isinstance(tokenizer, str):
        yield Note(f"No answers: {tokenizer}.")
        return
    for i, (out, report) in enumerate(run.reports.items()):
        rows = [row for row in report.outputs if "origins" in row and "rejected" in row]
        if not rows:
            command = f"outrider eval run.dir={run.folder} eval.out={out}"
            yield Note(f"{out} has no origins of its tokens.", command)
            continue
        ranked = sorted(rows, key=lambda row: -_tau(row))
        last, number = len(ranked) - 1, min(count, len(ranked))
        chosen = [ranked[round(k * last / max(1, number - 1))] for k in range(number)]
        answers: list[Part] = [_answer(row, tokenizer) for row in chosen]
        answers += [choice_figure(row) for row in chosen[-1:] if "auto" in row]
        yield from answers if i == 0 else [Collapsible(out, answers)]


def choice_figure(row: dict[str, Any]) -> Figure:
    """Draw what decode=auto drafted along an answer, and why."""
    lines = {
        "drafted levels": row["drafted"],
        "accepted tokens": row["accepted"],
        "gain": row["auto"]["gains"],
    }
    points = {name: list(enumerate(values, start=1)) for name, values in lines.items()}
    definition = (
        "gain: expected tokens per second of the best draft over those of plain decoding; below 1 "
        "no draft pays, and rounds are plain but for probes."
    )
    paint = curves(points, "round", "levels, tokens, gain")
    return draw(f"choices of decode=auto: {row['id']}", definition, paint)


def _tau(row: dict[str, Any]) -> float:
    return (len(row["output_ids"]) - 1) / max(1, len(row["accepted"]))


def _answer(row: dict[str, Any], tokenizer: TextDecoder) -> AnnotatedAnswer:
    groups = groupby(origin_spans(row, tokenizer), key=lambda span: span[1])
    spans = [("".join(text for text, _ in group), origin) for origin, group in groups]
    counts = f"{len(row['output_ids'])} tokens, {len(row['accepted'])} rounds, tau {_tau(row):.2f}"
    return AnnotatedAnswer(f"{row['id']} ({row['category']}): {counts}", row["prompt"], spans)
