"""Runs that differ in their seed alone, joined: intervals over seeds and dialogues.

Seeds and dialogues are both drawn with replacement: training again and another text are two causes
of chance. Runs are joined if their settings are equal but for `run.seed` and `run.dir`, and if they
have decoded the same dialogues in the same way.

Shape letters: S seeds, D dialogues, K terms.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from outrider.eval.compare import SAME_TEXT, SAME_TIMES, decoding_label, differing
from outrider.eval.metrics import Record, crossed_bootstrap, ratio
from outrider.eval.report import format_number, load
from outrider.eval.report_tables import narrow_table
from outrider.eval.run_results import RunResults
from outrider.models.decode.round_times import RoundTimes

MEGA = 1e6
DECODING = ("policy", "temperature", "guesses", "verified by")  # conditions of eval/compare.py
PARTS = {field.name for field in fields(RoundTimes)}
NEEDED = {
    "dialogue", "output_ids", "accepted", "drafted", "steps", "seconds", "baseline_ids",
    "baseline_seconds", "room",
}  # fmt: skip


class SeedRow(NamedTuple):
    """One decoding by the runs of several seeds.

    Attributes:
        name: of the first run.
        draft: milliseconds of the drafter per round.
        parameters: that are trained; None if unknown.
    """

    name: str
    seeds: Sequence[int]
    label: str
    tau: float | None
    tau_95: tuple[float, float] | None
    speedup: float | None
    speedup_95: tuple[float, float] | None
    draft: float | None
    parameters: float | None


def seed_rows(runs: Sequence[RunResults]) -> list[SeedRow]:
    """Return a row per decoding of every group of at least two seeds."""
    groups: dict[str, list[RunResults]] = {}
    for run in runs:
        if (key := _settings_but_the_seed(run.settings)) is not None:
            groups.setdefault(key, []).append(run)
    rows = []
    for group in groups.values():
        group = [*{_seed(run): run for run in group}.values()]  # the last run of each seed
        if len(group) > 1:
            names = [name for name in group[0].reports if all(name in run.reports for run in group)]
            rows += [row for name in names if (row := _join(group, name)) is not None]
    return rows


def _settings_but_the_seed(settings: Mapping[str, Any]) -> str | None:
    """Return the settings of a run as a key; None if its seed is unknown."""
    run = settings.get("run")
    if not isinstance(run, Mapping) or not isinstance(run.get("seed"), int):
        return None
    other = {key: value for key, value in run.items() if key not in ("seed", "dir")}
    return json.dumps({**settings, "run": other}, sort_keys=True)


def _seed(run: RunResults) -> int:
    return int(run.settings["run"]["seed"])


def _join(group: Sequence[RunResults], name: str) -> SeedRow | None:
    """Return the row of a report that all runs have; None if they were not measured alike."""
    reports = [run.reports[name] for run in group]
    records = [_records(run, name) for run in group]
    answers = [[one.id for one in each] for each in records]
    if not answers[0] or any(ids != answers[0] for ids in answers):
        return None
    if differing(reports, (*SAME_TEXT, *DECODING)):
        return None
    dialogues = [*dict.fromkeys(one.dialogue for one in records[0])]
    tau = np.array([_by_dialogue(one, dialogues, _tau_terms) for one in records])
    drafts = [one["ms"]["draft"] for one in reports]
    sizes: list[Any] = [(run.training or {}).get("parameters") for run in group]
    timed = all(one.baseline is not None for each in records for one in each)
    timed = timed and not differing(reports, SAME_TIMES)
    speed = np.array([_by_dialogue(one, dialogues, _speed_terms) for one in records])
    return SeedRow(
        name=group[0].name,
        seeds=sorted(map(_seed, group)),
        label=decoding_label(reports[0]),
        tau=_ratio(tau),
        tau_95=crossed_bootstrap(tau, 0),
        speedup=_ratio(speed) if timed else None,
        speedup_95=crossed_bootstrap(speed, 0) if timed else None,
        draft=None if None in drafts else mean(drafts),
        parameters=None if None in sizes else mean(sizes),
    )


def _records(run: RunResults, name: str) -> list[Record]:
    """Return the answers of a report; none where its file is missing or older than these fields."""
    rows = load(run.folder / "eval", name).outputs
    complete = all(row.keys() >= NEEDED and _is_timed(row) for row in rows)
    return [Record.from_output(row) for row in rows] if complete else []


def _is_timed(row: Mapping[str, Any]) -> bool:
    """Return whether the times of a row are those of a round."""
    return all(set(row[name] or ()) <= PARTS for name in ("seconds", "baseline_seconds"))


def _tau_terms(one: Record) -> tuple[float, ...]:
    return one.emitted, len(one.accepted)


def _speed_terms(one: Record) -> tuple[float, ...]:
    plain = one.baseline.rounds if one.baseline else 0.0
    return plain, one.baseline_emitted, one.times.rounds, one.emitted


def _by_dialogue(
    answers: Sequence[Record],
    dialogues: Sequence[str],
    terms: Callable[[Record], tuple[float, ...]],
) -> list[list[float]]:
    """Return the sums of the terms, [D, K]."""
    groups = [[terms(one) for one in answers if one.dialogue == name] for name in dialogues]
    return [[*map(sum, zip(*rows, strict=True))] for rows in groups]


def _ratio(terms: np.ndarray) -> float | None:
    """Return the ratio of the sums over seeds and dialogues, of terms as `bootstrap` has them."""
    above, below, *base = terms.sum(axis=(0, 1)).tolist()
    value = ratio(above, below)
    return ratio(value, ratio(*base)) if base else value


def table(rows: Sequence[SeedRow]) -> Table:
    """Return the table of the rows."""
    head = (
        "run", "seeds", "decoding", "tau", "tau 95 %", "speedup", "95 %", "draft ms", "M params",
    )  # fmt: skip
    out = narrow_table(head, ("run", "seeds", "decoding"))
    out.title = "over the seeds"
    for row in rows:
        parameters = None if row.parameters is None else row.parameters / MEGA
        out.add_row(
            row.name, ", ".join(map(str, row.seeds)), row.label, format_number(row.tau),
            _span(row.tau_95), format_number(row.speedup, 2, "x"), _span(row.speedup_95),
            format_number(row.draft, 1), format_number(parameters),
        )  # fmt: skip
    return out


def _span(interval: tuple[float, float] | None) -> str:
    return "-" if interval is None else "{:.2f}-{:.2f}".format(*interval)
