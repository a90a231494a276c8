"""docs/notebook.ipynb: its code cells run in order, in an empty folder, and have outputs."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.wheel import ROOT

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def read() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    return content


def code_cells() -> list[dict[str, Any]]:
    return [cell for cell in read()["cells"] if cell["cell_type"] == "code"]


def executor() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "execute_notebook", ROOT / "docs" / "execute_notebook.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_outputs_are_stored() -> None:
    """`python docs/execute_notebook.py` stores them; they name no folder of the machine."""
    cells = code_cells()
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert all(cell["outputs"] for cell in cells)
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds == {"stream", "execute_result", "display_data"}
    text = json.dumps([cell["outputs"] for cell in cells])
    assert "Exactness: all 4 answers equal plain" in text
    assert not re.search(r"(?<![\w.<])/(home|root|tmp|work|Users)/", text)


def test_only_the_public_api_is_imported() -> None:
    source = "\n".join("".join(cell["source"]) for cell in code_cells())
    assert re.findall(r"^(?:from|import) (outrider\S*)", source, re.MULTILINE) == ["outrider.api"]


def test_outputs_are_what_a_cell_prints_shows_and_draws() -> None:
    sources = ["x = 2\nprint('a', x)\nx + 1", "import matplotlib.pyplot as plt\nf = plt.figure()"]
    cells: list[dict[str, Any]] = [{"cell_type": "code", "source": text} for text in sources]
    executor().execute({"cells": [*cells, {"cell_type": "markdown", "source": "text"}]})
    first, second = (cell["outputs"] for cell in cells)
    assert [output["output_type"] for output in first] == ["stream", "execute_result"]
    assert first[0]["text"] == ["a 2\n"]
    assert first[1]["data"]["text/plain"] == ["3"]
    assert second[0]["data"]["image/png"].startswith("iVBOR")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_notebook_trains_decodes_plots_measures_and_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = executor().execute(read())
    assert names["answer"].tau > 1
    assert names["reports"]["eval"].summary.tau > 1
    run = tmp_path / "runs" / "notebook"
    assert (run / "acceptance.png").stat().st_size > 1000
    assert (run / "published" / "vllm" / "README.md").is_file()
