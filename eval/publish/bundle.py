"""Writes `verify.py`, the checker of one drafter's family, as one file of its own.

It is the modules of `check/` that the family needs, one behind the other, without their imports of
each other: what is published is what is read, linted and tested here.
"""

import ast
import sys
from pathlib import Path

HERE = Path(__file__).parent / "check"
ROOM = "outrider.eval.publish.check."
FAMILIES = {  # drafter -> module of `check/` and its class
    "eagle": ("eagle", "Eagle"), "hass": ("eagle", "Eagle"), "eagle3": ("eagle3", "Eagle3"),
    "mtp": ("mtp", "Mtp"), "medusa": ("medusa", "Medusa"), "draft_lm": ("draft_lm", "DraftLm"),
}  # fmt: skip
END = """
FAMILY = {family}

if __name__ == "__main__":
    place = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
    sys.exit(main(FAMILY, place.resolve()))
"""


def verifier(drafter: str) -> str:
    """The text of verify.py for this drafter."""
    module, family = FAMILIES[drafter]
    order = needed(module)
    imports = dict.fromkeys(line for name in order for line in _outside(name))
    doc = ast.get_docstring(ast.parse(_source("core")), clean=False)
    head = [f'"""{doc}"""', "", *sorted(["import sys", *imports], key=_foreign)]
    bodies = [_body(name) for name in order]
    return "\n".join([*head, "", "", "\n\n\n".join(bodies), END.format(family=family)])


def needed(module: str) -> list[str]:
    """The modules that one of them needs, itself last."""
    found: dict[str, None] = {}
    for node in ast.parse(_source(module)).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(ROOM):
            found.update(dict.fromkeys(needed(str(node.module).removeprefix(ROOM))))
    return [*found, module]


def _outside(module: str) -> list[str]:
    """Its imports of other packages, a line each."""
    nodes = ast.parse(_source(module)).body
    inner = [n for n in nodes if isinstance(n, ast.ImportFrom) and str(n.module).startswith(ROOM)]
    return [ast.unparse(n) for n in nodes if _is_import(n) and n not in inner]


def _foreign(line: str) -> tuple[bool, str]:
    """Python's own modules come first."""
    return line.split()[1].partition(".")[0] not in sys.stdlib_module_names, line


def _body(module: str) -> str:
    """What stands behind docstring and imports."""
    source = _source(module)
    nodes = ast.parse(source).body
    last = max(i for i, node in enumerate(nodes) if _is_import(node))
    end = nodes[last].end_lineno
    assert end is not None, "parsed nodes know their lines"
    return "\n".join(source.splitlines()[end:]).strip("\n")


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _source(module: str) -> str:
    return (HERE / f"{module}.py").read_text(encoding="utf-8")
