"""Rendering of a page to `report.html`, self-contained, and `report.md`, for a model card.

Jinja escapes all text of the html. Characters that are invalid in a page (controls, lone
surrogates, bidirectional overrides) are replaced in both.
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
from outrider.conf.shown_text import mask_credentials
from outrider.eval.page.answers import LEGEND
from outrider.eval.page.elements import Collapsible, Note, Page, Part, Table

TEMPLATES = Path(__file__).parent.parent / "templates"
INVALID = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
MARKDOWN_SYNTAX = re.compile(r"([\\`*|~\[\]$#]|(?<!\w)_|_(?!\w))")
DEFINED_ABOVE = "Defined above."
BLANKS = re.compile("\n{3,}")


def write_page(page: Page, folder: Path) -> list[Path]:
    """Write both files; RunError: the disk is full or the folder cannot be written."""
    files = {"report.html": as_html(page), "report.md": as_markdown(page)}
    for name, text in files.items():
        write(folder / name, text.encode())
    return [folder / name for name in files]


def as_html(page: Page) -> str:
    page = page._replace(sections=[section for section in page.sections if section.parts])
    return _environment(True).get_template("page.html.jinja").render(page=page, legend=LEGEND)


def as_markdown(page: Page) -> str:
    page = _without_figures(page)
    text = _environment(False).get_template("page.md.jinja").render(page=page)
    return BLANKS.sub("\n\n", text).strip() + "\n"


def _without_figures(page: Page) -> Page:
    """Keep tables and notes, and print each definition once per section."""
    sections = [s._replace(parts=_once(s.parts, set())) for s in page.sections]
    return page._replace(sections=[section for section in sections if section.parts])


def _once(parts: Sequence[Part], defined: set[str]) -> list[Part]:
    out = list[Part]()
    for part in parts:
        if isinstance(part, Collapsible):
            inner = _once(part.parts, defined)
            out += [replace(part, parts=inner)] if inner else []
        elif isinstance(part, Table):
            definition = DEFINED_ABOVE if part.definition in defined else part.definition
            out.append(replace(part, definition=definition))
            defined.add(part.definition)
        elif isinstance(part, Note):
            out.append(part)
    return out


@cache
def _environment(escape: bool) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=escape, finalize=_clean, trim_blocks=True,
        undefined=StrictUndefined,
    )  # fmt: skip
    environment.filters |= {"md": markdown, "code": code}
    return environment


def _clean(value: Any) -> Any:
    """Replace invalid characters in strings; markup of the templates is unchanged."""
    plain = isinstance(value, str) and not isinstance(value, Markup)
    return INVALID.sub("\N{REPLACEMENT CHARACTER}", mask_credentials(value)) if plain else value


def markdown(text: str) -> str:
    """Escape text for a line or a table cell of Markdown."""
    line = " ".join(text.split())
    return MARKDOWN_SYNTAX.sub(r"\\\1", html.escape(line, quote=False))


def code(text: str) -> str:
    """Return inline code, with more backticks than the text has in a row."""
    line = " ".join(text.split())
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}" if "`" in line else f"`{line}`"
