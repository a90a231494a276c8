"""docs/notebook.ipynb: its code cells run in order, in an empty folder."""

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parent.parent / "docs" / "notebook.ipynb"


def code_cells() -> list[dict[str, Any]]:
    content = json.loads(NOTEBOOK.read_text())
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    return [cell for cell in content["cells"] if cell["cell_type"] == "code"]


def test_no_output_is_stored() -> None:
    assert all(cell["outputs"] == [] for cell in code_cells())
    assert all(cell["execution_count"] is None for cell in code_cells())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_notebook_trains_decodes_plots_and_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    names: dict[str, Any] = {}
    for number, cell in enumerate(code_cells()):
        exec(compile("".join(cell["source"]), f"code cell {number}", "exec"), names)
    assert names["answer"].tau > 1
    run = tmp_path / "runs" / "notebook"
    assert (run / "acceptance.png").stat().st_size > 1000
    assert (run / "published" / "vllm" / "README.md").is_file()
