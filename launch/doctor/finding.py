"""The result of a check, its table and its JSON form.

A finding is `ok`; a `note`, where the run works but may not do what is intended; or `wrong`, where
it would fail or train a useless drafter: training refuses to start.
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
    """The result of one check.

    Attributes:
        message: text for the table, one or more lines.
        facts: the same as JSON values.
        fix: what to do about it; "" for an ok finding, and where nothing can be done.
    """

    name: str
    state: State
    message: str
    facts: dict[str, Any] = field(default_factory=dict)
    fix: str = ""

    def __post_init__(self) -> None:
        if self.state == "ok":
            object.__setattr__(self, "fix", "")


class FindingGroup(NamedTuple):
    """Findings about one subject: launcher, target, template, text or costs."""

    name: str
    findings: list[Finding]


def with_state(groups: Sequence[FindingGroup], state: State) -> Iterator[Finding]:
    return (one for group in groups for one in group.findings if one.state == state)


def print_findings(console: Console, groups: Sequence[FindingGroup]) -> None:
    """Print a table per group: state, check, and message with the fix below."""
    for title, findings in groups:
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
        for no_wrap in (True, True, False):
            table.add_column(no_wrap=no_wrap)
        for one in findings:
            text = Text(one.message)
            if one.fix:
                text.append(f"\n{one.fix}", style=COLOURS[one.state])
            table.add_row(Text(one.state, style=COLOURS[one.state]), one.name, text)
        console.print(table)


def verdict(groups: Sequence[FindingGroup]) -> str:
    """Return the last line: whether training can start."""
    wrong, notes = (len(list(with_state(groups, state))) for state in ("wrong", "note"))
    start = "Training cannot start" if wrong else "Training can start"
    return f"{start}: {wrong} wrong, {notes} to note"


def to_json(groups: Sequence[FindingGroup]) -> dict[str, Any]:
    """Return all findings as JSON values; `may_start` is false if one is wrong."""
    return {
        "format": FORMAT,
        "may_start": not list(with_state(groups, "wrong")),
        "groups": {
            group.name: {
                one.name: {"state": one.state, "message": one.message, "fix": one.fix, **one.facts}
                for one in group.findings
            }
            for group in groups
        },
    }


def require_none_wrong(findings: Sequence[Finding]) -> None:
    """Refuse to train if a finding is wrong: a RunError names all of these with their fixes."""
    wrong = [one for one in findings if one.state == "wrong"]
    if wrong:
        messages = "\n  ".join(f"{one.name}: {one.message}" for one in wrong)
        fixes = " ".join(one.fix for one in wrong)
        raise RunError(f"Training cannot start:\n  {messages}", fixes)
