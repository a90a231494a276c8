"""`outrider watch`: plots and lines of a run that trains."""

import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.console import Console
from outrider.conf.errors import ConfigError, RunError
from outrider.launch import watch as module
from outrider.launch.watch import format_line, is_finished, plot, view, watch


def write(folder: Path, *lines: dict[str, Any]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def line(step: int, kind: str, **values: float) -> dict[str, Any]:
    return {"step": step, "kind": kind, **values}


def finish(folder: Path) -> None:
    (folder / "training.json").write_text('{"steps": 2}')
    later = (folder / "metrics.jsonl").stat().st_mtime + 1
    os.utime(folder / "training.json", (later, later))


def test_a_plot_marks_every_point_of_every_curve() -> None:
    drawn = plot([[(0, 3.0), (4, 1.0)], [(2, 2.0)]], width=10, height=3)
    assert drawn.splitlines() == ["3 | *", "  |   o", "1 |      *", "    0 step 4"]


def test_a_plot_of_a_single_point_has_a_size() -> None:
    assert plot([[(5, 2.0)]], 20, 2).splitlines()[0] == "2 | *"


def test_single_depths_are_left_out_of_a_line() -> None:
    whole = line(3, "held", **{"accept_length": 2.125, "loss@1": 1.0, "term.tv": 2.0})
    assert format_line(whole) == "step 3, held: accept_length 2.125"


def test_numbers_that_are_not_finite_are_not_drawn(tmp_path: Path) -> None:
    odd = float("nan"), float("inf"), 1e308, -1e308, 10**400
    log = [line(i, "train", objective=value) for i, value in enumerate((*odd, 2.0))]
    assert format_line(log[0]) == "step 0, train: objective nan"
    assert format_line(log[4]) == "step 4, train: "
    write(tmp_path, *log)
    shown = view(tmp_path, log, 40, 20, False).plain
    assert shown.count("*") == 2, "in the legend and in the plot"
    assert "accept_length [" not in shown


def test_a_pipe_gets_a_line_for_each_of_the_log_as_it_grows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = [line(0, "held", accept_length=1.0), line(1, "train", objective=3.0)]

    def sleep(_seconds: float) -> None:
        """The run goes on: its first lines, one more, its end."""
        written = (tmp_path / "metrics.jsonl").read_text() if count else ""
        count.append(len(written))
        if len(count) < 3:
            write(tmp_path, *log[: len(count)])
        else:
            finish(tmp_path)

    count = list[int]()
    monkeypatch.setattr(time, "sleep", sleep)
    assert watch([f"run.dir={tmp_path}"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert "has no metrics yet" in first
    expected = ["step 0, held: accept_length 1", "step 1, train: objective 3"]
    assert lines == [*expected, f"{tmp_path} is finished"]


def test_a_terminal_gets_plots_with_their_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = [
        line(step, kind, objective=4.0 - step, accept_length=1.0 + step)
        for step in range(3)
        for kind in ("train", "held", "own")
    ]
    write(tmp_path, *log)
    finish(tmp_path)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60, height=30, color_system=None)
    monkeypatch.setattr(module, "Console", lambda: console)
    assert watch([f"run.dir={tmp_path}"]) == 0
    shown = screen.getvalue()
    for text in ("finished", "objective [nats]: * training", "4 | *", "3 | ", "step 2"):
        assert text in shown


def test_a_continued_run_is_not_finished(tmp_path: Path) -> None:
    write(tmp_path, line(0, "train", objective=1.0))
    assert not is_finished(tmp_path)
    finish(tmp_path)
    assert is_finished(tmp_path)
    later = (tmp_path / "training.json").stat().st_mtime + 1
    os.utime(tmp_path / "metrics.jsonl", (later, later))
    assert not is_finished(tmp_path)


def test_control_c_ends_the_wait_for_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    assert watch([f"run.dir={tmp_path}"]) == 0
    assert f"{tmp_path} has no metrics yet" in " ".join(capsys.readouterr().out.split())


def test_a_run_that_does_not_exist_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="does not exist"):
        watch([f"run.dir={tmp_path / 'none'}"])
    with pytest.raises(ConfigError, match=r"run\.dir"):
        watch([])
    with pytest.raises(ConfigError):
        watch([f"run.dir={tmp_path}", "train.lr=1"])
