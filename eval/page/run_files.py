"""Contents of a run folder for a report page; missing files are None or empty.

Intervals are computed from outputs by the bootstrap and the seed of the report's own intervals.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from outrider.conf.errors import CorruptFile
from outrider.eval.calibration_file import read_calibration
from outrider.eval.metrics import bootstrap, count_accepted, pair_with_room
from outrider.eval.plan.show import read_plan
from outrider.eval.report import MEASURE_AGAIN, Report, load
from outrider.train.manifest import read_manifest, read_training
from outrider.train.metrics_log import read_log
from outrider.train.settings import read_saved_config

TOLERANCE = 1e-9  # of two ways to divide the same counts


class RunFiles(NamedTuple):
    """The contents of a run folder."""

    folder: Path
    drafter: str  # its name
    config: str
    log: list[dict[str, Any]]
    training: dict[str, Any] | None
    manifest: dict[str, Any] | None
    reports: dict[str, Report]
    plans: dict[str, dict[str, Any]]
    calibration: dict[str, Any] | None


def read_run_files(folder: Path) -> RunFiles:
    """Read a run folder; a CorruptFile is raised for a damaged file or another format."""
    config = read_saved_config(folder)
    return RunFiles(
        folder,
        str(config.drafter.name),
        OmegaConf.to_yaml(config),
        read_log(folder),
        read_training(folder),
        read_manifest(folder),
        {f.stem: _read_report(f) for f in sorted((folder / "eval").glob("*.json"))},
        {f.stem: read_plan(f) for f in sorted((folder / "plan").glob("*.json"))},
        read_calibration(folder),
    )


def _read_report(file: Path) -> Report:
    """Read a report and check that its rates are those of its outputs."""
    report = load(file.parent, file.stem)
    if rounds := answer_rounds(report):
        for k, rate in enumerate(report.summary.accept_at, start=1):
            again = ratio_of_sums(rounds, accepted_at_least(k))
            if abs((again or 0) - (rate or 0)) > TOLERANCE:
                message = f"{file} and {file.stem}.outputs.jsonl are not of one measurement."
                raise CorruptFile(message, MEASURE_AGAIN)
    return report


class AnswerRounds(NamedTuple):
    """The rounds of one answer."""

    dialogue: str
    category: str
    drafts: list[tuple[int, float]]  # accepted draft tokens of each round, and its room for them
    emitted: list[int]  # tokens of each; the last round may end without a bonus
    prefix_lengths: list[int]  # tokens before each, prompt included


def answer_rounds(report: Report) -> list[AnswerRounds]:
    """Return the rounds of every answer; `talk/2` is the second turn of the dialogue `talk`."""
    answers, dialogues = list[AnswerRounds](), set[str]()
    for row in report.outputs:
        first, _, turn = row["id"].rpartition("/")
        dialogue = first if turn.isdigit() and first in dialogues else row["id"]
        dialogue = row.get("dialogue", dialogue)  # not in older files
        dialogues.add(dialogue)
        emitted, prefixes, left = list[int](), list[int](), len(row["output_ids"]) - 1
        for accepted in row["accepted"]:
            prefixes.append(len(row["prompt_ids"]) + len(row["output_ids"]) - left)
            emitted.append(min(accepted + 1, left))
            left -= emitted[-1]
        drafts = pair_with_room(row["accepted"], row.get("room", ()))
        answers.append(AnswerRounds(dialogue, row["category"], drafts, emitted, prefixes))
    return answers


Terms = Callable[[AnswerRounds], tuple[int, int]]


def accepted_at_least(k: int, given: int = 0) -> Terms:
    """Return `metrics.count_accepted` of an answer's rounds."""
    return lambda rounds: count_accepted(rounds.drafts, k, given)


def emitted_after(low: int, high: int) -> Terms:
    """Return a function that counts tokens and rounds that begin after low..high-1 tokens."""

    def terms(rounds: AnswerRounds) -> tuple[int, int]:
        pairs = zip(rounds.emitted, rounds.prefix_lengths, strict=True)
        emitted = [tokens for tokens, length in pairs if low <= length < high]
        return sum(emitted), len(emitted)

    return terms


def ratio_of_sums(answers: Sequence[AnswerRounds], terms: Terms) -> float | None:
    """Return a ratio of sums over answers; None if the denominator is 0."""
    above, below = (sum(part) for part in zip(*map(terms, answers), strict=True))
    return above / below if below else None


def interval(
    report: Report, answers: Sequence[AnswerRounds], terms: Terms
) -> tuple[float, float] | None:
    """Return the 95 % interval of a ratio, dialogues drawn with replacement."""
    dialogues = [answer.dialogue for answer in answers]
    return bootstrap(list(map(terms, answers)), dialogues, report.setting.get("seed", 0))
