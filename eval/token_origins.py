"""Answers as text annotated with the origin of each token, for experiment trackers and pages.

The rejected draft tokens of a chain are recorded; those of a tree are not, and only the token in
their place is shown.
"""

import html
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from outrider.eval.report import Report
from outrider.models.decode.request import ACCEPTED, BONUS, CORRECTION
from outrider.train.trackers import AnswerSample, ReportSummary

REJECTED = "rejected"
MAX_ANSWERS = 16  # answers of a report that are sent to a tracker
STYLES = {
    ACCEPTED: "color:green", CORRECTION: "color:crimson", BONUS: "color:steelblue",
    REJECTED: "color:gray;text-decoration:line-through",
}  # fmt: skip


@runtime_checkable
class TextDecoder(Protocol):
    """The part of a tokenizer that decodes."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


def origin_spans(row: dict[str, Any], tokenizer: TextDecoder) -> Iterator[tuple[str, str]]:
    """Yield text and origin of every token of an answer, a rejected token before its correction.

    A token that ends within a character has no text; the one that completes it has all of it.

    Args:
        row: a line of `<out>.outputs.jsonl`.
    """
    ids, emitted = row["output_ids"], ""
    rejected = (token for token in row["rejected"] if token is not None)
    for i, origin in enumerate(row["origins"]):
        if origin == CORRECTION and (token := next(rejected, None)) is not None:
            yield _text(tokenizer, [*ids[:i], token]).removeprefix(emitted), REJECTED
        text = _text(tokenizer, ids[: i + 1])
        yield text.removeprefix(emitted) if text.startswith(emitted) else "", origin
        emitted = text


def _text(tokenizer: TextDecoder, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False).rstrip("\N{REPLACEMENT CHARACTER}")


def bracketed_text(spans: list[tuple[str, str]]) -> str:
    """Return `The[ best time to]~ go~ visit`: [accepted] and ~rejected~ draft tokens."""
    frames = {ACCEPTED: ("[", "]"), REJECTED: ("~", "~")}
    out = ""
    for origin, group in groupby(spans, key=lambda span: span[1]):
        left, right = frames.get(origin, ("", ""))
        out += left + "".join(text for text, _ in group) + right
    return out


def coloured_html(spans: list[tuple[str, str]]) -> str:
    parts = (f'<span style="{STYLES.get(o, "")}">{html.escape(text)}</span>' for text, o in spans)
    return f'<div style="white-space:pre-wrap">{"".join(parts)}</div>'


def report_summary(report: Report, folder: Path, out: str, tokenizer: TextDecoder) -> ReportSummary:
    """Return what a tracker receives of a report in `folder`."""
    answers = []
    for row in report.outputs[:MAX_ANSWERS]:
        spans = list(origin_spans(row, tokenizer))
        rounds = len(row["accepted"])
        tau = (len(row["output_ids"]) - 1) / rounds if rounds else None
        counts = {kind: row["origins"].count(kind) for kind in (ACCEPTED, CORRECTION, BONUS)}
        texts = bracketed_text(spans), coloured_html(spans)
        about = row["id"], row["category"], row["prompt"]
        answers.append(AnswerSample(*about, tau, counts, *texts))
    files = [folder / f"{out}.{kind}" for kind in ("json", "outputs.jsonl", "png")]
    return ReportSummary(out, _headline(report), answers, files)


def _headline(report: Report) -> dict[str, float]:
    """Return the numbers that runs are compared by, without missing ones."""
    total = report.summary
    numbers: dict[str, float | None] = {
        "tau": total.tau, "alpha": total.alpha, "speedup": total.speedup,
        "ms_per_round": total.ms["round"], "tokens_per_second": total.tokens_per_second,
        "baseline_tokens_per_second": total.baseline_tokens_per_second,
        "forecast": report.forecast, "exact": report.exact,
    }  # fmt: skip
    numbers |= {f"accept@{k}": share for k, share in enumerate(total.accept_at, start=1)}
    return {name: float(value) for name, value in numbers.items() if value is not None}
