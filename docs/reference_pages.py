"""Pages that are generated from the code: configuration, commands, metrics, and the map of files.

`docs/conf.py` writes the first three for every build. `python docs/reference_pages.py` writes the
map of files into docs/architecture.md, which a test compares with the code.
"""

import ast
import contextlib
import io
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("conf", "models", "data", "train", "eval", "launch")
BEGIN, END = "<!-- files: begin -->\n", "<!-- files: end -->\n"


def write(folder: Path) -> None:
    """Write configuration.md, commands.md and metrics.md into a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "configuration.md").write_text(configuration(), encoding="utf-8")
    (folder / "commands.md").write_text(commands(), encoding="utf-8")
    (folder / "metrics.md").write_text(metrics(), encoding="utf-8")


def configuration() -> str:
    """Return a page with a table of keys per group of conf/."""
    from outrider.conf.command_settings import VERB_GROUPS
    from outrider.conf.compose import choices, default_values, groups
    from outrider.launch.help import group_keys, schema_keys

    parts = [
        "# Configuration\n",
        "Every key is set as `group.key=value`. A group with files in `conf/` is chosen as "
        "`group=file`. Allowed values are in brackets.\n",
    ]
    defaults = {**default_values("eval"), **default_values("train")}
    for group, first in groups("train").items():
        if group == "experiment":
            continue
        parts += [f"## {group}\n", f"`{group}=` {', '.join(choices(group))}\n"]
        parts += _table(group_keys(group, first), defaults)
    parts += ["## run\n", *_table(group_keys("run"), defaults)]
    for group, schema in VERB_GROUPS.items():
        parts += [f"## {group}\n", *_table(list(schema_keys(schema, group)), {})]
    return "\n".join(parts) + "\n"


def _table(keys: list[Any], defaults: dict[str, object]) -> list[str]:
    from outrider.launch.help import show

    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, meaning, allowed in keys:
        default = f"`{show(defaults[name])}`" if name in defaults else ""
        cells = f"`{name}`", default, f"{meaning} [{allowed}]" if allowed else meaning
        escaped = (cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells)
        rows.append(f"| {' | '.join(escaped)} |")
    return [*rows, ""]


def commands() -> str:
    """Return a page with the output of `--help` for every command."""
    from outrider.launch import cli
    from outrider.launch.verbs import VERBS

    parts = ["# Commands\n", "The output of `outrider COMMAND --help`.\n"]
    for verb in VERBS:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            cli.main([verb, "--help"])
        parts += [f"## outrider {verb}\n", "```text", output.getvalue().strip(), "```\n"]
    return "\n".join(parts)


def metrics() -> str:
    """Return a page with a table of the metrics that training logs."""
    from outrider.train.metrics_log import METRICS

    parts = [
        "# Logged metrics\n",
        "The numbers of `metrics.jsonl`, of the trackers and of the report page's curves; `x@d` is "
        "x at depth d. A line is of kind `train`, `held` (held-out text), `own` (the target's own "
        "answers), `held_ema` or `own_ema` (the same with the averaged weights of `train.ema`), or "
        "`skipped`. Metrics of a report: {doc}`../measuring`.\n",
        "| name | unit | reduction | meaning |\n|---|---|---|---|",
    ]
    for name, metric in METRICS.items():
        parts.append(f"| `{name}` | {' | '.join(metric)} |")
    return "\n".join(parts) + "\n"


def file_map() -> str:
    """Return the tables of all files, one per folder."""
    parts = []
    for folder in FOLDERS:
        parts += [f"### {folder}/\n", "| file | content |", "|---|---|"]
        for file in sorted((ROOT / folder).rglob("*.py")):
            docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            line = docstring.partition("\n")[0].replace("|", "\\|")
            parts.append(f"| `{file.relative_to(ROOT)}` | {line} |")
        parts.append("")
    return "\n".join(parts)


def with_file_map(page: str) -> str:
    """Return the architecture page with its map of files renewed."""
    head, _, rest = page.partition(BEGIN)
    return head + BEGIN + "\n" + file_map() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    page = ROOT / "docs" / "architecture.md"
    renewed = with_file_map(page.read_text(encoding="utf-8"))
    if "--check" in sys.argv:
        sys.exit(renewed != page.read_text(encoding="utf-8"))
    page.write_text(renewed, encoding="utf-8")
