"""The part of a report on `decode=auto`: what was drafted, and what the ledger says."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.models.decode.request import Output

LEDGER = {
    "real, plain, bound, slack, worst, eps, debt, step": float, "refused": int, "paused?": float,
}  # fmt: skip
MOST_SHAPES = 4  # that are named: a line has 80 columns
ANSWER = {"choices": [str], "gains": [float], "ledger": LEDGER}  # of a line of the outputs
SUMMARY = {  # in `<out>.json`
    "choices": {str: int}, "real, plain, bound": float, "answers, kept": int, "worst_share": float,
    "paused?": float, "baseline?": (float, None), "notes": [str],
}  # fmt: skip


def answer_fields(out: Output) -> dict[str, Any]:
    """Return what the outputs keep of an answer; {} without decode=auto."""
    if out.ledger is None:
        return {}
    fields = {"choices": out.choices, "gains": out.gains, "ledger": out.ledger.fields()}
    return {"auto": fields}


def summarise_auto(rows: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> dict[str, Any]:
    """Return the summary over the answers of a report; {} without decode=auto.

    `worst_share` is the largest (T_real - c0) / T_plain - 1 of an answer, which eps bounds.
    """
    answers = [row["auto"] for row in rows if "auto" in row]
    if not answers:
        return {}
    ledgers = [answer["ledger"] for answer in answers]
    totals = {name: sum(one[name] for one in ledgers) for name in ("real", "plain", "bound")}
    shares = [(one["real"] - one["slack"]) / one["plain"] - 1 for one in ledgers if one["plain"]]
    summary = {
        "choices": dict(Counter(choice for answer in answers for choice in answer["choices"])),
        **totals,
        "answers": len(answers),
        "kept": sum(one["worst"] <= one["slack"] for one in ledgers),
        "worst_share": max(shares, default=0.0),
        "paused": sum(one.get("paused", 0.0) for one in ledgers),
        "baseline": _baseline_seconds(rows),
        "notes": list(notes),
    }
    return {"auto": summary}


def _baseline_seconds(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the seconds of plain decoding as the report has measured them; None: it has not."""
    measured = [row.get("baseline_seconds") for row in rows if "auto" in row]
    return sum(one["prefill"] + one["rounds"] for one in measured if one) if all(measured) else None


def choice_shares(choices: Sequence[str]) -> str:
    """Return how often each shape was drafted: `plain 20 %, chain 3 50 %, tree 8 30 %`."""
    return shares_of(Counter(choices))


def shares_of(counts: Mapping[str, int]) -> str:
    """Return the shares of the most frequent shapes, at most MOST_SHAPES of them."""
    total = sum(counts.values()) or 1
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    shown, others = ranked[:MOST_SHAPES], sum(n for _, n in ranked[MOST_SHAPES:])
    parts = [f"{name} {100 * count / total:.0f} %" for name, count in shown]
    return ", ".join(parts + [f"others {100 * others / total:.0f} %"] * (others > 0))


def auto_lines(summary: Mapping[str, Any]) -> str:
    """Return lines for the console: the shapes, the ledger and its bound."""
    measured = summary.get("baseline")
    also = "" if measured is None else f", measured {measured:.2f} s"
    paused = summary.get("paused", 0.0)
    without = f"\npauses of the machine, left out: {paused:.2f} s" if paused else ""
    return (
        f"rounds: {shares_of(summary['choices'])}\n"
        f"time {summary['real']:.2f} s; plain decoding, estimated {summary['plain']:.2f} s{also}\n"
        f"bound {summary['bound']:.2f} s, kept in {summary['kept']} of {summary['answers']} answers"
        f"{without}"
    )
