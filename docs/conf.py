"""Sphinx configuration of the documentation site; `make docs` builds it with warnings as errors."""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "docs"), str(ROOT)]

import reference_pages  # noqa: E402 - found through the line above

import outrider  # noqa: E402
from outrider.conf.packages import project_url  # noqa: E402

project = "Outrider"
author = "The Outrider authors"
copyright = "The Outrider authors, Apache-2.0"
version = release = outrider.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
default_role = "code"
autodoc_typehints = "none"  # jaxtyping's shapes stand in the docstrings' own words
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_use_rtype = False
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "pydata_sphinx_theme"
html_title = "Outrider"
html_show_sourcelink = False
html_theme_options = {
    "show_prev_next": False,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
if repository := project_url():
    link = {"name": "Repository", "url": repository, "icon": "fa-solid fa-code-branch"}
    html_theme_options["icon_links"] = [link]


def name_repository(app: object, page: str, source: list[str]) -> None:
    """Write the project's address where a page has <this repository>."""
    source[0] = source[0].replace("<this repository>", repository or "<this repository>")


def setup(app: Any) -> None:
    """Write the pages that are generated from the schema and the command line."""
    reference_pages.write(ROOT / "docs" / "reference")
    app.connect("source-read", name_repository)
