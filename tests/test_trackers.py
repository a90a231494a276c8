"""Trackers: they receive every metric, and their errors and delays do not affect the run."""

import json
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from outrider.conf.schema import Config
from outrider.launch import cli
from outrider.train.trackers import (
    IDENTITY,
    QUEUE_SIZE,
    AnswerSample,
    ReportSummary,
    TrackerThread,
    open_trackers,
)
from tests.runs import SMALL, config


class Fake:
    """Records calls; fails in `fails` or blocks until `waits`."""

    def __init__(self, fails: str = "", waits: threading.Event | None = None) -> None:
        self.fails, self.waits, self.lines, self.closed = fails, waits, list[int](), False
        self.summaries = list[ReportSummary]()

    def open(self) -> "Fake":
        if self.fails == "open":
            raise RuntimeError("no route to host\nand much more")
        return self

    def log(self, step: int, kind: str, values: dict[str, float]) -> None:
        if self.waits is not None:
            self.waits.wait()
        if self.fails == "log" and step == 3:
            raise ConnectionError("gone away")
        self.lines.append(step)

    def report(self, summary: ReportSummary) -> None:
        self.summaries.append(summary)

    def close(self) -> None:
        self.closed = True


def test_calls_are_made_in_order() -> None:
    fake, messages = Fake(), list[str]()
    background = TrackerThread("fake", fake.open, messages.append)
    for step in range(100):
        background.log(step, "train", {"loss@1": 1.0})
    background.close()
    assert fake.lines == list(range(100))
    assert fake.closed
    assert messages == []


@pytest.mark.parametrize(("fails", "reason", "logged"), [
    ("open", "no route to host", []), ("log", "gone away", [0, 1, 2]),
])  # fmt: skip
def test_failed_tracker_is_not_called_again(fails: str, reason: str, logged: list[int]) -> None:
    fake, messages = Fake(fails), list[str]()
    background = TrackerThread("fake", fake.open, messages.append)
    for step in range(2 * QUEUE_SIZE):
        background.log(step, "train", {})
    background.close()
    assert fake.lines == logged
    assert messages == [f"fake is not available ({reason}); the run continues without it"]


def _seconds_with_hanging_tracker() -> tuple[float, float]:
    """Return the seconds to log more than the queue holds, and to close the tracker as well."""
    never, messages = threading.Event(), list[str]()
    background = TrackerThread("fake", Fake(waits=never).open, messages.append, patience=0.2)
    began = time.perf_counter()
    with patch.object(background._calls, "put", wraps=background._calls.put) as put:
        for step in range(QUEUE_SIZE + 500):
            background.log(step, "train", {})
    logged = time.perf_counter() - began
    assert put.call_count == QUEUE_SIZE + 500
    assert all(call.kwargs == {"block": False} for call in put.call_args_list)  # none waits
    background.close()
    closed = time.perf_counter() - began
    never.set()
    (line,) = messages
    assert "did not take" in line
    assert int(line.split("take ")[1].split()[0]) >= QUEUE_SIZE
    return logged, closed


def test_hanging_tracker_does_not_delay_the_run() -> None:
    """Of three runs the shortest: a pause of the machine delays one, a wait all of them."""
    runs = [_seconds_with_hanging_tracker() for _ in range(3)]
    assert min(logged for logged, _ in runs) < 1
    assert min(closed for _, closed in runs) < 3


def test_an_error_after_close_is_not_shown() -> None:
    gate, messages = threading.Event(), list[str]()
    background = TrackerThread("fake", Fake("log", waits=gate).open, messages.append, patience=0.1)
    background.log(3, "train", {})
    background.close()
    gate.set()
    background._thread.join()
    (line,) = messages
    assert "did not take" in line


def test_logged_values_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    values, seen = {"loss": 1.0}, list[float]()

    class Reads(Fake):
        def log(self, step: int, kind: str, values: dict[str, float]) -> None:
            seen.append(values["loss"])

    background = TrackerThread("fake", Reads().open, lambda _: None)
    background.log(0, "train", values)
    values["loss"] = 2.0
    background.close()
    assert seen == [1.0]


def test_no_tracker_is_the_default(tmp_path: Path) -> None:
    with open_trackers(config(tmp_path), print, main=True) as services:
        assert services == []


def test_tensorboard_contains_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = config(tmp_path, "train.tensorboard=true")
    with open_trackers(settings, pytest.fail, main=True) as (service,):
        for step in range(3):
            service.log(step, "train", {"loss@1": 2.0 - step})
        service.log(2, "held", {"accept_length": 1.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss@1")] == [(0, 2), (1, 1), (2, 0)]
    assert [e.value for e in events.Scalars("held/accept_length")] == [1.5]


KEY = "0123456789abcdef0123456789abcdef01234567"  # in the format of a real one


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment with an API key."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_RUN_GROUP", "a-sweep")


def records(folder: Path) -> list[Any]:
    """Return wandb's records of all starts, in order.

    Its process may still be writing when a run is closed; the last record is "exit".
    """
    from wandb.proto.wandb_internal_pb2 import Record

    found = list[Any]()
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        late, lines = time.monotonic() + 20, list[Any]()
        while not any(line.WhichOneof("record_type") == "exit" for line in lines):
            assert time.monotonic() < late, f"{file} never ends"
            lines = [Record.FromString(data) for data in leveldb_entries(file.read_bytes())]
            time.sleep(0.05)
        found += lines
    return found


def leveldb_entries(log: bytes) -> Iterator[bytes]:
    """LevelDB's log format: blocks of 32 KB; records with crc, length, and full/first/middle/last.

    Source: github.com/google/leveldb, doc/log_format.md. Differs: a header of seven bytes.
    """
    at, whole = 7, b""
    while at + 7 <= len(log):
        if (left := 2**15 - at % 2**15) < 7:  # too little for a head: padding
            at += left
            continue
        size, kind = struct.unpack("<HB", log[at + 4 : at + 7])
        if at + 7 + size > len(log):
            return
        whole += log[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield whole
            whole = b""


def values(items: Iterable[Any]) -> dict[str, Any]:
    """Return the values of a history line or a summary."""
    return {"/".join(x.nested_key) or x.key: json.loads(x.value_json) for x in items}


def without_secrets(folder: Path) -> bool:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return bool(files) and not [file for file in files if KEY.encode() in file.read_bytes()]


def example_report(folder: Path) -> ReportSummary:
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "eval.json", folder / "eval.outputs.jsonl"]
    for file in files:
        file.write_text("{}\n")
    counts = {"accepted": 3, "correction": 1, "bonus": 1}
    answer = AnswerSample(
        "p1", "talk", "When?", 2.5, counts, "The[ best time]~ to~ is", "<div>x</div>"
    )
    return ReportSummary("eval", {"tau": 2.5, "accept@1": 0.75, "speedup": 1.25}, [answer], files)


def test_wandb_contains_metrics_table_and_artifact(tmp_path: Path, offline: None) -> None:
    """A real offline run of wandb, then the same run resumed."""
    settings: Config = config(tmp_path, "train.wandb.mode=offline")
    with open_trackers(settings, pytest.fail, True) as (service,):
        service.log(0, "train", {"loss@1": 1.0})
    with open_trackers(settings, pytest.fail, True) as (service,):
        service.log(1, "train", {"loss@1": 0.5})
        service.report(example_report(tmp_path / "eval"))
    found = records(tmp_path)
    runs = [r.run for r in found if r.WhichOneof("record_type") == "run"]
    assert {run.run_id for run in runs} == {(tmp_path / IDENTITY).read_text().strip()}
    assert {run.run_group for run in runs} == {"a-sweep"}
    lines = [values(r.history.item) for r in found if r.WhichOneof("record_type") == "history"]
    assert [x["train/loss@1"] for x in lines if "train/loss@1" in x] == [1.0, 0.5]
    (table,) = tmp_path.glob("wandb/offline-*/files/media/table/eval/*.table.json")
    shown = json.loads(table.read_text())
    assert shown["columns"][:7] == ["id", "category", "prompt", "tau", "accepted", "correction",
                                    "bonus"]  # fmt: skip
    assert shown["data"][0][:8] == ["p1", "talk", "When?", 2.5, 3, 1, 1, "The[ best time]~ to~ is"]
    summary: dict[str, Any] = {}
    for record in found:
        if record.WhichOneof("record_type") == "summary":
            summary |= values(record.summary.update)
    assert summary["eval/tau"] == 2.5
    assert summary["eval/accept@1"] == 0.75
    artifacts = [
        r.request.log_artifact.artifact if r.WhichOneof("record_type") == "request" else r.artifact
        for r in found
        if "artifact" in str(r.WhichOneof("record_type"))
    ]
    (report,) = [a for a in artifacts if a.type == "report"]
    assert {e.path for e in report.manifest.contents} == {"eval.json", "eval.outputs.jsonl"}
    assert without_secrets(tmp_path)


def test_tensorboard_contains_report_numbers_and_text(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = config(tmp_path, "train.tensorboard=true")
    with open_trackers(settings, pytest.fail, True) as (service,):
        service.report(example_report(tmp_path / "eval"))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.value for e in events.Scalars("eval/tau")] == [2.5]
    (text,) = events.Tensors("eval/answers/text_summary")
    assert b"The[ best time]~ to~ is" in text.tensor_proto.string_val[0]


def test_unused_tracker_is_not_opened(tmp_path: Path) -> None:
    """Neither without metrics nor on other ranks."""
    with open_trackers(config(tmp_path, "train.wandb.mode=offline"), pytest.fail, True):
        pass
    with open_trackers(config(tmp_path, "train.wandb.mode=offline"), pytest.fail, False) as none:
        assert none == []
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_train_command_logs_metrics_and_report(
    tmp_path: Path, offline: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Metrics during training, the report after decoding, and no API key in any file."""
    run = tmp_path / "run"
    words = [
        "train", *SMALL, f"run.dir={run}", "train.quick_eval=true", "eval.limit=2",
        "eval.max_new_tokens=16", "train.wandb.mode=offline", "train.tensorboard=true",
    ]  # fmt: skip
    assert cli.main(words) == 0
    assert "not available" not in capfd.readouterr().out
    report = json.loads((run / "eval" / "eval.json").read_text())
    summary: dict[str, Any] = {}
    for record in records(run):
        if record.WhichOneof("record_type") == "summary":
            summary |= values(record.summary.update)
    assert summary["eval/tau"] == report["tau"]
    assert summary["eval/accept@1"] == report["accept_at"][0]
    (table,) = run.glob("wandb/offline-*/files/media/table/eval/*.table.json")
    rows = json.loads(table.read_text())["data"]
    outputs = [json.loads(x) for x in (run / "eval/eval.outputs.jsonl").read_text().splitlines()]
    assert [row[0] for row in rows] == [output["id"] for output in outputs]
    for row, output in zip(rows, outputs, strict=True):
        assert row[4] == output["origins"].count("accepted") == sum(output["accepted"])
    assert without_secrets(run)
    phases = json.loads((run / "training.json").read_text())["phases"]
    assert phases.keys() == {"loading", "steps", "held out", "saving", "report"}
    assert all(seconds > 0 for seconds in phases.values())
