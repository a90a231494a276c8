"""What a check has found, and how it is shown and written.

A finding is `ok`; a `note`, where the run works but somebody should know; or `wrong`, where it
would fail or be worth nothing, and training refuses to start.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.conf.errors import RunError

State: TypeAlias = Literal["ok", "note", "wrong"]
FORMAT = "outrider-doctor-1"
COLOURS = {"ok": "green", "note": "yellow", "wrong": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One check's result.

    Attributes:
        said: for people, some lines.
        facts: the same as numbers, for programs; json's types alone.
        fix: what to do about it; "" where there is nothing to do.
    """

    name: str
    state: State
    said: str
    facts: dict[str, Any] = field(default_factory=dict)
    fix: str = ""


class Group(NamedTuple):
    """Findings that belong together."""

    name: str
    findings: list[Finding]


def of_state(groups: Sequence[Group], state: State) -> Iterator[Finding]:
    return (one for group in groups for one in group.findings if one.state == state)


def show(console: Console, groups: Sequence[Group]) -> None:
    """A table per group: sign, check, what was found and what to do."""
    for group in groups:
        if group.findings:
            console.print(table(group.name, group.findings))


def table(title: str, findings: Sequence[Finding]) -> Table:
    made = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    made.add_column(no_wrap=True)
    made.add_column(no_wrap=True)
    made.add_column()
    for one in findings:
        text = Text(one.said)
        if one.fix and one.state != "ok":
            text.append(f"\n{one.fix}", style=COLOURS[one.state])
        made.add_row(Text(one.state, style=COLOURS[one.state]), one.name, text)
    return made


def verdict(groups: Sequence[Group]) -> str:
    """The last line: may training start?"""
    wrong, notes = (len(list(of_state(groups, state))) for state in ("wrong", "note"))
    if wrong:
        return f"training may not start: {wrong} wrong, {notes} to note"
    return f"training may start: nothing wrong, {notes} to note"


def as_json(groups: Sequence[Group]) -> dict[str, Any]:
    """All findings; `may_start` is what the exit code says."""
    return {
        "format": FORMAT,
        "may_start": not list(of_state(groups, "wrong")),
        "groups": {
            group.name: {
                one.name: {"state": one.state, "said": one.said, "fix": one.fix, **one.facts}
                for one in group.findings
            }
            for group in groups
        },
    }


def refuse(findings: Sequence[Finding]) -> None:
    """
    Raises:
        RunError: something is wrong.
    """
    wrong = [one for one in findings if one.state == "wrong"]
    if wrong:
        said = "\n  ".join(f"{one.name}: {one.said}" for one in wrong)
        fixes = " ".join(one.fix for one in wrong)
        raise RunError(f"This run would be worth nothing:\n  {said}", fixes)


def size_of(size: int | float) -> str:
    """Bytes for people."""
    for unit, scale in (("GB", 2**30), ("MB", 2**20)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 2**10:.0f} kB"


def time_of(seconds: int | float) -> str:
    """Seconds for people."""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.2g} s"
