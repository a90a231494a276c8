"""The part of a report on `decode=auto`: what was drafted, and what the ledger says."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.models.decode.request import Output

LEDGER = {
    "real, plain, bound, slack, worst, eps, debt, step": float, "refused": int, "paused?": float,
}  # fmt: skip
MOST_SHAPES = 8  # that are named
ANSWER = {"choices": [str], "gains": [float], "ledger": LEDGER}  # of a line of the outputs
SUMMARY = {  # in `<out>.json`
    "choices": {str: int}, "real, plain, bound": float, "answers, kept": int, "worst_share": float,
    "paused?": float, "notes": [str],
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
        "notes": list(notes),
    }
    return {"auto": summary}


def choice_shares(choices: Sequence[str]) -> str:
    """Return how often each shape was drafted: `plain 20 %, chain 3 50 %, tree 8 30 %`."""
    return shares_of(Counter(choices))


def shares_of(counts: Mapping[str, int]) -> str:
    """Return the shares of counted shapes; those that are not named are no more than one of them.

    At most MOST_SHAPES are named.
    """
    total = sum(counts.values()) or 1
    ranked = sorted(counts.items(), key=lambda pair: -pair[1])
    named = 3
    most = min(MOST_SHAPES, len(ranked))
    while named < most and sum(n for _, n in ranked[named:]) > ranked[named - 1][1]:
        named += 1
    shown, others = ranked[:named], sum(n for _, n in ranked[named:])
    parts = [f"{name} {100 * count / total:.0f} %" for name, count in shown]
    return ", ".join(parts + [f"others {100 * others / total:.0f} %"] * (others > 0))


def auto_line(summary: Mapping[str, Any]) -> str:
    """Return one line for the console: the shapes, the ledger and its bound."""
    kept, answers = summary["kept"], summary["answers"]
    within = "all answers" if kept == answers else f"{kept} of {answers} answers"
    paused = summary.get("paused", 0.0)
    without = f"; pauses of the machine, {paused:.2f} s, are left out" if paused else ""
    return (
        f"auto: {shares_of(summary['choices'])}; ledger {summary['real']:.2f} s, bound "
        f"{summary['bound']:.2f} s (plain {summary['plain']:.2f} s), kept in {within}{without}"
    )
