"""DeepSpeed's operator is loaded whatever a killed process has left in its folder."""

import subprocess
import sys
from pathlib import Path
from threading import Event, Thread

import pytest

from outrider.conf.files import claimed
from outrider.train import deepspeed_build as compiled

pytest.importorskip("deepspeed")
NAME = "deepspeed_shm_comm"


def test_a_mark_that_a_killed_process_left_is_nobodys() -> None:
    mark = compiled.home() / NAME / compiled.MARK
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    code = "from outrider.train.deepspeed_build import load; load()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=250)
    assert not mark.exists()
    assert list(mark.parent.glob("*.so"))


def test_while_another_process_builds_its_mark_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is alive holds the lock: the next one waits instead of taking the mark away."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    class Builder:
        NAME, name = "shm_comm", NAME
        loaded = Event()

        def load(self) -> None:
            self.loaded.set()

    monkeypatch.setattr(compiled, "home", lambda: tmp_path)
    monkeypatch.setattr(get_accelerator(), "create_op_builder", lambda _name: Builder())
    monkeypatch.setitem(vars(deepspeed.ops), "__compatible_ops__", {Builder.NAME: True})
    mark = tmp_path / NAME / compiled.MARK
    mark.parent.mkdir()
    with claimed(tmp_path, waiting=lambda: None):
        mark.touch()
        second = Thread(target=compiled.load)
        second.start()
        assert not Builder.loaded.wait(timeout=0.5)
        assert mark.exists()
    second.join(timeout=10)
    assert Builder.loaded.is_set()
    assert not mark.exists()
