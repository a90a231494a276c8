"""Reports of a run folder whose fields have values that no evaluation writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.conf import json_shapes
from outrider.conf.errors import CorruptFile
from outrider.eval.report import load, save
from tests.test_report import report

OUTPUT: dict[str, Any] = {"id": "a", "category": "b", "prompt": "c", "prompt_ids": [1],
                          "output_ids": [1, 2], "accepted": [0]}  # fmt: skip


def written(folder: Path) -> Path:
    result = report(7.0)
    result.outputs[:] = [OUTPUT]
    save(result, folder, "eval")
    return folder


@pytest.mark.parametrize(("field", "value"), [
    ("output_ids", [10**12]), ("output_ids", [-7]), ("prompt_ids", ["1"]), ("prompt_ids", 5),
    ("accepted", [True]), ("accepted", [[]]), ("accepted", None), ("id", 7), ("category", {}),
    ("prompt", []), ("output_ids", [*range(9), -7, 5]), ("output_ids", [3, 2**31, *range(9)]),
    ("accepted", [1, True]), ("accepted", [1, None, 2]), ("rejected", [None, 1, "x"]),
])  # fmt: skip
def test_output_of_a_wrong_value_names_file_line_and_field(
    field: str, value: Any, tmp_path: Path
) -> None:
    file = written(tmp_path) / "eval.outputs.jsonl"
    file.write_text(json.dumps(OUTPUT) + "\n" + json.dumps({**OUTPUT, field: value}) + "\n")
    with pytest.raises(CorruptFile, match=rf"eval\.outputs\.jsonl: line 2: {field}"):
        load(tmp_path, "eval")


def test_of_a_long_list_only_the_ends_and_other_entries_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a file of outputs takes five times as long to read."""
    compared, fits = list[Any](), json_shapes._fits

    def counted(value: Any, shape: Any) -> bool:
        compared.append(value)
        return fits(value, shape)

    monkeypatch.setattr(json_shapes, "_fits", counted)
    tokens = [*range(1, 500), 0, *range(500)]
    assert not json_shapes.find_mismatch([*tokens, None, None], [(json_shapes.token, None)])
    assert {*compared} == {0, 499, None}
    assert json_shapes.find_mismatch([*tokens, -7], [int]).startswith("[1000] is -7,")


@pytest.mark.parametrize(("field", "value"), [
    ("tau", "2.5"), ("tokens", [1]), ("ms", "fast"), ("ms", {"round": "1"}), ("accept_at", {}),
    ("accept_at", ["x"]), ("tau_95", "12"), ("speedup", {}), ("shares", None),
    ("categories", {"a": "b"}), ("categories", []), ("mismatches", [{"id": 1}]),
])  # fmt: skip
def test_report_of_a_wrong_value_names_the_file(field: str, value: Any, tmp_path: Path) -> None:
    file = written(tmp_path) / "eval.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    with pytest.raises(CorruptFile, match=r"eval\.json"):
        load(tmp_path, "eval")


def test_valid_report_loads(tmp_path: Path) -> None:
    assert load(written(tmp_path), "eval").outputs == [OUTPUT]
