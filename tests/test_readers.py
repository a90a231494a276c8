"""Readers: equal rows from every kind of file, streamed; damage raises or is counted."""

import csv
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from outrider.conf.errors import ConfigError, RunError
from outrider.data.readers import MAX_ROW, SUFFIXES, BadRowPolicy, _array_elements, read_records

ROWS: list[dict[str, Any]] = [
    {"prompt": f"{n} [a, b] ] \u00e9", "deep": [{"n": n}, {"n": -n}]} for n in range(50)
]


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", *ROWS)
    lines(tmp_path / "lines.json", *ROWS)
    (tmp_path / "b.json").write_text(json.dumps(ROWS, indent=1, ensure_ascii=False))
    (tmp_path / "bom.json").write_text("\ufeff" + json.dumps(ROWS))
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "d.parquet")
    with (tmp_path / "c.csv").open("w", newline="") as stream:
        table = csv.DictWriter(stream, ["prompt", "deep"])
        table.writeheader()
        table.writerows({**row, "deep": json.dumps(row["deep"])} for row in ROWS)
    for name in ("a.jsonl", "lines.json", "b.json", "bom.json", "c.csv", "d.parquet"):
        assert list(read_records(tmp_path / name)) == ROWS, name
    for chunk in (1, 7, 64):  # an element may be cut anywhere
        assert list(_array_elements(tmp_path / "b.json", BadRowPolicy(), chunk)) == ROWS


def test_blank_lines_and_an_empty_array_have_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"prompt": "x"}\n\n')
    (tmp_path / "b.json").write_text("[ ]\n")
    assert list(read_records(tmp_path / "a.jsonl")) == [{"prompt": "x"}]
    assert list(read_records(tmp_path / "b.json")) == []


BAD = [
    ("a.jsonl", b'{"a": 1}\n\n{"a": \n', 3),
    ("a.jsonl", b'{"a": 1}\n[1]\n', 2),
    ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', 2),
    ("a.jsonl", b'{"a": 1}\n' + b"[" * 100_000 + b"\n", 2),
    ("a.jsonl", b'{"a": 1}\n{"a": 2}{"a": 3}\n', 2),
    ("a.jsonl", b'{"a": 1}\n' + bytes(100), 2),
    ("a.jsonl", b'{"a": 1}\n{"a": ' + b"9" * 5000 + b"}", 2),
    ("a.json", b'[{"a": 1},\n 7]', 2),
    ("a.json", b'[{"a": 1},\n [[], 7]]', 2),
    ("a.json", b'[{"a": 1},\n null]', 2),
    ("a.csv", b"a\n1\n2,3\n", 3),
    ("a.csv", b"a,b\n1,2\n3\n", 3),
    ("a.csv", b"a\n1\n\xff\n", 3),
    ("a.csv", b'a\n1\n"b" c\n', 3),
]
UNRECOVERABLE = [  # no row can be found after the damage
    ("a.json", b'[{"a": 1},\n {"b": 2},\n {"c": }]', 3),
    ("a.json", b'[\n{"a":\n 1},\n\n {"b": 2}', 5),
    ("a.json", b'[{"a": "\xff"}]', 1),
    ("a.json", b'[{"a": 1},\n' + b"[" * 100_000, 2),
    ("a.json", b'[{"a": 1}]\n[{"a": 1}]', 1),
]


@pytest.mark.parametrize(("name", "content", "line"), BAD + UNRECOVERABLE)
def test_a_bad_record_names_file_and_line(
    tmp_path: Path, name: str, content: bytes, line: int
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RunError, match=rf"{name}, line {line}:"):
        list(read_records(tmp_path / name))


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_cut_line_is_described_by_its_column(tmp_path: Path, end: str) -> None:
    """The 49 characters lack their two brackets at the end, whatever ends the line."""
    cut = '{"messages": [{"role": "user", "content": "hello"'
    (tmp_path / "a.jsonl").write_bytes(f'{{"a": 1}}\n{cut}{end}'.encode())
    why = r"line 2: this is not one complete JSON object \(Expecting ',' delimiter at column 50\)"
    with pytest.raises(RunError, match=why):
        list(read_records(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(("name", "content", "line"), BAD)
def test_a_bad_record_is_skipped_and_counted_within_the_limit(
    tmp_path: Path, name: str, content: bytes, line: int
) -> None:
    (tmp_path / name).write_bytes(content)
    skipped: list[int] = []
    policy = BadRowPolicy(1, lambda: skipped.append(1), "data.skip_bad")
    assert len(list(read_records(tmp_path / name, policy=policy))) == 1
    assert len(skipped) == 1
    with pytest.raises(RunError, match=r"or leave it out: data\.skip_bad=1"):
        list(read_records(tmp_path / name, policy=BadRowPolicy(0, option="data.skip_bad")))


def test_a_line_of_a_hundred_megabytes_is_read_in_bounded_memory(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    with file.open("wb") as stream:
        stream.write(b'{"a": 1}\n{"b": "')
        for _ in range(100):
            stream.write(b"x" * 1_000_000)
        stream.write(b'"}\n{"c": 3}\n')
    tracemalloc.start()
    assert list(read_records(file, policy=BadRowPolicy(1))) == [{"a": 1}, {"c": 3}]
    assert tracemalloc.get_traced_memory()[1] < 5 * MAX_ROW  # 84 MB
    tracemalloc.stop()
    with pytest.raises(RunError, match=r"a\.jsonl, line 2: the line is longer"):
        list(read_records(file))
    array = tmp_path / "a.json"
    array.write_bytes(b'[{"a": 1}, {"b": "' + b"x" * (3 * MAX_ROW) + b'"}]')
    with pytest.raises(RunError, match=r"a\.json, line 1: an element is longer"):
        list(read_records(array))


def test_a_truncated_parquet_file_raises(tmp_path: Path) -> None:
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    for cut in (content[:-100], b"PAR1"):
        (tmp_path / "a.parquet").write_bytes(cut)
        with pytest.raises(RunError, match=r"a\.parquet is damaged"):
            list(read_records(tmp_path / "a.parquet"))


@pytest.mark.parametrize(("column", "name"), [
    (["b"], b"n\x80x"), (pa.array([2**62], pa.timestamp("us")), b"when"),
])  # fmt: skip
def test_a_parquet_file_with_a_name_or_date_that_is_none_raises(
    column: Any, name: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"a": ["b"], "name": column}), file, store_schema=False)
    file.write_bytes(file.read_bytes().replace(b"name", name.ljust(4)))
    with pytest.raises(RunError, match=r"a\.parquet is damaged"):
        list(read_records(file))


def test_a_parquet_row_that_is_not_utf_8_raises_or_is_skipped(tmp_path: Path) -> None:
    text = pa.array([b"%d" % n if n != 300 else b"\xff" for n in range(600)], pa.binary())
    damaged = pa.StringArray.from_buffers(len(text), *text.buffers()[1:])
    parquet.write_table(pa.table({"a": damaged}), tmp_path / "a.parquet")
    with pytest.raises(RunError, match=r"a\.parquet, line 301: 'utf-8' codec can't decode"):
        list(read_records(tmp_path / "a.parquet"))
    rows = list(read_records(tmp_path / "a.parquet", policy=BadRowPolicy(1)))
    assert rows == [{"a": str(n)} for n in range(600) if n != 300]


def test_an_unreadable_file_is_a_config_error_of_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval\.prompts = .*nowhere.*\n.*no such file"):
        read_records(tmp_path / "nowhere.jsonl", key="eval.prompts")
    (tmp_path / "a.xlsx").touch()
    with pytest.raises(ConfigError, match=r"data\.path = .*\n.*\.xlsx is not read"):
        read_records(tmp_path / "a.xlsx")
    for suffix in SUFFIXES:
        (tmp_path / f"a{suffix}").touch()
        with pytest.raises(ConfigError, match="empty"):
            read_records(tmp_path / f"a{suffix}")
    for wide in ("UTF-16", "UTF-16LE", "UTF-16BE", "UTF-32", "UTF-32LE", "UTF-32BE"):
        (tmp_path / "a.jsonl").write_text('{"a": 1}\n' * 9, wide)
        with pytest.raises(ConfigError, match=f"iconv -f {wide} -t UTF-8"):
            read_records(tmp_path / "a.jsonl")
