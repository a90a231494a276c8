"""A run folder, read: what it holds, each file checked; what it lacks is None or empty.

Which tokens a round brought behind how much text is in the outputs of a report, prompt by prompt.
Intervals come from there by the bootstrap that the report's own intervals come from, with its seed.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from outrider.conf.errors import Damaged
from outrider.conf.files import read_json, read_lines
from outrider.eval.calibration import FILE as CALIBRATION
from outrider.eval.calibration import read_calibration
from outrider.eval.metrics import bootstrap
from outrider.eval.plan.surface import FORMAT as PLAN
from outrider.eval.report import AGAIN, Report, load

RESTORE = "Restore it from a copy, or train again."
SAME = 1e-9  # two ways to divide the same counts


class Run(NamedTuple):
    """What a run folder holds."""

    folder: Path
    config: str
    log: list[dict[str, Any]]
    training: dict[str, Any] | None
    manifest: dict[str, Any] | None
    reports: dict[str, Report]
    plans: dict[str, dict[str, Any]]
    calibration: dict[str, Any] | None


def read_run(folder: Path) -> Run:
    """
    Raises:
        Damaged: a file that is there cannot be read, or is not what its name says.
    """
    log = folder / "metrics.jsonl"
    return Run(
        folder,
        (folder / "config.yaml").read_text(errors="replace"),
        read_lines(log, RESTORE, torn=True) if log.is_file() else [],
        _object(folder / "training.json"),
        _object(folder / "manifest.json"),
        {f.stem: _report(f) for f in sorted((folder / "eval").glob("*.json"))},
        {f.stem: _plan(f) for f in sorted((folder / "plan").glob("*.json"))},
        read_calibration(folder / CALIBRATION),
    )


def _object(file: Path) -> dict[str, Any] | None:
    return read_json(file, RESTORE) if file.is_file() else None


def _report(file: Path) -> Report:
    """With outputs that are its own: their rounds add up to its rates."""
    found = load(file.parent, file.stem)
    if rounds := rounds_of(found):
        for k, rate in enumerate(found.summary.accept_at, start=1):
            if abs((share(rounds, accepted_first(k)) or 0) - rate) > SAME:
                message = f"{file} and {file.stem}.outputs.jsonl are not of one measurement."
                raise Damaged(message, AGAIN)
    return found


def _plan(file: Path) -> dict[str, Any]:
    again = f"Give the command again: outrider plan run.dir={file.parents[1]}"
    content = read_json(file, again)
    if content.get("format") != PLAN:
        raise Damaged(f"{file} is not a plan of this format ({PLAN}).", again)
    return content


class Rounds(NamedTuple):
    """The rounds of one answer.

    Attributes:
        accepted: drafted tokens that each emitted.
        emitted: tokens of each; the last may end without a bonus.
        behind: tokens in front of each, those of the prompt in.
    """

    dialogue: str
    category: str
    accepted: list[int]
    emitted: list[int]
    behind: list[int]


def rounds_of(report: Report) -> list[Rounds]:
    """Of every answer. `talk/2` is the second turn of the dialogue `talk`."""
    found, dialogues = list[Rounds](), set[str]()
    for row in report.outputs:
        first, _, turn = row["id"].rpartition("/")
        dialogue = first if turn.isdigit() and first in dialogues else row["id"]
        dialogues.add(dialogue)
        emitted, behind, left = list[int](), list[int](), len(row["output_ids"]) - 1
        for accepted in row["accepted"]:
            behind.append(len(row["prompt_ids"]) + len(row["output_ids"]) - left)
            emitted.append(min(accepted + 1, left))
            left -= emitted[-1]
        found.append(Rounds(dialogue, row["category"], row["accepted"], emitted, behind))
    return found


Terms = Callable[[Rounds], tuple[int, int]]


def accepted_first(k: int, given: int = 0) -> Terms:
    """Rounds that accepted k drafts or more, of those that accepted `given` or more."""
    return lambda one: (sum(a >= k for a in one.accepted), sum(a >= given for a in one.accepted))


def emitted_behind(low: int, high: int) -> Terms:
    """Tokens and rounds behind low..high-1 tokens."""

    def terms(one: Rounds) -> tuple[int, int]:
        here = [e for e, at in zip(one.emitted, one.behind, strict=True) if low <= at < high]
        return sum(here), len(here)

    return terms


def share(found: Sequence[Rounds], terms: Terms) -> float | None:
    """A ratio of sums over answers."""
    above, below = (sum(part) for part in zip(*map(terms, found), strict=True))
    return above / below if below else None


def interval(report: Report, found: Sequence[Rounds], terms: Terms) -> tuple[float, float] | None:
    """95 %, dialogues drawn with replacement."""
    return bootstrap(found, terms, report.setting["seed"])
