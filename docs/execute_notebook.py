"""Execution of docs/notebook.ipynb: run its code cells in order and store their outputs.

python docs/execute_notebook.py   # in an empty temporary folder; about two minutes
"""

import ast
import base64
import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parent / "notebook.ipynb"


def execute(notebook: dict[str, Any]) -> dict[str, Any]:
    """Run the code cells in the current folder and set their outputs; return their names.

    An output is what a cell prints, the value of its last expression, and the figures that it
    leaves open.
    """
    import matplotlib

    matplotlib.use("agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, start=1):
        cell["execution_count"] = number
        cell["outputs"] = _run("".join(cell["source"]), number, names)
    return names


def _run(source: str, number: int, names: dict[str, Any]) -> list[dict[str, Any]]:
    import matplotlib.pyplot as plt

    tree, value, printed = ast.parse(source), None, io.StringIO()
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"code cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            code = compile(ast.Expression(last.value), f"code cell {number}", "eval")
            value = eval(code, names)
    outputs = list[dict[str, Any]]()
    if text := printed.getvalue():
        lines = text.splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    if value is not None:
        data = {"text/plain": [repr(value)]}
        outputs.append({
            "data": data, "execution_count": number, "metadata": {},
            "output_type": "execute_result",
        })  # fmt: skip
    for figure in map(plt.figure, plt.get_fignums()):
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=80, metadata={"Software": None})
        png = base64.b64encode(image.getvalue()).decode()
        data = {"image/png": png, "text/plain": [repr(figure)]}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    plt.close("all")
    return outputs


def main() -> None:
    """Execute the notebook and write it."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    os.environ["COLUMNS"] = "100"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        execute(notebook)
        os.chdir(NOTEBOOK.parent)
    text = json.dumps(notebook, indent=1, ensure_ascii=True)
    NOTEBOOK.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
