"""A page as files: `report.html`, whole in itself, and `report.md`, its tables for a model card.

Jinja escapes every text of the html. Characters that no page may hold (controls, halves of pairs)
are replaced in both. The page asks browsers to fetch and run nothing (Content-Security-Policy).
"""

import html
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from outrider.conf.files import write
from outrider.eval.page.answers import LEGEND
from outrider.eval.page.elements import Answer, Figure, Fold, Listing, Note, Page, Part, Table

TEMPLATES = Path(__file__).parent.parent / "templates"
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
MARKS = re.compile(r"([\\`*|~\[\]$#]|(?<!\w)_|_(?!\w))")
ABOVE = "Defined above."
BLANKS = re.compile("\n{3,}")


def publish(page: Page, folder: Path) -> list[Path]:
    """Write both files.

    Raises:
        RunError: the disk is full or the folder cannot be written.
    """
    files = {"report.html": as_html(page), "report.md": as_markdown(page)}
    for name, text in files.items():
        write(folder / name, text.encode())
    return [folder / name for name in files]


def as_html(page: Page) -> str:
    told = _told_once(page, (Table, Figure, Note, Listing, Answer))
    return _environment(True).get_template("page.html.jinja").render(page=told, legend=LEGEND)


def as_markdown(page: Page) -> str:
    told = _told_once(page, (Table, Note))
    text = _environment(False).get_template("page.md.jinja").render(page=told)
    return BLANKS.sub("\n\n", text).strip() + "\n"


def _told_once(page: Page, kinds: tuple[type, ...]) -> Page:
    """With parts of these kinds, and each section's definitions where they are first needed."""
    sections = [
        section._replace(parts=_once(section.parts, kinds, set())) for section in page.sections
    ]
    return page._replace(sections=[section for section in sections if section.parts])


def _once(parts: Sequence[Part], kinds: tuple[type, ...], said: set[str]) -> list[Part]:
    out = list[Part]()
    for part in parts:
        if isinstance(part, Fold):
            inner = _once(part.parts, kinds, said)
            out += [replace(part, parts=inner)] if inner else []
        elif isinstance(part, Figure | Table) and isinstance(part, kinds):
            told = part.definition
            out.append(replace(part, definition=ABOVE if told in said else told))
            said.add(told)
        elif isinstance(part, kinds):
            out.append(part)
    return out


@cache
def _environment(escape: bool) -> Environment:
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=escape,
        finalize=_clean,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters |= {"md": markdown, "code": code}
    return made


def _clean(value: Any) -> Any:
    """Texts from outside; what a template has made itself is left alone."""
    plain = isinstance(value, str) and not isinstance(value, Markup)
    return UNSEEN.sub("\N{REPLACEMENT CHARACTER}", value) if plain else value


def markdown(text: str) -> str:
    """Text that is nothing but text in a line or a cell of a table."""
    line = " ".join(text.split())
    return MARKS.sub(r"\\\1", html.escape(line, quote=False))


def code(text: str) -> str:
    """Text between backticks, with more of them than it has in a row itself."""
    line = " ".join(text.split())
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}" if "`" in line else f"`{line}`"
