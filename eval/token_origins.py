"""An answer as text: who proposed each token, and which guess was turned down there.

For people who look at a run from afar (train/trackers.py). A chain's rejected guesses are known; a
tree's are not, and only the token in their place is shown.
"""

import html
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from outrider.eval.report import Report
from outrider.models.decode.request import ACCEPTED, BONUS, CORRECTION
from outrider.train.trackers import Answer, Told

REJECTED = "rejected"
MOST = 16  # answers of a report that are told
STYLES = {
    ACCEPTED: "color:green", CORRECTION: "color:crimson", BONUS: "color:steelblue",
    REJECTED: "color:gray;text-decoration:line-through",
}  # fmt: skip


@runtime_checkable
class Speller(Protocol):
    """The part of a tokenizer that makes text."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


def pieces(row: dict[str, Any], tokenizer: Speller) -> Iterator[tuple[str, str]]:
    """Text and origin of every token of an answer, a rejected guess before its correction.

    A token that ends within a character has no text of its own; the one that ends the character
    has all of it.

    Args:
        row: a line of `<out>.outputs.jsonl`.
    """
    ids, shown = row["output_ids"], ""
    rejected = (guess for guess in row["rejected"] if guess is not None)
    for i, origin in enumerate(row["origins"]):
        if origin == CORRECTION and (guess := next(rejected, None)) is not None:
            yield _text(tokenizer, [*ids[:i], guess]).removeprefix(shown), REJECTED
        text = _text(tokenizer, ids[: i + 1])
        yield text.removeprefix(shown) if text.startswith(shown) else "", origin
        shown = text


def _text(tokenizer: Speller, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False).rstrip("\N{REPLACEMENT CHARACTER}")


def marked(parts: list[tuple[str, str]]) -> str:
    """`The[ best time to]~ go~ visit`: what the drafter wrote, and where it was wrong."""
    frames = {ACCEPTED: ("[", "]"), REJECTED: ("~", "~")}
    out = ""
    for origin, group in groupby(parts, key=lambda part: part[1]):
        left, right = frames.get(origin, ("", ""))
        out += left + "".join(text for text, _ in group) + right
    return out


def coloured(parts: list[tuple[str, str]]) -> str:
    """The same in html."""
    spans = (f'<span style="{STYLES.get(o, "")}">{html.escape(text)}</span>' for text, o in parts)
    return f'<div style="white-space:pre-wrap">{"".join(spans)}</div>'


def told_of(report: Report, folder: Path, out: str, tokenizer: Speller) -> Told:
    """What a service is told of a report that lies in `folder`."""
    answers = []
    for row in report.outputs[:MOST]:
        parts = list(pieces(row, tokenizer))
        rounds = len(row["accepted"])
        tau = (len(row["output_ids"]) - 1) / rounds if rounds else None
        counts = {kind: row["origins"].count(kind) for kind in (ACCEPTED, CORRECTION, BONUS)}
        answers.append(
            Answer(row["id"], row["category"], row["prompt"], tau, counts, marked(parts),
                   coloured(parts))
        )  # fmt: skip
    files = [folder / f"{out}.{kind}" for kind in ("json", "outputs.jsonl", "png")]
    return Told(out, _headline(report), answers, files)


def _headline(report: Report) -> dict[str, float]:
    """The numbers that runs are compared by; those that there are."""
    total = report.summary
    numbers: dict[str, float | None] = {
        "tau": total.tau, "alpha": total.alpha, "speedup": total.speedup,
        "ms_per_round": total.ms["round"], "tokens_per_second": total.tokens_per_second,
        "baseline_tokens_per_second": total.baseline_tokens_per_second,
        "forecast": report.forecast, "exact": report.exact,
    }  # fmt: skip
    numbers |= {f"accept@{k}": share for k, share in enumerate(total.accept_at, start=1)}
    return {name: float(value) for name, value in numbers.items() if value is not None}
