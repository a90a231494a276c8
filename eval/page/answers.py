"""Answers on a page, every token in the colour of who proposed it.

Which answers: by tokens per round, from the one with the most to the one with the least, in equal
steps, so that neither the best nor the worst stand for all.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from outrider.eval.page.elements import Answer, Fold, Note, Part, Section
from outrider.eval.page.run_files import Run
from outrider.eval.token_origins import Speller, pieces

TITLE = "Answers: who proposed each token"
LEGEND = (
    ("first", "the prompt's forward"),
    ("accepted", "the drafter, accepted"),
    ("rejected", "the drafter, rejected (known for chains)"),
    ("correction", "the target, in place of a rejected guess"),
    ("bonus", "the target, behind accepted guesses"),
)


def answers_of(run: Run, speller: Speller | str, count: int) -> Section:
    """Some answers of every report.

    Args:
        speller: the target's tokenizer, or why there is none.
        count: of each report.
    """
    if isinstance(speller, str):
        return Section("answers", TITLE, [Note(f"No answers: {speller}.")])
    parts: list[Part] = []
    for out, report in run.reports.items():
        rows = [row for row in report.outputs if "origins" in row and "rejected" in row]
        if not rows:
            command = f"outrider eval run.dir={run.folder} eval.out={out}"
            parts.append(Note(f"{out} does not say who proposed its tokens.", command))
            continue
        shown = [_answer(row, speller) for row in _spread(rows, count)]
        parts += shown if not parts else [Fold(out, shown)]
    return Section("answers", TITLE, parts)


def _spread(rows: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    ranked = sorted(rows, key=lambda row: -_tau(row))
    last, wanted = len(ranked) - 1, min(count, len(ranked))
    return [ranked[round(i * last / max(1, wanted - 1))] for i in range(wanted)]


def _tau(row: dict[str, Any]) -> float:
    return (len(row["output_ids"]) - 1) / max(1, len(row["accepted"]))


def _answer(row: dict[str, Any], speller: Speller) -> Answer:
    parts = groupby(pieces(row, speller), key=lambda part: part[1])
    together = [("".join(text for text, _ in group), origin) for origin, group in parts]
    rounds = len(row["accepted"])
    name = f"{row['id']} ({row['category']}): {len(row['output_ids'])} tokens, {rounds} rounds, "
    return Answer(f"{name}tau {_tau(row):.2f}", row["prompt"], together)
